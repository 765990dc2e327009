"""Tokens that travel to experts on other ranks as codes and scales, the experts' products on these, and the way back."""

"""Layers whose products a tensor-parallel group shares."""

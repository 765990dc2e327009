"""Layers whose products are quantized: each a thin composition of `linear` and plain torch."""

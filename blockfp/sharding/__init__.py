"""Placements of shards, and the plans that follow without touching data; `simulate` carries them out on NumPy arrays."""

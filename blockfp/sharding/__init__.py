"""Placements of shards, and plans derived from them without touching data; `simulate` runs plans on NumPy arrays."""

"""Where shards lie, and what is decided about them without touching data; `simulate` carries it out on NumPy arrays."""

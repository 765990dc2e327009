"""The definition of every format: each bit of codes and scales, computed on any array library."""

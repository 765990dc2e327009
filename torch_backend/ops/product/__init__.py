"""Products of operands, on codes or on values."""

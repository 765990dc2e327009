"""Plans and ops that quantize operands, in one direction or both."""

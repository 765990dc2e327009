"""Forward and backward of a dense layer, and of an activation before it."""

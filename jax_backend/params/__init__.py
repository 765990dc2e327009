"""Parameter trees with quantized leaves: made, differentiated, placed on a mesh, updated."""

"""Parameter trees with quantized leaves: quantization, gradients, placement on a mesh, optimizers."""

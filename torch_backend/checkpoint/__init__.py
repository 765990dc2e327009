"""Files: checkpoints of torch's DCP on any mesh, and .safetensors that NumPy and JAX read."""

"""Checkpoints through torch's DCP on any mesh, .safetensors that NumPy and JAX read, and weight streams to servers."""

"""Kernels for NVIDIA GPUs (compute capability 9.0 and above) in Pallas, lowered by Mosaic GPU."""

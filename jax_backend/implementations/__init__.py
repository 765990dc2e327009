"""The operations and their backends: XLA, the CPU and CUDA libraries, Pallas; and the derivatives of both."""

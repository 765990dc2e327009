"""Operations and their backends (XLA, the CPU and CUDA libraries, Pallas), and derivatives."""

"""Who carries an operation out: XLA on the definition, the CPU or CUDA library through FFI, Pallas."""

"""Who carries an operation out: XLA on the definition, the CUDA library through FFI, Pallas."""

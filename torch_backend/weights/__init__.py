"""High-precision and quantized weights of modules: loading, requantization over ranks, casts before a gather, state dicts."""

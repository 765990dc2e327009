"""Layouts of quantized weights for other libraries, one per file; `layout.Layout` is the interface."""

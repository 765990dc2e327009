"""The layouts of quantized weights that other libraries read, a file each; `layout.Layout` says what one is."""

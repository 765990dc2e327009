"""`QuantizedArray`, a pytree: made, dequantized and gathered, whole or as what a rank of a mesh stores."""

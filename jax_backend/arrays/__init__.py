"""`QuantizedArray`, a pytree: quantization, dequantization, collectives, and a rank's stored part."""

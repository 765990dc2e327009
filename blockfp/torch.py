"""The PyTorch face: `import blockfp.torch as bfp`.

`quantize` makes a `QuantizedTensor`, its `dequantize` method gives the values back; both run eager and compiled, on the same
bits as the NumPy and JAX faces.
"""

from .torch_backend.adamw import Adam, AdamW
from .torch_backend.interchange import from_jax
from .torch_backend.keys import random_key
from .torch_backend.loading import load_high_precision_
from .torch_backend.quantize import fake_quantize, quantize
from .torch_backend.tensor import QuantizedTensor

__all__ = ["Adam", "AdamW", "QuantizedTensor", "fake_quantize", "from_jax", "load_high_precision_", "quantize", "random_key"]

"""The JAX face of blockfp: `import blockfp.jax as bfp`. Never imports PyTorch."""

from .jax_backend.array import QuantizedArray, fake_quantize, quantize
from .jax_backend.interchange import from_torch

__all__ = ["QuantizedArray", "fake_quantize", "from_torch", "quantize"]

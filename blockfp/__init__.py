"""Block-scaled FP8, FP6, FP4 and INT8 arrays with the same bits in NumPy, JAX and PyTorch.

This package is the core and its NumPy face. `import blockfp.jax` and `import blockfp.torch` are the other two.
"""

from . import errors, formats, recipes
from .array import QuantizedArray, fake_quantize, quantize
from .files.saving import load, save
from .formats import Format
from .recipes import Recipe

__version__ = "0.1.0"

__all__ = [
    "Format",
    "QuantizedArray",
    "Recipe",
    "__version__",
    "errors",
    "fake_quantize",
    "formats",
    "load",
    "quantize",
    "recipes",
    "save",
]

# Pickles and tracebacks name the module that users import from, so internal modules can move.
for _public in (QuantizedArray, fake_quantize, load, quantize, save):
    _public.__module__ = __name__

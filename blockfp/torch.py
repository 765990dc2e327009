"""The PyTorch face: `import blockfp.torch as bfp`.

`quantize` makes a `QuantizedTensor`, its `dequantize` method gives the values back; both run eager and compiled, on the same
bits as the NumPy and JAX faces. `convert` turns the linear layers of a model into `Linear` layers, which train with quantized
weights, under FSDP2 too.
"""

from .torch_backend.adamw import Adam, AdamW
from .torch_backend.checkpoint import load_checkpoint, save_checkpoint
from .torch_backend.convert import convert
from .torch_backend.delayed import update_scales
from .torch_backend.files import load, save
from .torch_backend.interchange import from_jax
from .torch_backend.keys import random_key
from .torch_backend.linear import LinearState, linear
from .torch_backend.loading import load_high_precision_
from .torch_backend.modules.grouped_linear import GroupedLinear
from .torch_backend.modules.layernorm_linear import LayerNormLinear
from .torch_backend.modules.layernorm_mlp import LayerNormMLP
from .torch_backend.modules.linear import Linear
from .torch_backend.modules.multihead_attention import MultiheadAttention
from .torch_backend.modules.transformer_layer import TransformerLayer
from .torch_backend.observe import observe
from .torch_backend.parallelize import parallelize
from .torch_backend.quantize import fake_quantize, quantize
from .torch_backend.tensor import QuantizedTensor

__all__ = [
    "Adam",
    "AdamW",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearState",
    "MultiheadAttention",
    "QuantizedTensor",
    "TransformerLayer",
    "convert",
    "fake_quantize",
    "from_jax",
    "linear",
    "load",
    "load_checkpoint",
    "load_high_precision_",
    "observe",
    "parallelize",
    "quantize",
    "random_key",
    "save",
    "save_checkpoint",
    "update_scales",
]

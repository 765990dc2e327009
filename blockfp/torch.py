"""The PyTorch face: `import blockfp.torch as bfp`.

`quantize` makes a `QuantizedTensor`, its `dequantize` method gives the values back; both run eager and compiled, on the same
bits as the NumPy and JAX faces. `convert` turns the linear layers of a model into `Linear` layers, which train with quantized
weights, under FSDP2 too.
"""

from .torch_backend.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from .torch_backend.checkpoint.files import load, save
from .torch_backend.linear.delayed import update_scales, update_scales_after
from .torch_backend.linear.linear import LinearState, linear
from .torch_backend.linear.observe import observe
from .torch_backend.linear.recompute import keep_products
from .torch_backend.modules.convert import convert
from .torch_backend.modules.grouped_linear import GroupedLinear
from .torch_backend.modules.layernorm_linear import LayerNormLinear
from .torch_backend.modules.layernorm_mlp import LayerNormMLP
from .torch_backend.modules.linear import Linear
from .torch_backend.modules.multihead_attention import MultiheadAttention
from .torch_backend.modules.parallelize import parallelize
from .torch_backend.modules.summary import summary
from .torch_backend.modules.transformer_layer import TransformerLayer
from .torch_backend.optimizer.adamw import Adam, AdamW
from .torch_backend.quantized_tensor.interchange import from_jax
from .torch_backend.quantized_tensor.keys import random_key
from .torch_backend.quantized_tensor.quantize import fake_quantize, quantize
from .torch_backend.quantized_tensor.tensor import QuantizedTensor
from .torch_backend.weights.init import init_
from .torch_backend.weights.loading import load_high_precision_

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
    "init_",
    "keep_products",
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
    "summary",
    "update_scales",
    "update_scales_after",
]

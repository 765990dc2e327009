"""The JAX face of blockfp: `import blockfp.jax as bfp`. Never imports PyTorch."""

from .jax_backend.array import QuantizedArray, fake_quantize, quantize
from .jax_backend.delayed import DelayedState, delayed_state, update_scales
from .jax_backend.interchange import from_torch
from .jax_backend.linear import linear
from .jax_backend.optimizer import adamw, apply_updates, with_masters
from .jax_backend.params import dequantize_params, grad, quantize_params, value_and_grad
from .jax_backend.placing import partition_specs, shard_params, shard_state, unshard_params

__all__ = [
    "DelayedState",
    "QuantizedArray",
    "adamw",
    "apply_updates",
    "delayed_state",
    "dequantize_params",
    "fake_quantize",
    "from_torch",
    "grad",
    "linear",
    "partition_specs",
    "quantize",
    "quantize_params",
    "shard_params",
    "shard_state",
    "unshard_params",
    "update_scales",
    "value_and_grad",
    "with_masters",
]

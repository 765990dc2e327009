"""The JAX face of blockfp: `import blockfp.jax as bfp`. Never imports PyTorch."""

from .jax_backend.arrays.array import QuantizedArray
from .jax_backend.arrays.collectives import all_gather, all_reduce, reduce_scatter
from .jax_backend.arrays.interchange import from_torch
from .jax_backend.arrays.quantize import fake_quantize, quantize, quantize_both, quantize_columnwise
from .jax_backend.files import load, save
from .jax_backend.linear.delayed import DelayedState, delayed_state, update_scales
from .jax_backend.linear.dot_general import dot_general
from .jax_backend.linear.grouped import grouped_linear
from .jax_backend.linear.linear import linear
from .jax_backend.params.optimizer import adam, adamw, apply_updates, with_masters
from .jax_backend.params.params import dequantize_params, grad, quantize_params, value_and_grad
from .jax_backend.params.placing import (
    named_shardings,
    partition_specs,
    shard_params,
    shard_state,
    unshard_params,
    unshard_state,
)
from .jax_backend.params.restoring import rebuild_params

__all__ = [
    "DelayedState",
    "QuantizedArray",
    "adam",
    "adamw",
    "all_gather",
    "all_reduce",
    "apply_updates",
    "delayed_state",
    "dequantize_params",
    "dot_general",
    "fake_quantize",
    "from_torch",
    "grad",
    "grouped_linear",
    "linear",
    "load",
    "named_shardings",
    "partition_specs",
    "quantize",
    "quantize_both",
    "quantize_columnwise",
    "quantize_params",
    "rebuild_params",
    "reduce_scatter",
    "save",
    "shard_params",
    "shard_state",
    "unshard_params",
    "unshard_state",
    "update_scales",
    "value_and_grad",
    "with_masters",
]

"""The JAX face of blockfp: `import blockfp.jax as bfp`. Never imports PyTorch."""

from . import errors, formats, recipes
from .formats import Format
from .jax_backend.arrays.array import QuantizedArray
from .jax_backend.arrays.collectives import all_gather, all_reduce, reduce_scatter
from .jax_backend.arrays.identity import Static
from .jax_backend.arrays.quantize import fake_quantize, from_torch, keep_codes, quantize, quantize_both, quantize_columnwise
from .jax_backend.files import load, save
from .jax_backend.linear.delayed import DelayedState, delayed_state
from .jax_backend.linear.dot_general import dot_general
from .jax_backend.linear.experts import Received, combine, dispatch
from .jax_backend.linear.grouped import grouped_linear
from .jax_backend.linear.layer_state import LayerState, init_state, update_scales
from .jax_backend.linear.linear import linear
from .jax_backend.params.adam import AdamState, adam, adamw
from .jax_backend.params.muon import muon
from .jax_backend.params.optimizer import MasterState, Optimizer, Replacement, apply_updates, with_masters
from .jax_backend.params.params import dequantize_params, grad, quantize_params, value_and_grad
from .jax_backend.params.placing import (
    named_shardings,
    partition_specs,
    shard_params,
    shard_state,
    unshard_params,
    unshard_state,
)
from .jax_backend.params.trees import rebuild_params
from .recipes import Recipe

__all__ = [
    "AdamState",
    "DelayedState",
    "Format",
    "LayerState",
    "MasterState",
    "Optimizer",
    "QuantizedArray",
    "Received",
    "Recipe",
    "Replacement",
    "adam",
    "adamw",
    "all_gather",
    "all_reduce",
    "apply_updates",
    "combine",
    "delayed_state",
    "dequantize_params",
    "dispatch",
    "dot_general",
    "errors",
    "fake_quantize",
    "formats",
    "from_torch",
    "grad",
    "grouped_linear",
    "init_state",
    "keep_codes",
    "linear",
    "load",
    "muon",
    "named_shardings",
    "partition_specs",
    "quantize",
    "quantize_both",
    "quantize_columnwise",
    "quantize_params",
    "rebuild_params",
    "recipes",
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

# Pickles and tracebacks name the module that users import from, so internal modules can move. Pickled tree structures contain
# `Static`.
for _public in (Static, *map(globals().__getitem__, __all__)):
    if getattr(_public, "__module__", "").startswith(f"{__package__}.jax_backend."):
        _public.__module__ = __name__

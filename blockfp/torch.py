"""The PyTorch face: `import blockfp.torch as bfp`.

`quantize` makes a `QuantizedTensor`, and its `dequantize` method returns the values. Both run eagerly and compiled and give the
same bits as NumPy and JAX. `convert` replaces a model's linear layers by `Linear` layers, which train with quantized weights,
also under FSDP2.
"""

from . import errors, formats, recipes
from .formats import Format
from .recipes import Recipe
from .torch_backend.checkpoint.checkpoint import Loaded, Saving, load_checkpoint, save_checkpoint
from .torch_backend.checkpoint.files import high_precision_state_dict, load, save
from .torch_backend.checkpoint.stream import WeightBucket, WeightStream, stream_weights
from .torch_backend.conversion.convert import convert
from .torch_backend.conversion.fusing import FusedSequential
from .torch_backend.conversion.gated_mlp import _rebuild_mlp
from .torch_backend.conversion.kinds import _rebuild_layer
from .torch_backend.conversion.memory import MemoryRow
from .torch_backend.conversion.sensitivity import sensitivity
from .torch_backend.conversion.sensitivity_table import LayerSensitivity, Sensitivity
from .torch_backend.conversion.summary import LeftWeight, QuantizedWeight, Summary, summary
from .torch_backend.experts.dispatch import Received, combine, dispatch
from .torch_backend.linear.checkpointing import keep_codes, keep_products
from .torch_backend.linear.delayed import update_scales, update_scales_after
from .torch_backend.linear.grouped_mm import grouped_mm
from .torch_backend.linear.linear import LinearState, linear
from .torch_backend.linear.observe import Observation, Observed, Oscillation, observe
from .torch_backend.modules.blocks import LayerNormLinear, LayerNormMLP, MultiheadAttention, TransformerLayer
from .torch_backend.modules.experts import GroupedProduct
from .torch_backend.modules.grouped_linear import GroupedLinear
from .torch_backend.modules.known_classes import MLPParts, SharedInput
from .torch_backend.modules.layer_calls import _rebuild_sharing
from .torch_backend.modules.linear import Linear
from .torch_backend.modules.parallelize import parallelize
from .torch_backend.modules.reproducible import Reproducible
from .torch_backend.optimizer.adamw import Adam, AdamW
from .torch_backend.optimizer.clipping import clip_grad_norm_
from .torch_backend.optimizer.muon import Muon
from .torch_backend.optimizer.set_recipe import set_recipe
from .torch_backend.quantized_tensor.quantize import fake_quantize, from_jax, quantize, random_key
from .torch_backend.quantized_tensor.tensor import QuantizedTensor, _rebuild_tensor
from .torch_backend.sharded.all_reduce import all_reduce
from .torch_backend.weights.cast_weight import CastWeight, _rebuild_cast_weight
from .torch_backend.weights.loading import init_, load_high_precision_
from .torch_backend.weights.module_state import _LoadHooks, _show_parts

__all__ = [
    "Adam",
    "AdamW",
    "CastWeight",
    "Format",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerSensitivity",
    "LeftWeight",
    "Linear",
    "LinearState",
    "Loaded",
    "MLPParts",
    "MemoryRow",
    "MultiheadAttention",
    "Muon",
    "Observation",
    "Observed",
    "Oscillation",
    "QuantizedTensor",
    "QuantizedWeight",
    "Received",
    "Recipe",
    "Reproducible",
    "Saving",
    "Sensitivity",
    "SharedInput",
    "Summary",
    "TransformerLayer",
    "WeightBucket",
    "WeightStream",
    "all_reduce",
    "clip_grad_norm_",
    "combine",
    "convert",
    "dispatch",
    "errors",
    "fake_quantize",
    "formats",
    "from_jax",
    "grouped_mm",
    "high_precision_state_dict",
    "init_",
    "keep_codes",
    "keep_products",
    "linear",
    "load",
    "load_checkpoint",
    "load_high_precision_",
    "observe",
    "parallelize",
    "quantize",
    "random_key",
    "recipes",
    "save",
    "save_checkpoint",
    "sensitivity",
    "set_recipe",
    "stream_weights",
    "summary",
    "update_scales",
    "update_scales_after",
]

# Pickles and tracebacks name the module that users import from, so internal modules can move.
_REBUILT = (_rebuild_layer, _rebuild_mlp, _rebuild_sharing, _rebuild_tensor, _rebuild_cast_weight)
_IN_PICKLES = (*_REBUILT, _LoadHooks, _show_parts, FusedSequential, GroupedProduct)
for _public in (*_IN_PICKLES, *map(globals().__getitem__, __all__)):
    if getattr(_public, "__module__", "").startswith(f"{__package__}.torch_backend."):
        _public.__module__ = __name__

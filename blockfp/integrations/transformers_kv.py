"""Scales of the keys and values that a server caches, from a transformers model's own forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..torch_backend.checkpoint import ranks
from ..torch_backend.checkpoint.for_servers import KVScales
from ..torch_backend.modules import model_names
from ..torch_backend.quantized_tensor.quantize import quantize


@dataclass
class KVObservation:
    """The largest magnitudes of keys and values, from `observe_kv`.

    Attributes:
        amaxes: float32 [2, heads] of keys and values, by the path of an attention.
    """

    amaxes: dict[str, Tensor] = field(default_factory=dict)

    def note(self, path: str, key: Tensor, value: Tensor) -> None:
        """Takes keys and values [batch, heads, tokens, size] into account."""
        with torch.no_grad():
            new = torch.stack([x.detach().abs().amax((0, 2, 3)).float() for x in (key, value)])
            self.amaxes[path] = torch.maximum(self.amaxes[path], new) if path in self.amaxes else new

    def scales(self, per: Literal["tensor", "head"] = "tensor") -> KVScales:
        """Returns the scales of all forwards since the last call, and forgets these; collective over all ranks.

        A scale is that of the format `fp8_e4m3`, amax / 448, or `fp8_e4m3_row` with one for each head; ranks share the amax.

        Args:
            per: "tensor" for one scale a layer, which all servers read, or "head", which compressed-tensors has.

        Raises:
            ValueError: per is unknown, there was no forward, ranks observed other layers, or keys or values aren't finite.
        """

        def checked() -> tuple[None, dict[str, Any], dict[str, str]]:
            if per not in ("tensor", "head"):
                raise ValueError(f"per must be 'tensor' or 'head', got {per!r}")
            if not self.amaxes:
                raise ValueError("no attention of the model has run since the last scales()")
            seen = {path: list(amaxes.shape) for path, amaxes in self.amaxes.items()}
            return None, {"per": per, "the observed attentions": seen}, {}

        ranks.check_alike("KVObservation.scales", checked, None)
        if ranks.rank_and_world(None)[1] > 1:
            for amaxes in self.amaxes.values():
                dist.all_reduce(amaxes, dist.ReduceOp.MAX)
        found, self.amaxes = self.amaxes, {}
        for path, amaxes in found.items():
            if not bool(amaxes.isfinite().all()):
                raise ValueError(f"{path}: keys or values are not finite")
        return {path: (_scale(one[0], per), _scale(one[1], per)) for path, one in found.items()}


def _scale(amaxes: Tensor, per: str) -> Tensor:
    if per == "tensor":
        return quantize(amaxes.max().view(1, 1), "fp8_e4m3").scales.view(1)
    return quantize(amaxes.view(-1, 1), "fp8_e4m3_row").scales.view(-1, 1, 1)


@contextmanager
def observe_kv(model: nn.Module) -> Iterator[KVObservation]:
    """Records the largest keys and values of a transformers model's attentions, as they would be cached, within the context.

    Works for models whose attentions call transformers' attention functions, in eager code; keys are those after rotary
    embeddings. Nothing else changes.

    Raises:
        ValueError: model has no attention with a cache, or one with a compressed cache (DeepSeek's), whose values these aren't.

    Example:
        >>> with observe_kv(model) as observation:
        ...     model(**batch)
        >>> stream = stream_in_layout(model, "compressed-tensors", kv_scales=observation.scales())
    """
    paths = {module: path for path, module in model_names.named_modules(model) if _caches(module)}
    if not paths:
        raise ValueError("model has no attention of transformers that caches keys and values")
    for module, path in paths.items():
        if hasattr(module, "kv_lora_rank"):
            raise ValueError(
                f"{path}, a {type(module).__name__}, caches a compression of keys and values, which isn't observed"
            )
    observation, theirs = KVObservation(), ALL_ATTENTION_FUNCTIONS.get_interface

    @wraps(theirs)
    def get_interface(*arguments: Any, **options: Any) -> Any:
        attend = theirs(*arguments, **options)

        @wraps(attend)
        def noted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> Any:
            if module in paths:
                observation.note(paths[module], key, value)
            return attend(module, query, key, value, *rest, **others)

        return noted

    functions: Any = ALL_ATTENTION_FUNCTIONS
    outer = vars(functions).get("get_interface")  # of another observation
    functions.get_interface = get_interface
    try:
        yield observation
    finally:
        del functions.get_interface
        if outer is not None:
            functions.get_interface = outer


def _caches(module: nn.Module) -> bool:
    """Returns whether a module is an attention of a decoder: such have a place in the cache."""
    return getattr(module, "is_causal", False) and getattr(module, "layer_idx", None) is not None

"""What files and streams for servers hold besides a model's state: codes of its high-precision weights, and KV scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockfp.files.modelfile import Tensor as Entry

from ..distributed_internals import reshard
from ..modules import model_names
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.requantize import quantized_as_used
from . import ranks

KVScales = Mapping[str, tuple[Tensor, Tensor]]
"""By the path of an attention, the scales of its keys and of its values, with which FP8 codes are multiplied: float32 [1], or
[heads, 1, 1] with one for each head."""

_KEYS = ".k_proj.weight"


def kv_entries(scales: KVScales | None, model: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[Entry, Entry]]:
    """Checks scales of keys and values and returns them by the server's names of the attentions.

    `names` has the server's names of the model's tensors; an attention goes where its k_proj goes. Raises TypeError or
    ValueError for what isn't `KVScales` of this model.
    """
    if scales is not None and not isinstance(scales, Mapping):
        raise TypeError(f"kv_scales must be a dictionary by the path of an attention, got {type(scales).__name__}")
    modules, found = model_names.modules(model), {}
    for path, pair in (scales or {}).items():
        if path not in modules:
            raise ValueError(f"kv_scales: model has no module {path!r}")
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
            raise TypeError(f"kv_scales[{path!r}] must be two tensors, for keys and values, got {pair!r}")
        for scale in pair:
            heads = scale.shape[:1] if scale.ndim == 3 else ()
            if scale.dtype != torch.float32 or scale.shape not in ((1,), (*heads, 1, 1)):
                got = f"{scale.dtype} {tuple(scale.shape)}"
                raise ValueError(f"kv_scales[{path!r}] must be float32 of shape (1,) or (heads, 1, 1), got {got}")
            if scale.is_meta or not bool((scale.isfinite() & (scale > 0)).all()):
                raise ValueError(f"kv_scales[{path!r}] must be finite and above 0, got {scale}")
        server = names.get(path + _KEYS, (path + _KEYS,))[0]
        keys, values = (Entry("", np.dtype(np.float32), tuple(x.shape), lambda x=x: x.detach().cpu().numpy()) for x in pair)
        found[server.removesuffix(_KEYS)] = (keys, values)
    if len({len(scale.shape) for pair in found.values() for scale in pair}) > 1:
        raise ValueError("kv_scales: some are of a whole attention and some of each head: take either")
    return found


def codes_of_values(function: str, model: nn.Module, quantize: bool) -> dict[int, Tensor]:
    """Returns the codes of a model's weights in high precision by the parameter's id; {} unless `quantize` is set.

    FSDP2's gathered weights, which are codes, are freed first. Collective if `quantize` is set. `function` names the caller,
    for errors. The result is placed like its parameter. Raises on all ranks: TypeError if `quantize` is not a bool, ValueError
    if no weight of the model has a format, or one has no values.
    """
    if isinstance(model, nn.Module) and ranks.rank_and_world(None)[1] > 1:
        # A forward without a backward leaves the root's weights gathered, as codes.
        reshard(model)
    if quantize is False:
        return {}

    def checked() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
        if not isinstance(quantize, bool):
            raise TypeError(f"quantize must be True or False, got {quantize!r}")
        params = model_names.parameters(model_names.plain_module(model))
        locals = {name: sharding.local_of(param) for name, param in params.items()}
        found = {name: params[name] for name, local in locals.items() if isinstance(local, CastWeight)}
        if not found and not any(isinstance(local, QuantizedTensor) for local in locals.values()):
            raise ValueError(
                "quantize=True: no weight of model has a format: use convert(model, recipe, weights='high_precision') first"
            )
        for name in found:
            if locals[name].is_meta:
                raise ValueError(f"{name} is on the meta device and has no values")
        return found, {"quantize": quantize}, {name: f"{locals[name].format} {tuple(one.shape)}" for name, one in found.items()}  # pyright: ignore[reportAttributeAccessIssue]

    named = ranks.check_alike(function, checked, None)
    params = list({id(param): param for param in named.values()}.values())
    return {id(param): codes for param, codes in zip(params, quantized_as_used(params), strict=True)}

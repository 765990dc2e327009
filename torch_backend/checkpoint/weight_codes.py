"""Codes of weights in high precision, for files and streams that contain codes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..distributed_internals import reshard
from ..modules import model_names
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.requantize import quantized_as_used
from . import ranks


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

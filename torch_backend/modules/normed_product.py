"""A layer behind a norm, called so that what the norm makes is cast as it is made, wherever nobody could tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..linear.normed import cast_of, normed
from .gated_product import QUANTIZED
from .known_classes import LINEAR, RMS_NORM, watched


def fused_norm_product(norm: nn.Module, layer: Any, x: Tensor) -> Tensor | None:
    """Returns layer(norm(x)) in one op for norm and cast, with the same bits; None where both have to be called for it.

    That is off a GPU and while a compiler traces, where somebody may want to see what the norm makes (hooks), where another
    module stands in the place of either, and where `linear.normed` says no.
    """
    if (
        type(norm) is not nn.RMSNorm
        or nn.RMSNorm.forward is not RMS_NORM
        or type(x) is not Tensor
        or not x.is_cuda
        or torch.compiler.is_compiling()
    ):
        return None
    if type(layer).forward is not QUANTIZED or layer.parallel is not None or norm.normalized_shape != x.shape[-1:]:
        return None
    if layer.made_of is not None and layer.made_of.forward is not LINEAR:
        return None
    # As attributes of a module, parameters cost a Python call each. Parametrizations put others in their place.
    norm_weight, own = norm._parameters.get("weight"), layer._parameters
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or (norm.elementwise_affine and norm_weight is None):
        return None
    # PyTorch's own default, of the dtype that it computes in.
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    cast = cast_of(x, norm_weight, eps, weight, layer.linear_recipe)
    if cast is None or watched(norm) or watched(layer):
        return None
    state = layer.state() if layer.stateful or layer.observed is not None else None
    return normed(x, norm_weight, eps, cast, weight, bias, layer.linear_recipe, state=state)

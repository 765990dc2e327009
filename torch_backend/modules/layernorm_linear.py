"""`LayerNormLinear`: a norm followed by a linear layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe

from .linear import Linear
from .quantized_layer import LayerOptions, Weights

Norm = Literal["layer_norm", "rms_norm"]


def make_norm(kind: Norm, features: int, eps: float, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """Returns torch's norm of this kind over the last axis; raises ValueError for unknown kinds."""
    kinds = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}
    if kind not in kinds:
        raise ValueError(f"norm must be one of {', '.join(kinds)}, got {kind!r}")
    return kinds[kind](features, eps=eps, device=device, dtype=dtype)


class LayerNormLinear(nn.Module):
    """Computes linear(norm(x)).

    The norm's output is quantized once, along both axes; only its codes are saved for the backward. Layers that read the same
    norm, such as query, key and value, can be one layer with concatenated outputs.

    Args:
        in_features, out_features, bias: of the linear layer.
        recipe: a `Recipe` or its name.
        norm: "layer_norm" or "rms_norm".
        eps: the norm's epsilon.
        device, dtype, weights, compute, keep_init: as for `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str,
        norm: Norm = "layer_norm",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ):
        super().__init__()
        self.norm = make_norm(norm, in_features, eps, device, dtype)
        options = LayerOptions(recipe=recipe, device=device, dtype=dtype, weights=weights, compute=compute, keep_init=keep_init)
        self.linear = Linear(in_features, out_features, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [.., out] for x [.., in]."""
        return self.linear(self.norm(x))

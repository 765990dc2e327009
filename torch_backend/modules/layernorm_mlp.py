"""`LayerNormMLP`: a norm, two linear layers and the activation between them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe

from ..custom_ops.activations import Gating
from .gated_product import gated_product
from .layernorm_linear import LayerNormLinear, Norm
from .linear import Linear
from .quantized_layer import LayerOptions, Weights

Activation = Literal["gelu", "swiglu", "relu2"]

_GATINGS = {"gelu": Gating("gelu_tanh", "apart"), "swiglu": Gating("silu", "pairs"), "relu2": Gating("relu2", "apart")}


class LayerNormMLP(nn.Module):
    """Computes down(activation(up(norm(x)))).

    With SwiGLU, `up` returns [.., 2 * ffn] with gates and values interleaved, gate first, so that tensor parallelism cuts
    between pairs; the result is silu(gate) * value. Where a kernel fuses the activation with the cast, the activation's output
    is never stored in high precision.

    Args:
        features: length of x's last axis.
        ffn_features: length of the axis between the two layers.
        bias: whether the linear layers have biases.
        recipe: a `Recipe` or its name.
        norm: "layer_norm" or "rms_norm".
        activation: "gelu" (its tanh approximation), "swiglu" or "relu2" (squared ReLU).
        eps, device, dtype, weights, compute, keep_init: as for `LayerNormLinear`.
    """

    def __init__(
        self,
        features: int,
        ffn_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str,
        norm: Norm = "layer_norm",
        activation: Activation = "gelu",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ):
        super().__init__()
        if activation not in _GATINGS:
            raise ValueError(f"activation must be one of {', '.join(map(repr, _GATINGS))}, got {activation!r}")
        self.activation = activation
        width = 2 * ffn_features if activation == "swiglu" else ffn_features
        options = LayerOptions(recipe=recipe, device=device, dtype=dtype, weights=weights, compute=compute, keep_init=keep_init)
        self.up = LayerNormLinear(features, width, bias, norm=norm, eps=eps, **options)
        self.down = Linear(ffn_features, features, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [.., features] for x [.., features]."""
        return gated_product(self.down, self.up(x), None, _GATINGS[self.activation])

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"

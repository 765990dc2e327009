"""`LayerNormMLP`: a norm, two linear layers and the activation between them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe, RecipeName

from ..ops.layer.activations import Gating
from .layer_calls import gated_product
from .linear import Linear
from .multihead_attention import MultiheadAttention
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
        recipe: Recipe | RecipeName,
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


# ---- norm and linear layer


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
        recipe: Recipe | RecipeName,
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


# ---- transformer layer


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: returns h + mlp(norm(h)) for h = x + attention(norm(x)).

    Attention is torch's `scaled_dot_product_attention` in the layer's dtype, by the kernels that PyTorch chooses;
    `torch.nn.attention.sdpa_kernel` around the call chooses others.

    Args:
        features: length of x's last axis.
        ffn_features: length of the axis between the MLP's layers.
        heads, key_value_heads: as for `MultiheadAttention`; the attention is causal.
        bias, recipe, norm, activation, eps, device, dtype, weights, compute, keep_init: as for `LayerNormMLP`.

    Example:
        >>> layer = TransformerLayer(1024, 4096, heads=16, recipe="fp8_block", dtype=torch.bfloat16)
        >>> y = layer(x)  # x [batch, length, 1024]
    """

    def __init__(
        self,
        features: int,
        ffn_features: int,
        heads: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        key_value_heads: int | None = None,
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
        self.norm = make_norm(norm, features, eps, device, dtype)
        options = LayerOptions(recipe=recipe, device=device, dtype=dtype, weights=weights, compute=compute, keep_init=keep_init)
        self.attention = MultiheadAttention(features, heads, bias, causal=True, key_value_heads=key_value_heads, **options)
        self.mlp = LayerNormMLP(features, ffn_features, bias, norm=norm, activation=activation, eps=eps, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, features] for x [batch, length, features]."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)

"""`TransformerLayer`: causal attention and an MLP, each after a norm and with a residual connection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe

from .layernorm_linear import Norm, make_norm
from .layernorm_mlp import Activation, LayerNormMLP
from .multihead_attention import MultiheadAttention
from .quantized_layer import LayerOptions, Weights


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: returns h + mlp(norm(h)) for h = x + attention(norm(x)).

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
        recipe: Recipe | str,
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

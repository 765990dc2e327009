"""`TransformerLayer`: causal attention and an MLP, each behind a norm and beside a residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockfp.recipes import Recipe

from ..linear import Compute
from .layernorm_linear import LayerNormLinear, Norm
from .layernorm_mlp import Activation, LayerNormMLP
from .linear import Linear
from .weights import Weights


class TransformerLayer(nn.Module):
    """x + out(attention(qkv(norm(x)))), and to that the MLP of its norm.

    Attention is torch's causal `scaled_dot_product_attention`, in high precision. The rows of `qkv.linear.weight` are
    [heads, 3, features / heads]: query, key and value of the first head, then those of the next, so that tensor parallelism
    cuts between heads.

    Args:
        features: length of x's last axis.
        ffn_features: length between the MLP's layers.
        heads: of the attention; they divide features.
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
        if heads < 1 or features % heads:
            raise ValueError(f"heads must divide features = {features}, got {heads}")
        self.heads, self.head_features = heads, features // heads
        self.qkv = LayerNormLinear(
            features, 3 * features, bias, recipe=recipe, norm=norm, eps=eps, device=device, dtype=dtype, weights=weights,
            compute=compute, keep_init=keep_init,
        )  # fmt: skip
        self.out = Linear(
            features, features, bias, recipe=recipe, device=device, dtype=dtype, weights=weights, compute=compute,
            keep_init=keep_init,
        )  # fmt: skip
        self.mlp = LayerNormMLP(
            features, ffn_features, bias, recipe=recipe, norm=norm, activation=activation, eps=eps, device=device, dtype=dtype,
            weights=weights, compute=compute, keep_init=keep_init,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, features] of x [batch, length, features]."""
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_features)).transpose(-4, -3)
        query, key, value = heads.unbind(-2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(x)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"

"""`MultiheadAttention`: self-attention with quantized projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe, RecipeName

from ..linear.tensor_parallel.pieces import in_pieces
from ..quantized_tensor.sharding import from_local, mesh_of, to_local
from .linear import Linear
from .quantized_layer import LayerOptions, Weights


class MultiheadAttention(nn.Module):
    """Self-attention with quantized projections: out(attention(qkv(x))).

    Attention itself is torch's `scaled_dot_product_attention`, in high precision. Rows of `qkv.weight` are [heads, 3, features
    / heads]: query, key and value of the first head, then of the second, so that tensor parallelism cuts between heads. With
    grouped queries they are [key_value_heads, heads / key_value_heads + 2, features / heads]: the queries that share a key and
    a value, then that key and value.

    Args:
        features: length of x's last axis.
        heads: number of query heads; divides features.
        bias: whether the linear layers have biases.
        recipe: a `Recipe` or its name.
        causal: whether a token attends only to itself and earlier tokens.
        key_value_heads: number of key and value heads (grouped-query attention); divides heads, and None means equal to heads.
        device, dtype, weights, compute, keep_init: as for `Linear`.

    Raises:
        ValueError: a number of heads doesn't divide.

    Example:
        >>> attention = MultiheadAttention(1024, heads=16, recipe="mxfp8", causal=True, dtype=torch.bfloat16)
        >>> y = attention(x)  # x [batch, tokens, 1024]
    """

    def __init__(
        self,
        features: int,
        heads: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        causal: bool = False,
        key_value_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ):
        super().__init__()
        if heads < 1 or features % heads:
            raise ValueError(f"heads must divide features = {features}, got {heads}")
        key_value_heads = heads if key_value_heads is None else key_value_heads
        if key_value_heads < 1 or heads % key_value_heads:
            raise ValueError(f"key_value_heads must divide heads = {heads}, got {key_value_heads}")
        self.heads, self.key_value_heads, self.head_features = heads, key_value_heads, features // heads
        self.causal = causal
        options = LayerOptions(recipe=recipe, device=device, dtype=dtype, weights=weights, compute=compute, keep_init=keep_init)
        self.qkv = Linear(features, (heads + 2 * key_value_heads) * self.head_features, bias, **options)
        self.out = Linear(features, features, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, tokens, features] for x [batch, tokens, features]."""
        return self.out(in_pieces(self._attend, self.qkv(x), self.qkv.parallel))

    def _attend(self, projected: Tensor) -> Tensor:
        shared = self.heads // self.key_value_heads
        # -1 is this rank's number of heads. torch's attention doesn't support DTensors on every device.
        groups = to_local(projected).unflatten(-1, (-1, shared + 2, self.head_features))
        query, key, value = (each.flatten(-3, -2).transpose(-3, -2) for each in groups.split((shared, 1, 1), -2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=shared > 1)
        attended = attended.transpose(-3, -2).flatten(-2)
        return from_local(attended, mesh_of(projected), getattr(projected, "placements", ()))

    def extra_repr(self) -> str:
        shared = "" if self.key_value_heads == self.heads else f", key_value_heads={self.key_value_heads}"
        return f"heads={self.heads}{shared}, causal={self.causal}"

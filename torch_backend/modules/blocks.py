"""Blocks of a transformer: `LayerNormMLP`, `LayerNormLinear`, `MultiheadAttention` and the `TransformerLayer` made of them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe, RecipeName

from ..linear.tensor_parallel.pieces import in_pieces
from ..ops.layer.activations import Gating
from ..quantized_tensor.sharding import from_local, mesh_of, to_local
from .known_classes import watched
from .layer_calls import fused_mlp, gated_product
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
        up, gating = self.up, _GATINGS[self.activation]
        if type(up).forward is not LayerNormLinear.forward or watched(up):
            return gated_product(self.down, up(x), None, gating)
        x = up.norm(x)
        y = fused_mlp((up.linear,), self.down, x, gating)
        return gated_product(self.down, up.linear(x), None, gating) if y is None else y

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


# ---- attention


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

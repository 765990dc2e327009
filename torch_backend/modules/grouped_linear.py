"""`GroupedLinear`: one linear layer per expert, applied to rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockfp.recipes import Compute, Recipe, RecipeName

from ..experts.dispatch import Received
from ..quantized_tensor.sharding import local_of, mesh_of, to_local
from .quantized_layer import QuantizedLayer, Weights


class GroupedLinear(QuantizedLayer):
    """Computes x of expert e @ weight[e]^T + bias[e] for each expert e; weight [experts, out, in] is one quantized tensor.

    Each expert's rows are quantized as a separate tensor: they have their own amaxes, and columnwise blocks start at their
    first row. The results equal those of one `Linear` per expert. In formats with one scale per tensor the experts' weights
    share it.

    Args:
        experts: number of experts.
        in_features, out_features: lengths.
        bias: whether there is a bias, [experts, out].
        recipe, device, dtype, weights, compute, keep_init: as for `Linear`.

    Example:
        >>> layer = GroupedLinear(8, 1024, 4096, recipe="mxfp8")
        >>> y = layer(x, counts=[3, 0, 17, 4, 0, 0, 1, 7])  # x [32, 1024], sorted by expert
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ):
        super().__init__(recipe, weights, compute, keep_init)
        if experts < 1:
            raise ValueError(f"experts must be 1 or more, got {experts}")
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.make_parameters((experts, out_features, in_features), bias, device, dtype)

    def forward(self, x: Tensor, counts: Sequence[int] | Tensor | Received) -> Tensor:
        """Returns [tokens, out] for x [tokens, in].

        Args:
            x: the rows of expert 0, then those of expert 1, and so on.
            counts: number of rows of each expert, [experts]; may be zero. A tensor on x's GPU isn't copied to the host: its
                values aren't checked, and rows beyond their sum give zeros. If experts are divided over a tensor-parallel
                group, pass this rank's counts; if each expert is sharded, the host reads the tensor. Or the `Received` of
                `dispatch`, with x its tokens or values in the same order.

        Raises:
            TypeError: a counts tensor isn't of an integer dtype.
            ValueError: counts are negative, not integers, don't add up to x's rows, or aren't one per expert; x is a DTensor
                and experts are divided over a group; or the rows were dispatched for another recipe or for sharded experts.
        """
        if isinstance(counts, Received):
            return self._received(x, counts)
        if self.parallel is not None and self.parallel.style == "experts" and mesh_of(x) is not None:
            # Ranks receive different numbers of rows, which a DTensor can't represent.
            raise ValueError("x: experts take the rows that were sent to this rank, got a DTensor: pass x.to_local()")
        experts = local_of(self.weight).shape[0]
        if x.ndim != 2:
            raise ValueError(f"x must be [tokens, in], got {tuple(x.shape)}")
        if isinstance(counts, Tensor) and (torch.compiler.is_compiling() or not counts.is_cpu):
            return self.multiply(x, offs=_ends(counts, experts, x))
        counts = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        if not all(isinstance(count, (int, np.integer)) and count >= 0 for count in counts):
            raise ValueError(f"counts must be integers, 0 or more, got {counts}")
        if len(counts) != experts:
            raise ValueError(f"counts must have one number of rows for each of {experts} experts, got {len(counts)} numbers")
        if sum(counts) != x.shape[0]:
            raise ValueError(f"x must be [tokens, in] with as many rows as counts add up to, got {tuple(x.shape)} and {counts}")
        return self.multiply(x, counts)

    def _received(self, x: Tensor, received: Received) -> Tensor:
        if received.recipe != self.linear_recipe:
            raise ValueError(f"the rows were dispatched by recipe {received.recipe}, and this layer has {self.linear_recipe}")
        if self.parallel is not None and self.parallel.style != "experts":
            raise ValueError(f"dispatched rows need whole experts, but these are sharded as {self.parallel.style!r}")
        bias = None if self.bias is None else to_local(self.bias)
        return received.multiply(x, to_local(self.weight), bias, state=self.state(), parallel=self.parallel)

    def extra_repr(self) -> str:
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {super().extra_repr()}"


def _ends(counts: Tensor, experts: int, x: Tensor) -> Tensor:
    """Returns the cumulative ends of experts' rows, on the counts' device."""
    if counts.is_floating_point() or counts.is_complex() or counts.dtype is torch.bool:
        raise TypeError(f"counts must be integers, got {counts.dtype}")
    if tuple(counts.shape) != (experts,):
        raise ValueError(f"counts must have one number of rows for each of {experts} experts, got shape {tuple(counts.shape)}")
    if counts.device != x.device:
        raise ValueError(f"counts is on {counts.device} and x on {x.device}: pass counts.to(x.device), or a list")
    return counts.cumsum(0, dtype=torch.int32)

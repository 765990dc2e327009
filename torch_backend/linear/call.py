"""`Call`, the constants of one call of `linear`; `Layer`, a kind of layer; and functions that all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels.operand_cast import Pair
from blockfp.recipes import Recipe

from ..ops.layer.activations import Gating
from ..ops.quantize.key_ops import gradient_keys
from .tensor_parallel.parallel import Parallel

Made = tuple[Tensor, list[Tensor], Sequence[Tensor], Sequence[Tensor]]
"""The results of a layer's forward: y, the parts of x and of the weight for the backward, and the weight's values if its parts
were made of them."""


class Layer(ABC):
    """How a call's operands are cast and multiplied; never instantiated. `LayerFunction` does what all layers have in common.

    `cuts` says whether ranks share products, which have no gradient of their gradient then.
    """

    cuts: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        extra: Any,
        scale: Tensor | None,
        history: Tensor | None,
    ) -> Made:
        """Multiplies x with the weight; casts use `scale` and record amaxes in `history`, unless these are None.

        Sets `ctx.format` to the format of the weight's parts. `extra` holds the groups' lengths or ends, or casts that layers
        share.
        """

    @staticmethod
    @abstractmethod
    def backward(
        ctx: Any, gradient: Any, kept: list[Tensor], parts: list[Any], points: list[Any], compiled: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of x, weight and bias that the call needs.

        Args:
            ctx: of the forward.
            gradient: of y, [tokens, out]; for a dense layer, maybe a `prologue.Source` of it.
            kept, parts: what the forward returned; `kept` may be emptied.
            points: the inputs of the prologue.
            compiled: whether a compiler traces the backward.
        """

    @staticmethod
    def group_by_group(ctx: Any, gradient: Tensor) -> Any:
        """Returns a context for `second_order`, in which each group's operands are apart."""
        return ctx


@dataclass(frozen=True)
class Call:
    """Constants of a call, independent of values; equal calls compile to one graph.

    Attributes:
        recipe: from `recipes.for_linear`.
        stored: the weight's format, or None for values.
        grouped: whether there are several groups with a weight each.
        needs: whether x, weight and bias need gradients.
        training: whether amaxes are recorded.
        rank: folded into the gradients' key; None if a key was passed to this call.
        parallel: how a tensor-parallel group shares the call, or None.
        quantizes_weight: number of parts of a weight that is quantized at use; else 0.
        direct: the weight can be unpacked before the op: it is codes or a plain tensor, x has memory, and nothing traces.
        traced: whether a compiler traces the call.
        lays: whether the input is laid out for its products (`products.comes_laid`): rowwise, if the weight's origin allows it,
            and columnwise, if it is quantized for the backward alone.
        keeps_laid: whether the columnwise input that a forward keeps is laid out.
        takes_axes: the autograd function accepts x with any number of axes: a direct call on one rank without groups. Each view
            outside of it would be a node of the graph.
        dtype: autocast's dtype for x and the parameters, or None.
        has_scales: whether delayed scales are known to be above 0.
        layer: how operands are cast and multiplied.
        prologue: the activation before the layer, or None.
        experts: number of the first group, and of all groups, over all ranks that share them; None if this rank has all.
        eps: the recipe's. Separate, since with `dynamic=True` compilers may treat an object's number as symbolic.
    """

    recipe: Recipe
    stored: Format | None
    grouped: bool
    needs: tuple[bool, ...]
    training: bool
    rank: int | None
    parallel: Parallel | None
    quantizes_weight: int
    direct: bool
    traced: bool
    lays: Pair
    keeps_laid: bool
    takes_axes: bool
    dtype: torch.dtype | None
    has_scales: bool
    eps: float
    layer: type[Layer]
    prologue: Gating | None = None
    experts: tuple[int, int] | None = None


def groups_of(x: Tensor, counts: Sequence[int] | None) -> list[tuple[int | None, Tensor]]:
    """Returns (index, rows) of each group; without counts, a single group with index None."""
    return [(None, x)] if counts is None else list(enumerate(x.split(list(counts))))


def ends_of(counts: Sequence[int] | None, x: Tensor) -> Tensor:
    """Returns the groups' cumulative ends from their row counts, int32 on x's device."""
    return torch.tensor(list(accumulate(counts or ())), dtype=torch.int32, device=x.device)


def keys_of_gradient(ctx: Any, gradient: Tensor, *, now: bool = False, single: bool = False) -> Tensor:
    """Returns the keys of a forward's backward, int32 [groups or 1, 2, 2]; the first call advances the step.

    A backward may run several times (`retain_graph`, zero-bubble pipelines, for inputs and for weights); all runs draw the same
    bits. `now` and `single` are as for `gradient_keys`.
    """
    call: Call = ctx.call
    drawn: tuple[Tensor, bool] | None = getattr(ctx, "drawn", None)
    if drawn is not None:
        keys, without_groups = drawn
        return keys if without_groups == single else keys[0] if single else keys[None]
    groups, own = len(ctx.counts) if call.grouped else None, None
    if groups is not None and call.experts is not None:
        first, total = call.experts
        groups, own = total, slice(first, first + groups)
    if call.rank is None:
        keys = gradient_keys(ctx.key, groups=groups, now=now, single=single)
    else:
        known = {"groups": groups, "now": now, "single": single}
        keys = gradient_keys(ctx.key, step=ctx.step, folds=(call.rank,), advance=ctx.step is not None, **known)
    keys = keys if own is None else keys[own]
    if not call.traced:
        ctx.drawn = keys, single
    return keys


def bias_gradient(gradient: Tensor, counts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of a bias [out], or [groups, out] with counts, from the outputs' gradient [tokens, out]."""
    if counts is None:
        return gradient.sum(0).to(dtype)
    if not counts:
        return gradient.new_empty((0, gradient.shape[1]), dtype=dtype)
    return torch.stack([group.sum(0) for _, group in groups_of(gradient, counts)]).to(dtype)

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
from blockfp.recipes import Recipe

from ..custom_ops.activations import Gating
from ..custom_ops.key_ops import gradient_keys
from ..custom_ops.quantize_plans import Aligned
from .parallel import Parallel

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
        ctx: Any, gradient: Tensor, kept: list[Tensor], parts: list[Any], points: list[Any]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of x, weight and bias that the call needs.

        Args:
            ctx: of the forward.
            gradient: of y, [tokens, out].
            kept, parts: what the forward returned; `kept` may be emptied.
            points: the inputs of the prologue.
        """

    @staticmethod
    def group_by_group(ctx: Any, gradient: Tensor) -> Any:
        """Returns a context for `second_order`, in which each group's operands are apart."""
        return ctx


@dataclass(frozen=True)
class Call:
    """The constants of a call, known before any value; equal calls compile to one graph.

    Attributes:
        recipe: from `recipes.for_linear`.
        stored: format of the weight, or None for values.
        grouped: whether there is a weight for each of several groups.
        needs: whether x, weight and bias want gradients.
        training: whether amaxes are recorded.
        rank: folded into the key of the gradients; None for a key that was given for this call.
        parallel: how a tensor-parallel group shares the call, or None.
        quantizes_weight: how many parts a weight has that is quantized at use; 0 for others.
        direct: whether the weight is codes, or values of a plain tensor, x has memory, and nothing traces: the weight is taken
            apart before the op.
        traced: whether a compiler traces the call.
        aligns: whether the input comes aligned (`products.comes_aligned`), rowwise and columnwise, if whoever multiplies it and
            the weight's origin allow it.
        takes_axes: whether x may have any number of axes for the layer's autograd function: that of one rank, of a direct call
            without groups. Each view outside of it would be a node of the graph.
        dtype: to which x and the parameters are cast by autocast; None outside of it.
        has_scales: whether delayed scaling's scales are known to be above 0.
        layer: how operands are cast and multiplied.
        prologue: the activation in front of the layer, or None.
        eps: the recipe's, out of its text: a number that an object holds compilers may leave open (`dynamic=True`).
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
    aligns: Aligned
    takes_axes: bool
    dtype: torch.dtype | None
    has_scales: bool
    eps: float
    layer: type[Layer]
    prologue: Gating | None = None


def groups_of(x: Tensor, counts: Sequence[int] | None) -> list[tuple[int | None, Tensor]]:
    """(index, rows) of each group; one group without index where there are no counts."""
    return [(None, x)] if counts is None else list(enumerate(x.split(list(counts))))


def ends_of(counts: Sequence[int] | None, x: Tensor) -> Tensor:
    """The groups' ends from how many rows each has, int32 beside x."""
    return torch.tensor(list(accumulate(counts or ())), dtype=torch.int32, device=x.device)


def keys_of_gradient(ctx: Any, gradient: Tensor, *, now: bool = False, single: bool = False) -> Tensor:
    """Returns the keys of a forward's backward, int32 [groups or 1, 2, 2]; the first time it moves the step on.

    Pipelines without bubbles run a backward twice, for inputs and for weights, and so does `retain_graph`: of one forward all
    draw the same bits. `now` and `single` are as for `gradient_keys`.
    """
    call: Call = ctx.call
    drawn: tuple[Tensor, bool] | None = getattr(ctx, "drawn", None)
    if drawn is not None:
        keys, without_groups = drawn
        return keys if without_groups == single else keys[0] if single else keys[None]
    groups, own = len(ctx.counts) if call.grouped else None, None
    if groups is not None and call.parallel is not None and call.parallel.style == "experts":
        # Experts are numbered over all ranks.
        own = slice(call.parallel.first, call.parallel.first + groups)
        groups = call.parallel.features
    if call.rank is None:
        keys = gradient_keys(ctx.key, groups=groups, now=now, single=single)
    else:
        known = {"groups": groups, "now": now, "single": single}
        keys = gradient_keys(ctx.key, step=ctx.step, folds=(call.rank,), advance=True, **known)
    keys = keys if own is None else keys[own]
    if not call.traced:
        ctx.drawn = keys, single
    return keys


def bias_gradient(gradient: Tensor, counts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """The gradient of a bias [out], or [groups, out] with counts, from the gradient of the outputs [tokens, out]."""
    if counts is None:
        return gradient.sum(0).to(dtype)
    if not counts:
        return gradient.new_empty((0, gradient.shape[1]), dtype=dtype)
    return torch.stack([group.sum(0) for _, group in groups_of(gradient, counts)]).to(dtype)

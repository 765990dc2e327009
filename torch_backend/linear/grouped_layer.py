"""A layer whose rows are sorted by group: one op forward, one backward, eager and compiled.

    forward   y of group g  = x of group g  w[g]^T
    dgrad     dx of group g = g of group g  w[g]
    wgrad     dw[g]         = g^T x, of group g

The groups' ends are a tensor on x's device, which the host never reads where the device multiplies all groups at once
(`ops/groups/grouped_ops`). The layout of the groups is saved before x columnwise. Ranks that share the layer hold experts of
their own; experts that several ranks share are a `parallel_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blockfp.definition.bits import INFINITY
from blockfp.recipes import HIGH_PRECISION

from ..ops.groups import grouped_ops
from ..ops.groups.group_operands import Codes, group_operands
from ..ops.library import runs_now
from ..quantized_tensor.own_ops import experts_parts
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import dispatch_modes
from .call import Call, Layer, Made, keys_of_gradient
from .delayed import multiplier, record
from .observe import observe_operand
from .operands import apart, weight_operand


def counts_of(offs: Tensor, x: Tensor) -> list[int]:
    """Counts the rows of each group from their ends, which the host reads.

    Raises:
        ValueError: ends that descend, or don't end where x does.
    """
    ends = [0, *offs.tolist()]
    counts = [end - begin for begin, end in pairwise(ends)]
    if min(counts, default=0) < 0 or ends[-1] != x.shape[0]:
        raise ValueError(f"offs must ascend to the {x.shape[0]} rows of x, got {ends[1:]}")
    return counts


class GroupedLayer(Layer):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        extra: Tensor | tuple[Tensor, Sequence[int]],
        scale: Tensor | None,
        history: Tensor | None,
    ) -> Made:
        recipe = call.recipe
        offs, ends = extra if isinstance(extra, tuple) else (extra, None)
        columnwise = recipe.input_columnwise if call.needs[1] else HIGH_PRECISION
        w = weight_operand(weight, call.stored, recipe.weight, call.parallel)
        given = scale if recipe.input.format is not None or columnwise.format is not None else None
        if given is not None and not call.has_scales:
            given = multiplier(x, scale, call, "input", offs=offs, group=_group_of(call))
        coded = isinstance(x, QuantizedTensor)
        now = coded or ctx.observed is not None or (call.direct and not dispatch_modes())
        arguments: Any = (*_taken_apart(w.parts, call, now), offs, bias, given, recipe.text, call.needs[1])
        if now:
            note = None if ctx.observed is None else partial(observe_operand, ctx.observed, "input")
            y, words, *kept = grouped_ops.forward_now(_codes(x) if coded else x, *arguments, ends=ends, note=note)
        elif call.traced:
            y, words, *kept = grouped_ops.forward_apart(x, *arguments, again=apart(x))
        else:
            y, words, *kept = grouped_ops.forward(x, *arguments)
        if given is not None:
            if history is not None:
                record_groups(history, kept[-1])
            kept = kept[:-1]
        ctx.ends, ctx.coded = ends, None
        if coded:
            ctx.coded, kept = (x.format, x.shape[1], x.dtype), list(x.parts) if call.needs[1] else []
        elif call.needs[1] and columnwise.format is None:
            kept = [x]
        # Codes that ranks made together are kept; one rank makes them again of the weight.
        alone = call.parallel is None
        parts = ([weight] if alone else w.parts) if call.needs[0] else []
        ctx.format = call.stored if alone else w.format
        # `keys_of_gradient` asks how many groups there are.
        ctx.counts = range(weight.shape[0])
        made = len(parts) > 0 and not alone and call.stored is None and w.format is not None
        return y, [words, *kept], parts, [weight] if made and not call.traced else []

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, kept: list[Tensor], parts: list[Any], points: list[Any], compiled: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        call: Call = ctx.call
        recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
        words, *kept = kept
        coded = isinstance(gradient, QuantizedTensor)
        rowwise = recipe.gradient if needs_x else HIGH_PRECISION
        columnwise = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
        keyed = rowwise.stochastic or columnwise.stochastic
        given = ctx.scale if rowwise.format is not None or columnwise.format is not None else None
        if given is not None and not call.has_scales:
            offs = words[: ctx.shape[0]]
            given = multiplier(gradient, ctx.scale, call, "gradient", offs=offs, group=_group_of(call))
        now = coded or ctx.coded is not None or ctx.observed is not None or (call.direct and runs_now(gradient))
        note = None if ctx.observed is None else partial(observe_operand, ctx.observed, "gradient")
        known = {"ends": ctx.ends, "note": note} if now else {}
        found = (grouped_ops.backward_now if now else grouped_ops.backward)(
            _codes(gradient) if coded else gradient,
            words,
            kept if ctx.coded is None else Codes(kept, *ctx.coded),
            *_taken_apart(parts, call, now),
            given,
            keys_of_gradient(ctx, gradient, now=now) if keyed else None,
            recipe.text,
            ctx.shape[0],
            ctx.shape[-1],
            needs_x,
            ctx.dtype if needs_weight else None,
            ctx.bias_dtype if needs_bias else None,
            **known,
        )
        if given is not None:
            if ctx.history is not None:
                record_groups(ctx.history, found[-1])
            found = found[:-1]
        d_x = found[0] if needs_x else None
        d_weight = found[int(needs_x)] if needs_weight else None
        return d_x, d_weight, found[-1] if needs_bias else None

    @staticmethod
    def group_by_group(ctx: Any, gradient: Tensor) -> Any:
        words, *saved = ctx.saved_tensors
        ends = words[: ctx.shape[0]].tolist()
        if ends and ends[-1] != gradient.shape[0]:
            raise NotImplementedError("rows past the last end have no gradient of their gradient: leave them out of x")
        format = ctx.call.recipe.input_columnwise.format
        tokens, features = gradient.shape[0], ctx.shape[-1]
        kept: Sequence[Tensor] = saved[: ctx.kept - 1]
        if format is not None:
            kept = [part for one in group_operands(kept, format, ends, tokens, features) for part in one.parts]
        return SimpleNamespace(
            **(vars(ctx) | {"kept": len(kept), "counts": [end - begin for begin, end in pairwise([0, *ends])]}),
            saved_tensors=[*kept, *saved[ctx.kept - 1 :]],
        )


def _codes(x: QuantizedTensor) -> Codes:
    return Codes(x.parts, x.format, x.shape[1], x.dtype)


def _taken_apart(parts: Sequence[Tensor], call: Call, now: bool) -> Sequence[Tensor | None]:
    """Codes, scales and tensor scale; or one tensor; or nothing: as the ops take a weight. They take it apart, if not now."""
    if now and len(parts) == 1 and call.stored is not None:
        weight: Any = parts[0]
        return experts_parts(weight, call.recipe.text)
    return [*parts, *[None] * (3 - len(parts))]


def _group_of(call: Call) -> str | None:
    """The group of the ranks that share the layer."""
    return None if call.parallel is None else call.parallel.group


def record_groups(history: Tensor, amaxes: Tensor) -> None:
    """Records the amaxes of groups, int32 [groups], one after another: see `delayed.record`."""
    if amaxes.shape[0]:
        record(history, torch.where(amaxes >= INFINITY, torch.zeros_like(amaxes), amaxes).amax().view(1))

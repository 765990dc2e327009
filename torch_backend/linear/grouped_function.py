"""The autograd function of a linear layer whose rows are sorted by group: one op forward, one backward, eager and compiled.

    forward   y of group g  = x of group g  w[g]^T
    dgrad     dx of group g = g of group g  w[g]
    wgrad     dw[g]         = g^T x, of group g

The groups' ends are a tensor on x's device, which the host never reads where the device multiplies all groups at once
(`custom_ops/grouped_ops`). What is saved for the backward is x columnwise, the weight, and where the groups lie. Ranks that
share the layer have experts of their own; each expert they share by `shared_function`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blockfp.definition.bits import INFINITY
from blockfp.recipes import HIGH_PRECISION

from ..custom_ops import grouped_ops
from ..custom_ops.library import runs_now
from ..quantized_tensor.own_ops import experts_parts
from ..torch_internals import apply_of, dispatch_modes
from .call import Call, keys_of_gradient
from .delayed import multiplier, record
from .operands import apart
from .second_order import backward_with_graph, plus, save_for_graph, taken
from .weight_operands import weight_operand


def takes(call: Call, observed: Tensor | None) -> bool:
    """Says whether `GroupedFunction` carries out a call with groups; `SharedFunction` does the others, one group after another.

    Those look at single groups: ranks that share each expert find the amaxes of a group together, and `observe` measures each.
    """
    return observed is None and (call.parallel is None or call.parallel.style == "experts")


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


class GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        offs: Tensor,
        input_amax_history: Tensor | None,
        input_scale: Tensor | None,
        gradient_amax_history: Tensor | None,
        gradient_scale: Tensor | None,
        key: Tensor | None,
        step: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        recipe = call.recipe
        columnwise = recipe.input_columnwise if call.needs[1] else HIGH_PRECISION
        w = weight_operand(weight, call.stored, recipe.weight, call.parallel)
        given = input_scale if recipe.input.format is not None or columnwise.format is not None else None
        if given is not None and not call.has_scales:
            given = multiplier(x, input_scale, call, "input", offs=offs, group=_group_of(call))
        now = call.direct and not dispatch_modes()
        arguments: Any = (x, *_taken_apart(w.parts, call, now), offs, bias, given, recipe.text, call.needs[1])
        if now:
            y, words, *kept = grouped_ops.forward_now(*arguments)
        elif torch.compiler.is_compiling():
            y, words, *kept = grouped_ops.forward_apart(*arguments, again=apart(x))
        else:
            y, words, *kept = grouped_ops.forward(*arguments)
        if given is not None:
            if call.training and input_amax_history is not None:
                record_groups(input_amax_history, kept[-1])
            kept = kept[:-1]
        if call.needs[1] and columnwise.format is None:
            kept = [x]
        # Codes that ranks made together are kept; one rank makes them again of the weight.
        alone = call.parallel is None
        parts = ([weight] if alone else w.parts) if call.needs[0] else []
        ctx.call, ctx.kept, ctx.parts, ctx.format = call, len(kept), len(parts), call.stored if alone else w.format
        # `keys_of_gradient` asks how many groups there are.
        ctx.counts = range(weight.shape[0])
        ctx.shape, ctx.dtype, ctx.bias_dtype = weight.shape, weight.dtype, None if bias is None else bias.dtype
        # Not saved: another microbatch's backward may write into them before this one's.
        ctx.history, ctx.scale, ctx.key, ctx.step = gradient_amax_history, gradient_scale, key, step
        if torch.compiler.is_compiling():
            ctx.save_for_backward(words, *kept, *parts)
            return y
        made = bool(parts) and not alone and call.stored is None and w.format is not None
        return save_for_graph(ctx, y, x, weight, [words, *kept, *parts], made=made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, carried: Tensor | None = None):
        call: Call = ctx.call
        recipe, (needs_x, needs_weight, needs_bias) = call.recipe, call.needs
        nothing = [None] * 8
        if gradient is None:
            return taken(ctx.waiting, ctx.saved_tensors[-1].dtype), None, None, *nothing
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return *backward_with_graph(_group_by_group(ctx, gradient), gradient), *nothing
        words, *saved = ctx.saved_tensors
        kept, parts = saved[: ctx.kept], saved[ctx.kept : ctx.kept + ctx.parts]
        rowwise = recipe.gradient if needs_x else HIGH_PRECISION
        columnwise = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
        keyed = rowwise.stochastic or columnwise.stochastic
        given = ctx.scale if rowwise.format is not None or columnwise.format is not None else None
        if given is not None and not call.has_scales:
            offs = words[: ctx.shape[0]]
            given = multiplier(gradient, ctx.scale, call, "gradient", offs=offs, group=_group_of(call))
        now = call.direct and runs_now(gradient)
        found = (grouped_ops.backward_now if now else grouped_ops.backward)(
            gradient,
            words,
            kept,
            *_taken_apart(parts, call, now),
            given,
            keys_of_gradient(ctx, gradient, now=now) if keyed else None,
            recipe.text,
            ctx.shape[0],
            ctx.shape[-1],
            needs_x,
            ctx.dtype if needs_weight else None,
            ctx.bias_dtype if needs_bias else None,
        )
        if given is not None:
            if ctx.history is not None:
                record_groups(ctx.history, found[-1])
            found = found[:-1]
        d_x = found[0] if needs_x else None
        d_weight = found[int(needs_x)] if needs_weight else None
        d_bias = found[-1] if needs_bias else None
        if d_x is not None and carried is not None:
            d_x = plus(d_x, taken(ctx.waiting, d_x.dtype))
        return d_x, d_weight, d_bias, *nothing


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


def _group_by_group(ctx: Any, gradient: Tensor) -> Any:
    """Makes a context for `second_order` with each group's operands apart; the host reads where they end."""
    words, *saved = ctx.saved_tensors
    ends = words[: ctx.shape[0]].tolist()
    if ends and ends[-1] != gradient.shape[0]:
        raise NotImplementedError("rows past the last end have no gradient of their gradient: leave them out of x")
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    format = ctx.call.recipe.input_columnwise.format
    tokens, features = gradient.shape[0], ctx.shape[-1]
    kept: Sequence[Tensor] = saved[: ctx.kept]
    if format is not None:
        kept = [part for one in grouped_ops.group_operands(kept, format, ends, tokens, features) for part in one.parts]
    fields = {name: getattr(ctx, name) for name in ("call", "parts", "format", "shape", "dtype", "bias_dtype", "weight_beside")}
    state = {name: getattr(ctx, name) for name in ("history", "scale", "key", "step")}
    return SimpleNamespace(
        **fields,
        **state,
        saved_tensors=[*kept, *saved[ctx.kept :]],
        kept=len(kept),
        counts=counts,
        x_origin=(0, 0),
        again=None,
        observed=None,
        waiting=getattr(ctx, "waiting", None),
    )


run_grouped = apply_of(GroupedFunction)
"""`GroupedFunction.apply` where nothing is traced or transformed."""

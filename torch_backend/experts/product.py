"""The product of rows that are sorted by expert, where the rows or the gradient of the product may be codes already.

It is `linear` with groups (grouped_layer.py) on one rank, and gives its bits where neither is. What is codes already is
multiplied as it is, and its columnwise form follows from the codes (`coded.columnwise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockfp.formats import Format
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe

from ..custom_ops.dequantize_plans import dequantize_parts
from ..custom_ops.grouped_ops import group_operands
from ..custom_ops.key_ops import gradient_keys
from ..custom_ops.operand_ops import part_count
from ..custom_ops.products import Matrix, multiply
from ..linear.linear import LinearState
from ..linear.operands import Scaling, quantized
from ..linear.parallel import Parallel
from ..linear.weight_operands import columnwise_weight, weight_operand
from ..quantized_tensor.tensor import QuantizedTensor
from . import at_once
from .coded import columnwise, rows_of


@dataclass(frozen=True, eq=False)
class Call:
    """The settings of a call, besides its operands.

    Attributes:
        recipe: from `recipes.for_linear`.
        offs: the end of each expert's rows, int32 [own experts].
        counts: how many rows each has, where the host knows.
        first, experts: number of the first one here, and how many there are on all ranks: they have their own random keys.
        parallel: how a group shares the weight; None where it is of this rank alone.
    """

    recipe: Recipe
    offs: Tensor
    counts: Sequence[int] | None
    first: int
    experts: int
    parallel: Parallel | None

    def spans(self) -> list[tuple[int, int]]:
        """The first row of each expert, and the one after its last; the host waits for them where it doesn't know."""
        ends = [0, *(self.offs.tolist() if self.counts is None else accumulate(self.counts))]
        return list(pairwise(ends))


def multiply_groups(x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState, call: Call) -> Tensor:
    """Returns [rows, out] for x [rows, in], values or codes, sorted by expert.

    Args:
        x: float32, float16 or bfloat16, or a `QuantizedTensor` in the recipe's format of inputs.
        weight: [own experts, out, in], values or quantized.
        bias: [own experts, out], or None.
        state: of the layer.
        call: all else.

    Under `torch.autocast` values and bias are cast to its dtype; codes have theirs already.

    Raises:
        TypeError: dtypes that differ.
        ValueError: codes in another format, or shapes that don't fit.
    """
    recipe, experts = call.recipe, len(call.offs)
    if isinstance(x, QuantizedTensor) and x.format is not recipe.input.format:
        raise ValueError(f"x is in {x.format}, but recipe {recipe} wants {recipe.input}: dispatch it by the same recipe")
    if isinstance(weight, QuantizedTensor) and weight.format is not recipe.weight.format:
        raise ValueError(f"the weight is in {weight.format}, but recipe {recipe} wants {recipe.weight}: quantize it in that")
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[0] != experts or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x must be [rows, in] and weight [experts, out, in] of the {experts} experts here, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = x.dtype if isinstance(x, QuantizedTensor) else torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        weight = weight.to(dtype) if recipe.weight.format is None else weight
    elif weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        other = weight.dtype if bias is None else f"{weight.dtype}, bias {bias.dtype}"
        raise TypeError(f"x is {x.dtype}, weight {other}: cast them to one dtype")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:2])}, got {tuple(bias.shape)}")
    stochastic = recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic
    wants = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if wants and stochastic and state.rng_key is None:
        raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass key= to dispatch")
    with torch.autocast(x.device.type, enabled=False):
        return GroupedProduct.apply(x, weight, bias, call, state)


def takes_codes(y: Tensor) -> bool:
    """Says whether y comes straight from a product whose backward takes the gradient as codes."""
    return getattr(y.grad_fn, "takes_codes", False)


class GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, state: LinearState) -> Tensor:
        recipe, (needs_x, needs_weight, _) = call.recipe, ctx.needs_input_grad[:3]
        wanted = recipe.input_columnwise if needs_weight else HIGH_PRECISION
        stored = weight.format if isinstance(weight, QuantizedTensor) else None
        w, outputs = weight_operand(weight, stored, recipe.weight, call.parallel), weight.shape[1]
        # Figures of `observe` are those of single groups.
        found = None if state.observed is not None else at_once.forward(x, w, bias, call.offs, outputs, recipe, wanted)
        if found is None:
            y, kept = _one_by_one(x, w, bias, (outputs, weight.shape[2]), call, wanted, state)
        else:
            y, ctx.words, kept = found
        ctx.all_at_once, ctx.takes_codes, ctx.coded = found is not None, True, None
        if isinstance(x, QuantizedTensor):
            ctx.coded, kept = x.format, x.parts if needs_weight else []
        elif needs_weight and wanted.format is None:
            kept = [x]
        parts = list(w.parts) if needs_x else []
        ctx.call, ctx.state, ctx.kept, ctx.format, ctx.origin = call, state, len(kept), w.format, w.origin
        ctx.shape, ctx.dtype, ctx.bias_dtype = weight.shape, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*kept, *parts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        call: Call = ctx.call
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        saved = list(ctx.saved_tensors)
        kept, w = saved[: ctx.kept], Matrix(saved[ctx.kept :], ctx.format, ctx.origin) if needs_x else None
        keys = _keys(call, ctx.state) if needs_x or needs_weight else None
        dtypes = ctx.dtype if needs_weight else None, ctx.bias_dtype if needs_bias else None
        found = None
        if ctx.all_at_once:
            found = at_once.backward(gradient, w, kept, ctx.coded, ctx.words, ctx.shape, call.recipe, keys, dtypes)
            cast = call.recipe.input_columnwise
            if found is None and ctx.coded is None and cast.format is not None:
                each = group_operands(kept, cast.format, call.offs.tolist(), gradient.shape[0], ctx.shape[2])
                kept = [part for one in each for part in one.parts]
        if found is None:
            found = _gradients(gradient, w, kept, ctx.coded, call, keys, ctx.state, ctx.shape, dtypes)
        return *found, None, None


def _one_by_one(
    x: Tensor, w: Matrix, bias: Tensor | None, size: tuple[int, int], call: Call, wanted: Cast, state: LinearState
) -> tuple[Tensor, list[Tensor]]:
    """The product, and x columnwise in the parts of each expert, where it isn't codes already."""
    recipe, kept = call.recipe, []
    y = torch.zeros((x.shape[0], size[0]), dtype=x.dtype, device=x.device)
    scaling, fast = Scaling(recipe.eps, observed=state.observed), "forward" in recipe.fast_accum
    for index, (first, last) in enumerate(call.spans()):
        if isinstance(x, QuantizedTensor):
            row = Matrix(rows_of(x.parts, x.format, first, last), x.format)
        else:
            row, columns = quantized(x[first:last], "input", recipe.input, wanted, scaling)
            kept += [] if columns is None else columns.parts
        own = None if bias is None else bias[index]
        y[first:last] = multiply(row, w, size, own, x.dtype, fast_accum=fast, index=index, exact=recipe.exact_products)
    return y, kept


def _gradients(
    gradient: Tensor,
    w: Matrix | None,
    kept: list[Tensor],
    coded: Format | None,
    call: Call,
    keys: Tensor | None,
    state: LinearState,
    shape: Sequence[int],
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> list[Tensor | None]:
    """The gradients of x, weight and bias, one expert after another."""
    recipe, (_, outputs, inputs), (weight_dtype, bias_dtype) = call.recipe, shape, dtypes
    rowwise = HIGH_PRECISION if w is None else recipe.gradient
    wanted = HIGH_PRECISION if weight_dtype is None else recipe.gradient_columnwise
    scaling, device = Scaling(recipe.eps, observed=state.observed), gradient.device
    fast = "wgrad" in recipe.fast_accum
    d_x = None if w is None else torch.zeros((gradient.shape[0], inputs), dtype=gradient.dtype, device=device)
    d_weight = None if weight_dtype is None else torch.empty(tuple(shape), dtype=weight_dtype, device=device)
    d_bias = None if bias_dtype is None else torch.empty(tuple(shape[:2]), dtype=bias_dtype, device=device)
    for index, (first, last) in enumerate(call.spans()):
        key = None if keys is None else keys[index]
        if isinstance(gradient, QuantizedTensor):
            own = rows_of(gradient.parts, gradient.format, first, last)
            row, column = Matrix(own, gradient.format), None
            if d_weight is not None:
                column_key = key[1] if key is not None and wanted.stochastic else None
                column = columnwise(own, gradient.format, wanted, outputs, gradient.dtype, recipe.eps, column_key)
            values = None if d_bias is None else dequantize_parts(own, gradient.format, torch.float32, outputs)
        else:
            values = gradient[first:last]
            row, column = quantized(values, "gradient", rowwise, wanted, scaling, None, key)
            column = Matrix([values.mT], None) if column is None else column
        if d_bias is not None and values is not None:
            d_bias[index] = values.sum(0)
        if d_weight is not None and column is not None and weight_dtype is not None:
            x = _columnwise_input(kept, coded, recipe, index, (first, last), inputs, gradient.dtype)
            size = (inputs, last - first)
            d_weight[index] = multiply(column, x, size, None, weight_dtype, fast_accum=fast, exact=recipe.exact_products)
        if d_x is not None and w is not None:
            d_x[first:last] = _dgrad(row, w, (inputs, outputs), recipe, gradient.dtype, index)
    return [d_x, d_weight, d_bias]


def _keys(call: Call, state: LinearState) -> Tensor | None:
    """Keys of this backward for the experts here, int32 [own experts, 2, 2]; moves the step on."""
    recipe = call.recipe
    if not (recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic):
        return None
    assert state.rng_key is not None
    keys = gradient_keys(state.rng_key, step=state.step, folds=(state.rank,), groups=call.experts)
    if state.step is not None:
        state.step.add_(1)
    return keys[call.first : call.first + len(call.offs)]


def _columnwise_input(
    kept: list[Tensor],
    coded: Format | None,
    recipe: Recipe,
    index: int,
    span: tuple[int, int],
    columns: int,
    dtype: torch.dtype,
) -> Matrix:
    cast: Cast = recipe.input_columnwise
    if coded is not None:
        return columnwise(rows_of(kept, coded, *span), coded, cast, columns, dtype, recipe.eps)
    if cast.format is None:
        return Matrix([kept[0][span[0] : span[1]].mT], None)
    each = part_count(cast.format)
    return Matrix(kept[index * each : (index + 1) * each], cast.format)


def _dgrad(row: Matrix, w: Matrix, size: tuple[int, int], recipe: Recipe, dtype: torch.dtype, index: int) -> Tensor:
    cast, fast, exact = recipe.weight_columnwise, "dgrad" in recipe.fast_accum, recipe.exact_products
    if w.format is None and cast.format is not None:
        # A weight whose rowwise operand is in high precision has no codes yet.
        w = columnwise_weight(w.parts[0][index], cast, None)
        return multiply(row, w, size, None, dtype, fast_accum=fast, exact=exact)
    return multiply(row, w._replace(transposed=True), size, None, dtype, fast_accum=fast, index=index, exact=exact)

"""The product of rows that are sorted by expert, where the rows or the gradient of the product may be codes already.

It is `linear` with groups (linear_function.py) on one rank, and gives its bits where neither is. What is codes already is
multiplied as it is, and its columnwise form follows from the codes (`coded.columnwise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockfp.formats import Format
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe

from ..custom_ops.key_ops import gradient_keys
from ..custom_ops.operand_ops import part_count
from ..custom_ops.products import Matrix, multiply
from ..linear.linear import LinearState
from ..linear.parallel import Parallel
from ..linear.operands import Scaling, columnwise_weight, quantized, weight_operand
from ..quantized_tensor.tensor import QuantizedTensor
from .coded import columnwise, rows_of


@dataclass(frozen=True)
class Call:
    """The constants of a call.

    Attributes:
        recipe: from `recipes.for_linear`.
        counts: how many rows each expert has.
        first, experts: number of the first one here, and how many there are on all ranks: they have their own random keys.
        rank: folded into the key.
        needs: whether x, weight and bias want gradients.
        training: whether amaxes are recorded.
        parallel: how a group shares the weight, or None.
    """

    recipe: Recipe
    counts: tuple[int, ...]
    first: int
    experts: int
    rank: int
    needs: tuple[bool, bool, bool]
    training: bool
    parallel: Parallel | None

    def spans(self) -> list[tuple[int, int]]:
        """The first row of each expert, and the one after its last."""
        found, first = [], 0
        for count in self.counts:
            found.append((first, first + count))
            first += count
        return found


def multiply_groups(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    state: LinearState,
    *,
    counts: Sequence[int],
    first: int,
    experts: int,
    parallel: Parallel | None = None,
) -> Tensor:
    """Returns [rows, out] for x [rows, in], values or codes, sorted by expert.

    Args:
        x: float32, float16 or bfloat16, or a `QuantizedTensor` in the recipe's format of inputs.
        weight: [own experts, out, in], values or quantized.
        bias: [own experts, out], or None.
        recipe: from `recipes.for_linear`.
        state: of the layer.
        counts, first, experts: see `Call`.
        parallel: how a group shares the weight; None where it is of this rank alone.

    Under `torch.autocast` values and bias are cast to its dtype; codes have theirs already.

    Raises:
        TypeError: dtypes that differ.
        ValueError: codes in another format, or shapes that don't fit.
    """
    if isinstance(x, QuantizedTensor) and x.format is not recipe.input.format:
        raise ValueError(f"x is in {x.format}, but recipe {recipe} wants {recipe.input}: dispatch it by the same recipe")
    if isinstance(weight, QuantizedTensor) and weight.format is not recipe.weight.format:
        raise ValueError(
            f"the weight is in {weight.format}, but recipe {recipe} wants {recipe.weight}: quantize it in that format"
        )
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[0] != len(counts) or x.shape != (sum(counts), weight.shape[2]):
        raise ValueError(
            f"x must be [rows, in] of {len(counts)} experts with {sum(counts)} rows, and weight [experts, out, in], got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
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
    training = torch.is_grad_enabled()
    needs = tuple(training and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    stochastic = recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic
    if any(needs) and stochastic and state.rng_key is None:
        raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass key= to dispatch")
    call = Call(recipe, tuple(counts), first, experts, state.rank, needs, training, parallel)
    with torch.autocast(x.device.type, enabled=False):
        return GroupedProduct.apply(x, weight, bias, call, state)


def takes_codes(y: Tensor) -> bool:
    """Says whether y comes straight from a product whose backward takes the gradient as codes."""
    return getattr(y.grad_fn, "takes_codes", False)


class GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, state: LinearState) -> Tensor:
        recipe = call.recipe
        wanted = recipe.input_columnwise if call.needs[1] else HIGH_PRECISION
        stored = weight.format if isinstance(weight, QuantizedTensor) else None
        w, size = weight_operand(weight, stored, recipe.weight, call.parallel), (weight.shape[1], weight.shape[2])
        scaling = Scaling(recipe.eps, state.input_scale, state.input_amax_history if call.training else None, state.observed)
        y = torch.empty((x.shape[0], size[0]), dtype=x.dtype, device=x.device)
        kept: list[Tensor] = []
        for index, (first, last) in enumerate(call.spans()):
            if isinstance(x, QuantizedTensor):
                row = Matrix(rows_of(x.parts, x.format, first, last), x.format)
            else:
                row, columns = quantized(x[first:last], "input", recipe.input, wanted, scaling)
                kept += [] if columns is None else columns.parts
            own = None if bias is None else bias[index]
            y[first:last] = multiply(row, w, size, own, x.dtype, fast_accum="forward" in recipe.fast_accum, index=index)
        ctx.takes_codes, ctx.coded = True, None
        if isinstance(x, QuantizedTensor):
            ctx.coded, kept = x.format, list(x.parts) if call.needs[1] else []
        elif call.needs[1] and wanted.format is None:
            kept = [x]
        parts = list(w.parts) if call.needs[0] else []
        ctx.call, ctx.state, ctx.kept, ctx.format, ctx.origin = call, state, len(kept), w.format, w.origin
        ctx.shape, ctx.dtype, ctx.bias_dtype = weight.shape, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*kept, *parts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        call: Call = ctx.call
        recipe, (needs_x, needs_weight, needs_bias), state = call.recipe, call.needs, ctx.state
        saved = list(ctx.saved_tensors)
        kept, w = saved[: ctx.kept], Matrix(saved[ctx.kept :], ctx.format, ctx.origin)
        keys = _keys(call, state) if needs_x or needs_weight else None
        rowwise = recipe.gradient if needs_x else HIGH_PRECISION
        wanted = recipe.gradient_columnwise if needs_weight else HIGH_PRECISION
        scaling = Scaling(recipe.eps, state.gradient_scale, state.gradient_amax_history, state.observed)
        device, (_, outputs, inputs) = gradient.device, ctx.shape
        d_x = torch.empty((gradient.shape[0], inputs), dtype=gradient.dtype, device=device) if needs_x else None
        d_weight = torch.empty(ctx.shape, dtype=ctx.dtype, device=device) if needs_weight else None
        d_bias = torch.empty(ctx.shape[:2], dtype=ctx.bias_dtype, device=device) if needs_bias else None
        for index, (first, last) in enumerate(call.spans()):
            key = None if keys is None else keys[index]
            if isinstance(gradient, QuantizedTensor):
                own = rows_of(gradient.parts, gradient.format, first, last)
                row, column, values = Matrix(own, gradient.format), None, None
                if needs_weight:
                    column_key = key[1] if key is not None and wanted.stochastic else None
                    column = columnwise(own, gradient.format, wanted, outputs, gradient.dtype, recipe.eps, column_key)
                if d_bias is not None:
                    values = gradient[first:last].dequantize(torch.float32)
            else:
                values = gradient[first:last]
                row, column = quantized(values, "gradient", rowwise, wanted, scaling, None, key)
                column = Matrix([values.mT], None) if column is None else column
            if d_bias is not None and values is not None:
                d_bias[index] = values.sum(0)
            if d_weight is not None and column is not None:
                x = _columnwise_input(kept, ctx.coded, call, index, (first, last), inputs, ctx.dtype)
                size = (inputs, last - first)
                d_weight[index] = multiply(column, x, size, None, ctx.dtype, fast_accum="wgrad" in recipe.fast_accum)
            if d_x is not None:
                d_x[first:last] = _dgrad(row, w, (inputs, outputs), recipe, gradient.dtype, index)
        return d_x, d_weight, d_bias, None, None


def _keys(call: Call, state: LinearState) -> Tensor | None:
    """Keys of this backward for the experts here, int32 [own experts, 2, 2]; moves the step on."""
    recipe = call.recipe
    if not (recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic):
        return None
    assert state.rng_key is not None
    keys = gradient_keys(state.rng_key, step=state.step, folds=(call.rank,), groups=call.experts)
    if state.step is not None:
        state.step.add_(1)
    return keys[call.first : call.first + len(call.counts)]


def _columnwise_input(
    kept: list[Tensor], coded: Format | None, call: Call, index: int, span: tuple[int, int], columns: int, dtype: torch.dtype
) -> Matrix:
    cast: Cast = call.recipe.input_columnwise
    if coded is not None:
        return columnwise(rows_of(kept, coded, *span), coded, cast, columns, dtype, call.recipe.eps)
    if cast.format is None:
        return Matrix([kept[0][span[0] : span[1]].mT], None)
    each = part_count(cast.format)
    return Matrix(kept[index * each : (index + 1) * each], cast.format)


def _dgrad(row: Matrix, w: Matrix, size: tuple[int, int], recipe: Recipe, dtype: torch.dtype, index: int) -> Tensor:
    cast = recipe.weight_columnwise
    if w.format is None and cast.format is not None:
        # A weight whose rowwise operand is in high precision has no codes yet.
        w = columnwise_weight(w.parts[0][index], cast, None)
        return multiply(row, w, size, None, dtype, fast_accum="dgrad" in recipe.fast_accum)
    return multiply(row, w._replace(transposed=True), size, None, dtype, fast_accum="dgrad" in recipe.fast_accum, index=index)

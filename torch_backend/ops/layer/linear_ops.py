"""A dense layer's forward and backward, each with its casts and products, by plans that are kept for each shape.

    forward   x, weight .. -> y, weight .., x columnwise .., amax?
    backward  gradient, x columnwise .., weight .. -> d_x?, d_weight?, amax?

    blockfp::linear_backward  (gradient, x, weight, .., casts, ..) -> [d_x?, d_weight?, amax?]

`casts` is a `Recipe.text`. The weight comes as codes, scales and maybe tensor scale; or as values, which are quantized here
where the recipe says so. Eager code calls both functions as they are, where nobody watches operations (`library.runs_now`).
Compiled code, modes and tensors without memory go through ops: the backward's own, which also takes the weight as one
`QuantizedTensor`; in the forward those of the cast and of the product, so that compilers see where layers share a cast.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from blockfp.definition.recipe import Exact
from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.operand_cast import Given, OperandCast, Pair, given_of, operand_cast
from blockfp.recipes import Recipe

from ..library import define, fake, impl
from ..product.products import Matrix, Product, comes_laid, in_order, product_of
from ..quantize.cuda_reader import Read
from ..quantize.quantize_plans import plan_of, quantize_matrix

linear_backward = define(
    "linear_backward(Tensor gradient, Tensor[] x, Tensor? weight, Tensor? scales, Tensor? tensor_scale, Tensor? amax, "
    "Tensor? multiplier, Tensor? keys, str casts, bool needs_x, bool needs_weight, SymInt columns, "
    "ScalarType dtype, SymInt[] origin, bool x_laid=False, Tensor[]? found=None) -> Tensor[]"
)


Casts = dict[Any, list[Tensor]]
"""The parts of one input, rowwise and columnwise, and with a multiplier its amax, by the options of their cast."""

_recipes: dict[str, Recipe] = {}


def recipe_of(casts: str) -> Recipe:
    """The recipe that a `Recipe.text` stands for, without name and delayed scaling."""
    recipe = _recipes.get(casts)
    if recipe is None:
        recipe = switch.kept(_recipes, casts, Recipe.of_text(casts))
    return recipe


# ---- forward


class _Forward(NamedTuple):
    """The plan of a forward.

    Attributes:
        quantize: makes the input's parts; None where it stays as it is.
        row: format of the input, or None.
        count: how many parts are rowwise.
        laid: whether these come laid out for the product.
        weight: format of the weight, or None.
        fast: whether the product may accumulate fast.
        exact: the recipe's `exactness`.
        cast: how the input's parts are made; equal ones make equal parts.
        multiply: the product, which the first operands of their kind say how to plan.
    """

    quantize: Read | None
    row: Format | None
    count: int
    laid: bool
    weight: Format | None
    fast: bool
    exact: Exact
    cast: tuple[Any, ...]
    multiply: Product | None = None


class _Backward(NamedTuple):
    """The plan of a backward.

    Attributes:
        quantize: makes the gradient's parts; None where it stays as it is.
        row, column: its formats, or None.
        count: how many parts are rowwise.
        laid: which directions come laid out for the products.
        input: format of the columnwise input, or None.
        weight, weight_columnwise: formats of the weight, or None.
        fast: whether dgrad and wgrad may accumulate fast.
        exact: the recipe's `exactness`.
        multiply_columns, multiply_rows: wgrad and dgrad, planned like `_Forward.multiply`.
    """

    quantize: Read | None
    row: Format | None
    column: Format | None
    count: int
    laid: Pair
    input: Format | None
    weight: Format | None
    weight_columnwise: Format | None
    fast: tuple[bool, bool]
    exact: Exact
    multiply_columns: Product | None = None
    multiply_rows: Product | None = None


_forwards: dict[Any, _Forward] = switch.plans()
_backwards: dict[Any, _Backward] = switch.plans()


class Found(NamedTuple):
    """An input that comes cast.

    Attributes:
        parts: rowwise, columnwise, and with a multiplier the amax.
        laid: whether the rowwise parts are laid out for the product.
        columns: of the input.
    """

    parts: list[Tensor]
    laid: bool
    columns: int


def _count(format: Format | None) -> int:
    return 0 if format is None else 3 if format.scale.two_level else 2


def forward(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    bias: Tensor | None,
    multiplier: Tensor | None,
    casts: str,
    keep: bool,
    origin: tuple[int, int] = (0, 0),
    shared: Casts | None = None,
    found: Found | None = None,
    keeps_laid: bool = False,
) -> list[Tensor]:
    """Carries out a layer's forward.

    Args:
        x: [tokens, in].
        weight: [out, in], codes or values.
        scales, tensor_scale: of codes.
        bias: [out].
        multiplier: of delayed scaling: float32 of one element.
        casts: the recipe's text.
        keep: whether x is wanted columnwise.
        origin: (row, column) of the weight's first element in the matrix whose blocks are counted.
        shared: casts of x that other layers made with an equal multiplier, or will ask for.
        found: the input that a prologue made of x and cast, instead of x.
        keeps_laid: whether x columnwise comes laid out for the backward's product.

    Returns:
        y [tokens, out]; the parts of a weight that was quantized here; those of x columnwise if they are wanted and have a
        format; with a multiplier the amax of x.
    """
    added = None if bias is None else bias.dtype
    made_of = None if found is None else found[1:]
    key = (
        casts, keep, x.shape, x.stride(), x.dtype, x.device, multiplier is None,
        weight.shape, scales is None, origin, added, made_of, keeps_laid,
    )  # fmt: skip
    plan = _forwards.get(key)
    if plan is None:
        plan = _plan_forward(x, given_of(None, multiplier), recipe_of(casts), keep, origin, made_of, keeps_laid)
    quantize, row, count, laid, format, fast, exact, cast, multiply = plan
    cast_x = None if found is None else found.parts
    if cast_x is None and shared is not None:
        cast_x = shared.get(cast)
    if cast_x is None:
        cast_x = [] if quantize is None else quantize(x, None, multiplier, None)
        if shared is not None:
            shared[cast] = cast_x
    a, parts = [x] if row is None else cast_x[:count], cast_x[count:]
    del found, cast_x
    made: list[Tensor] = []
    if scales is not None:
        w = [weight, scales] if tensor_scale is None else [weight, scales, tensor_scale]
    elif format is None:
        w = [weight]
    else:
        w = made = quantize_matrix(weight, OperandCast(format))
    if multiply is None:
        lengths = weight.shape[0], x.shape[1] if made_of is None else made_of[1]
        left = Matrix(a, row, laid=laid)
        multiply = product_of(left, Matrix(w, format, origin), *lengths, added, x.dtype, fast, exact)
        switch.kept(_forwards, key, plan._replace(multiply=multiply))
    y = multiply(a, w, bias)
    return [y, *made, *parts]


def _plan_forward(
    x: Tensor,
    given: Given,
    recipe: Recipe,
    keep: bool,
    origin: tuple[int, int],
    made_of: tuple[Any, ...] | None,
    keeps_laid: bool,
) -> _Forward:
    row = recipe.input.format
    weight, exact = recipe.weight.format, recipe.exactness
    if made_of is None:
        laid = comes_laid(x, row, weight, exact=exact, in_order=in_order(weight, origin, False))
    else:
        laid = made_of[0]
    columnwise = recipe.input_columnwise if keep else None
    cast = operand_cast(recipe.input, columnwise, recipe.eps, given=given, laid=(laid, keeps_laid))
    quantize = None if row is None and cast.column is None else plan_of(x, cast, one_scale=True)
    return _Forward(quantize, row, _count(row), laid, weight, "forward" in recipe.fast_accum, exact, (x.dtype, cast))


# ---- backward


def backward(
    gradient: Tensor,
    x: list[Tensor],
    weight: Tensor | None,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    amax: Tensor | None,
    multiplier: Tensor | None,
    keys: Tensor | None,
    casts: str,
    needs_x: bool,
    needs_weight: bool,
    columns: int,
    dtype: torch.dtype,
    origin: tuple[int, int] = (0, 0),
    x_laid: bool = False,
    found: list[Tensor] | None = None,
) -> list[Tensor]:
    """Carries out a layer's backward.

    Args:
        gradient: [tokens, out].
        x: the parts of x columnwise, or x alone where that has no format; the list is emptied when they were multiplied.
        weight, scales, tensor_scale, origin: as `forward` got them; needed for the gradient of x.
        amax: of the gradient, where it is known.
        multiplier: of delayed scaling.
        keys: of stochastic rounding, int32 [2, 2].
        casts: the recipe's text.
        needs_x, needs_weight: which gradients are wanted.
        columns: in.
        dtype: of the weight's gradient.
        x_laid: whether the parts of x come laid out for the product.
        found: the parts of a gradient that comes cast (`prologue.cast_gradient`) and its amax; `gradient` is any tensor like it
            then. The list is emptied.

    Returns:
        The gradients that are wanted, of x [tokens, in] and of the weight [out, in]; with a multiplier the amax of what came.
    """
    key = (
        casts, needs_x, needs_weight, gradient.shape, gradient.stride(), gradient.dtype, gradient.device,
        amax is None, multiplier is None, scales is None, columns, dtype, origin, x_laid,
    )  # fmt: skip
    plan = _backwards.get(key)
    if plan is None:
        recipe = recipe_of(casts)
        plan = _plan_backward(gradient, given_of(amax, multiplier), recipe, needs_x, needs_weight, origin)
    quantize, row, column, count, laid, of_input, of_weight, weight_columnwise, fast, exact, wgrad, dgrad = first = plan
    parts = found
    if parts is None:
        parts = [] if quantize is None else quantize(gradient, amax, multiplier, keys)
    g = [gradient] if row is None else parts[:count]
    del parts[:count]
    recorded = [parts.pop()] if multiplier is not None else []
    d_x = d_weight = None
    if needs_weight:
        a, b = [gradient.mT] if column is None else parts, [x[0].mT] if of_input is None else x
        if wgrad is None:
            lengths = columns, gradient.shape[0]
            left = Matrix(a, column, laid=laid[1])
            right = Matrix(b, of_input, laid=x_laid)
            wgrad = product_of(left, right, *lengths, None, dtype, fast[1], exact)
            plan = plan._replace(multiply_columns=wgrad)
        d_weight = wgrad(a, b, None)
        # Memory for the next product.
        del a, b
        parts.clear()
        x.clear()
    if needs_x:
        assert weight is not None
        format, start, transposed = of_weight, (0, 0), True
        if scales is not None:
            w, start = [weight, scales] if tensor_scale is None else [weight, scales, tensor_scale], origin
        elif of_weight is not None:
            # The forward's codes of it were not kept beside it.
            w = quantize_matrix(weight, OperandCast(of_weight))
        elif weight_columnwise is not None:
            # A weight whose rowwise operand is in high precision has no codes yet.
            w = quantize_matrix(weight, OperandCast(column=weight_columnwise))
            format, transposed = weight_columnwise, False
        else:
            w = [weight]
        if dgrad is None:
            held, lengths = Matrix(w, format, start, transposed), (columns, gradient.shape[1])
            left = Matrix(g, row, laid=laid[0])
            dgrad = product_of(left, held, *lengths, None, gradient.dtype, fast[0], exact)
            plan = plan._replace(multiply_rows=dgrad)
        d_x = dgrad(g, w, None)
    if plan is not first:
        switch.kept(_backwards, key, plan)
    results = recorded if d_weight is None else [d_weight, *recorded]
    return results if d_x is None else [d_x, *results]


def _plan_backward(
    gradient: Tensor,
    given: Given,
    recipe: Recipe,
    needs_x: bool,
    needs_weight: bool,
    origin: tuple[int, int],
) -> _Backward:
    row, column = recipe.gradient if needs_x else None, recipe.gradient_columnwise if needs_weight else None
    rowwise, columnwise = None if row is None else row.format, None if column is None else column.format
    of_weight, exact = recipe.weight.format, recipe.exactness
    held = recipe.weight_columnwise.format if of_weight is None else of_weight
    turns = of_weight is not None
    laid = (
        comes_laid(gradient, rowwise, held, exact=exact, in_order=in_order(held, origin if turns else (0, 0), turns)),
        comes_laid(gradient, columnwise, recipe.input_columnwise.format, exact=exact),
    )
    cast = operand_cast(row, column, recipe.eps, given=given, keyed=True, laid=laid)
    quantize = None if cast.row is cast.column is None else plan_of(gradient, cast, one_scale=True)
    fast = ("dgrad" in recipe.fast_accum, "wgrad" in recipe.fast_accum)
    return _Backward(
        quantize,
        rowwise,
        columnwise,
        _count(rowwise),
        laid,
        recipe.input_columnwise.format,
        of_weight,
        recipe.weight_columnwise.format,
        fast,
        exact,
    )


@impl(linear_backward)
def _linear_backward(
    gradient, x, weight, scales, tensor_scale, amax, multiplier, keys, casts, needs_x, needs_weight, columns, dtype, origin,
    x_laid=False, found=None,
) -> list[Tensor]:  # fmt: skip
    found = None if found is None else list(found)
    options = (needs_x, needs_weight, columns, dtype, (origin[0], origin[1]), x_laid, found)
    return backward(gradient, list(x), weight, scales, tensor_scale, amax, multiplier, keys, casts, *options)


@fake(linear_backward)
def _linear_backward_fake(
    gradient, x, weight, scales, tensor_scale, amax, multiplier, keys, casts, needs_x, needs_weight, columns, dtype, origin,
    x_laid=False, found=None,
) -> list[Tensor]:  # fmt: skip
    results = [gradient.new_empty((gradient.shape[0], columns))] if needs_x else []
    if needs_weight:
        results.append(gradient.new_empty((gradient.shape[1], columns), dtype=dtype))
    return results if multiplier is None else [*results, gradient.new_empty((1,), dtype=torch.int32)]


@register_flop_formula(torch.ops.blockfp.linear_backward)
def _backward_flops(
    gradient, x, weight, scales, tensor_scale, amax, multiplier, keys, casts, needs_x, needs_weight, columns, *_, **__
) -> int:
    return 2 * math.prod(gradient) * columns * (needs_x + needs_weight)

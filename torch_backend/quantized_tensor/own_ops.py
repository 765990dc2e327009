"""blockfp's own operations on a `QuantizedTensor`: dequantization, and a layer's products with a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.definition.recipe import Exact
from blockfp.formats import Format

from ..ops import dequantize_plans, library
from ..ops.dequantize_plans import dequantize_parts
from ..ops.groups import grouped_ops
from ..ops.layer import linear_ops
from ..ops.library import runs_now
from ..ops.product import products
from ..ops.product.products import Matrix
from .dispatch import implements, run
from .geometry import COPIED
from .refusals import refused
from .tensor import QuantizedTensor

aten = torch.ops.aten


@implements(dequantize_plans.dequantize_tensor)
def _dequantize(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    if q.geometry.copied is not None:
        raise RuntimeError(COPIED)
    if runs_now(q.codes):
        return dequantize_parts(q.parts, q.format, dtype, q.shape[-1], q.origin)
    return dequantize_plans.dequantize(q.codes, q.scales, q.tensor_scale, q.format.name, dtype, q.shape[-1], q.origin)


@implements(products.weight_product)
def _weight_product(
    a: Sequence[Tensor],
    a_format: str | None,
    weight: QuantizedTensor,
    format: str,
    n: int,
    k: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
    columnwise: bool = False,
    index: int | None = None,
    a_origin: Sequence[int] = (0, 0),
    exact: Exact = "",
    a_laid: bool = False,
) -> Tensor:
    _check_format(weight, Format.parse(format))
    if not runs_now(weight.codes):
        options = (bias, dtype, fast_accum, columnwise, index, weight.origin, a_origin, exact, a_laid)
        return products.product(a, a_format, weight.parts, format, n, k, *options)
    left = Matrix(a, None if a_format is None else Format.parse(a_format), (a_origin[0], a_origin[1]), laid=a_laid)
    right = Matrix(weight.parts, weight.format, weight.origin, columnwise)
    return products.multiply_parts(left, right, n, k, bias, dtype, fast_accum, index, exact)


@implements(linear_ops.linear_backward)
def _linear_backward(
    gradient: Tensor,
    x: Sequence[Tensor],
    weight: QuantizedTensor,
    scales: None,
    tensor_scale: None,
    amax: Tensor | None,
    multiplier: Tensor | None,
    keys: Tensor | None,
    casts: str,
    needs_x: bool,
    needs_weight: bool,
    columns: int,
    dtype: torch.dtype,
    origin: Sequence[int],
    x_laid: bool = False,
    found: list[Tensor] | None = None,
) -> list[Tensor]:
    _check_format(weight, linear_ops.recipe_of(casts).weight.format)
    run = linear_ops.backward if runs_now(weight.codes) else linear_ops.linear_backward
    parts = (weight.codes, weight.scales, weight.tensor_scale)
    # The caller's `origin` is for plain weights.
    options = (needs_x, needs_weight, columns, dtype, weight.origin, x_laid, found)
    return run(gradient, list(x), *parts, amax, multiplier, keys, casts, *options)


def _check_format(weight: QuantizedTensor, format: Format | None) -> None:
    if weight.format is not format:
        raise ValueError(f"the weight is in {weight.format}, but the product expects {format}")


@implements(library.without_backward)
def _without_backward(y: Tensor, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    return library.without_backward(y, x.codes if isinstance(x, QuantizedTensor) else x, weight.codes, bias)


@implements(grouped_ops.forward)
def _grouped_forward(
    x: Tensor,
    weight: QuantizedTensor,
    scales: None,
    tensor_scale: None,
    offs: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    casts: str,
    keep: bool,
) -> list[Tensor]:
    return grouped_ops.forward(x, *experts_parts(weight, casts), offs, bias, multiplier, casts, keep)


@implements(grouped_ops.backward)
def _grouped_backward(
    gradient: Tensor,
    words: Tensor,
    x: Sequence[Tensor],
    weight: QuantizedTensor,
    scales: None,
    tensor_scale: None,
    multiplier: Tensor | None,
    keys: Tensor | None,
    casts: str,
    *options: Any,
) -> list[Tensor]:
    return grouped_ops.backward(gradient, words, list(x), *experts_parts(weight, casts), multiplier, keys, casts, *options)


def experts_parts(weight: QuantizedTensor, casts: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the parts of a grouped weight; raises ValueError unless its matrices are whole."""
    _check_format(weight, linear_ops.recipe_of(casts).weight.format)
    if weight.origin != (0, 0):
        raise ValueError(f"weights of groups must be whole matrices, but these begin at {weight.origin}")
    return weight.codes, weight.scales, weight.tensor_scale


# ---- operations that overwrite a whole parameter


def _fill(func: Any, q: QuantizedTensor, *args: Any, **options: Any) -> QuantizedTensor:
    # A DTensor's local tensor is not a parameter, and may share scales with other ranks.
    if not isinstance(q, nn.Parameter) or q.geometry.base is not None or q.geometry.gathered:
        raise refused(
            func,
            "it is not a whole parameter, and a part's scales may depend on other parts",
            "use blockfp.torch.init_(parameter, function) with the parameter itself, sharded or not",
        )
    if q.is_meta:
        return q
    values = func(torch.empty(q.shape, dtype=q.dtype, device=q.device), *args, **options)
    parts = dequantize_plans.quantize(values, q.format.name, None)
    source = q.with_parts(*parts, geometry=q.geometry.copy(initial=None))
    # The optimizer initializes its master from these.
    source.initial = values.to("cpu", copy=True) if q.requires_grad else None
    return run(aten.copy_.default, (q, source), {})


for _func in (aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
    implements(_func)(partial(_fill, _func))

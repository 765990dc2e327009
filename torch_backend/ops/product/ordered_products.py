"""Products with one order of sums on every device (`blockfp.kernels.exact_order`), and their sums on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockfp.definition import alignment, products
from blockfp.definition.products import Operand
from blockfp.definition.recipe import Exact, Recipe
from blockfp.definition.recipe import Product as RecipeProduct
from blockfp.kernels import cuda_library, exact_order, native
from blockfp.kernels.routes import Route

from ...torch_internals import assume_constant_result
from ..kernels import kernels_for, transpose
from ..library import name_of
from .gpu_products import on_values
from .matrix import Matrix

Product = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Tensor]


@assume_constant_result
def why_not(
    casts: str,
    kind: str,
    index: int | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
) -> str | None:
    """Returns why a layer's products have no defined order of sums, or None; a constant for dynamo.

    `casts` is the recipe's text; `kind` and `index` are the device's; dtypes are as for `exact_order.check`; `needs_x` and
    `needs_weight` say which gradients are needed.
    """
    wanted: list[tuple[RecipeProduct, bool]] = [("forward", True), ("dgrad", needs_x), ("wgrad", needs_weight)]
    try:
        _check_device(torch.device(kind) if index is None else torch.device(kind, index))
        exact_order.check(
            Recipe.of_text(casts), name_of(x_dtype), name_of(weight_dtype), [product for product, needed in wanted if needed]
        )
    except ValueError as error:
        return str(error)
    return None


def _check_device(device: torch.device) -> None:
    if device.type != "cuda" or not torch.cuda.is_available():
        # Fake tensors may name a device that this machine lacks.
        return
    exact_order.check_device(
        torch.cuda.get_device_capability(device), None if cuda_library.available() else "the CUDA library is missing"
    )


def route_of(a: Matrix, b: Matrix, exact: Exact, *, contracts_blocks: bool, cut: bool) -> Route:
    """Returns the route of a product; see `exact_order.route_in_order`."""
    _check_device(a.parts[0].device)
    dtypes = name_of(a.parts[0].dtype), name_of(b.parts[0].dtype)
    return exact_order.route_in_order(a.format, b.format, *dtypes, exact=exact, contracts_blocks=contracts_blocks, cut=cut)


def on_the_host(a: Matrix, b: Matrix, n: int, k: int, dtype: torch.dtype, chosen: Route) -> Product:
    """Plans the product on a CPU, by the kernel library or the definition."""
    summation, named, codes = exact_order.summation_of(chosen), name_of(dtype), exact_order.on_codes(chosen)
    left_kind, right_kind, columns = a._replace(parts=()), b._replace(parts=()), n if b.transposed else k
    multiply = native.product if kernels_for(a.parts[0]) is native else products.product

    def operand(x: Matrix, columns: int) -> Operand:
        return _codes(x, columns, chosen.mode == "aligned") if codes else _values(x, columns)

    def run(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        left, right = operand(left_kind._replace(parts=a), k), operand(right_kind._replace(parts=b), columns)
        return multiply(left, right, summation, dtype=named, bias=bias)

    return run


def on_values_of(a: Matrix, b: Matrix, n: int, k: int, dtype: torch.dtype) -> Product:
    """Plans a product of values in bfloat16 by the CUDA library's own kernel."""
    first = a.parts[0]
    run_values = on_values(first.device, first.shape[0], n, k, dtype)
    left_kind, right_kind, columns = a._replace(parts=()), b._replace(parts=()), n if b.transposed else k
    one = torch.ones(1, device=first.device)

    def run(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        sides = _values(left_kind._replace(parts=a), k), _values(right_kind._replace(parts=b), columns)
        left, right = ([x.codes, one if x.scales is None else x.scales.reshape(1)] for x in sides)
        return run_values(left, right, bias)

    return run


def _codes(x: Matrix, columns: int, aligned: bool) -> Operand:
    """Returns codes and scales, of a matrix stored with so many columns, as matrix units take them."""
    assert x.format is not None
    codes, scales, format = x.parts[0], x.parts[1], x.format
    if x.transposed:
        codes, scales = transpose(codes, scales, format, columns=columns)
        columns = x.parts[0].shape[0]
    if aligned:
        codes, scales, _ = alignment.align(codes.contiguous(), scales, format, columns=columns)
        format = alignment.aligned_format(format)
    return Operand(codes, scales, format)


def _values(x: Matrix, columns: int) -> Operand:
    """Returns values in bfloat16 and their tensor scale, if any."""
    values = x.values(torch.bfloat16, columns, factored=True)
    scaled = x.format is not None and x.format.has_tensor_scale
    return Operand(values.mT if x.transposed else values, x.factor if scaled else None)

"""Custom ops that multiply two quantized operands by the route that `kernels.routes` chooses.

    blockfp::product        (a, a_format, b, b_format, n, k, bias, dtype, fast_accum, columnwise, index, origin, a_origin,
                             exact, a_laid, b_laid)
    blockfp::weight_product (a, a_format, weight, format, n, k, bias, dtype, fast_accum, columnwise, index, a_origin, exact,
                             a_laid)

Both return a @ b^T + bias, [m, n], for a [m, k] and b [n, k]. An operand is a list of parts: codes, scales and any tensor
scale, or values alone without a format. `columnwise` means that b is stored as [k, n]: a weight with only rowwise codes, in the
product that contracts its rows. Its columnwise codes are derived during the call. `index` selects one matrix of a stack.
`exact` is the recipe's `exactness`: it may exclude routes that change an operand, or ask for a defined order of sums.
`a_laid` and `b_laid` mark operands that come laid out for the product (`comes_laid`).

`weight_product` takes b as one `QuantizedTensor`, which has its own origin; the op table unpacks it after dynamo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from blockfp.definition import alignment
from blockfp.definition.recipe import Exact
from blockfp.formats import Format
from blockfp.kernels import cuda_library, switch
from blockfp.kernels.routes import Route, route

from ...torch_internals import assume_constant_result
from .. import cuda, kernels
from ..dequantize_plans import plan_of
from ..library import define, fake, impl, maker
from ..quantize import cuda_layouts
from . import ordered_products
from .gpu_products import BLACKWELL, on_codes
from .matrix import Matrix

product = define(
    "product(Tensor[] a, str? a_format, Tensor[] b, str? b_format, SymInt n, SymInt k, Tensor? bias, ScalarType dtype, "
    "bool fast_accum=False, bool columnwise=False, int? index=None, SymInt[] origin=[0, 0], SymInt[] a_origin=[0, 0], "
    "str exact='', bool a_laid=False, bool b_laid=False) -> Tensor"
)
weight_product = define(
    "weight_product(Tensor[] a, str? a_format, Tensor weight, str format, SymInt n, SymInt k, Tensor? bias, ScalarType dtype, "
    "bool fast_accum=False, bool columnwise=False, int? index=None, SymInt[] a_origin=[0, 0], str exact='', "
    "bool a_laid=False) -> Tensor"
)


def multiply(
    a: Matrix,
    b: Matrix,
    size: Sequence[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    index: int | None = None,
    exact: Exact = "",
) -> Tensor:
    """Returns a @ b^T + bias, through one of the ops.

    Args:
        a: [m, k].
        b: [n, k], or a stack of such matrices.
        size: (n, k).
        bias: [n], or None.
        dtype: dtype of the result.
        fast_accum: whether FP8 matrix units may keep fewer bits of their sums.
        index: index into a stack b; None for a single matrix.
        exact: the recipe's `exactness`.
    """
    a_format = None if a.format is None else a.format.name
    b_format = None if b.format is None else b.format.name
    options = (*size, bias, dtype, fast_accum, b.transposed, index)
    if b.is_one_tensor:
        return weight_product(a.parts, a_format, b.parts[0], b_format, *options, a.origin, exact, a.laid)
    return product(a.parts, a_format, b.parts, b_format, *options, b.origin, a.origin, exact, a.laid, b.laid)


@lru_cache(maxsize=4096)
def route_on(
    device: torch.device,
    a: Format | None,
    b: Format | None,
    m: int,
    n: int,
    k: int,
    in_order: bool = True,
    exact: Exact = "",
) -> Route:
    """Returns a product's route on a device; see `kernels.routes.route`."""
    if device.type != "cuda":
        return route(a, b, platform="cpu", in_order=in_order)
    sizes = {"m": m, "n": n, "k": k, "in_order": in_order, "exact": "exact" in exact}
    capability, library = torch.cuda.get_device_capability(device), cuda_library.available()
    return route(a, b, platform="cuda", capability=capability, library=library, **sizes)


@impl(product)
def _product(
    a: Sequence[Tensor],
    a_format: str | None,
    b: Sequence[Tensor],
    b_format: str | None,
    n: int,
    k: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
    columnwise: bool = False,
    index: int | None = None,
    origin: Sequence[int] = (0, 0),
    a_origin: Sequence[int] = (0, 0),
    exact: Exact = "",
    a_laid: bool = False,
    b_laid: bool = False,
) -> Tensor:
    formats = [None if name is None else Format.parse(name) for name in (a_format, b_format)]
    right = Matrix(b, formats[1], (origin[0], origin[1]), columnwise, b_laid)
    left = Matrix(a, formats[0], (a_origin[0], a_origin[1]), laid=a_laid)
    return multiply_parts(left, right, n, k, bias, dtype, fast_accum, index, exact)


@fake(product)
def _product_fake(a, a_format, b, b_format, n, k, bias, dtype, *_, **__) -> Tensor:
    return a[0].new_empty((a[0].shape[0], n), dtype=dtype)


@impl(weight_product)
def _weight_product(a, a_format, weight: Tensor, *_, **__) -> Tensor:
    raise TypeError(f"weight must be a QuantizedTensor, got a tensor of {weight.dtype}")


@fake(weight_product)
def _weight_product_fake(a, a_format, weight, format, n, k, bias, dtype, *_, **__) -> Tensor:
    return a[0].new_empty((a[0].shape[0], n), dtype=dtype)


@register_flop_formula([torch.ops.blockfp.product, torch.ops.blockfp.weight_product])
def _flops(a, a_format, b, b_format, n, k, *_, out_shape, **__) -> int:
    """Counts FLOPs as torch's counters do for the same product in high precision."""
    return 2 * math.prod(out_shape) * k


Product = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Tensor]
"""(a's parts, b's parts, bias or None) -> a @ b^T + bias, for operands of one kind."""

_products: dict[Any, Product] = switch.plans()


def multiply_parts(
    a: Matrix,
    b: Matrix,
    n: int,
    k: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
    index: int | None,
    exact: Exact = "",
) -> Tensor:
    """Implements the op `product`; arguments are as for `multiply`, with b given by parts."""
    if index is not None:
        b = b._replace(parts=[part[index if part.shape[0] > 1 else 0] if part.ndim > 2 else part for part in b.parts])
    first, added = a.parts[0], None if bias is None else bias.dtype
    key = (first.device, first.shape[0], n, k, dtype, first.dtype, b.parts[0].dtype, added, fast_accum, exact)
    key = (*key, a.format, a.origin, a.laid, b.format, b.origin, b.transposed, b.laid)
    run = _products.get(key)
    if run is None:
        run = switch.kept(_products, key, product_of(a, b, n, k, added, dtype, fast_accum, exact))
    return run(a.parts, b.parts, bias)


def product_of(
    a: Matrix, b: Matrix, n: int, k: int, bias: torch.dtype | None, dtype: torch.dtype, fast_accum: bool, exact: Exact
) -> Product:
    """Plans the product of operands with this layout."""
    device, m = a.parts[0].device, a.parts[0].shape[0]
    if 0 in (m, n, k):
        zeros = partial(torch.zeros, (m, n), dtype=dtype, device=device)
        return lambda a, b, bias: zeros() if bias is None else zeros() + bias
    transposed = b.transposed
    ordered = "order" in exact
    if ordered:
        blocks = not transposed or b.format is None or b.format.square
        chosen = ordered_products.route_of(a, b, exact, contracts_blocks=blocks, cut=_cut(a) or _cut(b))
    else:
        whole = in_order(b.format, b.origin, transposed) and not _cut(a)
        chosen = route_on(device, a.format, b.format, m, n, k, whole, exact)
    on_host = ordered and not a.parts[0].is_cuda
    if (a.laid or b.laid) and (on_host or chosen.mode not in ("block", "aligned")):
        why = "a CPU multiplies parts as they are stored" if on_host else chosen.reason
        raise ValueError(f"an operand comes laid out for the CUDA library's product, which doesn't run here: {why}")
    if on_host:
        return ordered_products.on_the_host(a, b, n, k, dtype, chosen)
    if chosen.mode in ("dequantize", "plain"):
        if ordered:
            return ordered_products.on_values_of(a, b, n, k, dtype)
        return _of_values(a, b, n, k, dtype, chosen)
    if chosen.mode in BLACKWELL:
        multiply, left, right = BLACKWELL[chosen.mode], a._replace(parts=()), b._replace(parts=())

        def on_blackwell(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            other = right._replace(parts=b)
            return multiply(left._replace(parts=a), _turned(other, n) if transposed else other, bias, dtype)

        return on_blackwell
    assert a.format is not None
    assert b.format is not None
    a_format, b_format = formats = a.format, b.format
    width, options = k, {"fast": fast_accum, "exact_order": ordered, "ordered": (a.laid, b.laid)}
    aligned = chosen.mode == "aligned"
    if aligned:
        formats, width = tuple(map(alignment.aligned_format, formats)), -(-k // 16) * 16
        options |= {"ordered": (True, True), "bands": b_format.square}
    run = on_codes(device, *formats, m, n, width, dtype, bias, **options)
    if not aligned and not transposed:
        return run
    columns = n if transposed else k
    if not aligned:
        turn = cuda.turner(b.parts, b_format, n)
        return lambda a, b, bias: run(a, turn(b), bias)
    align_a = None if a.laid else cuda_layouts.aligner(a.parts[0], a_format, k, False)
    align_b = None if b.laid else cuda_layouts.aligner(b.parts[0], b_format, columns, transposed)
    if align_a is None and align_b is None:
        return run

    def on_aligned_codes(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        a = a if align_a is None else align_a(a[0], a[1])
        b = b if align_b is None else align_b(b[0], b[1])
        return run(a, b, bias)

    return on_aligned_codes


def comes_laid(x: Tensor, own: Format | None, other: Format | None, *, exact: Exact, in_order: bool = True) -> bool:
    """Returns whether x, quantized for a single product, should be laid out for it while it is quantized.

    It should if the CUDA library's product would do that anyway; `Matrix.laid` then tells it not to. Only the device of x
    matters. `own` is its format, `other` the other operand's; `exact` is as for `multiply`, `in_order` as for
    `kernels.routes.route`.
    """
    # One scale has no layout, and square blocks are read as they are stored.
    if own is None or other is None or not in_order or own.block is None or own.block[0] > 1:
        return False
    return _lays(x.device.type, x.device.index, own.name, other.name, exact)


# A constant for dynamo.
@assume_constant_result
def _lays(kind: str, index: int | None, own: str, other: str, exact: Exact) -> bool:
    if kind == "cuda" and not torch.cuda.is_available():
        # Fake tensors may name a device that this machine lacks.
        return False
    device = torch.device(kind) if index is None else torch.device(kind, index)
    return route_on(device, Format.parse(own), Format.parse(other), 1, 1, 1, exact=exact).mode in ("block", "aligned")


def in_order(format: Format | None, origin: tuple[int, int], transposed: bool) -> bool:
    """Returns whether a second operand's scales run along the contracted axis, and its blocks begin at its corner."""
    return not (transposed and format is not None and not format.square) and not _cut(Matrix((), format, origin))


def _cut(x: Matrix) -> bool:
    """Returns whether x begins inside a block."""
    rows, columns = (x.format and x.format.block) or (1, 1)
    columns = 1 if x.format and x.format.per_row else columns
    return bool(x.origin[0] % rows or x.origin[1] % columns)


def _of_values(a: Matrix, b: Matrix, n: int, k: int, dtype: torch.dtype, chosen: Route) -> Product:
    """Plans a product of dequantized values in a dtype that represents them exactly, with fp32 sums."""
    left_kind, right_kind = a._replace(parts=()), b._replace(parts=())
    transposed, columns, factored = b.transposed, n if b.transposed else k, chosen.scale_product
    known = getattr(torch, chosen.dtype) if chosen.dtype else None
    mixed = known is None or a.format is None or b.format is None
    a_scaled, b_scaled = (x.format is not None and x.format.has_tensor_scale for x in (a, b))
    new = maker((a.parts[0].shape[0], n), dtype, a.parts[0].device)
    left_values = right_values = None
    # A per-tensor scale is its format's only scale, so a call without tensor scale doesn't leave it out.
    one_scale = factored and any(x.format is not None and x.format.per_tensor for x in (a, b))
    if known is not None and a.format is not None and b.format is not None and not one_scale:
        left_values = plan_of(a.parts, a.format, known, k, a.origin)
        right_values = plan_of(b.parts, b.format, known, columns, b.origin)
    a_whole, b_whole = (not factored and len(x.parts) > 2 for x in (a, b))

    def run(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        working: Any = known
        if mixed:
            of_values = [x[0].dtype for x, kind in ((a, left_kind), (b, right_kind)) if kind.format is None or known is None]
            working = reduce(torch.promote_types, of_values if known is None else [known, *of_values])
        if left_values is not None and right_values is not None:
            left = left_values(a[0], a[1], a[2] if a_whole else None)
            right = right_values(b[0], b[1], b[2] if b_whole else None)
        else:
            left = left_kind._replace(parts=a).values(working, k, factored=factored)
            right = right_kind._replace(parts=b).values(working, columns, factored=factored)
        right = right if transposed else right.mT
        if factored:
            wide = working is not torch.float32
            out = torch.mm(left, right, out_dtype=torch.float32) if wide else torch.mm(left, right)
            # Multiplied first, so that the product is read once. The factor underflows only if the amaxes' product is below
            # 1e-31.
            factor = a[-1] if a_scaled else b[-1]
            if a_scaled and b_scaled:
                factor = factor * b[-1]
            factor = factor.view(()) if factor.ndim else factor
            if bias is None:
                return torch.mul(out, factor, out=new())
            return torch.addcmul(bias.float(), out, factor).to(dtype)
        if working is dtype or not left.is_cuda or working is torch.float32:
            out = torch.mm(left, right) if bias is None else torch.addmm(bias.to(working), left, right)
            return out.to(dtype)
        out = torch.mm(left, right, out_dtype=torch.float32)
        return (out if bias is None else out + bias).to(dtype)

    return run


def _turned(b: Matrix, n: int) -> Matrix:
    """Transposes b, stored as [k, n], to [n, k]."""
    assert b.format is not None
    codes, scales, *tensor_scale = b.parts
    codes, scales = kernels.transpose(codes, scales, b.format, columns=n)
    return b._replace(parts=[codes.contiguous(), scales.contiguous(), *tensor_scale], transposed=False)

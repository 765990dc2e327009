"""Products of all groups at once on a GPU, the groups' ends in its memory.

    rows       y [tokens, n]             rows of a group times its own weight       forward, input's gradient
    columns    weight [groups, n, k]     what a group's rows contract to            weight's gradient

FP8 per tensor and in blocks is multiplied on codes by the library's own kernel for Hopper, and so is MX once it is aligned. All
else is dequantized, all groups in one launch, and goes to torch's `grouped_mm`, which takes and gives bfloat16: scales of whole
groups multiply its result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from blockfp.definition import alignment, groups
from blockfp.definition.recipe import Exact
from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.routes import HOPPER, Mode, exact_in_bfloat16, group_mode, why_groups_apart

from .. import cuda
from ..dequantize_plans import dequantize_parts
from ..product.gpu_products import on_codes
from ..product.products import Matrix
from ..quantize import cuda_layouts
from . import cuda_groups

_ALIGNED = 8  # elements of bfloat16 that grouped_mm's strides are multiples of


def _mode(device: torch.device, a: Format | None, b: Format | None, exact: Exact) -> Mode | None:
    """`kernels.routes.group_mode` of a device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return None
    return group_mode(a, b, "exact" in exact)


def why_apart(
    x: Tensor, n: int, a: Format | None, w: Format | None, *, exact: Exact, transposed: bool, again: Format | None = None
) -> str | None:
    """Says why rows of groups are not multiplied all at once on a GPU; None where they are.

    a is made of x [tokens, k], and w is a weight of n columns, or `transposed` [groups, k, n]; `again` is the format in which a
    weight of values is quantized for this product.
    """
    why = why_groups_apart(a, "row")
    if why is not None:
        return why
    if w is not None and w.per_row:
        return f"a scale for each row, {w}"
    if w is None and again is not None:
        return f"a weight that is quantized columnwise alone, in {again}"
    if _weight_mode(x.device, a, w, exact, transposed) is not None:
        return None
    return _why_not_dequantized(x, (x.shape[1], n), (a, w), exact)


def _weight_mode(device: torch.device, a: Format | None, w: Format | None, exact: Exact, transposed: bool) -> Mode | None:
    """`_mode` of rows and a weight, which is turned where it is transposed."""
    return None if w is None or (transposed and not w.square) else _mode(device, a, w, exact)


@switch.memo
def rows_come_aligned(device: torch.device, a: Format | None, w: Format | None, exact: Exact, transposed: bool) -> bool:
    """Says whether rows that are quantized to a for this product alone come aligned, as it would align them."""
    return _weight_mode(device, a, w, exact, transposed) == "aligned"


@switch.memo
def columns_come_aligned(device: torch.device, a: Format | None, b: Format | None, exact: Exact) -> bool:
    """Says the same of columns."""
    return _mode(device, a, b, exact) == "aligned"


def why_columns_apart(x: Tensor, a: Format | None, b: Format | None, k: int, dtype: torch.dtype, *, exact: Exact) -> str | None:
    """Says why columns of groups, a made of x [tokens, n] and b of k rows, aren't multiplied all at once; None if they are."""
    why = why_groups_apart(a, "column") or why_groups_apart(b, "column", kept=True)
    if why is not None or _mode(x.device, a, b, exact) is not None:
        return why
    if (a is None) != (b is None):
        return "one operand of the weight's gradient is in high precision"
    if dtype is not torch.bfloat16:
        return f"torch's grouped_mm gives no {dtype}"
    return _why_not_dequantized(x, (x.shape[1], k), (a, b), exact)


def _why_not_dequantized(
    x: Tensor, lengths: tuple[int, int], formats: tuple[Format | None, Format | None], exact: Exact
) -> str | None:
    if "order" in exact:
        return "torch's grouped_mm has no defined order of sums"
    if x.dtype is not torch.bfloat16:
        return f"torch's grouped_mm takes no {x.dtype}"
    for format in formats:
        if format is not None and not exact_in_bfloat16(format):
            return f"values of {format} are exact in float32 only"
    odd = [length for length in lengths if length % _ALIGNED or not length]
    return f"torch's grouped_mm takes no lengths of {odd[0]}" if odd else None


def multiply_rows(
    a: Matrix, w: Matrix, words: Tensor, count: int, n: int, k: int, bias: Tensor | None, dtype: torch.dtype,
    exact: Exact,
) -> Tensor:  # fmt: skip
    """Multiplies the rows of each group with its own weight; rows past the last end become zero.

    Args:
        a: [tokens, k], parts of groups along the rows, or values.
        w: [groups, n, k], or with `transposed` stored as [groups, k, n].
        words: of `cuda_groups.group_rows`.
        count: how many groups.
        n, k: columns of the product, and the contracted length.
        bias: [groups, n], or None.
        dtype: of the product.
        exact: as for `why_apart`.
    """
    tokens, ends = a.parts[0].shape[0], words[:count]
    if 0 in (tokens, n, k, count):
        y = a.parts[0].new_zeros((tokens, n), dtype=dtype)
        return y if bias is None or not count else _cleared(y + bias[_group_of_rows(ends, tokens)], words, count)
    mode = _weight_mode(a.parts[0].device, a.format, w.format, exact, w.transposed)
    if mode is not None:
        assert w.format is not None
        bands = mode == "aligned" and w.format.square
        if mode == "aligned":
            a, w = _aligned(a, k), _aligned(w, n if w.transposed else k)
        elif w.transposed:
            codes, scales = cuda.transpose(w.parts[0], w.parts[1], w.format, columns=n)
            w = Matrix([codes, scales], w.format)
        y = a.parts[0].new_empty((tokens, n), dtype=dtype)
        return _cleared(multiply_groups(_in_order(a), w, ends, bias, out=y, bands=bands), words, count)
    rows = _values(a, tokens, k, columnwise=False)
    weight = w.values(torch.bfloat16, n if w.transposed else k, factored=True)
    y = grouped_mm(rows, weight if w.transposed else weight.mT, offs=ends)
    factor = _factor(a, w)
    if factor is None and bias is None:
        return _cleared(y.to(dtype), words, count)
    # torch's product comes rounded to bfloat16; what follows is rounded once more.
    of_group, y = _group_of_rows(ends, tokens), y.float()
    y = y if factor is None else y.mul_(factor.expand(count)[of_group, None])
    y = y if bias is None else y.add_(bias[of_group])
    return _cleared(y.to(dtype), words, count)


def multiply_columns(
    a: Matrix, b: Matrix, words: Tensor, count: int, n: int, k: int, dtype: torch.dtype, exact: Exact
) -> Tensor:
    """Contracts the rows of each group; zeros for groups without rows.

    Args:
        a, b: [n, columns] and [k, columns], parts of groups along the columns; or values, [tokens, n] and [tokens, k].
        words: of `cuda_groups.group_rows`.
        count: how many groups.
        n, k: lengths of each product.
        dtype: of the products.
        exact: as for `why_apart`.
    """
    if not a.parts[0].numel() or not b.parts[0].numel():
        return a.parts[0].new_zeros((count, n, k), dtype=dtype)
    mode = _mode(a.parts[0].device, a.format, b.format, exact)
    if mode is not None:
        if mode == "aligned":
            a, b = (_aligned(x, _length(x)) for x in (a, b))
        out = a.parts[0].new_empty((count, n, k), dtype=dtype)
        multiply_groups(_in_order(a), _in_order(b), words[:count], out=out)
    elif a.format is None:
        out = grouped_mm(a.parts[0].mT, b.parts[0], offs=words[:count]).to(dtype)
    else:
        left, right = _values(a, n, None, columnwise=True), _values(b, k, None, columnwise=True)
        out = grouped_mm(left, right.mT, offs=words[count : 2 * count])
        factor = _factor(a, b)
        if factor is not None:
            out.mul_(factor.view(-1, 1, 1))
        out = out.to(dtype)
    cuda_groups.clear_groups(words, count, matrices=out)
    return out


def multiply_groups(
    a: Matrix,
    b: Matrix,
    ends: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    bands: bool = False,
) -> Tensor:
    """Multiplies group after group on codes, outside of a graph, where a device has a route for that.

    Of rows: a [m, k], b [groups, n, k], the result [m, n]; rows past the last end are zeros, or in a given `out` as they were.
    Along k: a [m, padded], b [n, padded], whose columns of a group begin at a multiple of 128, with zero codes up to there
    (`definition.groups.columns_for`); the result is [groups, m, n]. Groups without rows give zeros there.

    Args:
        a, b: FP8 with one scale, one for each group ([groups]), or in blocks of 1x128 or 128x128. b decides which kind it is.
        ends: int32 [groups] on the device, ascending: the row after each group's last.
        bias: [groups, n], or None; of rows only.
        dtype: of the result; that of `out` where it is given.
        out: contiguous, to write to.
        accumulate: adds the product to what `out` holds.
        bands: see `kernels.products.plan`.
    """
    along_k, groups = b.parts[0].ndim == 2, ends.shape[0]
    codes, (n, k) = a.parts[0], b.parts[0].shape[-2:]
    m = codes.shape[0]
    if out is None:
        assert dtype is not None
        out = codes.new_zeros((groups, m, n) if along_k else (m, n), dtype=dtype)
    if out.numel() == 0 or k == 0:
        return out
    assert a.format is not None
    assert b.format is not None
    run = on_codes(
        codes.device, a.format, b.format, m, n, k, out.dtype, None if bias is None else bias.dtype,
        ordered=(a.laid, b.laid), groups=groups, along_k=along_k, accumulate=accumulate, bands=bands,
    )  # fmt: skip
    return run(a.parts, b.parts, bias, ends, out)


def _in_order(x: Matrix) -> Matrix:
    return x._replace(laid=x.format is not None and groups.ordered(x.format))


def _aligned(x: Matrix, columns: int) -> Matrix:
    """MX codes, `columns` in each stored row, shifted to one scale for 128 elements, of x not transposed.

    Blocks begin with a group, so each row is shifted by itself.
    """
    assert x.format is not None
    if x.laid:
        return Matrix(x.parts, alignment.aligned_format(x.format), laid=True)
    parts = cuda_layouts.align(x.parts[0], x.parts[1], x.format, columns=columns, transposed=x.transposed)
    return Matrix(parts, alignment.aligned_format(x.format), laid=True)


def _length(x: Matrix) -> int:
    """The columns of packed codes that fill whole bytes."""
    assert x.format is not None
    return x.parts[0].shape[1] * 8 // x.format.element.bits


def _values(x: Matrix, lines: int, columns: int | None, *, columnwise: bool) -> Tensor:
    """The values of an operand in bfloat16, scales of whole groups left out."""
    if x.format is None:
        return x.parts[0]
    codes, scales, *_ = x.parts
    length = _length(x) if columns is None else columns
    if groups.ordered(x.format):
        scales = cuda_layouts.transpose_words(scales)[:lines]
    parts = [codes, scales]
    if x.format.has_tensor_scale:
        one = torch.ones((1, 1) if x.format.per_tensor else (), dtype=torch.float32, device=codes.device)
        parts = [codes, one] if x.format.per_tensor else [codes, scales, one]
    return dequantize_parts(parts, x.format, torch.bfloat16, length)


def _factor(a: Matrix, b: Matrix) -> Tensor | None:
    """The product of the operands' scales of whole groups or tensors, float32 [groups] or [1]; None where there are none."""
    factors = [x.factor.reshape(-1) for x in (a, b) if x.format is not None and x.format.has_tensor_scale]
    return None if not factors else factors[0] if len(factors) == 1 else factors[0] * factors[1]


def _group_of_rows(ends: Tensor, tokens: int) -> Tensor:
    rows = torch.arange(tokens, dtype=torch.int32, device=ends.device)
    return torch.bucketize(rows, ends, right=True).clamp_(max=ends.shape[0] - 1)


def _cleared(y: Tensor, words: Tensor, count: int) -> Tensor:
    cuda_groups.clear_groups(words, count, rows=y)
    return y

"""The products of `blockfp check --products`: forward, dgrad and wgrad of a weight, bit by bit, and where bits first differ.

Each operand is a sample of a few lines of at most `LENGTH` elements. The backends cast it, and multiply what they cast with the
bits of one summation. A backend has products if it has `summations`, names of what it runs, and `product`, with the contract of
`definition.products.product` on NumPy arrays.

Operands of MXFP8, MXFP6 and MXFP4 are aligned first for a summation that takes no E8M0 scales, as on Hopper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..definition import alignment, layout, matrix_units, products
from ..definition.matrix_units import SUMMATIONS, Summation
from ..definition.numerics import Quantized
from ..definition.products import Operand
from ..errors import BadBackend
from ..formats import Format
from .crosscheck import (
    Backend,
    ProductDifference,
    Products,
    array_of,
    attempt,
    bits_of,
    checked,
    compare,
    describe,
    hexadecimal,
    in_whole,
)

LINES, LENGTH, TENSORS = 8, 384, 3
"""Rows and columns of each product, most elements of each sum, and most tensors of a run: the definition is slow."""

DEFAULT = "hopper_fp8"
"""The summation of this library's own kernel: what its users have on Hopper, and what they compare with elsewhere."""


class Sample(NamedTuple):
    """One operand before its cast.

    Attributes:
        name: such as "weight".
        values: [lines, k].
        corner: index of the first element in the operand.
    """

    name: str
    values: np.ndarray
    corner: tuple[int, int] = (0, 0)


class Case(NamedTuple):
    """One product a @ b^T, and what its epilogue does."""

    name: str
    a: Sample
    b: Sample
    dtype: str
    bias: np.ndarray | None = None
    addend: np.ndarray | None = None

    @property
    def epilogue(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "bias": self.bias, "addend": self.addend}


# ---- What a format and a backend have


def lacks(backend: Backend, summation: Summation) -> str:
    """Returns why a backend doesn't run a summation; "" if it does."""
    has = tuple(getattr(backend, "summations", ()))
    if summation.name in has:
        return ""
    return f"{backend.name} has no {summation}, but {', '.join(has)}" if has else f"{backend.name} has no products"


@cache
def _takes(summation: Summation, format: Format) -> bool:
    lines = (1, 128)
    codes = np.zeros(layout.codes_shape(lines, format), np.uint8)
    scales = np.zeros(layout.scales_shape(lines, format), np.float32 if format.scale.dtype == "float32" else np.uint8)
    try:
        one = _operand(Quantized(codes, scales, None), format, summation, lines[1])
        products.sides(one, one, summation)
    except ValueError:
        return False
    return True


def refusal(format: Format, summation: Summation) -> str:
    """Returns why a format has no products in a summation; "" if it has."""
    if _takes(summation, format):
        return ""
    fitting = [name for name, other in SUMMATIONS.items() if _takes(other, format)]
    return f"{summation} doesn't take them, but {', '.join(fitting)}" if fitting else "no summation takes them"


def named(name: str, formats: Sequence[Format]) -> Summation:
    """Returns the summation of a name; raises ValueError unless it has products of one of the formats."""
    summation = matrix_units.named(name)
    if not any(_takes(summation, format) for format in formats):
        fitting = [name for name, other in SUMMATIONS.items() if any(_takes(other, format) for format in formats)]
        some = ", ".join(map(str, formats[:3])) + (", .." if len(formats) > 3 else "")
        raise ValueError(f"multiplies none of {some}; {', '.join(fitting) or 'no summation'} can")
    return summation


def _operand(q: Quantized, format: Format, summation: Summation, columns: int) -> Operand:
    if summation.scale_block is None and alignment.can_align(format):
        q, format = alignment.align(q.codes, q.scales, format, columns=columns), alignment.aligned_format(format)
    return Operand(q.codes, q.scales, format)


def chosen(count: int) -> frozenset[int]:
    """Returns which of `count` tensors are multiplied: evenly spread, the first and the last among them."""
    if count <= TENSORS:
        return frozenset(range(count))
    return frozenset(round(i * (count - 1) / (TENSORS - 1)) for i in range(TENSORS))


# ---- Operands


def _window(size: int, length: int) -> slice:
    """Returns at most `length` lines that begin at a block of any format: the last ones, of which a block may be ragged."""
    start = max(0, -(-(size - length) // 128) * 128) if length >= 128 else (size - 1) // 128 * 128
    return slice(start, min(start + length, size))


def _drawn(lines: int, length: int, seed: int, dtype: np.dtype) -> np.ndarray:
    """Draws [lines, length], nearly Gaussian, with large channels; from integers, so the bits are the same on all machines."""
    raw = np.random.PCG64(seed).random_raw(lines * length)
    words = [((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int32) for shift in (0, 16, 32, 48)]
    total = words[0] + words[1] + words[2] + words[3]
    x = ((total - 2 * 0xFFFF).astype(np.float32) * np.float32(2.0**-15)).reshape(lines, length)
    x[:, ::16] *= 32
    return x.astype(dtype)


def cases(weight: np.ndarray) -> list[Case]:
    """Returns samples of a layer's three products, of the first matrix of a weight [.., n, k].

    Forward adds a bias and rounds to bfloat16, as dgrad does; wgrad adds to an fp32 gradient.
    """
    matrix = weight[(0,) * (weight.ndim - 2)]
    n, k = matrix.shape
    draw = partial(_drawn, dtype=weight.dtype)
    some_n, some_k, many_n, many_k = _window(n, LINES), _window(k, LINES), _window(n, LENGTH), _window(k, LENGTH)
    rows = Sample("weight", matrix[some_n, many_k], (some_n.start, many_k.start))
    columns = Sample("weight, transposed", matrix[many_n, some_k].T.copy(), (some_k.start, many_n.start))
    lines_n, lines_k = rows.values.shape[0], columns.values.shape[0]
    bias = draw(1, lines_n, 0)[0].astype(np.float32)
    before = draw(lines_n, lines_k, 1).astype(np.float32)
    tokens = LENGTH - 20  # ends within a block
    inputs = Sample("input", draw(LINES, rows.values.shape[1], 2))
    gradients = Sample("gradient", draw(LINES, columns.values.shape[1], 3))
    across = Sample("gradient, transposed", draw(lines_n, tokens, 4)), Sample("input, transposed", draw(lines_k, tokens, 5))
    return [
        Case("forward", inputs, rows, "bfloat16", bias=bias),
        Case("dgrad", gradients, columns, "bfloat16"),
        Case("wgrad", *across, "float32", addend=before),
    ]


# ---- The comparison


class _Expected(NamedTuple):
    """A product as the reference has it: the casts of both operands, what is multiplied, and the result."""

    backend: Backend
    case: Case
    casts: tuple[Quantized, Quantized]
    operands: tuple[Operand, Operand]
    summation: Summation
    result: np.ndarray


def check_products(
    weight: np.ndarray, format: Format, backends: Sequence[Backend], summation: Summation | None = None
) -> Products:
    """Casts and multiplies samples of a layer's three products with every backend, and compares them with the first.

    Args:
        weight: float32, float16 or bfloat16, [.., n, k].
        format: of all operands.
        backends: one or more; the first is the reference.
        summation: None for `DEFAULT`.

    Raises:
        BadBackend: a backend raises an exception (the cause), or returns something other than arrays.
    """
    summation = SUMMATIONS[DEFAULT] if summation is None else summation
    reference, *others = backends
    reason = refusal(format, summation) or lacks(reference, summation) or ("" if weight.size else "empty")
    if reason:
        return Products(None, reason)
    differences: list[ProductDifference] = []
    without = {one.name: lacks(one, summation) for one in others if lacks(one, summation)}
    operands_hash, products_hash, sums = hashlib.sha256(), hashlib.sha256(), 0
    for case in cases(weight):
        expected = _expected(reference, case, format, summation)
        for part in (part for q in expected.casts for part in q if part is not None):
            operands_hash.update(part.tobytes())
        products_hash.update(expected.result.tobytes())
        sums += expected.result.size
        for backend in others:
            if backend.name in without:
                continue
            found = _first_difference(backend, expected, format)
            if isinstance(found, str):
                without[backend.name] = found
            elif found is not None:
                differences.append(found)
    compared = tuple(one.name for one in others if one.name not in without)
    hashes = operands_hash.hexdigest(), products_hash.hexdigest()
    return Products(summation.name, "", sums, tuple(differences), compared, without, *hashes)


def _expected(reference: Backend, case: Case, format: Format, summation: Summation) -> _Expected:
    left, right = (_cast(reference, side, format) for side in (case.a, case.b))
    if isinstance(left, str) or isinstance(right, str):
        raise BadBackend(f"backend {reference.name!r}, the reference, has no {format}")
    length = case.a.values.shape[1]
    a, b = (_operand(q, format, summation, length) for q in (left, right))
    result = _multiply(reference, a, b, summation, **case.epilogue)
    return _Expected(reference, case, (left, right), (a, b), summation, result)


def _cast(backend: Backend, side: Sample, format: Format) -> Quantized | str:
    where = f"backend {backend.name!r}, format {format}, {side.name} of shape {side.values.shape}"
    return attempt(lambda: checked(backend.quantize(side.values, format), backend.name), where)


def _multiply(backend: Backend, a: Operand, b: Operand, summation: Summation, **epilogue: Any) -> np.ndarray:
    where = f"backend {backend.name!r}, product of {a.format} in {summation}"
    multiply: Any = backend
    found = attempt(lambda: array_of(multiply.product(a, b, summation, **epilogue), backend.name, "product"), where)
    wanted = (a.codes.shape[0], b.codes.shape[0]), layout.DTYPES[epilogue.get("dtype", "float32")]
    if isinstance(found, str):
        raise BadBackend(f"{where}: not implemented, but its summations have {summation}: {found}")
    if (found.shape, found.dtype) != wanted:
        raise BadBackend(f"{where}: must be {wanted[1]} of shape {wanted[0]}, got {describe(found)}")
    return found


def _first_difference(backend: Backend, expected: _Expected, format: Format) -> ProductDifference | str | None:
    """Returns where a backend first differs, None if it doesn't, or why it doesn't support the format."""
    case = expected.case
    for side, cast in zip((case.a, case.b), expected.casts, strict=True):
        found = _cast(backend, side, format)
        if isinstance(found, str):
            return found
        # The same values: only the casts are compared.
        for one in compare(side.values, format, (cast, side.values), (found, side.values)):
            where = f"{one.part} of {side.name}"
            index = in_whole(one, side.corner, format)
            return ProductDifference(backend.name, case.name, "operand", where, index, one.expected, one.found)
    result = _multiply(backend, *expected.operands, expected.summation, **case.epilogue)
    want, got = bits_of(expected.result), bits_of(result)
    if np.array_equal(want, got):
        return None
    index = tuple(int(i) for i in np.unravel_index(np.argmax(want != got), want.shape))
    stage, where = _begins(backend, expected, index)
    place = (index[0] + case.a.corner[0], index[1] + case.b.corner[0])
    bits = hexadecimal(want[index]), hexadecimal(got[index])
    return ProductDifference(backend.name, case.name, stage, where, place, *bits)


def _begins(backend: Backend, expected: _Expected, index: tuple[int, ...]) -> tuple[str, str]:
    """Returns the stage and place where one sum first differs: runs parts of the product with both backends."""
    case, (a, b), summation = expected.case, expected.operands, expected.summation
    length, first = case.a.values.shape[1], case.b.corner[1]

    def differs(start: int, stop: int, unit_scales: bool = False, **epilogue: Any) -> bool:
        left, right = (_columns(x, start, stop, unit_scales) for x in (a, b))
        want, got = (_multiply(one, left, right, summation, **epilogue)[index] for one in (expected.backend, backend))
        return want.tobytes() != got.tobytes()

    def columns(start: int, stop: int) -> str:
        return f"{first + start} to {first + stop} of k"

    if not differs(0, length):
        for name in ("bias", "addend"):
            if getattr(case, name) is not None and differs(0, length, **{name: getattr(case, name)}):
                return name, ""
        return ("rounding", f"to {case.dtype}") if differs(0, length, **case.epilogue) else ("unsteady", "")
    size = summation.promotion or length
    for start in range(0, length, size):
        stop = min(start + size, length)
        if differs(0, stop):
            break
    else:
        return "unsteady", ""
    if start and not differs(start, stop):
        return "promotion", columns(start, stop)
    # Scales inside a matrix unit are part of its sums.
    unit = summation.scale_block is None
    if unit and not differs(start, stop, unit_scales=True):
        return "scales", columns(start, stop)
    for begin in range(start, stop, summation.length):
        end = min(begin + summation.length, stop)
        if differs(start, end, unit_scales=unit):
            return "sums", columns(begin, end)
    return "unsteady", ""


def _columns(x: Operand, start: int, stop: int, unit_scales: bool) -> Operand:
    """Returns the elements `start` to `stop` of each line and their scales, or scales of 1. `start` begins a block."""
    assert x.format is not None
    assert x.scales is not None
    width, scales = x.format.element.bits, x.scales
    if x.format.block is not None and not x.format.per_row:
        block = x.format.block[1]
        scales = scales[:, start // block : -(-stop // block)]
    codes = x.codes[:, start * width // 8 : -(-stop * width // 8)]
    scales = np.ones_like(scales) if unit_scales else scales
    return Operand(np.ascontiguousarray(codes), np.ascontiguousarray(scales), x.format)

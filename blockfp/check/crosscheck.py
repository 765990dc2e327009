"""Runs an array through every backend, compares the results bit by bit, and measures the quantization error.

A backend quantizes and dequantizes NumPy arrays (`Backend`); this module knows no framework. The first backend is the reference
for the comparison and for the statistics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from ..definition import checks, layout
from ..definition.numerics import Quantized
from ..errors import BadBackend
from ..formats import Format
from . import pieces
from .measure import Statistics, measure

T = TypeVar("T")


class Backend(Protocol):
    """The interface of a backend: a library that quantizes NumPy arrays. `products` has what one that multiplies adds."""

    @property
    def name(self) -> str:
        """The name in reports, such as "jax"."""
        ...

    @property
    def version(self) -> str:
        """Exact software and hardware: versions, device, instruction set."""
        ...

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        """Returns codes and scales of x (float32, float16 or bfloat16, two or more axes) as NumPy arrays.

        Raises:
            NotImplementedError: the backend doesn't support the format and is skipped for it.
        """
        ...

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        """Returns the values of q, rounded to `dtype`."""
        ...


class Definition(pieces.ByPieces):
    """The definition (`definition.numerics`) on NumPy arrays."""

    name = "numpy"
    version = f"NumPy {np.__version__}"


@dataclass(frozen=True)
class Difference:
    """The first position where a backend's bits differ from the reference's.

    Attributes:
        backend: name of the differing backend.
        part: "codes", "scales", "tensor_scale" or "values" (dequantized); "padding" if codes agree, but not the unused bits of
            a row's last byte.
        index: index of the element, of the block for scales, of the byte for padding, () for the tensor scale. None if the
            array has another shape or dtype.
        input: bits of the input element in hex; for scales, of the element of largest magnitude in the block.
        expected: the reference's code, scale or value as bits in hex; or its shape and dtype.
        found: the backend's.
    """

    backend: str
    part: str
    index: tuple[int, ...] | None
    input: str | None
    expected: str
    found: str

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.backend}: {self.part} are {self.found}, expected {self.expected}"
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.backend}: {self.part}{where} of input {self.input} is {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class ProductDifference:
    """The first difference of a backend in one product, and the part of the computation where it begins.

    Attributes:
        backend: name of the differing backend.
        product: "forward", "dgrad" or "wgrad".
        stage: "operand": a cast differs; "sums": the sums of a step along k; "promotion": how sums of a chunk of k join those
            of earlier chunks; "scales": their multiplication by scales; "bias", "addend" and "rounding": the epilogue;
            "unsteady": another run gives the reference's bits.
        where: the part and the operand, "codes of weight"; or the elements of each sum, "128 to 256 of k"; or a dtype.
        index: index of the sum, or of the operand's element or block; None if an operand's shape or dtype differs.
        expected, found: bits in hex: of the result, or of an operand's code or scale.
    """

    backend: str
    product: str
    stage: str
    where: str
    index: tuple[int, ...] | None
    expected: str
    found: str

    def __str__(self) -> str:
        place = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        if self.stage == "operand":
            return f"{self.backend}: {self.product}: {self.where}{place} is {self.found}, expected {self.expected}"
        begins = f"first in {self.stage} {self.where}".rstrip()
        return f"{self.backend}: {self.product}{place} is {self.found}, expected {self.expected}, {begins}"


@dataclass(frozen=True)
class Products:
    """The result of the products of one array in one format (`products.check_products`).

    Attributes:
        summation: name of the summation; None: the format has no products.
        reason: why there are none, or "".
        sums: number of sums that were looked at in each backend.
        differences: the first one per backend and product.
        compared: names of the backends that were compared with the reference.
        without: names of backends without this summation, with reasons.
        operands_sha256, products_sha256: hashes of the reference's operands (codes and scales) and results.
    """

    summation: str | None
    reason: str = ""
    sums: int = 0
    differences: tuple[ProductDifference, ...] = ()
    compared: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)
    operands_sha256: str = ""
    products_sha256: str = ""


@dataclass(frozen=True)
class Check:
    """The result for one array in one format.

    Attributes:
        format: the format.
        differences: the first one per backend and part; empty if all bits are equal.
        compared: names of the backends that were compared with the reference.
        without: names of backends without this format, with reasons.
        statistics: statistics of the reference's values.
        codes_sha256, scales_sha256, values_sha256: hashes of the reference's bytes, row-major, to compare machines or releases
            (`comparison`); the scales' hash includes the tensor scale.
        products: the products; None if they weren't asked for, or not of this array.
    """

    format: Format
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    without: dict[str, str]
    statistics: Statistics
    codes_sha256: str
    scales_sha256: str
    values_sha256: str
    products: Products | None = None

    @property
    def identical(self) -> bool:
        return not self.differences and not (self.products and self.products.differences)


def check(x: np.ndarray, format: Format | str, backends: Sequence[Backend]) -> Check:
    """Quantizes and dequantizes x with every backend and compares codes, scales, tensor scale and values.

    x is processed in pieces of whole blocks, as slices of its rows; in one piece if the format has a tensor scale.

    Args:
        x: float32, float16 or bfloat16, [..., rows, columns].
        format: a `Format` or its name.
        backends: one or more; the first is the reference.

    Raises:
        TypeError, ValueError: x can't be quantized, or the format is unknown.
        BadBackend: a backend raises an exception (the cause), or returns something other than codes and scales.
    """
    checks.check_input(x)
    format = Format.parse(format)
    places = [()] if format.has_tensor_scale or not x.size else pieces.split(x.shape)
    differences: dict[tuple[str, str], Difference] = {}
    statistics, without = Statistics(), {}
    codes_hash, scales_hash, values_hash = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for where in places:
        piece = x[where]
        corner = tuple(s.start for s in where) + (0,) * (x.ndim - len(where))
        reference = run(backends[0], piece, format)
        if isinstance(reference, str):
            raise BadBackend(f"backend {backends[0].name!r}, the reference, has no {format}: {reference}")
        for backend in backends[1:]:
            result = run(backend, piece, format)
            if isinstance(result, str):
                without[backend.name] = result
                continue
            for found in compare(piece, format, reference, result):
                named = replace(found, backend=backend.name, index=in_whole(found, corner, format))
                differences.setdefault((backend.name, found.part), named)
        q, values = reference
        codes_hash.update(q.codes.tobytes())
        scales_hash.update(q.scales.tobytes() + (b"" if q.tensor_scale is None else q.tensor_scale.tobytes()))
        values_hash.update(values.tobytes())
        statistics.add(measure(piece, q, values, format))
    compared = tuple(backend.name for backend in backends[1:] if backend.name not in without)
    return Check(
        format,
        tuple(differences.values()),
        compared,
        without,
        statistics,
        codes_hash.hexdigest(),
        scales_hash.hexdigest(),
        values_hash.hexdigest(),
    )


def run(backend: Backend, x: np.ndarray, format: Format) -> tuple[Quantized, np.ndarray] | str:
    """Returns a backend's codes, scales and values, or why it doesn't support the format."""

    def both() -> tuple[Quantized, np.ndarray]:
        q = checked(backend.quantize(x, format), backend.name)
        return q, array_of(backend.dequantize(q, format, x.dtype.name, x.shape[-1]), backend.name, "dequantize")

    return attempt(both, f"backend {backend.name!r}, format {format}, {x.dtype} array of shape {x.shape}")


def attempt(function: Callable[[], T], where: str) -> T | str:
    """Returns what a backend's function returns, or why it doesn't support it; raises BadBackend if it fails."""
    try:
        return function()
    except NotImplementedError as error:
        return str(error)
    except BadBackend:
        raise
    except Exception as error:
        raise BadBackend(f"{where}: {type(error).__name__}: {error}") from error


def array_of(x: object, backend: str, function: str) -> np.ndarray:
    """Returns what a backend's function returned; raises BadBackend if it isn't a NumPy array."""
    if not isinstance(x, np.ndarray):
        raise BadBackend(f"backend {backend!r}: {function} must return a NumPy array, got {type(x).__name__}")
    return x


def checked(q: object, backend: str) -> Quantized:
    """Returns a backend's result; raises BadBackend if it isn't codes and scales."""
    if not isinstance(q, Quantized):
        raise BadBackend(
            f"backend {backend!r}: quantize must return blockfp.definition.numerics.Quantized(codes, scales, tensor_scale), "
            f"got {type(q).__name__}"
        )
    for name, part in q._asdict().items():
        if not isinstance(part, np.ndarray | np.generic | None):
            raise BadBackend(f"backend {backend!r}: {name} must be a NumPy array, got {type(part).__name__}")
    return q


def compare(
    x: np.ndarray, format: Format, expected: tuple[Quantized, np.ndarray], found: tuple[Quantized, np.ndarray]
) -> Iterator[Difference]:
    """Yields the first difference in each part, with `backend` empty and `index` relative to x."""
    parts = {name: (getattr(expected[0], name), getattr(found[0], name)) for name in Quantized._fields}
    parts["values"] = (expected[1], found[1])
    for part, (a, b) in parts.items():
        if a is None and b is None:
            continue
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference("", part, None, None, describe(a), describe(b))
            continue
        a, b = bits_of(a), bits_of(b)
        if np.array_equal(a, b):
            continue
        if part == "codes":
            codes = [layout.unpack(packed, format.element.bits, x.shape[-1]) for packed in (a, b)]
            if np.array_equal(*codes):
                part = "padding"
            else:
                a, b = codes
        index = tuple(int(i) for i in np.unravel_index(np.argmax(a != b), a.shape))
        yield Difference("", part, index, _input(x, part, index, format), hexadecimal(a[index]), hexadecimal(b[index]))


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, order="C").view(f"u{x.itemsize}")


def hexadecimal(bits: np.unsignedinteger) -> str:
    return f"0x{int(bits):0{2 * bits.itemsize}x}"


def describe(x: np.ndarray | None) -> str:
    return "missing" if x is None else f"{x.dtype} of shape {x.shape}"


def _input(x: np.ndarray, part: str, index: tuple[int, ...], format: Format) -> str | None:
    """Returns the bits of the element of a code or value, or of the largest element of a scale's block."""
    if part in ("codes", "values"):
        return hexadecimal(bits_of(x)[index])
    if part == "padding":
        return None
    if part == "scales" and format.block is not None:
        *leading, row, column = index
        rows, columns = format.block
        x = x[(*leading, slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))]
    magnitude = np.abs(np.where(np.isnan(x), 0, x.astype(np.float32)))
    return hexadecimal(bits_of(x).reshape(-1)[np.argmax(magnitude)])


def in_whole(found: Difference, corner: tuple[int, ...], format: Format) -> tuple[int, ...] | None:
    """Converts an index in the piece at `corner` to an index in the whole array."""
    if not found.index:
        return found.index
    if found.part == "scales":
        block = format.block or (1, 1)
        corner = (*corner[:-2], corner[-2] // block[0], corner[-1] // block[1])
    return tuple(i + start for i, start in zip(found.index, corner, strict=True))

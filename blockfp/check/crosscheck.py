"""Runs an array through every backend, compares the results bit by bit, and measures the quantization error.

A backend quantizes and dequantizes NumPy arrays (`Backend`); this module knows no framework. The first backend is the reference
for the comparison and for the statistics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..definition import checks, layout
from ..definition.numerics import Quantized
from ..errors import BadBackend
from ..formats import Format
from . import pieces
from .measure import Statistics, measure


class Backend(Protocol):
    """The interface of a backend: a library that quantizes NumPy arrays."""

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
    """

    format: Format
    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    without: dict[str, str]
    statistics: Statistics
    codes_sha256: str
    scales_sha256: str
    values_sha256: str

    @property
    def identical(self) -> bool:
        return not self.differences


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
        reference = _run(backends[0], piece, format)
        if isinstance(reference, str):
            raise BadBackend(f"backend {backends[0].name!r}, the reference, has no {format}: {reference}")
        for backend in backends[1:]:
            result = _run(backend, piece, format)
            if isinstance(result, str):
                without[backend.name] = result
                continue
            for found in _compare(piece, format, reference, result):
                named = replace(found, backend=backend.name, index=_in_whole(found, corner, format))
                differences.setdefault((backend.name, found.part), named)
        q, values = reference
        codes_hash.update(q.codes.tobytes())
        scales_hash.update(q.scales.tobytes() + (b"" if q.tensor_scale is None else q.tensor_scale.tobytes()))
        values_hash.update(values.tobytes())
        statistics.add(measure(piece, q, values, format))
    hashes = (hash.hexdigest() for hash in (codes_hash, scales_hash, values_hash))
    compared = tuple(backend.name for backend in backends[1:] if backend.name not in without)
    return Check(format, tuple(differences.values()), compared, without, statistics, *hashes)


def _run(backend: Backend, x: np.ndarray, format: Format) -> tuple[Quantized, np.ndarray] | str:
    """Returns a backend's codes, scales and values, or why it doesn't support the format."""
    try:
        q = _checked(backend.quantize(x, format), backend.name)
        values = backend.dequantize(q, format, x.dtype.name, x.shape[-1])
        if not isinstance(values, np.ndarray):
            got = type(values).__name__
            raise BadBackend(f"backend {backend.name!r}: dequantize must return a NumPy array, got {got}")
        return q, values
    except NotImplementedError as error:
        return str(error)
    except BadBackend:
        raise
    except Exception as error:
        where = f"backend {backend.name!r}, format {format}, {x.dtype} array of shape {x.shape}"
        raise BadBackend(f"{where}: {type(error).__name__}: {error}") from error


def _checked(q: object, backend: str) -> Quantized:
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


def _compare(
    x: np.ndarray, format: Format, expected: tuple[Quantized, np.ndarray], found: tuple[Quantized, np.ndarray]
) -> Iterator[Difference]:
    """Yields the first difference in each part, with `backend` empty and `index` relative to x."""
    parts = {name: (getattr(expected[0], name), getattr(found[0], name)) for name in Quantized._fields}
    parts["values"] = (expected[1], found[1])
    for part, (a, b) in parts.items():
        if a is None and b is None:
            continue
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference("", part, None, None, _describe(a), _describe(b))
            continue
        a, b = _bits(a), _bits(b)
        if np.array_equal(a, b):
            continue
        if part == "codes":
            codes = [layout.unpack(packed, format.element.bits, x.shape[-1]) for packed in (a, b)]
            if np.array_equal(*codes):
                part = "padding"
            else:
                a, b = codes
        index = tuple(int(i) for i in np.unravel_index(np.argmax(a != b), a.shape))
        yield Difference("", part, index, _input(x, part, index, format), _hex(a[index]), _hex(b[index]))


def _bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, order="C").view(f"u{x.itemsize}")


def _hex(bits: np.unsignedinteger) -> str:
    return f"0x{int(bits):0{2 * bits.itemsize}x}"


def _describe(x: np.ndarray | None) -> str:
    return "missing" if x is None else f"{x.dtype} of shape {x.shape}"


def _input(x: np.ndarray, part: str, index: tuple[int, ...], format: Format) -> str | None:
    """Returns the bits of the element of a code or value, or of the largest element of a scale's block."""
    if part in ("codes", "values"):
        return _hex(_bits(x)[index])
    if part == "padding":
        return None
    if part == "scales" and format.block is not None:
        *leading, row, column = index
        rows, columns = format.block
        x = x[(*leading, slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))]
    magnitude = np.abs(np.where(np.isnan(x), 0, x.astype(np.float32)))
    return _hex(_bits(x).reshape(-1)[np.argmax(magnitude)])


def _in_whole(found: Difference, corner: tuple[int, ...], format: Format) -> tuple[int, ...] | None:
    """Converts an index in the piece at `corner` to an index in the whole array."""
    if not found.index:
        return found.index
    if found.part == "scales":
        block = format.block or (1, 1)
        corner = (*corner[:-2], corner[-2] // block[0], corner[-1] // block[1])
    return tuple(i + start for i, start in zip(found.index, corner, strict=True))

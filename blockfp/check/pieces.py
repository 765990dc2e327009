"""Checks of large arrays: applies the definition piece by piece, so that intermediate results fit in a core's cache, and bounds
what `blockfp check` does at once, in threads and in memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ..definition import layout, numerics, products
from ..definition.matrix_units import SUMMATIONS, Summation
from ..definition.numerics import Quantized
from ..definition.products import Operand
from ..formats import Format

PIECE = 1 << 18
"""Number of elements processed at once."""

MOST_BYTES = 1 << 30
"""Bytes of checks that run at once. A check that needs more runs alone."""

_BYTES_AN_ELEMENT = 16
"""Codes and values of two backends and their float32 intermediates."""


def split(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yields slices of about `PIECE` elements, contiguous in memory, that cut no block of any format.

    Rows are a power of two of at least 128, so that a model's matrices give few different shapes, each of which a jitted
    backend compiles.
    """
    *leading, rows, columns = shape
    matrix = rows * columns
    if 0 in shape:
        return
    if not leading:
        step = 128
        while 2 * step * columns <= PIECE:
            step *= 2
        for row in range(0, rows, step):
            yield (slice(row, row + step),)
    elif matrix * math.prod(leading[1:]) <= PIECE:
        step = PIECE // (matrix * math.prod(leading[1:]))
        for index in range(0, leading[0], step):
            yield (slice(index, index + step),)
    else:
        for index in range(leading[0]):
            for inner in split(shape[1:]):
                yield (slice(index, index + 1), *inner)


class ByPieces:
    """Runs the definition on NumPy arrays by an array library; here NumPy itself."""

    def give(self, x: np.ndarray) -> Any:
        """Converts a NumPy array to the library's."""
        return x

    def take(self, x: Any) -> np.ndarray:
        """Converts the library's array to NumPy."""
        return x

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        """Returns codes and scales of x [..., rows, columns]."""
        if not format.has_tensor_scale or x.size <= PIECE:
            return self._quantize(x, format)
        # For one tensor scale, compute the amaxes of all pieces first, then codes, as ranks that share a tensor do.
        pieces = [x[where] for where in split(x.shape)]
        amaxes = [numerics.amax(self.give(piece), format) for piece in pieces]
        shared = "blocks" if format.per_tensor else "tensor"
        largest = self.give(reduce(np.maximum, [self.take(getattr(amax, shared)) for amax in amaxes]))
        amaxes = [amax._replace(**{shared: largest}) for amax in amaxes]
        parts = [self._quantize(piece, format, amax=amax) for piece, amax in zip(pieces, amaxes, strict=True)]
        codes = _joined([part.codes for part in parts], layout.codes_shape(x.shape, format))
        if format.per_tensor:
            return parts[0]._replace(codes=codes)
        return Quantized(codes, _joined([p.scales for p in parts], layout.scales_shape(x.shape, format)), parts[0].tensor_scale)

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        """Returns the values of q [..., rows, columns], rounded to `dtype`."""
        shape = (*q.codes.shape[:-1], columns)
        if not format.has_tensor_scale or math.prod(shape) <= PIECE:
            return self._dequantize(q, format, dtype, columns)
        parts = [q._replace(codes=q.codes[where], scales=_scales(q.scales, where, format)) for where in split(shape)]
        return _joined([self._dequantize(part, format, dtype, columns) for part in parts], shape)

    summations = tuple(SUMMATIONS)

    def product(
        self,
        a: Operand,
        b: Operand,
        summation: Summation,
        *,
        dtype: str = "float32",
        bias: np.ndarray | None = None,
        addend: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns a @ b^T of NumPy operands; see `products.product`."""
        left, right = a.converted(self.give), b.converted(self.give)
        bias, addend = (None if x is None else self.give(x) for x in (bias, addend))
        return self.take(products.product(left, right, summation, dtype=dtype, bias=bias, addend=addend))

    def _quantize(self, x: np.ndarray, format: Format, **options: Any) -> Quantized:
        q = numerics.quantize(self.give(x), format, **options)
        return Quantized(*(None if part is None else self.take(part) for part in q))

    def _dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        codes, scales, tensor_scale = (None if part is None else self.give(part) for part in q)
        return self.take(numerics.dequantize(codes, scales, tensor_scale, format, dtype, columns=columns))


def _scales(scales: np.ndarray, where: tuple[slice, ...], format: Format) -> np.ndarray:
    """Returns the scales of a piece from `split`."""
    if format.block is None:
        return scales
    if len(where) == scales.ndim - 1:
        rows = format.block[0]
        where = (*where[:-1], slice(where[-1].start // rows, -(-where[-1].stop // rows)))
    return scales[where]


def _joined(parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)


def usable_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of CPUs that this process may use, by its affinity and by its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cpus, math.ceil(int(allowed) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max"
        return cpus


def bytes_of(x: np.ndarray, format: Format) -> int:
    """Returns about how much memory checking x in a format takes: all of x for a tensor scale, else a piece at a time."""
    return _BYTES_AN_ELEMENT * (x.size if format.has_tensor_scale else min(x.size, PIECE))


class InFlight:
    """A bound on the bytes in work, shared by threads."""

    def __init__(self, most: int = MOST_BYTES):
        self.most = most
        self._now = 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Waits until `nbytes` more stay within the bound, or nothing else is in work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._now or self._now + nbytes <= self.most)
            self._now += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._now -= nbytes
                self._changed.notify_all()

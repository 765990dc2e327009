"""Statistics of quantization: noise, largest error, saturation, zeros, bytes, exponents of scales."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ..definition import layout
from ..definition.bits import Array
from ..definition.numerics import Quantized
from ..formats import ElementFormat, Format
from .pieces import split


@dataclass
class Statistics:
    """Errors of dequantized values, as sums, so that statistics of parts can be added.

    Attributes:
        elements: number of elements.
        excluded: elements whose input or value is Inf or NaN; excluded from the next three.
        signal, noise: sums of x^2 and of (x - value)^2.
        largest_relative_error: largest |x - value| / |x| of elements that are neither zero nor flushed to zero.
        saturated: elements beyond the largest code, which lost more than rounding.
        flushed: nonzero elements that became zero.
        stored_bytes, original_bytes: bytes of codes and scales, and of the input.
        exponents: number of scales by binary exponent floor(log2(scale)), without zero and NaN.
    """

    elements: int = 0
    excluded: int = 0
    signal: float = 0.0
    noise: float = 0.0
    largest_relative_error: float = 0.0
    saturated: int = 0
    flushed: int = 0
    stored_bytes: int = 0
    original_bytes: int = 0
    exponents: Counter[int] = field(default_factory=Counter)

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio, 10 log10(signal / noise); Inf without noise, NaN without signal and noise."""
        if self.noise == 0:
            return math.inf if self.signal else math.nan
        return 10 * math.log10(self.signal / self.noise)

    @property
    def saturated_share(self) -> float:
        return self.saturated / max(self.elements, 1)

    @property
    def flushed_share(self) -> float:
        return self.flushed / max(self.elements, 1)

    def add(self, other: Statistics) -> None:
        """Adds the counts of `other`."""
        for name in ("elements", "excluded", "signal", "noise", "saturated", "flushed", "stored_bytes", "original_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_relative_error = max(self.largest_relative_error, other.largest_relative_error)
        self.exponents.update(other.exponents)


def measure(x: np.ndarray, q: Quantized, values: np.ndarray, format: Format) -> Statistics:
    """Returns the statistics of an array x [..., rows, columns], its codes and scales q, and q's dequantized values."""
    parts = [part for part in q if part is not None]
    result = Statistics(
        elements=x.size,
        stored_bytes=sum(part.nbytes for part in parts),
        original_bytes=x.nbytes,
        exponents=scale_exponents(q, format),
    )
    for where in split(x.shape):
        _measure_piece(result, x[where], values[where], q.codes[where], format)
    return result


def _measure_piece(result: Statistics, x: np.ndarray, values: np.ndarray, codes: np.ndarray, format: Format) -> None:
    """Adds the counts of a piece: its elements, their values and packed codes."""
    x, values = x.astype(np.float32, copy=False), values.astype(np.float32, copy=False)
    finite = np.isfinite(x) & np.isfinite(values)
    codes = layout.unpack(codes, format.element.bits, x.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        result.saturated += int(np.count_nonzero(saturated(x, values, codes, format.element)))
    excluded = x.size - int(np.count_nonzero(finite))
    result.excluded += excluded
    if excluded:
        x, values = x[finite], values[finite]
    result.signal += float(np.square(x, dtype=np.float64).sum())
    error = np.abs(np.subtract(x, values, dtype=np.float64))
    result.noise += float(np.square(error).sum())
    lost = values == 0
    result.flushed += int(np.count_nonzero(lost & (x != 0)))
    relative = np.divide(error, np.abs(x), where=~lost & (x != 0), out=np.zeros_like(error))
    result.largest_relative_error = max(result.largest_relative_error, float(relative.max(initial=0.0)))


def saturated(x: Array, values: Array, codes: Array, element: ElementFormat) -> Array:
    """Returns a mask of elements with the largest code that exceed it by more than half a step; for any array library.

    x and its values are float32, codes are unpacked uint8.
    """
    half_step = 2.0 ** (element.emax - element.mantissa_bits - 1)
    # With a NaN scale there is no value to compare with; an Inf always counts as saturated.
    beyond = (abs(x) > abs(values) * (1 + half_step / element.max)) | (abs(x) == math.inf)
    if element.signed == "complement":
        return beyond & ((codes == element.max_code) | (codes == 256 - element.max_code))
    return beyond & ((codes & ((1 << (element.bits - 1)) - 1)) == element.max_code)


def scale_exponents(q: Quantized, format: Format) -> Counter[int]:
    """Counts decode scales by binary exponent floor(log2(scale)), without zero, Inf and NaN."""
    scales = layout.view_scales(q.scales, format).astype(np.float64)
    if q.tensor_scale is not None:
        scales = scales * np.float64(q.tensor_scale)
    usable = scales[np.isfinite(scales) & (scales > 0)]
    exponents, counts = np.unique(np.frexp(usable)[1] - 1, return_counts=True)
    return Counter(dict(zip(exponents.tolist(), counts.tolist(), strict=True)))

"""Parameters for the AdamW kernels: their arrays, and what the definition makes of them."""

from typing import Any, NamedTuple

import numpy as np
from held_formats import FORMATS
from samples import DTYPES

from blockfp.definition import adamw, bits, layout, numerics
from blockfp.kernels.step_table import ARRAYS, one_pass, pack, row

KEY = (3, 0xDEADBEEF)
FUSED = [format for format in FORMATS if one_pass(format)]


class Step(NamedTuple):
    """One parameter's step: the arrays of its row, NumPy's or torch's, and what else the table says."""

    gradient: Any
    weight: Any
    first: Any
    second: Any
    first_scales: Any
    second_scales: Any
    out: Any
    out_scales: Any
    coefficients: adamw.Coefficients
    step: int
    parameter: int
    format: Any
    start: tuple[int, int, int]
    whole: tuple[int, int]


def table(steps, two_passes=False):
    """The kernels' table of some steps. Their arrays must outlive it."""
    rows = []
    for s in steps:
        names = [bits.dtype_name(x) for x in (s.gradient, s.first)]
        out = None if s.out is None or s.format is not None else bits.dtype_name(s.out)
        options = {"nominal": "bfloat16", "start": s.start, "whole": s.whole, "two_passes": two_passes}
        rows.append(row(tuple(s.weight.shape), *names, out, s.format, **options))
        for x, expected in zip(s[: len(ARRAYS)], rows[-1].arrays, strict=True):
            assert (x is None) == (expected is None)
            assert x is None or (bits.dtype_name(x), int(np.prod(x.shape))) == expected
    addresses = [[0 if x is None else _address(x) for x in s[: len(ARRAYS)]] + [0, 0] for s in steps]
    return pack(rows, addresses, [s.parameter for s in steps], [s.coefficients for s in steps], [s.step for s in steps], KEY)


def _address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


class Parameter:
    """A parameter's arrays, and what the definition makes of them."""

    def __init__(self, shape, moments="float32", dtype="float32", format=None, copy=None, seed=0, start=(0, 0, 0), whole=None):
        rng = np.random.default_rng(seed)
        self.moments, self.format, self.copy, self.start, self.whole = moments, format, copy, start, whole or shape[-2:]
        self.shape, self.number = shape, 5
        self.weight = rng.standard_normal(shape).astype(np.float32)
        self.gradient = (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 4, shape))).astype(DTYPES[dtype])
        first = rng.standard_normal(shape).astype(np.float32)
        second = (rng.standard_normal(shape) ** 2).astype(np.float32)
        self.first, self.second = (self.store(x, which, 1) for which, x in enumerate((first, second)))
        self.out = self.out_scales = None
        if format is not None:
            self.out = np.full(layout.codes_shape(shape, format), 0xA5, np.uint8)
            self.out_scales = np.zeros(layout.scales_shape(shape, format), format.scale.dtype)
        elif copy is not None:
            self.out = np.zeros(shape, DTYPES[copy])

    def store(self, moment, which, step):
        """A moment as it is kept: (values or codes, scales)."""
        key = adamw.rounding_key(KEY, step, self.number, adamw.SECOND if which else adamw.FIRST)
        *leading, rows, columns = moment.shape
        stacked = moment.reshape((int(np.prod(leading)), rows, columns))
        place = {"origin": (self.start[0] * self.whole[0] + self.start[1], self.start[2]), "shape": self.whole}
        assert self.start == (0, 0, 0) or len(stacked) == 1
        if self.moments == "float32":
            return moment.copy(), None
        if self.moments == "bfloat16":
            return adamw.round_to_bfloat16(stacked, key, **place).reshape(moment.shape), None
        codes, scales = adamw.store_fp8(stacked, second=bool(which), key=key, **place)
        return np.ascontiguousarray(codes).reshape(moment.shape), scales.reshape((*leading, *scales.shape[1:]))

    def value(self, kept, which):
        if self.moments == "fp8":
            return adamw.load_fp8(*kept, second=bool(which), origin=(0, self.start[2]))
        return kept[0].astype(np.float32)

    def expected(self, c, step):
        moments = [self.value(kept, which) for which, kept in enumerate((self.first, self.second))]
        weight, *moments = adamw.update(self.weight, *moments, self.gradient.astype(np.float32), c)
        kept = [self.store(x, which, step) for which, x in enumerate(moments)]
        if self.format is not None:
            return weight, *kept, tuple(numerics.quantize(weight, self.format, nominal="bfloat16"))[:2]
        return weight, *kept, (None if self.copy is None else weight.astype(DTYPES[self.copy]), None)

    def step(self, c, step):
        return Step(
            self.gradient, self.weight, self.first[0], self.second[0], self.first[1], self.second[1], self.out, self.out_scales,
            c, step, self.number, self.format, self.start, self.whole,
        )  # fmt: skip

    def state(self):
        return self.weight, self.first, self.second, (self.out, self.out_scales)

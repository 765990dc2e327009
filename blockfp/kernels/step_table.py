"""What the AdamW kernels are told of each parameter, and the table that they read it from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..definition import bits, layout
from ..definition.adamw import Coefficients
from ..definition.bits import Array
from ..formats import Format
from .format_numbers import DTYPES, format_numbers

_MOMENT_DTYPES = ("float32", "bfloat16", "uint8")
_NONE, _COPY, _CODES = 0, 1, 2
_NO_COEFFICIENTS = (0.0,) * len(Coefficients._fields)

# kernels/include/blockfp/adamw.h, StepEntry.
_POINTERS = ("gradient", "weight", "first", "second", "first_scales", "second_scales", "out", "out_scales")
_ROW = np.dtype(
    [(name, "i8") for name in (*_POINTERS, "coefficients_at", "step_at")]
    + [(name, "i8") for name in ("batches", "rows", "columns", "first_batch", "first_row", "first_column")]
    + [(name, "i8") for name in ("total_rows", "total_columns")]
    + [(name, "i4") for name in ("gradient_dtype", "moments", "output", "out_dtype")]
    + [(name, "i4") for name in ("element", "block_rows", "block_columns", "rule", "largest_bits", "step")]
    + [(name, "u4") for name in ("parameter", "key0", "key1", "reserved")]
    + [("coefficients", "f4", (len(Coefficients._fields),))]
)


class Step(NamedTuple):
    """An AdamW step of one parameter, or of a rank's shard of it. Arrays are contiguous and on one device.

    Attributes:
        gradient: float32, float16 or bfloat16, of the weight's shape.
        weight: float32 [..., rows, columns], the master; changed in place.
        first, second: moments of the weight's shape, in place: float32, bfloat16, or uint8 codes of FP8.
        first_scales, second_scales: float32 [..., rows, ceil(columns / 128)] of FP8 moments, else None.
        coefficients: the step's constants: numbers, or on a device float32 of their order, read when the kernel runs.
        step: the step's number, from 1: an int, or a float32 of shape () on the device.
        parameter: the parameter's position in the optimizer.
        out: the weight itself, where it is not the master: float16 or bfloat16 values, or the codes of `format`; else None.
        out_scales: scales of the codes.
        format: of the codes; its blocks begin where the weight does. One scale per tensor and two levels are not among them.
        nominal: name of the dtype that a quantized weight stands for.
        start: (batch, row, column) of the first element in the unsharded array, its leading axes counted as one.
        shape: (rows, columns) of the unsharded matrix.
    """

    gradient: Array
    weight: Array
    first: Array
    second: Array
    first_scales: Array | None
    second_scales: Array | None
    coefficients: Coefficients | Array
    step: int | Array
    parameter: int
    out: Array | None
    out_scales: Array | None
    format: Format | None
    nominal: str
    start: tuple[int, int, int]
    shape: tuple[int, int]


def one_pass(format: Format) -> bool:
    """Whether a kernel can write codes in the pass that finds the new masters: no amax reaches beyond a tile of theirs."""
    return not format.has_tensor_scale


def pack(steps: Sequence[Step], key: tuple[int, int], pointer: Any) -> np.ndarray:
    """The table of some steps, int64 [steps, words].

    Args:
        steps: the steps.
        key: the optimizer's key, which rounds moments in fewer bits.
        pointer: (array, dtype name or names, elements) -> address, after it has checked the array.
    """
    rows = np.array([_row(s, key, pointer) for s in steps], _ROW)
    return rows.view(np.int64).reshape(len(steps), _ROW.itemsize // 8)


class _Fixed(NamedTuple):
    """What the row of a parameter says step after step, and how many elements its arrays must hold.

    Attributes:
        count: of the weight, the gradient and the moments.
        moment_scales: of each moment's scales; 0 where it has none.
        out_type, out_count: dtype and elements of what is written beside the master; "" and 0 where nothing is.
        scale_type, scale_count: of the scales of codes.
        sizes: batches, rows, columns.
        kinds: from moments to rule, as `_ROW` has them.
    """

    count: int
    moment_scales: int
    out_type: str
    out_count: int
    scale_type: str
    scale_count: int
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]


@lru_cache(maxsize=4096)
def _fixed(shape: tuple[int, ...], moment: str, out: str | None, format: Format | None) -> _Fixed:
    """Of a weight of this shape; moment and out are names of dtypes."""
    *leading, height, width = shape
    count, moments = math.prod(shape), _MOMENT_DTYPES.index(moment)
    moment_scales = count // width * -(-width // 128) if width and moments == 2 else 0
    sizes = (math.prod(leading), height, width)
    if format is not None:
        if not one_pass(format):
            raise ValueError(f"{format} has an amax of the whole tensor: step without codes, then quantize")
        codes, scales = math.prod(layout.codes_shape(shape, format)), math.prod(layout.scales_shape(shape, format))
        kinds = (moments, _CODES, 0, *format_numbers(format))
        return _Fixed(count, moment_scales, "uint8", codes, format.scale.dtype, scales, sizes, kinds)
    output, out_dtype = (_NONE, 0) if out is None else (_COPY, DTYPES[out])
    kinds = (moments, output, out_dtype, 0, 0, 0, 0)
    return _Fixed(count, moment_scales, out or "", 0 if out is None else count, "float32", 0, sizes, kinds)


def _row(s: Step, key: tuple[int, int], pointer: Any) -> tuple:
    moment = bits.dtype_name(s.first)
    out = None if s.out is None else bits.dtype_name(s.out)
    fixed = _fixed(tuple(s.weight.shape), moment, out, s.format)
    known, fp8, coded = isinstance(s.coefficients, Coefficients), moment == "uint8", s.format is not None
    return (
        pointer(s.gradient, bits.FLOAT_DTYPES, fixed.count),
        pointer(s.weight, "float32", fixed.count),
        pointer(s.first, moment, fixed.count),
        pointer(s.second, moment, fixed.count),
        pointer(s.first_scales, "float32", fixed.moment_scales) if fp8 else 0,
        pointer(s.second_scales, "float32", fixed.moment_scales) if fp8 else 0,
        pointer(s.out, fixed.out_type, fixed.out_count) if fixed.out_type else 0,
        pointer(s.out_scales, fixed.scale_type, fixed.scale_count) if coded else 0,
        0 if known else pointer(s.coefficients, "float32", len(Coefficients._fields)),
        0 if isinstance(s.step, int) else pointer(s.step, "float32", 1),
        *fixed.sizes,
        *s.start,
        *s.shape,
        DTYPES[bits.dtype_name(s.gradient)],
        *fixed.kinds,
        bits.LARGEST_FINITE[s.nominal],
        s.step if isinstance(s.step, int) else 0,
        *(s.parameter, *key, 0),
        tuple(s.coefficients) if known else _NO_COEFFICIENTS,
    )

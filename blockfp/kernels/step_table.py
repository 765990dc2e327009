"""Builds the AdamW kernels' table, with a row per parameter; most fields of a row are the same in every step."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..definition import bits, layout
from ..definition.adamw import Coefficients
from ..formats import Format
from .calls import DTYPE_NUMBERS, format_numbers

ARRAYS = ("gradient", "weight", "first", "second", "first_scales", "second_scales", "out", "out_scales")
"""Arrays that a row points to, all contiguous and on one device.

- gradient: float32, float16 or bfloat16, of the weight's shape.
- weight: float32 [..., rows, columns], the master; changed in place.
- first, second: moments of the weight's shape, in place: float32, bfloat16, or uint8 codes of FP8.
- first_scales, second_scales: float32 [..., rows, ceil(columns / 128)] for FP8 moments, else absent.
- out: the weight, if it isn't the master: float16 or bfloat16 values, or codes of a format; else absent.
- out_scales: scales of the codes.
"""

NO_COEFFICIENTS = Coefficients(*(0.0,) * len(Coefficients._fields))
"""Placeholder for constants that only the device knows."""

_MOMENT_DTYPES = ("float32", "bfloat16", "uint8")
_NONE, _COPY, _CODES, _AMAX = 0, 1, 2, 3

# Matches kernels/include/blockfp/adamw.h, StepEntry.
_ROW = np.dtype(
    [(name, "i8") for name in (*ARRAYS, "coefficients_at", "step_at")]
    + [(name, "i8") for name in ("batches", "rows", "columns", "first_batch", "first_row", "first_column")]
    + [(name, "i8") for name in ("total_rows", "total_columns")]
    + [(name, "i4") for name in ("gradient_dtype", "moments", "output", "out_dtype")]
    + [(name, "i4") for name in ("element", "block_rows", "block_columns", "rule", "largest_bits", "step")]
    + [(name, "u4") for name in ("parameter", "key0", "key1", "reserved")]
    + [("coefficients", "f4", (len(Coefficients._fields),))]
)
ADDRESSES = len(ARRAYS) + 2
"""Addresses in a row: its arrays, its constants and its step number."""

_DLPACK = {"float32": 0x220, "float16": 0x210, "bfloat16": 0x410, "uint8": 0x108}


class Row(NamedTuple):
    """The constant part of a parameter's row.

    Attributes:
        arrays: dtype name and number of elements of each of `ARRAYS`; None for absent ones.
        content: the row's bytes, with zeros in the fields that a step fills in.
    """

    arrays: tuple[tuple[str, int] | None, ...]
    content: bytes


def one_pass(format: Format) -> bool:
    """Returns whether kernels can write codes in the pass that updates the masters: no amax extends beyond a tile."""
    return not format.has_tensor_scale


def two_passes(format: Format) -> bool:
    """Returns whether GPU kernels can write codes in a second pass, after the first has found the tensor's amax."""
    return format.has_tensor_scale and not format.scale.four_over_six


@lru_cache(maxsize=4096)
def row(
    shape: tuple[int, ...],
    gradient: str,
    moments: str,
    out: str | None = None,
    format: Format | None = None,
    *,
    nominal: str = "float32",
    start: tuple[int, int, int] = (0, 0, 0),
    whole: tuple[int, int],
    two_passes: bool = False,
) -> Row:
    """Returns the row of a parameter, or of a rank's shard of one.

    Args:
        shape: the weight's [..., rows, columns].
        gradient, moments: dtype names.
        out: dtype name of 16-bit values to write besides the master.
        format: format of codes to write besides the master; its blocks begin at the weight's corner.
        nominal: dtype name that a quantized weight stands for.
        start: (batch, row, column) of the first element in the unsharded array, with leading axes flattened.
        whole: (rows, columns) of the unsharded matrix.
        two_passes: whether `second_pass` will take the codes out of the table.

    Raises:
        TypeError: the kernels don't support a dtype.
        ValueError: the format has one scale per tensor or two levels, and there is no second pass.
    """
    if gradient not in DTYPE_NUMBERS:
        raise TypeError(f"gradient must be of {' or '.join(DTYPE_NUMBERS)}, got {gradient}")
    if moments not in _MOMENT_DTYPES:
        raise TypeError(f"moments must be of {' or '.join(_MOMENT_DTYPES)}, got {moments}")
    *leading, height, width = shape
    count, scales = math.prod(shape), None
    if moments == "uint8":
        scales = ("float32", count // width * -(-width // 128) if width else 0)
    arrays = [(gradient, count), ("float32", count), (moments, count), (moments, count), scales, scales, None, None]
    content = np.zeros((), _ROW)
    if format is not None:
        if not one_pass(format) and not two_passes:
            raise ValueError(f"{format} has an amax of the whole tensor: step without codes, then quantize")
        arrays[6] = ("uint8", math.prod(layout.codes_shape(shape, format)))
        arrays[7] = (format.scale.dtype, math.prod(layout.scales_shape(shape, format)))
        content["output"] = _CODES
        for name, number in zip(("element", "block_rows", "block_columns", "rule"), format_numbers(format), strict=True):
            content[name] = number
    elif out is not None:
        arrays[6] = (out, count)
        content["output"], content["out_dtype"] = _COPY, DTYPE_NUMBERS[out]
    for name, number in zip(("batches", "rows", "columns"), (math.prod(leading), height, width), strict=True):
        content[name] = number
    for name, number in zip(("first_batch", "first_row", "first_column"), start, strict=True):
        content[name] = number
    content["total_rows"], content["total_columns"] = whole
    content["gradient_dtype"], content["moments"] = DTYPE_NUMBERS[gradient], _MOMENT_DTYPES.index(moments)
    content["largest_bits"] = bits.LARGEST_FINITE[nominal]
    return Row(tuple(arrays), content.tobytes())


class Table:
    """The table of several parameters, with the fields that don't change already filled in.

    Attributes:
        expected: int64 [parameters * ADDRESSES, 2], describes the array at each address: 256 times DLPack's dtype code plus its
            bits, and the number of elements; a negative code if the address must be 0.
    """

    def __init__(self, rows: Sequence[Row], parameters: Sequence[int], known: Sequence[bool], key: tuple[int, int]):
        """Takes the parameters' rows and their positions in the optimizer.

        `known` says whether the host knows a parameter's constants and step number; otherwise only the device does. `key` is
        the optimizer's, for stochastic rounding of moments.
        """
        self._made_of = (rows, parameters, known, key)
        content = np.frombuffer(bytearray(b"".join([one.content for one in rows])), _ROW)
        content["parameter"], (content["key0"], content["key1"]) = parameters, key
        self._content = content
        constants = {True: (None, None), False: (("float32", len(Coefficients._fields)), ("float32", 1))}
        arrays = [array for one, own in zip(rows, known, strict=True) for array in (*one.arrays, *constants[own])]
        codes = [(-1, 0) if array is None else (_DLPACK[array[0]], array[1]) for array in arrays]
        self.expected = np.array(codes, np.int64).reshape(-1, 2)

    def is_of(self, rows: Sequence[Row], parameters: Sequence[int], known: Sequence[bool], key: tuple[int, int]) -> bool:
        """Returns whether the table was made from the same row objects and equal other arguments."""
        own, *others = self._made_of
        return others == [parameters, known, key] and len(own) == len(rows) and all(map(operator.is_, own, rows))

    def filled(
        self, addresses: np.ndarray | Sequence[Sequence[int]], coefficients: Sequence[Coefficients], steps: Sequence[int]
    ) -> np.ndarray:
        """Returns one step's table, int64 [parameters, words].

        `addresses` holds each parameter's array addresses, 0 for absent arrays, then those of its constants and step number,
        float32 on the device, or 0 if the host knows them. `coefficients` and `steps` (from 1) are the host's;
        `NO_COEFFICIENTS` and 0 where they have an address.
        """
        table = self._content.copy()
        words = table.view(np.int64).reshape(len(table), _ROW.itemsize // 8)
        words[:, :ADDRESSES] = addresses
        # Usually all parameters are at the same step.
        table["step"] = steps[0] if steps.count(steps[0]) == len(steps) else steps
        alike = coefficients.count(coefficients[0]) == len(coefficients)
        table["coefficients"] = coefficients[0] if alike else coefficients
        return words


def pack(
    rows: Sequence[Row],
    addresses: Sequence[Sequence[int]],
    parameters: Sequence[int],
    coefficients: Sequence[Coefficients],
    steps: Sequence[int],
    key: tuple[int, int],
) -> np.ndarray:
    """Returns one step's table for some parameters, int64 [parameters, words]; arguments are as for `Table` and `filled`."""
    return Table(rows, parameters, [True] * len(rows), key).filled(addresses, coefficients, steps)


def second_pass(table: np.ndarray, places: Sequence[int], tensor_scales: Sequence[int]) -> np.ndarray:
    """Moves some parameters' codes from a table to a second one, which is run after their amaxes are known, and returns that.

    `places` are the rows of `table` (changed) whose formats need the whole parameter's amax; `tensor_scales` are the addresses
    of their tensor scales, 0 for formats without one. `point_to_amaxes` sets the amaxes' addresses in both tables.
    """
    rows = table.view(_ROW).reshape(-1)
    codes = rows[places]
    codes["second"] = tensor_scales
    rows["out"][places], rows["output"][places] = 0, _AMAX
    return codes.view(np.int64).reshape(len(places), -1)


def point_to_amaxes(table: np.ndarray, places: Sequence[int], address: int, *, known: bool) -> None:
    """Sets the addresses of rows' amaxes, consecutive int32: raised by the step, or `known` to a second pass."""
    table[places, ARRAYS.index("first" if known else "out_scales")] = address + 4 * np.arange(len(places))

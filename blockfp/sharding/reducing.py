"""Reduce-scatters whose terms travel as codes: the formats, the keys, and what a rank sends.

    term of rank r   t[r] = dequantize(quantize(x[r], format, key=fold_in(key, r))) in fp32; an Inf of x[r] is sent as NaN
    sum              ((t[0] + t[1]) + t[2]) + .., in fp32
    rank d           gets its part of the sum along axis 0, d * c .. (d + 1) * c where c = ceil(length / ranks)

Each rank's x is quantized as the whole that it is. No block has more than one row, so the codes and scales of the part that a
rank gets are cut out of the whole's, wherever the cuts are. Random bits are those of the element's place in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..definition import layout
from ..definition.rounding import Key, key_words, threefry2x32
from ..formats import Format

ALIGNMENT = 16
"""Bytes at a multiple of which codes and scales begin in what is sent, so that they can be read in words."""


class SentPart(NamedTuple):
    """One array's place in what a rank sends to each other one.

    Attributes:
        rows: that each rank gets, all axes but the last joined; padded to the longest part.
        columns: of a row.
        codes: where its codes begin, in bytes; its values, if `scales` is None.
        scales: where its scales begin; None of an array that travels as values.
        end: where its scales, or its values, end.
    """

    rows: int
    columns: int
    codes: int
    scales: int | None
    end: int


class SentLayout(NamedTuple):
    """The layout of what a rank sends to each other one: several arrays' codes and scales.

    Attributes:
        parts: of each array.
        size: bytes, the same for every pair of ranks.
    """

    parts: tuple[SentPart, ...]
    size: int


def rows_alone(format: Format) -> bool:
    """Returns True where no scale goes beyond a row."""
    return format.block is not None and format.block[0] == 1 and not format.scale.two_level


def check_reduce_format(format: Format | str, name: str = "reduce_format") -> Format:
    """Returns a format in which terms can travel.

    Raises:
        ValueError: a format in which the rows of different ranks would share a scale.
    """
    format = Format.parse(format)
    if not rows_alone(format):
        raise ValueError(
            f"{name} {format}: rows that go to different ranks must not share a scale; use a format in blocks of one "
            "row and one level of scales, such as mxfp8_e5m2 or fp8_e4m3_1x128"
        )
    return format


@lru_cache(maxsize=4096)
def sent_layout(format: Format | str, shapes: tuple[tuple[int, ...], ...], ranks: int, item_size: int) -> SentLayout:
    """Lays out what a rank sends to each other one of the arrays of these shapes.

    An array of one axis, such as a bias, travels as values.

    Args:
        format: see `check_reduce_format`.
        shapes: of the unsharded arrays.
        ranks: among which axis 0 of each is cut.
        item_size: bytes of a value.
    """
    format, place, parts = Format.parse(format), 0, []
    for shape in shapes:
        chunk = -(-shape[0] // ranks)
        rows, columns = (chunk * math.prod(shape[1:-1]), shape[-1]) if len(shape) > 1 else (1, chunk)
        scales = None
        if len(shape) > 1:
            scales = _aligned(place + rows * layout.packed_columns(columns, format.element.bits))
            blocks, dtype = layout.parts((rows, columns), format)[1]
            end = scales + math.prod(blocks) * np.dtype(dtype).itemsize
        else:
            end = place + columns * item_size
        parts.append(SentPart(rows, columns, place, scales, end))
        place = _aligned(end)
    return SentLayout(tuple(parts), place)


def sent_bytes(format: Format | str | None, shapes: Sequence[Sequence[int]], ranks: int, item_size: int = 2) -> int:
    """Counts the bytes that a rank sends in the reduce-scatter of arrays of these shapes.

    Args:
        format: in which arrays of two or more axes travel; None sends values.
        shapes: of the unsharded arrays.
        ranks: among which axis 0 of each is cut.
        item_size: bytes of a value; 2 of bfloat16.
    """
    own = tuple(tuple(shape) for shape in shapes)
    if format is None:
        one = sum(-(-shape[0] // ranks) * math.prod(shape[1:]) * item_size for shape in own)
    else:
        one = sent_layout(check_reduce_format(format, "format"), own, ranks, item_size).size
    return (ranks - 1) * one


def term_keys(key: Key, arrays: Sequence[int], reductions: np.ndarray, rank: int) -> np.ndarray:
    """Makes the keys that a rank rounds its terms with: fold_in(fold_in(fold_in(key, array), reduction), rank).

    Args:
        key: a seed or two words.
        arrays: the number of each array.
        reductions: how often each was reduced before, integers [.., arrays].
        rank: this rank's number among those whose terms are added.

    Returns:
        int32 [.., arrays, 2].
    """
    words = np.array(key_words(key), np.uint32).view(np.int32)
    data = np.broadcast_arrays(np.asarray(arrays), reductions, rank)
    first, second = (np.broadcast_to(word, data[0].shape) for word in words)
    for number in data:
        low = number.astype(np.uint32).view(np.int32)
        first, second = threefry2x32((first, second), (np.zeros_like(low), low))
    return np.stack([first, second], -1)


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT

"""Reduce-scatters that send terms as codes: formats, keys, and the layout of the messages.

    term of rank r   t[r] = dequantize(quantize(x[r], format, key=fold_in(key, r))) in fp32; an Inf in x[r] is sent as NaN
    sum              ((t[0] + t[1]) + t[2]) + .., in fp32
    rank d           gets rows d * c .. (d + 1) * c of the sum along axis 0, with c = ceil(length / ranks)

Each rank quantizes its whole x. A block has one row, so any cut along axis 0 also cuts codes and scales. Random bits depend on
the element's index in the whole.
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
"""Byte alignment of codes and scales in a message, so that kernels can read words."""


class SentPart(NamedTuple):
    """Position of one array in the message to a rank.

    Attributes:
        rows: rows per rank, with all axes but the last joined, padded to the longest part.
        columns: columns of a row.
        codes: byte offset of its codes, or of its values if `scales` is None.
        scales: byte offset of its scales; None if the array is sent as values.
        end: byte offset of the end of its scales or values.
    """

    rows: int
    columns: int
    codes: int
    scales: int | None
    end: int


class SentLayout(NamedTuple):
    """Layout of the message from one rank to another: codes and scales of several arrays.

    Attributes:
        parts: one per array.
        size: bytes of the message, the same for every pair of ranks.
    """

    parts: tuple[SentPart, ...]
    size: int


def rows_alone(format: Format) -> bool:
    """Returns whether no scale spans several rows."""
    return format.block is not None and format.block[0] == 1 and not format.scale.two_level


def check_reduce_format(format: Format | str, name: str = "reduce_format") -> Format:
    """Returns the parsed format; raises ValueError if rows of different ranks would share a scale."""
    format = Format.parse(format)
    if not rows_alone(format):
        raise ValueError(
            f"{name} {format}: rows that go to different ranks must not share a scale; use a format in blocks of one "
            "row and one level of scales, such as mxfp8_e5m2 or fp8_e4m3_1x128"
        )
    return format


@lru_cache(maxsize=4096)
def sent_layout(format: Format | str, shapes: tuple[tuple[int, ...], ...], ranks: int, item_size: int) -> SentLayout:
    """Lays out the message from one rank to another for arrays of these unsharded shapes.

    Axis 0 of each array is cut among `ranks`. One-axis arrays, such as biases, are sent as values of `item_size` bytes;
    `format` is one that `check_reduce_format` accepts.
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
    """Returns the bytes that a rank sends in the reduce-scatter of arrays of these shapes.

    Args:
        format: format of arrays with two or more axes; None sends values.
        shapes: the unsharded shapes.
        ranks: number of ranks that cut axis 0 of each array.
        item_size: bytes of a value; 2 for bfloat16.
    """
    own = tuple(tuple(shape) for shape in shapes)
    if format is None:
        one = sum(-(-shape[0] // ranks) * math.prod(shape[1:]) * item_size for shape in own)
    else:
        one = sent_layout(check_reduce_format(format, "format"), own, ranks, item_size).size
    return (ranks - 1) * one


def term_keys(key: Key, arrays: Sequence[int], reductions: np.ndarray, rank: int) -> np.ndarray:
    """Returns the keys of a rank's terms, int32 [.., arrays, 2]: fold_in(fold_in(fold_in(key, array), reduction), rank).

    `arrays` are the arrays' numbers, `reductions` [.., arrays] count earlier reductions of each array, and `rank` is the
    position among the ranks that are summed.
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

"""Rounding to an element: nearest even, or stochastic with random bits that depend only on key and position.

Stochastic rounding uses Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), the
generator of `jax.random`, with the element's row-major index in the unsharded array as counter. Every framework, mesh and
kernel draws the same bits; a shard only needs its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..formats import ElementFormat
from . import bits
from .bits import Array
from .layout import Materialize, as_stored, on_device_of

Key = Any
"""An integer seed, or two uint32 words (`jax.random.key_data(key)`) as a sequence or an array."""

NARROW, WIDE = 1, 2
"""Random bytes per element: one in `quantize` and for gradients, as in hardware; two for weights and moments, which are rounded
repeatedly after steps far below the spacing of their codes."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def round_to_element(
    significand: Array, exponent: Array, element: ElementFormat, random: Array | None = None, width: int = NARROW
) -> Array:
    """Returns the magnitude code of a split number (see `bits`), saturated at the element's largest finite value.

    Significands are int32 with point 23, exponents any int32. `random` holds int32 numbers of `width` bytes for stochastic
    rounding; None rounds to nearest even.
    """
    exponent = bits.at_most(exponent, element.emax + 2)
    if random is None:
        code = bits.round_nearest(significand, exponent, element.mantissa_bits, element.emin)
    else:
        code = bits.round_stochastic(significand, exponent, element.mantissa_bits, element.emin, random, 8 * width)
    return bits.at_most(code, element.max_code)


def key_words(key: Key) -> tuple[Any, Any]:
    """Returns the two words of a key: Python ints in 0..2^32 - 1, or elements of the array. A seed s gives (s >> 32, s &
    0xffffffff).

    Raises ValueError for a seed outside 0..2^64 - 1, or unless the key is two words in 0..2^32 - 1.
    """
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        seed = int(key)
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"key must be a seed in 0..2^64 - 1 or two uint32 words, got {key}")
        return seed >> 32, seed & 0xFFFFFFFF
    words: Any = key
    if hasattr(words, "dtype"):
        # Only NumPy values are checked: other arrays may be traced, or need a device synchronization.
        beyond = isinstance(words, np.ndarray) and words.dtype == np.int64 and (words >> 32).any()
        if tuple(words.shape) == (2,) and bits.dtype_name(words) in ("uint32", "int32", "int64") and not beyond:
            return words[0], words[1]
    elif isinstance(words, Sequence) and len(words) == 2 and all(isinstance(w, int | np.integer) for w in words):
        first, second = int(words[0]), int(words[1])
        if 0 <= first < 1 << 32 and 0 <= second < 1 << 32:
            return first, second
    raise ValueError(f"key must be an integer seed or two uint32 words, got {key!r}")


def _key_arrays(key: Key, like: Array) -> tuple[Array, Array]:
    """Returns the key's words as int32 arrays of shape (1,) in the namespace of `like`."""
    xp = array_namespace(like)

    def word(value: Any) -> Array:
        if isinstance(value, int):
            return xp.full((1,), _signed(value), dtype=xp.int32, **on_device_of(like))
        if array_namespace(value) is not xp:
            return word(int(value))
        value = value.reshape((1,))
        # torch supports little more than a view for uint32.
        return value.view(xp.int32) if bits.dtype_name(value) == "uint32" else xp.astype(value, xp.int32)

    first, second = key_words(key)
    return word(first), word(second)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def shift_right(x: Array, places: int) -> Array:
    """Shifts int32 logically right by 1 to 31 places."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds: returns two int32 words per pair of counter words, in wrapping int32 arithmetic."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = counter[0] + k0, counter[1] + k1
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | shift_right(x1, 32 - rotation)) ^ x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + (schedule[(block + 2) % 3] + (block + 1))
    return x0, x1


def fold_in(key: Key, data: int | Array) -> tuple[int, int] | Array:
    """Derives a key from a key and a number: Threefry(key, (0, data)), equal to `jax.random.fold_in`.

    `data` is an int in 0..2^32 - 1, or a 0-d integer array of the key's library. An array key gives an int32 array, other keys
    give two ints.
    """
    like = key if hasattr(key, "dtype") else np.zeros(2, np.int32)
    xp = array_namespace(like)
    if isinstance(data, int):
        low = xp.full((1,), _signed(data), dtype=xp.int32, **on_device_of(like))
    else:
        low = xp.astype(data.reshape((1,)), xp.int32)
    words = threefry2x32(_key_arrays(key, like), (xp.zeros_like(low), low))
    if hasattr(key, "dtype"):
        return xp.concat(words)
    return int(words[0][0]) & 0xFFFFFFFF, int(words[1][0]) & 0xFFFFFFFF


ROWWISE, COLUMNWISE = 0, 1
"""Directions of a gradient, for `gradient_key`."""


def gradient_key(
    key: Key, direction: int, coordinate: int | Array | None = None, group: int | Array | None = None
) -> tuple[int, int] | Array:
    """Derives the key of one cast of a layer's gradient, by the same rule in every framework.

    Args:
        key: key of the layer and step; equal on all ranks.
        direction: `ROWWISE` or `COLUMNWISE`.
        coordinate: this rank's row-major position on the data-parallel axes, because its rows are a separate tensor; folded in
            first. None if no axis divides the batch.
        group: index of the group in a grouped layer, folded in last; None in other layers.
    """
    key = fold_in(key if coordinate is None else fold_in(key, coordinate), direction)
    return key if group is None else fold_in(key, group)


def random_bytes(
    key: Key,
    rows: Array,
    columns: int,
    first_column: int | Array,
    row_length: int | Array,
    materialize: Materialize = as_stored,
    width: int = NARROW,
) -> Array:
    """Returns the random bytes of each element of some rows as one number: int32 in 0..256^width - 1, [len(rows), columns].

    With n = 8 / width, element i of the unsharded array takes the bytes from (i mod n) * width of the two words (little-endian,
    first word first) that Threefry gives for counter floor(i / n).

    Args:
        key: the key.
        rows: int32 row numbers in the unsharded array, its leading axes counted as rows.
        columns: number of elements per row.
        first_column: column of the first element.
        row_length: columns of the unsharded array.
        materialize: see `layout.Materialize`.
        width: `NARROW` or `WIDE`.
    """
    xp = array_namespace(rows)
    high, low = _multiply_wide(rows, row_length)
    start = low + first_column
    high = high + xp.astype(_less_unsigned(start, low), xp.int32)
    known = isinstance(row_length, int) and isinstance(first_column, int)
    served, places = 8 // width, 4 - width  # elements per counter, and 4 - width = log2 of it
    aligned = known and row_length % served == 0 and first_column % served == 0
    groups = -(-columns // served) if aligned else (columns + 2 * (served - 1)) // served
    first, second = _key_arrays(key, rows)
    counter_low = ((high << (32 - places)) | shift_right(start, places))[:, None]
    counter = counter_low + xp.arange(groups, dtype=xp.int32, **on_device_of(rows))[None, :]
    carry = xp.astype(_less_unsigned(counter, counter_low), xp.int32)
    words = threefry2x32((first[:, None], second[:, None]), (shift_right(high, places)[:, None] + carry, counter))
    words = materialize(words[0]), materialize(words[1])
    numbers = [(word >> (8 * width * i)) & ((1 << 8 * width) - 1) for word in words for i in range(4 // width)]
    numbers = xp.stack(numbers, axis=-1).reshape((rows.shape[0], groups * served))
    if aligned:
        return numbers[:, :columns]
    offset = (start & (served - 1))[:, None]
    chosen = numbers[:, :columns]
    for i in range(1, served):
        chosen = xp.where(offset == i, numbers[:, i : i + columns], chosen)
    return chosen


def _less_unsigned(a: Array, b: Array) -> Array:
    return (a ^ bits.SIGN) < (b ^ bits.SIGN)


def _multiply_wide(a: Array, b: int) -> tuple[Array, Array]:
    """Multiplies non-negative int32 a and b in 16-bit limbs; returns (high, low) words of the 64-bit products."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    low, cross = a0 * b0, (a1 * b0, a0 * b1)
    middle = shift_right(low, 16) + (cross[0] & 0xFFFF) + (cross[1] & 0xFFFF)
    return a1 * b1 + (cross[0] >> 16) + (cross[1] >> 16) + (middle >> 16), (low & 0xFFFF) | (middle << 16)

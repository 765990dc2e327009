"""MS-EDEN: NVFP4 codes rounded to nearest, and block scales that make the estimate unbiased.

A rotated block x is encoded under its scale S as NVFP4 is. Its codes q, decoded, are shorter than x along x by the factor
c = <x, x> / <x, q>, which goes onto the scale: S c is rounded to E4M3 stochastically. Over random rotations the result is an
unbiased estimate of x with half the squared error of rounding the elements stochastically. (Panferov et al., "Quartet II",
2026, arXiv 2601.22813; Vargaftik et al., "EDEN", 2022.)

    rotate(x, key)                  random signs, and Hadamard's matrix over groups of 128 (`rotation.rotate_randomly`)
    quantize(z, format, key, ..)    codes, corrected scales and tensor scale, which dequantize as NVFP4

The sums of c are sums of integers, so that they have no order.
"""

from __future__ import annotations

from typing import Literal

from array_api_compat import array_namespace

from ..formats import E4M3, Format
from . import bits, layout, numerics, rotation, scaling
from .bits import Array
from .checks import check_eden, check_input
from .decoding import magnitude_bits, scaled
from .layout import Materialize, as_stored
from .numerics import Amax, Origin, Quantized
from .rounding import Key, fold_in, round_to_element

Operand = Literal["input", "gradient"]

# What is folded into the key of a cast.
_ROTATION = 0
_ROUNDING: dict[str, int] = {"gradient": 1, "input": 2}

# fp32 bits of 256 * 6. Below 448 there is room for the correction.
_LARGEST = bits.constant_bits(256.0 * 6.0)

# Magnitudes as integers, in steps of 2^-9 below 16: sums of 16 squares stay below 2^31.
_STEPS, _RANGE = 9, 4
_MOST = (1 << (_STEPS + _RANGE)) - 1


def rotate(x: Array, key: Key, origin: int | Array = 0, end: Array | None = None) -> Array:
    """Rotates x along its last axis, float32; see `rotation.rotate_randomly`.

    Args:
        x: float32, float16 or bfloat16, [..., k].
        key: of the cast; both operands of a product have the same one.
        origin: index of the first element in the unsharded axis; a multiple of 128.
        end: the length of that axis, where it is known only at run time.
    """
    return rotation.rotate_randomly(x, fold_in(key, _ROTATION), origin, end)


def rotate_back(z: Array, key: Key, origin: int | Array = 0, end: Array | None = None) -> Array:
    """Undoes `rotate`, of a whole axis or of a part with an `end`, but for roundings."""
    return rotation.rotate_back(z, fold_in(key, _ROTATION), origin, end)


def quantize(
    z: Array,
    format: Format | str,
    key: Key,
    operand: Operand = "gradient",
    *,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
    materialize: Materialize = as_stored,
) -> Quantized:
    """Quantizes rotated values.

    Args:
        z: float32, float16 or bfloat16, [..., rows, columns].
        format: "nvfp4".
        key: of the cast, as given to `rotate`.
        operand: "input" or "gradient", which draw different random bits from one key.
        origin: (row, column) of z's first element in the unsharded matrix; the column is a multiple of 16.
        shape: (rows, columns) of the unsharded matrix, for the random index; by default it ends where z ends.
        amax: amaxes of these blocks, already reduced over ranks; computed from z by default.
        materialize: see `layout.Materialize`.

    Raises:
        TypeError, ValueError: as `numerics.quantize`; a format that isn't "nvfp4".
    """
    check_input(z)
    format = Format.parse(format)
    check_eden(format)
    xp = array_namespace(z)
    element, block = format.element, format.block
    assert block is not None
    amax = numerics.amax(z, format) if amax is None else amax
    assert amax.nan is not None
    multiplier = scaling.nvfp4_multiplier(xp.reshape(amax.tensor, (1,) * z.ndim), format, _LARGEST)
    stored = scaling.nvfp4_scale(amax.blocks, multiplier, format)
    tensor_scale = scaling.reciprocal(multiplier)
    tensor = tensor_scale.reshape(()).view(xp.float32)
    if 0 in z.shape:
        codes = xp.zeros(layout.codes_shape(z.shape, format), dtype=xp.uint8, **layout.on_device_of(z))
        return Quantized(codes, xp.astype(stored, xp.uint8), tensor)
    encode = scaling.clamped_reciprocal(scaled(stored, E4M3, tensor_scale))
    pattern = layout.split_blocks(bits.from_float(z), block)
    magnitude = pattern & bits.MAGNITUDE
    nan = magnitude > bits.INFINITY
    y = bits.multiply(bits.split(magnitude), bits.split(materialize(encode)[..., :, None, :, None]))
    code = xp.where(nan, element.nan_code, round_to_element(*y, element))
    correction = _correction(*y, code, magnitude, nan)
    # One random byte a block, by its number in the unsharded grid.
    width = block[1]
    grid = None if shape is None else (shape[0], -(-shape[1] // width))
    byte = numerics.element_bytes(stored, fold_in(key, _ROUNDING[operand]), (origin[0], origin[1] // width), grid, materialize)
    exact = bits.multiply(bits.split(magnitude_bits(stored, E4M3)), bits.split(correction))
    corrected = xp.where(stored == 0, 0, round_to_element(*exact, E4M3, byte))
    corrected = xp.where(amax.nan > 0, format.scale.nan_code, corrected)
    code = xp.astype(xp.where(nan, code, code | (xp.astype(pattern < 0, xp.int32) << (element.bits - 1))), xp.uint8)
    codes = layout.pack(materialize(layout.join_blocks(code, z.shape)), element.bits)
    return Quantized(codes, xp.astype(corrected, xp.uint8), tensor)


def _correction(significand: Array, exponent: Array, code: Array, magnitude: Array, nan: Array) -> Array:
    """fp32 bits of each block's c, from its elements y, split, and their magnitude codes; 1 where <y, q> is 0."""
    xp = array_namespace(code)
    # As if 16 were the smallest normal number: below it the spacing stays.
    steps = bits.round_nearest(significand, bits.at_most(exponent, _RANGE), _STEPS + _RANGE, _RANGE)
    steps = bits.at_most(steps, _MOST)
    steps = xp.where((magnitude == 0) | nan, 0, steps)
    # Twice the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    twice = xp.where(code < 4, code, xp.where(code == 7, 12, xp.where(code == 6, 8, code + code - 4)))
    squares = xp.sum(steps * steps, axis=(-3, -1), dtype=xp.int32)
    products = xp.sum(steps * twice, axis=(-3, -1), dtype=xp.int32)
    # In steps of 2^-10 both, below 2^24.
    above = xp.astype((squares + 128) >> 8, xp.float32).view(xp.int32)
    below = xp.astype(products, xp.float32).view(xp.int32)
    empty = products == 0
    return xp.where(empty, bits.ONE, bits.divide(above, xp.where(empty, bits.ONE, below)))

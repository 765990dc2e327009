"""Alignment of MX operands: one power of two per 128 contracted elements instead of one per 32.

Hopper has no matrix units for MX, but its FP8 units promote sums every 128 elements. Alignment shifts the codes of four
neighbouring blocks to one exponent, and FP6 and FP4 codes become E4M3. The result has the layout of FP8 blocks of 1x128; it is
only an operand of a product and is never stored or sent.

The largest magnitude determines the shift: it moves to the highest binade that can hold it, with NaN and Inf counted as the
block's MAX. Values change if they fall below the smallest spacing, by at most half of it:

    target   from          |change| / largest magnitude   exact up to
    E4M3     E4M3          1 / (240 * 2^10) = 2^-17.9     (codes change that become subnormal by the shift)
    E4M3     E2M3          1 / (240 * 2^10) = 2^-17.9     11 binades between the blocks' scales
    E4M3     E3M2, E2M1    2^-18                          9 and 14 binades
    E5M2     E5M2          2^-32                          (as E4M3)
"""

from __future__ import annotations

from functools import cache

from array_api_compat import array_namespace

from ..formats import E5M2, INT8, Format
from . import bits, layout, scaling
from .bits import Array
from .checks import check_codes, check_scales
from .numerics import Quantized
from .rounding import round_to_element

_GROUP = 4
"""Number of 32-element blocks that share an exponent."""

# A significand above that of E4M3's MAX (448) needs one binade more. E5M2 has no larger significands.
_LARGEST_SIGNIFICAND = 0xE00000


def can_align(format: Format) -> bool:
    """Returns whether FP8 codes can represent a format's codes: MX elements with up to 4 significant bits."""
    return format.scale.e8m0 and format.element is not INT8


@cache
def aligned_format(format: Format | str) -> Format:
    """Returns the format that `align` produces: FP8 in 1x128 blocks with power-of-two scales. Raises ValueError if there is
    none."""
    format = Format.parse(format)
    if not can_align(format):
        raise ValueError(f"only MXFP8, MXFP6 and MXFP4 are aligned to 128 elements, got {format}")
    return Format.parse("fp8_e5m2_1x128" if format.element is E5M2 else "fp8_e4m3_1x128")


def align(codes: Array, scales: Array, format: Format | str, *, columns: int) -> Quantized:
    """Returns the codes and scales of an MX array, shifted to one scale per row and 128 columns.

    The rows of a 32x32 block share the exponent, so they get equal scales.

    Args:
        codes: uint8 [..., rows, bytes], packed along the last axis.
        scales: uint8 E8M0, one per block.
        format: MXFP8, MXFP6 or MXFP4, as a `Format` or its name.
        columns: length of the last axis.

    Returns:
        Codes uint8 [..., rows, columns] and scales float32 [..., rows, ceil(columns / 128)] in `aligned_format(format)`.
        Elements that are NaN, also by a NaN scale, get NaN codes.

    Raises:
        TypeError, ValueError: the format can't be aligned, or codes and scales don't fit it.
    """
    format = Format.parse(format)
    target = aligned_format(format).element
    check_codes(codes, columns, format)
    shape = (*codes.shape[:-1], columns)
    check_scales(scales, None, shape, format)
    xp, element = array_namespace(codes), format.element
    assert format.block is not None
    if 0 in shape:
        empty = {"dtype": xp.float32, **layout.on_device_of(codes)}
        grid = layout.scales_shape(shape, aligned_format(format))
        return Quantized(layout.unpack(codes, element.bits, columns), xp.zeros(grid, **empty), None)

    code = xp.astype(layout.unpack(codes, element.bits, columns), xp.int32)
    code = layout.split_blocks(code, (format.block[0], 32 * _GROUP))
    # [.., row blocks, rows, groups, blocks, 32]
    code = code.reshape((*code.shape[:-1], _GROUP, 32))
    stored = xp.astype(layout.pad_scales(scales, 1, _GROUP), xp.int32)
    stored = stored.reshape((*stored.shape[:-1], stored.shape[-1] // _GROUP, _GROUP))

    magnitude = code & ((1 << (element.bits - 1)) - 1)
    value = scaling.magnitude_bits(magnitude, element)
    finite = scaling.magnitude_bits(bits.at_most(magnitude, element.max_code), element)
    # `split` gives zero an exponent below all others, whatever the scale.
    significand, exponent = bits.split(xp.max(finite, axis=(-4, -1)))
    highest = exponent + xp.astype(significand > _LARGEST_SIGNIFICAND, xp.int32)
    highest = xp.where(stored == 0xFF, -1024, highest + stored)
    shared = bits.at_least(xp.max(highest, axis=-1) - target.emax, 0)

    significand, exponent = bits.split(value)
    exponent = exponent + (stored - shared[..., None])[..., :, None, :, :, None]
    aligned = round_to_element(significand, exponent, target)
    aligned = aligned | ((code >> (element.bits - 1)) << 7)
    if element is E5M2:
        aligned = xp.where(value == bits.INFINITY, (aligned & 0x80) | 0x7C, aligned)
    nan = (value > bits.INFINITY) | (stored == 0xFF)[..., :, None, :, :, None]
    aligned = xp.where(nan, target.nan_code, aligned)
    aligned = aligned.reshape((*aligned.shape[:-2], 32 * _GROUP))
    aligned = layout.join_blocks(aligned, shape)
    powers = scaling.e8m0_bits(shared).view(xp.float32)
    return Quantized(xp.astype(aligned, xp.uint8), layout.repeat_scales(powers, format.block[0], shape[-2]), None)

"""Quantize and dequantize: the definition, written once for every array library.

NumPy, PyTorch and JAX run the same lines, eagerly or compiled, and get the same bits. Kernels are tested against this module.
Quantization has three steps, which callers that share blocks across devices run separately:

    amax(x)             the largest magnitude of each block, as integers that ranks reduce by an integer maximum
    quantize(.., amax)  scales from amaxes, then codes
    encode(x, scales)   codes for existing scales

`requantize` updates weights without a master: their scales continue from the previous ones (`kept_scales`).

Rowwise means along the last axis. Columnwise quantization is `quantize` of the transposed array.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from ..formats import E4M3, ElementFormat, Format
from . import bits, four_over_six, kept_scales, layout, scaling
from .bits import Array
from .checks import check_codes, check_input, check_limits, check_output_dtype, check_scales, check_square
from .layout import Materialize, as_stored
from .rounding import NARROW, WIDE, Key, random_bytes, round_to_element
from .scaling import scaled

Origin = tuple[int, int]


class Quantized(NamedTuple):
    """Codes and scales in their stored form (`layout.codes_shape`, `layout.scales_shape`).

    Codes are uint8, packed along the last axis; scales are uint8 or float32, one per block. `tensor_scale` is float32 of shape
    () for formats with two levels, else None.
    """

    codes: Array
    scales: Array
    tensor_scale: Array | None


class Amax(NamedTuple):
    """Largest magnitudes. Ranks reduce every field by an elementwise integer maximum.

    Attributes:
        blocks: int32 fp32 bits in the shape of the scales; NaN ignored.
        nan: int32, 1 if the block holds a NaN; None if the element format has a NaN code.
        tensor: int32 fp32 bits of shape () for formats with two levels, else None.
        members: from `four_over_six.members` if other ranks hold elements that decide a block's scale, else None.
    """

    blocks: Array
    nan: Array | None
    tensor: Array | None
    members: Array | None = None


class _Scales(NamedTuple):
    stored: Array  # int32: the stored bytes, or fp32 bits
    tensor: Array | None  # int32 bits of tensor_scale
    multiplier: Array  # int32: fp32 bits of x's multiplier, or for E8M0 the exponent to subtract


def amax(x: Array, format: Format | str, *, origin: Origin = (0, 0)) -> Amax:
    """Returns the largest magnitude of each block of x, ignoring NaN.

    x is float32, float16 or bfloat16 [..., rows, columns]; `origin` is the (row, column) of its first element in the unsharded
    matrix.
    """
    check_input(x)
    format = Format.parse(format)
    return _amax(bits.from_float(x), format, origin)


def _amax(pattern: Array, format: Format, origin: Origin) -> Amax:
    xp = array_namespace(pattern)
    magnitude = pattern & bits.MAGNITUDE
    is_nan = magnitude > bits.INFINITY
    magnitude = xp.where(is_nan, 0, magnitude)
    if format.block is None:
        whole = _largest(magnitude, tuple(range(magnitude.ndim)))
        return Amax(whole.reshape((1,) * pattern.ndim), None, None)
    blocks = _largest(layout.split_blocks(magnitude, format.block, origin), (-3, -1))
    nan = None
    if not format.element.has_nan:
        nan = _largest(layout.split_blocks(xp.astype(is_nan, xp.int32), format.block, origin), (-3, -1))
    tensor = _largest(blocks, tuple(range(blocks.ndim))) if format.scale.two_level else None
    return Amax(blocks, nan, tensor)


def check_members(amax: Amax, format: Format) -> None:
    """Raises ValueError for members that don't fit the blocks, or that the format doesn't use."""
    if amax.members is None:
        return
    if not format.scale.four_over_six:
        raise ValueError(f"amax.members is for formats whose blocks choose between scales, got {format}")
    assert format.block is not None
    expected = (*amax.blocks.shape, format.block[0] * format.block[1])
    if tuple(amax.members.shape) != expected:
        raise ValueError(f"amax.members of {format} must have shape {expected}, got {tuple(amax.members.shape)}")


def _largest(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns the maximum over axes, 0 for empty arrays."""
    xp = array_namespace(x)
    if 0 not in x.shape:
        return xp.max(x, axis=axes)
    reduced = {axis % x.ndim for axis in axes}
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in reduced)
    return xp.zeros(shape, dtype=x.dtype, **layout.on_device_of(x))


def quantize(
    x: Array,
    format: Format | str,
    *,
    key: Key | None = None,
    eps: float = 0.0,
    nominal: str | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
    multiplier: Array | None = None,
    materialize: Materialize = as_stored,
    width: int = NARROW,
) -> Quantized:
    """Quantizes x in blocks of its last two axes.

    Args:
        x: float32, float16 or bfloat16, [..., rows, columns].
        format: a `Format` or its name.
        key: None rounds to nearest even; a seed or two uint32 words round stochastically.
        eps: lower bound of amaxes, before scales are computed (formats with fp32 scales only).
        nominal: dtype whose largest finite value replaces an infinite multiplier of FP8 blocks; x's own by default.
        origin: (row, column) of x's first element in the unsharded matrix, the start of blocks and random indices. A row or
            column known only at run time must be on a block boundary.
        shape: (rows, columns) of the unsharded matrix, for random indices; by default it ends where x ends.
        amax: the blocks' amaxes, already reduced over the ranks that share them; computed from x by default.
        multiplier: delayed scaling's factor for x, instead of an amax: one positive float32, for one scale per tensor. The
            stored scale is its reciprocal.
        materialize: see `layout.Materialize`.
        width: random bytes per element (`rounding.NARROW` or `WIDE`).
    """
    check_input(x)
    format = Format.parse(format)
    nominal = nominal or bits.dtype_name(x)
    check_limits(format, eps, nominal)
    xp = array_namespace(x)
    pattern = bits.from_float(x)
    phase = _phase(format, origin)
    if multiplier is not None:
        given = _delayed(multiplier, format, amax).reshape((1,) * x.ndim)
        codes = _codes(pattern, format, given, key, origin, shape, materialize, width)
        return Quantized(codes, scaling.reciprocal(given).view(xp.float32), None)
    if amax is None:
        amax = _amax(pattern, format, phase)
    check_members(amax, format)
    scales = _scales(amax, format, eps, nominal, pattern, phase, materialize)
    codes = _codes(pattern, format, scales.multiplier, key, origin, shape, materialize, width)
    return Quantized(codes, *_as_stored(scales.stored, scales.tensor, amax, format))


def _as_stored(stored: Array, tensor: Array | None, amax: Amax, format: Format) -> tuple[Array, Array | None]:
    """Converts scales to their stored form; if the element has no NaN code, the scale of a block with a NaN becomes NaN."""
    xp = array_namespace(stored)
    if amax.nan is not None:
        stored = xp.where(amax.nan > 0, format.scale.nan_code, stored)
    stored = stored.view(xp.float32) if format.scale.dtype == "float32" else xp.astype(stored, xp.uint8)
    return stored, None if tensor is None else tensor.view(xp.float32)


def _delayed(multiplier: Array, format: Format, amax: Amax | None) -> Array:
    """Returns the fp32 bits of a given multiplier; raises ValueError unless it can replace the amax."""
    if not format.per_tensor or amax is not None:
        raise ValueError(f"multiplier replaces amax, and needs a format with one scale per tensor, got {format}")
    return bits.from_float(multiplier)


def _phase(format: Format, origin: Origin) -> Origin:
    """Returns the position of x's first element in its block; an origin known only at run time counts as aligned."""
    block = format.block or (1, 1)
    row, column = (o % b if isinstance(o, int) else 0 for o, b in zip(origin, block, strict=True))
    return row, 0 if format.per_row else column


def _scales(
    amax: Amax, format: Format, eps: float, nominal: str, pattern: Array, phase: Origin, materialize: Materialize
) -> _Scales:
    element = format.element
    if format.scale.two_level:
        xp = array_namespace(amax.blocks)
        tensor_amax = xp.reshape(amax.tensor, (1,) * amax.blocks.ndim)
        multiplier = scaling.nvfp4_multiplier(tensor_amax, format)
        tensor_scale = scaling.reciprocal(multiplier)
        if format.scale.four_over_six and 0 not in amax.blocks.shape:
            assert format.block is not None
            if amax.members is None:
                magnitude = layout.split_blocks(pattern & bits.MAGNITUDE, format.block, phase)
            else:
                magnitude = four_over_six.members_in_blocks(amax.members, format.block)
            of_tensor = (tensor_amax, multiplier, tensor_scale)
            stored = four_over_six.scales(amax.blocks, *of_tensor, magnitude, format, materialize)
        else:
            stored = scaling.nvfp4_scale(amax.blocks, multiplier, format)
        decode = scaled(stored, E4M3, tensor_scale)
        return _Scales(stored, tensor_scale.reshape(()), scaling.clamped_reciprocal(decode))
    if format.scale.e8m0:
        stored = scaling.e8m0_scale(amax.blocks, element, format.scale.name)
        return _Scales(stored, None, stored - 127)
    largest = bits.FP32_MAX if format.per_tensor else bits.LARGEST_FINITE[nominal]
    multiplier = scaling.fp8_multiplier(scaling.lift(amax.blocks, eps), element, format.scale, largest)
    return _Scales(scaling.reciprocal(multiplier), None, multiplier)


def encode(
    x: Array,
    format: Format | str,
    scales: Array,
    tensor_scale: Array | None = None,
    *,
    key: Key | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    materialize: Materialize = as_stored,
    width: int = NARROW,
) -> Array:
    """Returns the codes of x for existing scales, such as the scales kept while values pass through high precision.

    Dequantizing to fp32 and encoding with the same scales gives the same codes, unless the scale is NaN or zero or a value
    overflows fp32 (the largest inputs can round up to 2^128). `scales` and `tensor_scale` are stored (decode) scales of x's
    blocks; the other arguments are those of `quantize`.
    """
    check_input(x)
    format = Format.parse(format)
    check_scales(scales, tensor_scale, x.shape, format, _phase(format, origin))
    xp = array_namespace(x)
    if format.scale.e8m0:
        multiplier = bits.at_most(xp.astype(scales, xp.int32), 0xFE) - 127
    else:
        decode = _decode_scale(scales, tensor_scale, format)
        magnitude = decode & bits.MAGNITUDE
        multiplier = scaling.clamped_reciprocal(xp.where(magnitude >= bits.INFINITY, bits.FP32_MAX, magnitude))
    return _codes(bits.from_float(x), format, multiplier, key, origin, shape, materialize, width)


def requantize(
    x: Array,
    format: Format | str,
    scales: Array,
    tensor_scale: Array | None = None,
    *,
    key: Key | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
    materialize: Materialize = as_stored,
) -> Quantized:
    """Quantizes an update of quantized values with their previous scales, or these times a power of two (see `kept_scales`).

    Values that didn't change stay the same, even if their block's or tensor's amax changed, except for codes that become
    subnormal. Stochastic rounding takes two bytes per element (`rounding.WIDE`). `scales` and `tensor_scale` are the stored
    scales before the update; the other arguments are those of `quantize`, and members of `amax` are ignored.
    """
    check_input(x)
    format = Format.parse(format)
    phase = _phase(format, origin)
    check_scales(scales, tensor_scale, x.shape, format, phase)
    if amax is None:
        amax = _amax(bits.from_float(x), format, phase)
    kept = kept_scales.scales(scales, tensor_scale, amax.blocks, amax.tensor, format)
    stored, tensor_scale = _as_stored(*kept, amax, format)
    options = {"key": key, "origin": origin, "shape": shape, "materialize": materialize, "width": WIDE}
    return Quantized(encode(x, format, stored, tensor_scale, **options), stored, tensor_scale)


def _codes(
    pattern: Array,
    format: Format,
    multiplier: Array,
    key: Key | None,
    origin: Origin,
    shape: tuple[int, int] | None,
    materialize: Materialize,
    width: int,
) -> Array:
    xp = array_namespace(pattern)
    element, own_shape, phase = format.element, pattern.shape, _phase(format, origin)
    if 0 in own_shape:
        return xp.zeros(layout.codes_shape(own_shape, format), dtype=xp.uint8, **layout.on_device_of(pattern))
    random = None if key is None else element_bytes(pattern, key, origin, shape, materialize, width)
    exponents = format.scale.e8m0
    if format.block is not None:
        pattern = layout.split_blocks(pattern, format.block, phase)
        multiplier = (multiplier if exponents else materialize(multiplier))[..., :, None, :, None]
        random = None if random is None else layout.split_blocks(random, format.block, phase)
    magnitude = pattern & bits.MAGNITUDE
    significand, exponent = bits.split(magnitude)
    if exponents:
        exponent = exponent - multiplier
    else:
        significand, exponent = bits.multiply((significand, exponent), bits.split(multiplier))
    code = round_to_element(significand, exponent, element, random, width)
    code = _apply_sign(code, pattern < 0, element)
    code = xp.where(magnitude > bits.INFINITY, element.nan_code, code)
    code = xp.astype(code, xp.uint8)
    if format.block is not None:
        code = layout.join_blocks(code, own_shape, phase)
    return layout.pack(materialize(code), element.bits) if element.packed else code


def _apply_sign(code: Array, negative: Array, element: ElementFormat) -> Array:
    xp = array_namespace(code)
    if element.signed == "complement":
        return xp.where(negative, -code, code) & 0xFF
    return code | (xp.astype(negative, xp.int32) << (element.bits - 1))


def element_bytes(
    pattern: Array,
    key: Key,
    origin: Origin,
    shape: tuple[int, int] | None,
    materialize: Materialize = as_stored,
    width: int = NARROW,
) -> Array:
    """Returns the random bytes of each element, indexed in the unsharded array, as int32 in the pattern's shape."""
    xp = array_namespace(pattern)
    *leading, rows, columns = pattern.shape
    total_rows, total_columns = shape or (origin[0] + rows, origin[1] + columns)
    matrices = 1
    for size in leading:
        matrices *= size
    device = layout.on_device_of(pattern)
    starts = xp.arange(matrices, dtype=xp.int32, **device)[:, None] * total_rows
    index = (starts + xp.arange(rows, dtype=xp.int32, **device)[None, :]).reshape((-1,)) + origin[0]
    return random_bytes(key, index, columns, origin[1], total_columns, materialize, width).reshape(pattern.shape)


def dequantize(
    codes: Array,
    scales: Array,
    tensor_scale: Array | None,
    format: Format | str,
    dtype: str,
    *,
    columns: int,
    origin: Origin = (0, 0),
    materialize: Materialize = as_stored,
) -> Array:
    """Returns the values in `dtype`: code times decode scale, rounded once to fp32 and once to float16 or bfloat16.

    `columns` is the length of the last axis; the other arguments are those of `Quantized` and `quantize`.
    """
    format = Format.parse(format)
    check_output_dtype(dtype)
    shape = (*codes.shape[:-1], columns)
    phase = _phase(format, origin)
    check_codes(codes, columns, format)
    check_scales(scales, tensor_scale, shape, format, phase)
    xp = array_namespace(codes)
    if 0 in shape:
        return bits.to_float(xp.zeros(shape, dtype=xp.int32, **layout.on_device_of(codes)), dtype)
    code = layout.unpack(codes, format.element.bits, columns)
    code = xp.astype(materialize(code) if format.element.bits == 6 else code, xp.int32)
    decode = _decode_scale(scales, tensor_scale, format)
    if format.block is not None:
        code = layout.split_blocks(code, format.block, phase)
        decode = decode[..., :, None, :, None]
    value = scaled(code, format.element, decode, power_of_two=format.scale.e8m0)
    if format.block is not None:
        value = layout.join_blocks(value, shape, phase)
    return bits.to_float(value, dtype)


def _decode_scale(scales: Array, tensor_scale: Array | None, format: Format) -> Array:
    """Returns the fp32 bits of each block's decode scale."""
    xp = array_namespace(scales)
    if format.scale.dtype == "float32":
        return scales.view(xp.int32)
    stored = xp.astype(scales, xp.int32)
    if tensor_scale is None:
        return scaling.e8m0_bits(stored)
    return scaled(stored, E4M3, tensor_scale.reshape((1,) * scales.ndim).view(xp.int32))


def transpose(codes: Array, scales: Array, format: Format | str, *, columns: int) -> tuple[Array, Array]:
    """Returns codes and scales of the transposed matrix, which is exact for square blocks and for one scale per tensor.

    `columns` is the length of the last axis. Raises ValueError for other formats.
    """
    format = Format.parse(format)
    check_square(format)
    check_codes(codes, columns, format)
    element = format.element
    flipped = layout.pack(layout.swap_matrix(layout.unpack(codes, element.bits, columns)), element.bits)
    return flipped, layout.swap_matrix(scales)

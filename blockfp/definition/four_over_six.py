"""NVFP4's choice between two scales per block, "4-over-6" (Cook et al., arXiv 2512.02010), as in TransformerEngine.

E2M1 has no values between 4 and 6. A block can have a smaller error with a scale that maps its amax to 4, because spacing is
finer near 4. Both scales are tried, and the one with the smaller error wins:

    base = amax / 6 * G             s6 = E4M3(min(base, 448))   s4 = E4M3(min(base * 1.5, 448))
    enc  = min(1 / (s * Gd), fp32's largest)                    code = E2M1(x * enc)
    err  = sum |code * s * amax of the tensor / (bound * 6) - x|       s4 if err4 < err6; ties, Inf and NaN take s6

G is the tensor's multiplier and Gd the tensor scale. With a bound of 256, a scale for 4 is at most 384; with 448 ("_448") it
saturates in blocks near the tensor's amax. "_mse" sums squares. Every operation is one fp32 operation rounded to nearest even,
from left to right. Errors of a row are summed from first to last; rows of a 16-row block are summed as a tree: rows i and i +
8, then i + 4, i + 2, i + 1. Missing elements count as zero.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from ..formats import E4M3, Format
from . import bits, layout, scaling
from .bits import Array
from .checks import check_input
from .layout import Materialize
from .rounding import round_to_element
from .scaling import magnitude_bits, scaled

_SIX, _THREE_HALVES = bits.constant_bits(6.0), bits.constant_bits(1.5)


def scales(
    amax: Array,
    tensor_amax: Array,
    multiplier: Array,
    tensor_scale: Array,
    magnitude: Array,
    format: Format,
    materialize: Materialize,
) -> Array:
    """Returns the E4M3 bytes (int32) of the block scales.

    Args:
        amax: int32 bits of the blocks' largest magnitudes, [.., row blocks, column blocks].
        tensor_amax: int32 bits of the tensor's amax, one element with as many axes.
        multiplier: bits of G (`scaling.nvfp4_multiplier`), same shape.
        tensor_scale: bits of Gd, same shape.
        magnitude: bits of the elements' magnitudes in the layout of `layout.split_blocks`, zero for missing elements; may be
            NaN.
        format: the format.
        materialize: see `layout.Materialize`.
    """
    xp = array_namespace(amax)
    sixth = bits.divide(amax, xp.full_like(amax, _SIX))
    base = bits.multiply(bits.split(sixth), bits.split(multiplier))
    for_4 = bits.multiply(base, bits.split(xp.full_like(amax, _THREE_HALVES)))
    tried = xp.stack([xp.where(amax == 0, 0, round_to_element(*level, E4M3)) for level in (base, for_4)])
    six, four = _sums(_errors(tried, tensor_amax, tensor_scale, magnitude, format, materialize))
    # With an infinite tensor amax, decoded values are Inf or NaN.
    takes_4 = (four < six) & (six <= bits.INFINITY) & (tensor_amax < bits.INFINITY)
    return xp.where(takes_4, tried[1], tried[0])


def _errors(
    stored: Array, tensor_amax: Array, tensor_scale: Array, magnitude: Array, format: Format, materialize: Materialize
) -> Array:
    """Returns the bits of each element's error for both scales [2, .., row blocks, column blocks], in the elements' layout."""
    xp, element = array_namespace(stored), format.element
    # Add the axis of scales explicitly: JAX can be configured to reject implicit ones (`jax_numpy_rank_promotion`).
    tensor_amax, tensor_scale, magnitude = tensor_amax[None], tensor_scale[None], magnitude[None]

    def of_block(per_block: Array) -> Array:
        return per_block[..., :, None, :, None]

    encode = of_block(materialize(scaling.clamped_reciprocal(scaled(stored, E4M3, tensor_scale))))
    code = round_to_element(*bits.multiply(bits.split(magnitude), bits.split(encode)), element)
    # Decode only the few possible values of a block: one per code except 0.
    numbers = range(1, element.max_code + 1)
    codes = xp.stack([xp.full_like(stored, number) for number in numbers])
    decoded = scaled(codes, element, magnitude_bits(stored, E4M3)[None])
    product = bits.product(decoded, tensor_amax[None])
    values = materialize(bits.divide(product, xp.full_like(product, scaling.LARGEST_TWO_LEVEL[format])))
    value = xp.zeros_like(code)
    for number in numbers:
        value = xp.where(code == number, of_block(values[number - 1]), value)
    error = bits.distance(value, magnitude)
    return materialize(bits.product(error, error) if format.scale.squared_errors else error)


def _sums(errors: Array) -> tuple[Array, Array]:
    """Sums errors [2, .., row blocks, rows, column blocks, columns] per block; returns the sums of both scales."""
    rows, columns = errors.shape[-3], errors.shape[-1]
    total = errors[..., 0]
    for column in range(1, columns):
        total = bits.add(total, errors[..., column])
    while rows > 1:
        rows //= 2
        total = bits.add(total[..., :rows, :], total[..., rows:, :])
    total = total[..., 0, :]
    return total[0], total[1]


def members(x: Array, format: Format | str, *, origin: tuple[int, int] = (0, 0)) -> Array:
    """Returns the magnitudes of each block's elements, which ranks exchange if they share a block in a 4-over-6 format.

    x, format and origin are those of `numerics.amax`. The result is int32 fp32 bits [*shape of the scales, elements per block],
    row by row, zero for missing elements; NaN is kept.
    """
    check_input(x)
    format = Format.parse(format)
    if format.block is None or format.per_row:
        raise ValueError(f"format must be one in blocks, got {format}")
    phase = (origin[0] % format.block[0], origin[1] % format.block[1])
    split = layout.split_blocks(bits.from_float(x) & bits.MAGNITUDE, format.block, phase)
    xp = array_namespace(split)
    axes = (*range(split.ndim - 3), split.ndim - 2, split.ndim - 3, split.ndim - 1)
    return xp.permute_dims(split, axes).reshape((*(split.shape[axis] for axis in axes[:-2]), format.block[0] * format.block[1]))


def members_in_blocks(members: Array, block: tuple[int, int]) -> Array:
    """Rearranges the result of `members` to the layout of `layout.split_blocks`."""
    xp = array_namespace(members)
    *grid, _ = members.shape
    axes = (*range(len(grid) - 1), len(grid), len(grid) - 1, len(grid) + 1)
    return xp.permute_dims(members.reshape((*grid, *block)), axes)

"""NVFP4's choice between two scales of a block, "4-over-6" (Cook et al., arXiv 2512.02010), as TransformerEngine makes it.

E2M1 has nothing between 4 and 6. So a block may do better with a scale that maps its amax to 4, where the elements near the
amax find finer steps. Both scales are tried, and the one whose elements err less is taken:

    base = amax / 6 * G             s6 = E4M3(min(base, 448))   s4 = E4M3(min(base * 1.5, 448))
    enc  = min(1 / (s * Gd), fp32's largest)                    code = E2M1(x * enc)
    err  = sum |code * s * amax of the tensor / (bound * 6) - x|       4 where err4 < err6; equal, Inf and NaN take 6

G is the tensor's multiplier and Gd the tensor scale. With the bound 256 a scale of 4 is at most 384; with 448 ("_448") it
saturates in blocks near the tensor's amax. "_mse" sums squares instead of magnitudes. Every operation is one fp32 operation,
rounded to nearest even, from left to right. A row's errors are summed from its first element to its last; those of a block's
16 rows as a tree: rows i and i + 8, then i + 4, i + 2, i + 1. Elements that a block lacks add nothing.
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
    """E4M3 bytes (int32) of the blocks' scales.

    Args:
        amax: int32 bits of the blocks' largest magnitudes, [.., row blocks, column blocks].
        tensor_amax: int32 bits of the tensor's, one element of as many axes.
        multiplier: bits of G (`scaling.nvfp4_multiplier`), likewise.
        tensor_scale: bits of its reciprocal, likewise.
        magnitude: bits of the elements' magnitudes in whole blocks, as `layout.split_blocks` lays them out, zero where there is
            no element; NaN as it is.
        format: the format.
        materialize: see `layout.Materialize`.
    """
    xp = array_namespace(amax)
    sixth = bits.divide(amax, xp.full_like(amax, _SIX))
    base = bits.multiply(bits.split(sixth), bits.split(multiplier))
    for_4 = bits.multiply(base, bits.split(xp.full_like(amax, _THREE_HALVES)))
    tried = xp.stack([xp.where(amax == 0, 0, round_to_element(*level, E4M3)) for level in (base, for_4)])
    six, four = _sums(_errors(tried, tensor_amax, tensor_scale, magnitude, format, materialize))
    # What the codes stand for is Inf or NaN where the tensor's amax is Inf.
    takes_4 = (four < six) & (six <= bits.INFINITY) & (tensor_amax < bits.INFINITY)
    return xp.where(takes_4, tried[1], tried[0])


def _errors(
    stored: Array, tensor_amax: Array, tensor_scale: Array, magnitude: Array, format: Format, materialize: Materialize
) -> Array:
    """Bits of each element's error, in the elements' layout, for each of the scales [2, .., row blocks, column blocks]."""
    xp, element = array_namespace(stored), format.element
    # With an axis for the scales: JAX can be told to add none (`jax_numpy_rank_promotion`).
    tensor_amax, tensor_scale, magnitude = tensor_amax[None], tensor_scale[None], magnitude[None]

    def of_block(per_block: Array) -> Array:
        return per_block[..., :, None, :, None]

    encode = of_block(materialize(scaling.clamped_reciprocal(scaled(stored, E4M3, tensor_scale))))
    code = round_to_element(*bits.multiply(bits.split(magnitude), bits.split(encode)), element)
    # A block has few values: one for each code but 0.
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
    """Sums errors [2, .., row blocks, rows, column blocks, columns] over the elements of each block, for both scales."""
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
    """The magnitudes of the elements of each block of x: what ranks exchange of blocks whose elements decide their scale.

    Args:
        x, format, origin: as for `numerics.amax`.

    Returns:
        int32 fp32 bits, [*shape of the scales, elements of a block], row by row, zero where x has no element; NaN as it is.
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
    """Elements that `members` gives, laid out as `layout.split_blocks` does."""
    xp = array_namespace(members)
    *grid, _ = members.shape
    axes = (*range(len(grid) - 1), len(grid), len(grid) - 1, len(grid) + 1)
    return xp.permute_dims(members.reshape((*grid, *block)), axes)

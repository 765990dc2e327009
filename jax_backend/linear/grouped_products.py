"""The products of `grouped_linear` for all groups at once, by the CUDA library on Hopper; the groups' ends stay on the device.

    rows       y [tokens, n]             rows of a group times its own weight       forward, dgrad
    columns    weight [groups, n, k]     what a group's rows contract to            wgrad

FP8 per tensor and in blocks is multiplied on codes, and so is MX once it is aligned. What stands in on other devices are the
spans of `grouped_spans`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from blockfp.definition import alignment
from blockfp.definition.numerics import Quantized
from blockfp.formats import Format
from blockfp.kernels.products import HOPPER
from blockfp.kernels.routes import Mode, route
from blockfp.recipes import Recipe

from ..arrays.array import QuantizedArray
from ..implementations import choice, cuda
from .grouped_codes import GroupCodes, on_device
from .grouped_spans import by_columns, by_rows
from .products import capability
from .tiles import Tiles, gather_rows

_Pair = tuple[jax.Array, jax.Array]  # codes and scales


def all_at_once(recipe: Recipe) -> bool:
    """Returns True where the CUDA library multiplies all groups at once, in all three products of a recipe."""
    if not choice.has_gpu() or choice.would_be_partitioned() or choice.missing("ffi") is not None or capability() != HOPPER:
        return False
    casts = (recipe.input, recipe.input_columnwise, recipe.gradient, recipe.gradient_columnwise)
    x, x_columns, g, g_columns = (cast.format for cast in casts)
    weights = recipe.weight.format, recipe.weight_columnwise.format
    if any(format is not None and format.per_row for format in (x, x_columns, g, g_columns, *weights)):
        return False
    if any(format is not None and format.block and format.block[0] > 1 for format in (x, x_columns, g, g_columns)):
        return False
    products = (x, weights[0]), (g, weights[1]), (g_columns, x_columns)
    return all(_mode(*formats, exact=recipe.exact_products) is not None for formats in products)


def _mode(a: Format | None, b: Format | None, *, exact: bool) -> Mode | None:
    """The mode of `kernels.routes` in which Hopper multiplies codes of groups; None where it doesn't."""
    if a is None or b is None or a.per_tensor != b.per_tensor:
        # A scale for each group and one for each block don't go together.
        return None
    mode = route(a, b, platform="cuda", capability=HOPPER, exact=exact).mode
    return mode if mode in ("tensor", "block", "aligned") else None


def multiply_rows(
    x: GroupCodes, weight: QuantizedArray, tiles: Tiles, dtype, *, fast: bool, exact: bool, turned: bool = False
) -> jax.Array:
    """Multiplies rows with their group's weight; zeros for rows beyond all groups.

    Args:
        x: [tokens, k].
        weight: [groups, n, k]; or with `turned` stored as [groups, k, n], MX in square blocks.
        tiles: where groups lie.
        dtype: of the product, [tokens, n].
        fast, exact: as for `products.product`.
        turned: see `weight`.
    """
    aligned = _mode(x.format, weight.format, exact=exact) == "aligned"

    def kernel(x, weight, tiles):
        ends, options = jnp.cumsum(tiles.sizes), {"capability": capability(), "fast": fast}
        if aligned:
            formats = alignment.aligned_format(x.format), alignment.aligned_format(weight.format)
            left, right = _aligned(x), _aligned(weight, turned=turned)
            options |= {"ordered": True, "bands": weight.format.square}
        else:
            formats, left = (x.format, weight.format), (x.codes, x.scales)
            right = weight.codes, weight.scales.reshape(-1) if weight.format.per_tensor else weight.scales
        y = cuda.multiply_groups(left, right, formats, ends, dtype, **options)
        return jnp.where((jnp.arange(y.shape[0]) < ends[-1])[:, None], y, jnp.zeros((), y.dtype))

    def definition(x, weight, tiles):
        weight = weight.mT if turned else weight
        return gather_rows(by_rows(x.tiles(tiles), weight, tiles, dtype, fast=fast, exact=True), tiles.target)

    return on_device(kernel, definition, x, weight, tiles)


def multiply_columns(a: GroupCodes, b: GroupCodes, tiles: Tiles, dtype, *, fast: bool, exact: bool) -> jax.Array:
    """[groups, m, n]: the products of each group's columns of a [m, columns] and b [n, columns], transposed."""
    aligned = _mode(a.format, b.format, exact=exact) == "aligned"

    def kernel(a, b, tiles):
        if aligned:
            operand, formats = _aligned, (alignment.aligned_format(a.format), alignment.aligned_format(b.format))
        else:
            operand, formats = _codes, (a.format, b.format)

        def of_filled(x: GroupCodes) -> _Pair:
            codes, scales = operand(x)
            # Of an empty group they may be anything, and a sum of nothing is multiplied with them.
            return codes, jnp.where(tiles.sizes > 0, scales, 1) if scales.ndim == 1 else scales

        options = {"capability": capability(), "along_k": True, "fast": fast}
        return cuda.multiply_groups(of_filled(a), of_filled(b), formats, jnp.cumsum(tiles.sizes), dtype, **options)

    def definition(a, b, tiles):
        return by_columns(a.tiles(tiles), b.tiles(tiles), tiles, dtype, fast=fast, exact=True)

    return on_device(kernel, definition, a, b, tiles)


def _codes(x: GroupCodes) -> _Pair:
    assert x.scales is not None
    return x.codes, x.scales


def _aligned(x: GroupCodes | QuantizedArray, *, turned: bool = False) -> _Pair:
    """MX codes with a scale for 128 elements; blocks begin with a group, so each row is shifted by itself."""
    assert x.format is not None
    assert x.scales is not None
    made = cuda.align(Quantized(x.codes, x.scales, None), x.format, x.columns, turned=turned)
    return made.codes, made.scales

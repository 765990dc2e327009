"""Products of `grouped_linear` for all groups at once, by the CUDA library on Hopper; group ends stay on the device.

    rows       y [tokens, n]             each group's rows times its weight         forward, dgrad
    columns    weight [groups, n, k]     contraction over each group's rows         wgrad

FP8 per tensor and in blocks is multiplied as codes, and so is aligned MX. Other formats are dequantized to bfloat16, all groups
in one launch, and multiplied by the same kernel; scales of whole groups multiply the fp32 sums. Other devices use the spans of
`grouped_spans`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition import alignment
from blockfp.definition.groups import ordered
from blockfp.definition.numerics import Quantized
from blockfp.definition.recipe import Exact
from blockfp.formats import Format
from blockfp.kernels.routes import HOPPER, exact_in_bfloat16, group_mode, why_groups_apart
from blockfp.recipes import Recipe

from ..arrays.array import QuantizedArray
from ..implementations import choice, cuda, explicit, ops
from .grouped_codes import GroupCodes
from .grouped_spans import by_columns, by_rows
from .products import Matrix, capability
from .tiles import Tiles, gather_rows

_Pair = tuple[jax.Array, jax.Array]  # codes and scales, or values and group scales


def all_at_once(recipe: Recipe, dtype: np.dtype, weight_dtype: np.dtype) -> bool:
    """Returns whether the CUDA library can run all three products of a recipe for all groups at once.

    `dtype` is that of x and the gradient; `weight_dtype` applies if the weight's values are multiplied.
    """
    if not choice.has_gpu() or choice.would_be_partitioned() or choice.missing("ffi") is not None or capability() != HOPPER:
        return False
    casts = (recipe.input, recipe.input_columnwise, recipe.gradient, recipe.gradient_columnwise)
    x, x_columns, g, g_columns = formats = tuple(cast.format for cast in casts)
    weights = recipe.weight.format, recipe.weight_columnwise.format
    if any(format is not None and format.per_row for format in weights):
        return False
    if any(why_groups_apart(format, "row", kept=True) is not None for format in formats):
        return False
    w, w_dtype = recipe.weight.format, weight_dtype
    if w is not None and not w.square:
        # dgrad takes the values (`arguments.transposed_weight`).
        w_dtype = np.dtype("bfloat16" if exact_in_bfloat16(w) and not w.has_tensor_scale else "float32")
        w = None
    products = (
        (x, dtype, recipe.weight.format, weight_dtype),
        (g, dtype, weights[1] if w is None and recipe.weight.format is None else w, w_dtype),
        (g_columns, dtype, x_columns, dtype),
    )
    return all(
        group_mode(a, b, recipe.exact_products) is not None
        or all(exact_in_bfloat16(f) if f is not None else d.name == "bfloat16" for f, d in ((a, a_dtype), (b, b_dtype)))
        for a, a_dtype, b, b_dtype in products
    )


def multiply_rows(
    x: GroupCodes,
    weight: Matrix,
    tiles: Tiles,
    dtype,
    *,
    bias: jax.Array | None = None,
    fast: bool,
    exact: Exact,
    turned: bool = False,
) -> jax.Array:
    """Multiplies rows with their group's weight and adds its bias; zeros for rows beyond all groups.

    Args:
        x: [tokens, k].
        weight: [groups, n, k]; with `turned`, stored as [groups, k, n] in square blocks.
        tiles: positions of the groups.
        dtype: dtype of the product [tokens, n].
        bias: [groups, n], or None.
        fast, exact: as for `products.product`.
        turned: see `weight`.
    """
    mode = group_mode(x.format, weight.format if isinstance(weight, QuantizedArray) else None, "exact" in exact)

    def kernel(x, weight, bias, tiles):
        weight = weight.mT if turned and mode != "aligned" else weight
        ends, options = jnp.cumsum(tiles.sizes), {"capability": capability(), "fast": fast and "order" not in exact}
        if mode is None:
            formats, left, right = None, _values(x), _values_of_weight(weight)
        elif mode == "aligned":
            formats = alignment.aligned_format(x.format), alignment.aligned_format(weight.format)
            left, right = _aligned(x), _aligned(weight, turned=turned)
            options |= {"ordered": True, "bands": weight.format.square}
        else:
            formats, left = (x.format, weight.format), (x.codes, x.scales)
            right = weight.codes, weight.scales.reshape(-1) if weight.format.per_tensor else weight.scales
        y = cuda.multiply_groups(left, right, formats, ends, dtype, bias=bias, **options)
        return jnp.where((jnp.arange(y.shape[0]) < ends[-1])[:, None], y, jnp.zeros((), y.dtype))

    def definition(x, weight, bias, tiles):
        weight = weight.mT if turned else weight
        y = by_rows(x.tiles(tiles), weight, tiles, dtype, bias=bias, fast=fast, exact=_elsewhere(exact))
        return gather_rows(y, tiles.target)

    return explicit.on_device(kernel, definition, x, weight, bias, tiles)


def multiply_columns(a: GroupCodes, b: GroupCodes, tiles: Tiles, dtype, *, fast: bool, exact: Exact) -> jax.Array:
    """Returns [groups, m, n]: products of each group's columns of a [m, columns] and of b [n, columns], transposed."""
    mode = group_mode(a.format, b.format, "exact" in exact)

    def kernel(a, b, tiles):
        if mode is None:
            operand, formats = _values, None
        elif mode == "aligned":
            operand, formats = _aligned, (alignment.aligned_format(a.format), alignment.aligned_format(b.format))
        else:
            operand, formats = _codes, (a.format, b.format)

        def of_filled(x: GroupCodes) -> _Pair:
            codes, scales = operand(x)
            # Scales of an empty group are undefined, and its sum of nothing is multiplied by them.
            return codes, jnp.where(tiles.sizes > 0, scales, 1) if scales.ndim == 1 else scales

        options = {"capability": capability(), "along_k": True, "fast": fast and "order" not in exact}
        return cuda.multiply_groups(of_filled(a), of_filled(b), formats, jnp.cumsum(tiles.sizes), dtype, **options)

    def definition(a, b, tiles):
        return by_columns(a.tiles(tiles), b.tiles(tiles), tiles, dtype, fast=fast, exact=_elsewhere(exact))

    return explicit.on_device(kernel, definition, a, b, tiles)


def _elsewhere(exact: Exact) -> Exact:
    """Returns the exactness of a product on other devices, which align operands for the sake of an order of sums alone."""
    return exact if "order" in exact else "exact"


def _codes(x: GroupCodes) -> _Pair:
    assert x.scales is not None
    return x.codes, x.scales


def _aligned(x: GroupCodes | QuantizedArray, *, turned: bool = False) -> _Pair:
    """Returns MX codes aligned to one scale per 128 elements. Blocks begin with a group, so rows are aligned separately."""
    assert x.format is not None
    assert x.scales is not None
    made = cuda.align(Quantized(x.codes, x.scales, None), x.format, x.columns, turned=turned)
    return made.codes, made.scales


def _values(x: GroupCodes) -> _Pair:
    """Returns values in bfloat16 and group scales, or 1."""
    if x.format is None:
        return x.codes.astype(jnp.bfloat16), jnp.ones(1, jnp.float32)
    assert x.scales is not None
    scales = x.scales[:, : x.codes.shape[0]].T if ordered(x.format) else x.scales
    return _dequantized(x.codes, scales, x.tensor_scale, x.format, x.columns)


def _values_of_weight(x: Matrix) -> _Pair:
    if not isinstance(x, QuantizedArray):
        return x.astype(jnp.bfloat16), jnp.ones(1, jnp.float32)
    return _dequantized(x.codes, x.scales, x.tensor_scale, x.format, x.columns)


def _dequantized(codes, scales, tensor_scale, format: Format, columns: int) -> _Pair:
    """Dequantizes without the scales of whole groups or tensors; returns these separately, float32 [groups] or [1]."""
    factors = jnp.ones(1, jnp.float32)
    if format.per_tensor:
        factors, scales = scales.reshape(-1), jnp.ones((1,) * codes.ndim, jnp.float32)
    elif tensor_scale is not None:
        factors, tensor_scale = tensor_scale.reshape(-1), jnp.ones((), jnp.float32)
    return ops.dequantize(codes, scales, tensor_scale, format=format, dtype="bfloat16", columns=columns), factors

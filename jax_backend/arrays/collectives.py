"""Collectives inside shard_map that send codes and scales.

all_gather       gathers a sharded weight, or quantizes values and gathers them; its gradient is a reduce-scatter
reduce_scatter   sends codes all-to-all, dequantizes them and sums in the order of ranks, in fp32
all_reduce       reduce_scatter, then all_gather of the quantized sums
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from blockfp.definition.rounding import Key, fold_in
from blockfp.formats import FP8_E4M3, Format, FormatName
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Sharding
from blockfp.sharding.reducing import check_reduce_format, rows_alone

from ..implementations import explicit, ops
from ..implementations.carriers import carrier_of
from ..implementations.derivatives import attach, linear_map
from ..implementations.explicit import axis_index, varying
from . import reducing, sharded
from .array import QuantizedArray
from .quantize import quantize
from .sharded import core_mesh, sharding_of


def all_gather(
    x: jax.Array | QuantizedArray,
    axes: str | Sequence[str],
    format: Format | FormatName | None = None,
    *,
    columnwise: bool = False,
    rotate: bool = False,
    key: Key | None = None,
    gradient_format: Format | FormatName | None = None,
    gradient_key: Key | None = None,
) -> QuantizedArray:
    """Gathers a sharded array as codes and scales; every rank gets the whole quantized array.

    The codes and scales of a quantized weight from `shard_params` are gathered unchanged. Values [rows, columns], with rows
    sharded over `axes`, are quantized before they travel if that gives the same bits. If a cut is inside a block or a rotated
    group, values travel unquantized.

    The gradient goes back as a reduce-scatter of the ranks' sum, in the array's dtype. With `gradient_format` it travels as
    codes and scales: each rank's gradient is rounded once, and they are summed in fp32 in the order of ranks. A layer that
    multiplies by the result must not list `axes` in its `data_axes`: with `check_vma=False` it would sum the gradient again.

    Args:
        x: this rank's part.
        axes: the mesh axes to gather over; for values, outermost cut first.
        format: the format of the result; only for values.
        columnwise: return the transposed array. For weights, exact for square blocks only.
        rotate: for values: first rotate along the last axis (after transposition).
        key: for values: key of stochastic rounding, equal on all ranks.
        gradient_format: format in which gradients travel: blocks of one row and one level of scales.
        gradient_key: key of the gradients' stochastic rounding, equal on all ranks and new in each step; ranks fold in their
            number.

    Raises:
        ValueError: an axis is unknown or doesn't cut the weight, values have no format, or the rows of `gradient_format` share
            scales or columns are gathered.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in axes:
        axis_index(name)
    if gradient_format is None and gradient_key is not None:
        raise ValueError("gradient_key: gradients are rounded only where a gradient_format is given")
    wanted = None if gradient_format is None else check_reduce_format(gradient_format, "gradient_format")
    back = _Back(wanted, ops.key_array(gradient_key))
    if isinstance(x, QuantizedArray):
        return _gather_weight(x, axes, format, columnwise, rotate or key is not None, back)
    if format is None:
        raise ValueError("format: values travel quantized, so say in which format")
    if x.ndim != 2:
        raise ValueError(f"x must be [rows, columns], got shape {x.shape}: reshape it first")
    mesh = _mesh_of(axes)
    sharding = _rows_over(x, mesh, axes)
    plan = plans.gather_activation(
        Format.parse(format), sharding, axes, columnwise=columnwise, rotate=rotate, stochastic=key is not None
    )
    words = None if key is None else jnp.asarray(ops.key_array(key))
    q = sharded.quantize(x, plan, sharded.Options(words, nominal=x.dtype.name))
    # The gradient's path only depends on rows, so any format gives the same plan.
    return _with_gradient(q, x, plans.gather_weight(FP8_E4M3, sharding, axes), columnwise, back)


class _Back(NamedTuple):
    """Format and key words of gradients."""

    format: Format | None
    key: Any


def _gather_weight(
    x: QuantizedArray, axes: tuple[str, ...], format, columnwise: bool, other: bool, back: _Back
) -> QuantizedArray:
    if x.sharding is None:
        raise ValueError("x is replicated on every rank (it has no sharding): use shard_params first")
    if other or (format is not None and Format.parse(format) is not x.format):
        raise ValueError(f"x is quantized already, in {x.format}: format, rotate and key are for values")
    plan = plans.gather_weight(x.format, x.sharding, axes)
    whole = plans.gather_weight(x.format, x.sharding, axes, columnwise=columnwise)
    local = sharded.run(whole, sharded.Local(None, x.codes, x.scales, x.tensor_scale))
    return _with_gradient(sharded.as_array(local, x.format, whole.target, x.dtype), x.carrier, plan, columnwise, back)


def _with_gradient(q: QuantizedArray, source: Any, plan: plans.Plan, columnwise: bool, back: _Back) -> QuantizedArray:
    """Routes the gradient of q to the gathered array: `source`, or the array that it carries."""
    if back.format is not None:
        reducing.check_gradient_plan(plan)
    if not isinstance(source, Tracer):
        return q
    whole = explicit.zeros_beside(q.codes, q.shape, q.dtype)
    whole = whole.mT if columnwise else whole
    like = [jax.typeof(whole)]

    kept = () if back.key is None else (jnp.asarray(back.key),)

    def rule(kept, carrier, tangent):
        return linear_map(forward, backward, kept, tangent, like)

    def backward(kept, _, cotangents):
        if back.format is None:
            return sharded.scatter_sum(cotangents[0], plan)
        return reducing.scatter_codes(cotangents[0], plan, back.format, kept[0] if kept else None)

    def forward(_, tangent):
        raise NotImplementedError(
            "a gathered weight only has gradients in reverse mode: take jvp, jacfwd or a second derivative of unsharded weights"
        )

    gathered = attach(carrier_of(whole), kept, carrier_of(source), rule)
    return q.replace(tangent=jnp.swapaxes(gathered, -1, -2) if columnwise else gathered)


def reduce_scatter(x: jax.Array, axis: str, format: Format | FormatName, *, key: Key | None = None) -> jax.Array:
    """Sums x over ranks, with each term rounded once to `format`; each rank gets its rows of the sum.

    Every rank sends each other rank its part of x as codes and scales. They are dequantized, summed in the order of ranks in
    fp32, and rounded once to x's dtype, so the bits don't depend on the interconnect. An Inf becomes NaN.

    If the format has blocks of one row, the whole x is quantized, as FSDP2's gradients are by
    `blockfp.experimental.torch.quantize_reduce_scatter`. If scales span rows, each part is quantized as its own array.

    Args:
        x: [rows, columns], this rank's term; rows must be a multiple of the ranks on the axis.
        axis: the mesh axis.
        format: the format in which terms travel.
        key: for stochastic rounding; may be equal on all ranks, which fold in their number.

    Returns:
        [rows / ranks, columns]. The gradient is an all-gather of the cotangent.

    Raises:
        ValueError: the ranks don't divide the rows, or an axis or format is unknown.
    """
    axis_index(axis)
    size = lax.axis_size(axis)
    if x.ndim != 2 or x.shape[0] % size:
        raise ValueError(f"x must be [rows, columns] with rows a multiple of the {size} ranks of {axis!r}, got {x.shape}")
    words = None if key is None else jnp.asarray(ops.key_array(key))
    return _reduce_scatter((axis, Format.parse(format)), x, words)


def all_reduce(x: jax.Array, axis: str, format: Format | FormatName, *, key: Key | None = None) -> jax.Array:
    """Sums x over ranks: a `reduce_scatter`, then an all-gather of the quantized sums. Every rank gets the same bits.

    Args:
        x: [rows, columns], any number of rows.
        axis, format, key: as for `reduce_scatter`.

    Returns:
        [rows, columns]. The gradient is the sum of the ranks' cotangents.
    """
    axis_index(axis)
    if x.ndim != 2:
        raise ValueError(f"x must be [rows, columns], got shape {x.shape}: reshape it first")
    words = None if key is None else jnp.asarray(ops.key_array(key))
    return _all_reduce((axis, Format.parse(format)), x, words)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_scatter(static: tuple[str, Format], x: jax.Array, key: jax.Array | None) -> jax.Array:
    axis, format = static
    if rows_alone(format):
        q = reducing.rounded(x, format, key, (axis,))
        size = lax.axis_size(axis)
        parts = jax.tree.map(lambda leaf: leaf.reshape(size, leaf.shape[0] // size, leaf.shape[1]), q)
    else:
        parts = reducing.parts_of(x, format, key, axis)
    return reducing.sum_in_order(parts, (axis,), x.dtype)


def _reduce_scatter_fwd(static, x, key):
    return _reduce_scatter(static, x, key), None


def _reduce_scatter_bwd(static, _, cotangent):
    return lax.all_gather(cotangent, static[0], axis=0, tiled=True), None


_reduce_scatter.defvjp(_reduce_scatter_fwd, _reduce_scatter_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_reduce(static: tuple[str, Format], x: jax.Array, key: jax.Array | None) -> jax.Array:
    axis, format = static
    rows, size = x.shape[0], lax.axis_size(axis)
    filled = jnp.pad(x, ((0, -rows % size), (0, 0)))
    part: Any = _reduce_scatter(static, filled, key)
    own = None if key is None else fold_in(fold_in(key, size), lax.axis_index(axis))
    q = jax.tree.map(lambda leaf: lax.all_gather(leaf, axis), quantize(reducing.without_inf(part), format, key=own))
    values = jax.vmap(lambda q: q.dequantize())(q)
    return values.reshape(-1, x.shape[1])[:rows]


def _all_reduce_fwd(static, x, key):
    return _all_reduce(static, x, key), None


def _all_reduce_bwd(static, _, cotangent):
    total = lax.psum(cotangent, static[0])
    if static[0] in varying(cotangent):
        total = lax.pcast(total, static[0], to="varying")
    return total, None


_all_reduce.defvjp(_all_reduce_fwd, _all_reduce_bwd)


def _mesh_of(axes: tuple[str, ...]) -> Mesh:
    mesh: Any = jax.sharding.get_abstract_mesh()
    return core_mesh(mesh) if set(axes) <= set(mesh.axis_names) else Mesh(tuple(map(lax.axis_size, axes)), axes)


def _rows_over(x: jax.Array, mesh: Mesh, axes: tuple[str, ...]) -> Sharding:
    """Returns the `Sharding` of an array with rows cut evenly over the axes, outermost cut first."""
    rows = x.shape[0] * int(np.prod([mesh.axis_size(name) for name in axes]))
    return sharding_of((rows, x.shape[1]), mesh, PartitionSpec(axes))

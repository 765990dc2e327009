"""Quantized collectives inside shard_map: what travels is codes and scales.

all_gather       of a sharded weight, or of values that are quantized before they travel; its gradient is a reduce-scatter
reduce_scatter   all-to-all of codes, dequantized and added in the order of the ranks, in fp32
all_reduce       both, one after the other
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
from blockfp.formats import FP8_E4M3, Format
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
    format: Format | str | None = None,
    *,
    columnwise: bool = False,
    rotate: bool = False,
    key: Key | None = None,
    gradient_format: Format | str | None = None,
    gradient_key: Key | None = None,
) -> QuantizedArray:
    """Gathers the quantization of the array whose parts the ranks hold; every rank gets all of it.

    A quantized weight of `shard_params` is gathered as it is, codes and scales. Values [rows, columns], whose rows are cut over
    `axes`, are quantized before they travel where that gives the same bits; where a cut falls inside a block (or a group
    that is rotated) they travel as they are.

    The gradient of the result goes back as a reduce-scatter of its sum, in the dtype of the array. With `gradient_format` it
    travels as codes and scales, each rank's rounded once, and is added in fp32 in the order of the ranks. So a layer that
    multiplies by the result takes none of `axes` among its `data_axes`: with `check_vma=False` it would sum the gradient too.

    Args:
        x: this rank's part.
        axes: the mesh axes to gather over; of values, the outermost cut first.
        format: what to quantize values into.
        columnwise: the result is the transposed array. Of a weight: exact for square blocks only.
        rotate: of values: rotate along the last axis (after transposition) first.
        key: of values: for stochastic rounding, equal on all ranks.
        gradient_format: in which the ranks' gradients travel; in blocks of one row, with one level of scales.
        gradient_key: for their stochastic rounding, equal on all ranks, whose numbers are folded in; another one each step.

    Raises:
        ValueError: an unknown axis, one that doesn't cut the weight, values without a format, or a `gradient_format` whose
            rows share scales or where columns are gathered.
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
    # The way back is the same for every format: it looks at rows.
    return _with_gradient(q, x, plans.gather_weight(FP8_E4M3, sharding, axes), columnwise, back)


class _Back(NamedTuple):
    """The way of gradients: in which format, and the words of their key."""

    format: Format | None
    key: Any


def _gather_weight(
    x: QuantizedArray, axes: tuple[str, ...], format, columnwise: bool, other: bool, back: _Back
) -> QuantizedArray:
    if x.sharding is None:
        raise ValueError("x is whole on every rank (it has no sharding): shard_params cuts it")
    if other or (format is not None and Format.parse(format) is not x.format):
        raise ValueError(f"x is quantized already, in {x.format}: format, rotate and key are for values")
    plan = plans.gather_weight(x.format, x.sharding, axes)
    whole = plans.gather_weight(x.format, x.sharding, axes, columnwise=columnwise)
    local = sharded.run(whole, sharded.Local(None, x.codes, x.scales, x.tensor_scale))
    return _with_gradient(sharded.as_array(local, x.format, whole.target, x.dtype), x.carrier, plan, columnwise, back)


def _with_gradient(q: QuantizedArray, source: Any, plan: plans.Plan, columnwise: bool, back: _Back) -> QuantizedArray:
    """Sends the gradient of q to what was gathered: `source`, or what that is the carrier of."""
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
            "a gathered weight has gradients in reverse mode alone: take jvp, jacfwd or a second derivative of unsharded "
            "weights"
        )

    gathered = attach(carrier_of(whole), kept, carrier_of(source), rule)
    return q.replace(tangent=jnp.swapaxes(gathered, -1, -2) if columnwise else gathered)


def reduce_scatter(x: jax.Array, axis: str, format: Format | str, *, key: Key | None = None) -> jax.Array:
    """Sums all ranks' x, each term rounded once to `format`; each rank gets its rows.

    Every rank sends each other one its part of x as codes and scales. They are dequantized and added in the order of the ranks
    in fp32, and rounded once to x's dtype: the same bits whatever the interconnect does. An Inf becomes NaN.

    In formats in blocks of one row, x is quantized as the whole that it is, as FSDP2's gradients are by
    `blockfp.torch.quantize_reduce_scatter`. In others, whose scales go beyond a row, each part is an array of its own.

    Args:
        x: [rows, columns], rows a multiple of the ranks on the axis; a term of the sum.
        axis: the mesh axis.
        format: what travels.
        key: for stochastic rounding; ranks may have the same: their places are folded in.

    Returns:
        [rows / ranks, columns]. The gradient is an all-gather of the cotangent.

    Raises:
        ValueError: rows that the ranks don't divide, or an unknown axis or format.
    """
    axis_index(axis)
    size = lax.axis_size(axis)
    if x.ndim != 2 or x.shape[0] % size:
        raise ValueError(f"x must be [rows, columns] with rows a multiple of the {size} ranks of {axis!r}, got {x.shape}")
    words = None if key is None else jnp.asarray(ops.key_array(key))
    return _reduce_scatter((axis, Format.parse(format)), x, words)


def all_reduce(x: jax.Array, axis: str, format: Format | str, *, key: Key | None = None) -> jax.Array:
    """Sums all ranks' x: `reduce_scatter`, then the sums travel quantized too. Every rank gets the same bits.

    Args:
        x: [rows, columns]; any number of rows.
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
    """The `Sharding` of an array with rows cut evenly over the axes, the outermost cut first."""
    rows = x.shape[0] * int(np.prod([mesh.axis_size(name) for name in axes]))
    return sharding_of((rows, x.shape[1]), mesh, PartitionSpec(axes))

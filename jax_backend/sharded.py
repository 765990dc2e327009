"""What a rank holds of a sharded quantized array inside shard_map, and the core's plans carried out there.

One program runs on all ranks, so what differs between them is data: where a shard begins, how much of it there is, which rows
a gather joins. It is looked up by rank in tables made from the `Sharding`, whose shape is that of the last two axes.

A rank stores as many rows (and columns) as the largest shard has, filled up with zero codes, and as many scales as that can
touch blocks. Where some shard begins inside a block, values are moved into a buffer of whole blocks, at their place in the
first one, and worked on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp import layout, numerics
from blockfp.formats import Format
from blockfp.layout import swap_matrix
from blockfp.numerics import Amax
from blockfp.placement import Mesh, Sharding
from blockfp.rotation import rotate
from blockfp.steps import Dequantize, Gather, Plan, Quantize, Rotate, Straddle, Transpose, block_length, grid_span

from . import implementations, ops
from .array import QuantizedArray
from .settling import settle


class Local(NamedTuple):
    """What a rank holds: values, or codes and scales."""

    values: jax.Array | None = None
    codes: jax.Array | None = None
    scales: jax.Array | None = None
    tensor_scale: jax.Array | None = None


class Options(NamedTuple):
    """How `Quantize` quantizes: see `numerics.quantize`. A multiplier stands instead of the tensor's amax."""

    key: jax.Array | None = None
    eps: float = 0.0
    nominal: str | None = None
    multiplier: jax.Array | None = None


# -- where things lie ----------------------------------------------------------------------------------------------------


def axis_index(name: str) -> jax.Array:
    """`lax.axis_index`; raises ValueError where the axis isn't one of the shard_map around."""
    try:
        return lax.axis_index(name)
    except NameError as error:
        manual = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "none"
        raise ValueError(
            f"mesh axis {name!r} is unknown here: call this inside jax.shard_map over a mesh that has it (axes here: {manual})"
        ) from error


def _of_rank(mesh: Mesh, table: Sequence) -> int | np.ndarray | jax.Array:
    """This rank's entry of a table by rank; not traced where all ranks have the same."""
    entries = np.asarray(table, np.int32)
    entries = entries.reshape(*mesh.shape, *entries.shape[1:])
    place = []
    for axis, name in enumerate(mesh.names):
        first = np.take(entries, [0], axis=axis)
        # What doesn't depend on an axis must not seem to: shard_map keeps account of the axes that values vary over.
        place.append(0 if (entries == first).all() else axis_index(name))
        if isinstance(place[-1], int):
            entries = first
    if any(isinstance(index, jax.Array) for index in place):
        return jnp.asarray(entries)[tuple(place)]
    whole = entries[tuple(place)]
    return whole if whole.ndim else int(whole)


def _spans(sharding: Sharding, dim: int) -> list[tuple[int, int]]:
    return [sharding.span(dim, rank) for rank in range(sharding.mesh.size)]


def length(sharding: Sharding, dim: int) -> int:
    """Elements along an axis of the matrix that a rank stores: as many as the largest shard has."""
    return max(size for _, size in _spans(sharding, dim))


def entries(format: Format, sharding: Sharding, dim: int) -> int:
    """Scales along an axis of the matrix that a rank stores."""
    if format.block is None:
        return 1
    block = block_length(format, sharding, dim)
    return -(-length(sharding, dim) // block) + (not sharding.aligned(dim, block))


def is_aligned(format: Format, sharding: Sharding) -> bool:
    """Whether every shard begins with a whole block."""
    return all(sharding.aligned(dim, block_length(format, sharding, dim)) for dim in (0, 1))


def aligned(q: QuantizedArray) -> bool:
    """Whether q's first row and column begin a block, on every rank."""
    return q.sharding is None or is_aligned(q.format, q.sharding)


def _phase(format: Format, sharding: Sharding, dim: int):
    """Where in its first block this rank's shard begins."""
    block = block_length(format, sharding, dim)
    return _of_rank(sharding.mesh, [start % block if size else 0 for start, size in _spans(sharding, dim)])


def _into_blocks(x: jax.Array, format: Format, sharding: Sharding) -> jax.Array:
    """Stored values or codes (one a byte) in a buffer of whole blocks; themselves where shards begin with whole blocks."""
    for dim in (0, 1):
        block = block_length(format, sharding, dim)
        if not sharding.aligned(dim, block):
            axis = dim - 2
            shape = list(x.shape)
            shape[axis] = entries(format, sharding, dim) * block
            starts: list = [0] * x.ndim
            starts[axis] = _phase(format, sharding, dim)
            x = lax.dynamic_update_slice(_zeros_like_shape(x, shape), x, starts)
    return x


def _out_of_blocks(x: jax.Array, format: Format, sharding: Sharding) -> jax.Array:
    for dim in (0, 1):
        if not sharding.aligned(dim, block_length(format, sharding, dim)):
            x = lax.dynamic_slice_in_dim(x, _phase(format, sharding, dim), length(sharding, dim), axis=dim - 2)
    return x


def _zeros_like_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    # Like x also in the mesh axes that its values vary over, which shard_map keeps account of.
    return jnp.zeros_like(x, shape=tuple(shape))


def take(x: jax.Array, places: np.ndarray | jax.Array, axis: int, otherwise: jax.Array | int = 0) -> jax.Array:
    """The entries of an axis by index; for -1 those of `otherwise`."""
    static = isinstance(places, np.ndarray)
    if static and np.array_equal(places, np.arange(x.shape[axis])):
        return x
    picked = jnp.take(x, jnp.maximum(places, 0), axis=axis)
    if static and (places >= 0).all():
        return picked
    shape = [1] * x.ndim
    shape[axis] = -1
    return jnp.where((jnp.asarray(places) >= 0).reshape(shape), picked, otherwise)


def only_own(x: jax.Array, sharding: Sharding) -> jax.Array:
    """x with zeros beyond this rank's own rows and columns."""
    for dim in (0, 1):
        sizes = [size for _, size in _spans(sharding, dim)]
        if min(sizes) < max(sizes):
            place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + dim - 2)
            x = jnp.where(place < _of_rank(sharding.mesh, sizes), x, jnp.zeros_like(x))
    return x


def check_stored(x: jax.Array, sharding: Sharding) -> None:
    """Raises ValueError where values inside shard_map don't have the shape that ranks store."""
    stored = (length(sharding, 0), length(sharding, 1))
    if x.shape[-2:] != stored:
        raise ValueError(f"a rank's part of an array that lies {sharding} has shape {stored}, got {x.shape[-2:]}")


# -- quantized arrays ----------------------------------------------------------------------------------------------------


def quantize(x: jax.Array, plan: Plan, options: Options) -> QuantizedArray:
    """What a plan of `quantize_shards` or `gather_activation` makes of this rank's values: a QuantizedArray that lies so."""
    local = run(plan, Local(values=lax.stop_gradient(x)), options)
    format = next(step.format for step in reversed(plan.steps) if isinstance(step, Quantize))
    return as_array(local, format, plan.target, x.dtype)


def as_array(local: Local, format: Format, sharding: Sharding, dtype) -> QuantizedArray:
    """The QuantizedArray of a rank's codes and scales."""
    assert local.codes is not None
    assert local.scales is not None
    columns = length(sharding, 1)
    return QuantizedArray(local.codes, local.scales, local.tensor_scale, format, columns, np.dtype(dtype), sharding=sharding)


def dequantize(q: QuantizedArray, dtype: str, implementation: str | None) -> jax.Array:
    """A rank's values."""
    assert q.sharding is not None
    options = {"format": q.format, "dtype": dtype, "origin": (0, 0)}
    options["choice"] = implementations.choose(implementation, "dequantize", q.format)
    if aligned(q):
        return ops.dequantize(q.codes, q.scales, q.tensor_scale, columns=q.columns, **options)
    bits = q.format.element.bits
    codes = _into_blocks(layout.unpack(q.codes, bits, q.columns), q.format, q.sharding)
    columns = codes.shape[-1]
    values = ops.dequantize(layout.pack(codes, bits), q.scales, q.tensor_scale, columns=columns, **options)
    return _out_of_blocks(values, q.format, q.sharding)


# -- plans ---------------------------------------------------------------------------------------------------------------


def run(plan: Plan, local: Local, options: Options = Options()) -> Local:  # noqa: B008
    """What this rank holds after a plan. All ranks of its mesh must call it, inside shard_map."""
    for step in plan.steps:
        match step:
            case Transpose():
                local = _transpose(step, local)
            case Rotate():
                local = Local(rotate(local.values))
            case Quantize():
                local = _quantize(step, local, options)
            case Dequantize():
                q = as_array(local, step.format, step.sharding, options.nominal)
                local = Local(dequantize(q, step.dtype or options.nominal or "float32", None))
            case Gather():
                local = _gather(step, local)
            case _:
                raise TypeError(f"a program inside shard_map has no way to {step}")
    return local


def _transpose(step: Transpose, local: Local) -> Local:
    if step.format is None:
        return Local(swap_matrix(local.values))
    columns = length(step.sharding, 1)
    codes, scales = ops.transpose(local.codes, local.scales, format=step.format, columns=columns)
    return Local(None, codes, scales, local.tensor_scale)


def _quantize(step: Quantize, local: Local, options: Options) -> Local:
    format, sharding = step.format, step.sharding
    assert local.values is not None
    check_stored(local.values, sharding)
    x = only_own(local.values, sharding)
    whole = options.multiplier
    if is_aligned(format, sharding) and options.key is None:
        if step.amax_axes and whole is None:
            amax = ops.amax(x, format=format)
            whole = max_over(amax.tensor if format.scale.two_level else amax.blocks, step.amax_axes)
        choice = implementations.choose(None, "quantize", format, eps=options.eps)
        q = ops.quantize(x, None, whole, format=format, choice=choice, eps=options.eps, nominal=options.nominal)
        return Local(None, *q)
    buffer = _into_blocks(x, format, sharding)
    amax = numerics.amax(buffer, format) if whole is None else None
    for straddle in step.straddles:
        assert amax is not None
        amax = _reduce_straddling(step, straddle, amax)
    if step.amax_axes and amax is not None:
        field = "tensor" if format.scale.two_level else "blocks"
        amax = amax._replace(**{field: max_over(getattr(amax, field), step.amax_axes)})
    q = numerics.quantize(
        buffer,
        format,
        key=options.key,
        eps=options.eps,
        nominal=options.nominal,
        origin=_corner(format, sharding),
        shape=(sharding.shape[0], sharding.shape[1]),
        amax=amax,
        multiplier=whole,
        settle=settle,
    )
    bits = format.element.bits
    codes = layout.pack(_out_of_blocks(layout.unpack(q.codes, bits, buffer.shape[-1]), format, sharding), bits)
    return Local(None, codes, q.scales, q.tensor_scale)


def _corner(format: Format, sharding: Sharding):
    """(row, column) in the unsharded matrix of the first element of this rank's buffer of whole blocks."""
    corner = []
    for dim in (0, 1):
        block = block_length(format, sharding, dim)
        moved = not sharding.aligned(dim, block)
        corner.append(
            _of_rank(sharding.mesh, [start - start % block * moved if size else 0 for start, size in _spans(sharding, dim)])
        )
    return tuple(corner)


def max_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Largest integer over mesh axes."""
    return lax.pmax(x, tuple(axes))


def _reduce_straddling(step: Quantize, straddle: Straddle, amax: Amax) -> Amax:
    """Amaxes (and NaN flags) whose straddling entries along one axis are those of the whole block."""
    regions = step.sharding.regions
    axis = straddle.dim - 2
    spans = [grid_span(step.format, region, straddle.dim) for region in regions]
    stored = amax.blocks.shape[axis]
    # By rank: where in its own grid each straddling block is, and which straddling block each of its own entries is.
    own = [[b - first if first <= b < first + count else -1 for b in straddle.blocks] for first, count in spans]
    index = {block: i for i, block in enumerate(straddle.blocks)}
    back = [[index.get(first + i, -1) if i < count else -1 for i in range(stored)] for first, count in spans]
    own, back = (_of_rank(step.sharding.mesh, table) for table in (own, back))

    def reduced(part: jax.Array) -> jax.Array:
        return take(max_over(take(part, own, axis), straddle.axes), back, axis, otherwise=part)

    return amax._replace(blocks=reduced(amax.blocks), nan=None if amax.nan is None else reduced(amax.nan))


def _gather(step: Gather, local: Local) -> Local:
    sharding, format, dim = step.sharding, step.format, step.dim
    after, mesh = sharding.gathered(step.axes), sharding.mesh
    ranks = range(mesh.size)
    elements = [step.elements(rank).runs for rank in ranks]
    size = length(sharding, dim)
    if step.payload == "values" or format is None:
        assert local.values is not None
        return Local(_joined(local.values, step, size, elements))
    assert local.codes is not None
    assert local.scales is not None
    bits, columns = format.element.bits, length(sharding, 1)
    if dim == 1 and format.element.packed:
        codes = layout.unpack(local.codes, bits, columns)
        codes = layout.pack(_joined(codes, step, size, elements), bits)
    else:
        codes = _joined(local.codes, step, size, elements)
    scale_runs = [step.scales(rank).runs for rank in ranks]
    stored = entries(format, sharding, dim)
    scales = _joined(local.scales, step, stored, scale_runs, entries(format, after, dim))
    tensor_scale = local.tensor_scale
    if tensor_scale is not None:
        first = _of_rank(mesh, [step.first(rank) for rank in ranks])
        tensor_scale = lax.all_gather(tensor_scale, step.axes)[first]
    return Local(None, codes, scales, tensor_scale)


def _joined(x: jax.Array, step: Gather, stored: int, runs: list, size: int | None = None) -> jax.Array:
    """The runs (source, start, stop) by rank of what all ranks sent, each `stored` entries; filled up with zeros to `size`."""
    axis = step.dim - 2
    together = lax.all_gather(x, step.axes, axis=x.ndim + axis, tiled=True)
    tables = [join_index(r, stored) for r in runs]
    size = max(map(len, tables)) if size is None else size
    tables = [np.concatenate([t, np.full(size - len(t), -1, np.int32)]) for t in tables]
    index = _of_rank(step.sharding.mesh, tables)
    if isinstance(index, np.ndarray) and np.array_equal(index, np.arange(size)):
        return lax.slice_in_dim(together, 0, size, axis=axis)
    return take(together, index, axis)


def join_index(runs, stored: int) -> np.ndarray:
    """int32: which entries of parts of `stored` entries each, laid one after another, the runs take."""
    parts = [np.arange(source * stored + start, source * stored + stop) for source, start, stop in runs]
    return np.concatenate([np.zeros(0), *parts]).astype(np.int32)


def scatter_sum(gradient: jax.Array, plan: Plan) -> jax.Array:
    """The sum over ranks of a gathered array's cotangents, each rank keeping its own part: a gather's transpose.

    Args:
        gradient: the cotangent of what `plan`, a plan of `gather_weight`, makes.
        plan: the plan of the gather.
    """
    for step in reversed(plan.steps):
        assert isinstance(step, Gather)
        axis, stored = step.dim - 2, length(step.sharding, step.dim)
        ranks = range(step.sharding.mesh.size)
        places = []
        for rank in ranks:
            runs = step.elements(rank).runs
            index = join_index(runs, stored)
            inverse = np.full(stored * len(step.group(rank)), -1, np.int32)
            inverse[index] = np.arange(len(index))
            places.append(inverse)
        gradient = take(gradient, _of_rank(step.sharding.mesh, places), axis)
        gradient = lax.psum_scatter(gradient, step.axes, scatter_dimension=gradient.ndim + axis, tiled=True)
    return gradient

"""Runs the core's plans inside shard_map, on a rank's part of a sharded quantized array (`storage`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from blockfp.definition import four_over_six, layout, numerics
from blockfp.definition.layout import swap_matrix
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rotation import rotate
from blockfp.formats import Format
from blockfp.sharding.placement import Mesh, Replicate, Sharding, from_partition_spec
from blockfp.sharding.steps import Dequantize, Gather, Plan, Quantize, Rotate, Straddle, Transpose

from ..implementations import explicit, ops
from ..implementations.xla import materialize
from . import storage
from .array import QuantizedArray


class Local(NamedTuple):
    """A rank's part of an array: values, or codes and scales."""

    values: jax.Array | None = None
    codes: jax.Array | None = None
    scales: jax.Array | None = None
    tensor_scale: jax.Array | None = None


class Options(NamedTuple):
    """Options of `Quantize` steps (see `numerics.quantize`). A multiplier replaces the tensor's amax."""

    key: jax.Array | None = None
    eps: float = 0.0
    nominal: str | None = None
    multiplier: jax.Array | None = None


def quantize(x: jax.Array, plan: Plan, options: Options) -> QuantizedArray:
    """Quantizes this rank's values by a plan of `quantize_shards` or `gather_activation`."""
    local = run(plan, Local(values=lax.stop_gradient(x)), options)
    format = next(step.format for step in reversed(plan.steps) if isinstance(step, Quantize))
    return as_array(local, format, plan.target, x.dtype)


def as_array(local: Local, format: Format, sharding: Sharding, dtype) -> QuantizedArray:
    """Makes the QuantizedArray of a rank's codes and scales."""
    assert local.codes is not None
    assert local.scales is not None
    columns = storage.length(sharding, 1)
    return QuantizedArray(local.codes, local.scales, local.tensor_scale, format, columns, np.dtype(dtype), sharding=sharding)


def aligned(q: QuantizedArray) -> bool:
    """Returns whether q's first row and column begin a block on every rank."""
    return q.sharding is None or storage.is_aligned(q.format, q.sharding)


def run(plan: Plan, local: Local, options: Options = Options()) -> Local:  # noqa: B008
    """Runs a plan on this rank's part, inside shard_map; all ranks of the mesh must call it."""
    for step in plan.steps:
        match step:
            case Transpose():
                local = _transpose(step, local)
            case Rotate():
                local = Local(rotate(local.values))
            case Quantize():
                local = _quantize(step, local, options)
            case Dequantize():
                q, dtype = as_array(local, step.format, step.sharding, options.nominal), step.dtype or options.nominal
                local = Local(q.dequantize(dtype or "float32"))
            case Gather():
                local = _gather(step, local)
    return local


def _transpose(step: Transpose, local: Local) -> Local:
    if step.format is None:
        return Local(swap_matrix(local.values))
    columns = storage.length(step.sharding, 1)
    codes, scales = ops.transpose(local.codes, local.scales, format=step.format, columns=columns)
    return Local(None, codes, scales, local.tensor_scale)


def _quantize(step: Quantize, local: Local, options: Options) -> Local:
    format, sharding = step.format, step.sharding
    assert local.values is not None
    storage.check_stored(local.values, sharding)
    x = storage.only_own(local.values, sharding)
    whole, field = options.multiplier, "tensor" if format.scale.two_level else "blocks"
    if storage.is_aligned(format, sharding) and not step.straddles and options.key is None:
        if step.amax_axes and whole is None:
            whole = explicit.max_over(getattr(ops.amax(x, format=format), field), step.amax_axes)
        q = ops.quantize(x, None, whole, format=format, eps=options.eps, nominal=options.nominal)
        return Local(None, *_known_alike(step, q))
    buffer = storage.into_blocks(x, format, sharding)
    amax = numerics.amax(buffer, format) if whole is None else None
    if step.straddles and format.scale.four_over_six:
        assert amax is not None
        amax = amax._replace(members=four_over_six.members(buffer, format))
    for straddle in step.straddles:
        assert amax is not None
        amax = _reduce_straddling(step, straddle, amax)
    if step.amax_axes and amax is not None:
        amax = amax._replace(**{field: explicit.max_over(getattr(amax, field), step.amax_axes)})
    q = numerics.quantize(
        buffer,
        format,
        key=options.key,
        eps=options.eps,
        nominal=options.nominal,
        origin=storage.corner(format, sharding),
        shape=(sharding.shape[0], sharding.shape[1]),
        amax=amax,
        multiplier=whole,
        materialize=materialize,
    )
    bits = format.element.bits
    codes = layout.pack(storage.out_of_blocks(layout.unpack(q.codes, bits, buffer.shape[-1]), format, sharding), bits)
    return Local(None, *_known_alike(step, q._replace(codes=codes)))


def _known_alike(step: Quantize, q: Quantized) -> Quantized:
    """Marks the tensor scale as equal on all ranks, which JAX otherwise can't infer for axes with one rank."""
    mesh = step.sharding.mesh
    cut = [name for name, how in zip(mesh.names, step.sharding.placements, strict=True) if not isinstance(how, Replicate)]
    lone = [name for name in cut if mesh.axis_size(name) == 1]
    if not lone or not step.format.has_tensor_scale:
        return q
    field = "tensor_scale" if step.format.scale.two_level else "scales"
    scale = getattr(q, field)
    return q._replace(**{field: explicit.max_over(scale.view(jnp.int32), lone).view(scale.dtype)})


def _reduce_straddling(step: Quantize, straddle: Straddle, amax: Amax) -> Amax:
    """Reduces amaxes, NaN flags and members of blocks that span ranks along one axis."""
    axis = straddle.dim - 2
    stored = amax.blocks.shape[axis]
    # By rank: the position of each straddling block in the rank's grid, and the straddling block of each of its entries.
    own, back = [], []
    for region in step.sharding.regions:
        held = straddle.held(step.format, region)
        entries, indices = dict(held), {index: entry for entry, index in held}
        own.append([entries.get(entry, -1) for entry in range(len(straddle.blocks))])
        back.append([indices.get(index, -1) for index in range(stored)])
    own, back = (storage.of_rank(step.sharding.mesh, table) for table in (own, back))

    def reduced(part: jax.Array | None, axis: int) -> jax.Array | None:
        if part is None:
            return None
        return storage.take(explicit.max_over(storage.take(part, own, axis), straddle.axes), back, axis, otherwise=part)

    of_blocks = {"blocks": reduced(amax.blocks, axis), "nan": reduced(amax.nan, axis)}
    return amax._replace(**of_blocks, members=reduced(amax.members, axis - 1))


def _gather(step: Gather, local: Local) -> Local:
    sharding, format, dim = step.sharding, step.format, step.dim
    after, mesh = sharding.gathered(step.axes), sharding.mesh
    ranks = range(mesh.size)
    elements = [step.elements(rank).runs for rank in ranks]
    size = storage.length(sharding, dim)
    if step.payload == "values" or format is None:
        assert local.values is not None
        return Local(_joined(local.values, step, size, elements))
    assert local.codes is not None
    assert local.scales is not None
    bits, columns = format.element.bits, storage.length(sharding, 1)
    if dim == 1 and format.element.packed:
        codes = layout.unpack(local.codes, bits, columns)
        codes = layout.pack(_joined(codes, step, size, elements), bits)
    else:
        codes = _joined(local.codes, step, size, elements)
    scale_runs = [step.scales(rank).runs for rank in ranks]
    stored = storage.scale_length(format, sharding, dim)
    scales = _joined(local.scales, step, stored, scale_runs, storage.scale_length(format, after, dim))
    tensor_scale = local.tensor_scale
    if tensor_scale is not None:
        first = storage.of_rank(mesh, [step.first(rank) for rank in ranks])
        tensor_scale = lax.all_gather(tensor_scale, step.axes)[first]
    return Local(None, codes, scales, tensor_scale)


def _joined(x: jax.Array, step: Gather, stored: int, runs: list, size: int | None = None) -> jax.Array:
    """Gathers parts of `stored` entries and joins runs (source, start, stop) by rank, padded with zeros to `size`."""
    axis = step.dim - 2
    together = lax.all_gather(x, step.axes, axis=x.ndim + axis, tiled=True)
    tables = [_join_index(r, stored) for r in runs]
    size = max(map(len, tables)) if size is None else size
    tables = [np.concatenate([t, np.full(size - len(t), -1, np.int32)]) for t in tables]
    index = storage.of_rank(step.sharding.mesh, tables)
    if isinstance(index, np.ndarray) and np.array_equal(index, np.arange(size)):
        return lax.slice_in_dim(together, 0, size, axis=axis)
    return storage.take(together, index, axis)


def _join_index(runs, stored: int) -> np.ndarray:
    """Returns the indices (int32) of runs in concatenated parts of `stored` entries each."""
    parts = [np.arange(source * stored + start, source * stored + stop) for source, start, stop in runs]
    return np.concatenate([np.zeros(0), *parts]).astype(np.int32)


def scatter_sum(gradient: jax.Array, plan: Plan) -> jax.Array:
    """Sums a gathered array's cotangents over ranks; each rank keeps its own part. Transpose of `plan`'s gather."""
    for step in reversed(plan.steps):
        assert isinstance(step, Gather)
        axis = step.dim - 2
        gradient = storage.take(gradient, storage.of_rank(step.sharding.mesh, sent_from(step)), axis)
        gradient = lax.psum_scatter(gradient, step.axes, scatter_dimension=gradient.ndim + axis, tiled=True)
    return gradient


def sent_from(step: Gather) -> list[np.ndarray]:
    """Returns by rank the index in the gathered array of each entry that it sends back, rank after rank; -1 for padding."""
    stored, tables = storage.length(step.sharding, step.dim), []
    for rank in range(step.sharding.mesh.size):
        index = _join_index(step.elements(rank).runs, stored)
        inverse = np.full(stored * len(step.group(rank)), -1, np.int32)
        inverse[index] = np.arange(len(index))
        tables.append(inverse)
    return tables


# ---- meshes


def core_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Mesh:
    """Converts a JAX mesh to the core's `Mesh`."""
    return Mesh(tuple(mesh.shape[name] for name in mesh.axis_names), tuple(mesh.axis_names))


def sharding_of(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Sharding:
    """Returns the `Sharding` of an array's last two axes; raises ValueError if the spec doesn't fit."""
    entries = tuple(spec) + (None,) * (len(shape) - len(tuple(spec)))
    return Sharding(shape[-2:], mesh, from_partition_spec(entries[len(shape) - 2 :], mesh, 2))

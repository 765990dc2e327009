"""Storage of a sharded array on a rank, inside shard_map: sizes and offsets.

All ranks run one program, so differences between them are data: where a shard begins, its size, which rows a gather joins.
These are looked up by rank in tables made from the `Sharding` of the last two axes.

A rank stores as many rows and columns as the largest shard, padded with zeros, and as many scales as these can touch blocks. If
any shard begins inside a block, values are processed in a buffer of whole blocks, at their offset in the first block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition import layout
from blockfp.formats import Format
from blockfp.sharding.placement import Mesh, Sharding
from blockfp.sharding.steps import block_length

from ..implementations import ops
from ..implementations.explicit import axis_index
from . import identity


def of_rank(mesh: Mesh, table: Sequence) -> Any:
    """Returns this rank's entry of a table by rank: traced, or an int or NumPy array if all ranks have the same entry."""
    entries = np.asarray(table, np.int32)
    entries = entries.reshape(*mesh.shape, *entries.shape[1:])
    place = []
    for axis, name in enumerate(mesh.names):
        first = np.take(entries, [0], axis=axis)
        # Don't index by axes that make no difference: shard_map tracks the axes that values vary over.
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
    """Returns how many elements along a matrix axis a rank stores: as many as the largest shard has."""
    return max(size for _, size in _spans(sharding, dim))


def shape(sharding: Sharding) -> tuple[int, int]:
    """Returns the (rows, columns) that a rank stores."""
    return length(sharding, 0), length(sharding, 1)


def scale_length(format: Format, sharding: Sharding, dim: int) -> int:
    """Returns how many scales along a matrix axis a rank stores."""
    if format.block is None:
        return 1
    return -(-length(sharding, dim) // block_length(format, sharding, dim)) + (not _aligned(format, sharding, dim))


def _whole_block(format: Format, sharding: Sharding, dim: int) -> int:
    """Returns the alignment of buffers along a matrix axis; 1 for one scale per row, where any part of a row is one block."""
    return 1 if format.per_row else block_length(format, sharding, dim)


def _aligned(format: Format, sharding: Sharding, dim: int) -> bool:
    return sharding.aligned(dim, _whole_block(format, sharding, dim))


def is_aligned(format: Format, sharding: Sharding) -> bool:
    """Returns whether every shard begins with a whole block, or the format has one scale per row."""
    return all(_aligned(format, sharding, dim) for dim in (0, 1))


def _phase(format: Format, sharding: Sharding, dim: int):
    """Returns the index of this rank's first element in its first block."""
    block = block_length(format, sharding, dim)
    return of_rank(sharding.mesh, [start % block if size else 0 for start, size in _spans(sharding, dim)])


def into_blocks(x: jax.Array, format: Format, sharding: Sharding) -> jax.Array:
    """Moves stored values or codes (one per byte) to a buffer of whole blocks; no-op if shards begin with whole blocks."""
    for dim in (0, 1):
        if not _aligned(format, sharding, dim):
            axis, block = dim - 2, block_length(format, sharding, dim)
            whole = list(x.shape)
            whole[axis] = scale_length(format, sharding, dim) * block
            starts: list = [0] * x.ndim
            starts[axis] = _phase(format, sharding, dim)
            # zeros_like keeps the mesh axes that x varies over, which shard_map tracks.
            x = lax.dynamic_update_slice(jnp.zeros_like(x, shape=tuple(whole)), x, starts)
    return x


def out_of_blocks(x: jax.Array, format: Format, sharding: Sharding) -> jax.Array:
    """Inverts `into_blocks`."""
    for dim in (0, 1):
        if not _aligned(format, sharding, dim):
            x = lax.dynamic_slice_in_dim(x, _phase(format, sharding, dim), length(sharding, dim), axis=dim - 2)
    return x


def corner(format: Format, sharding: Sharding) -> tuple[Any, Any]:
    """Returns the (row, column) in the unsharded matrix of the first element of this rank's buffer."""
    first = []
    for dim in (0, 1):
        back = 1 if _aligned(format, sharding, dim) else block_length(format, sharding, dim)
        first.append(of_rank(sharding.mesh, [start - start % back if size else 0 for start, size in _spans(sharding, dim)]))
    return first[0], first[1]


def take(x: jax.Array, places: np.ndarray | jax.Array, axis: int, otherwise: jax.Array | int = 0) -> jax.Array:
    """Takes entries along an axis by index; index -1 takes `otherwise`."""
    static = isinstance(places, np.ndarray)
    if static and np.array_equal(places, np.arange(x.shape[axis])):
        return x
    picked = jnp.take(x, jnp.maximum(places, 0), axis=axis)
    if static and (places >= 0).all():
        return picked
    along = [1] * x.ndim
    along[axis] = -1
    return jnp.where((jnp.asarray(places) >= 0).reshape(along), picked, otherwise)


def only_own(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Zeroes x outside this rank's own rows and columns."""
    for dim in (0, 1):
        sizes = [size for _, size in _spans(sharding, dim)]
        if min(sizes) < max(sizes):
            place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + dim - 2)
            x = jnp.where(place < of_rank(sharding.mesh, sizes), x, jnp.zeros_like(x))
    return x


def check_stored(x: jax.Array, sharding: Sharding) -> None:
    """Raises ValueError unless values inside shard_map have the shape that ranks store."""
    if x.shape[-2:] != shape(sharding):
        raise ValueError(f"a rank's part of an array placed as {sharding} has shape {shape(sharding)}, got {x.shape[-2:]}")


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    tensor_scale: jax.Array | None,
    sharding: Sharding,
    *,
    format: Format,
    dtype: str,
    implementation: str | None = None,
) -> jax.Array:
    """Dequantizes the values that a rank stores."""
    run = partial(ops.dequantize, format=format, dtype=dtype, implementation=implementation)
    columns = length(sharding, 1)
    if is_aligned(format, sharding):
        return run(codes, scales, tensor_scale, columns=columns)
    bits = format.element.bits
    buffer = into_blocks(layout.unpack(codes, bits, columns), format, sharding)
    values = run(layout.pack(buffer, bits), scales, tensor_scale, columns=buffer.shape[-1])
    return out_of_blocks(values, format, sharding)


# ---- Flax


def register(kind: type) -> None:
    """Registers the class with Flax, so that its arrays enter and leave state dicts. Flax must be imported."""
    from flax import serialization

    # The function is missing while Flax itself is being imported.
    if hasattr(serialization, "register_serialization_state"):
        serialization.register_serialization_state(kind, to_parts, of_state_dict, override=True)
        registered.add(kind)


registered: set[type] = set()
"""Classes registered with Flax."""


def to_parts(q: Any) -> dict[str, Any]:
    """Returns the parts by name, as `rebuild_params` takes them."""
    parts = {identity.codes_name(identity.static_of(q)): q.codes, "scales": q.scales, "tensor_scale": q.tensor_scale}
    return {name: part for name, part in parts.items() if part is not None}


def of_state_dict(target: Any, state: Mapping[str, Any]) -> Any:
    """Restores a quantized array into a target's structure, for `flax.serialization.from_state_dict`."""
    from flax import serialization

    where = serialization.current_path()
    expected = to_parts(target)
    if not isinstance(state, Mapping) or set(state) != set(expected):
        got = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"{where}: the target has {', '.join(expected)}, but the restored state has {got}")
    for name, part in expected.items():
        if (state[name].shape, state[name].dtype) != (part.shape, part.dtype):
            raise ValueError(
                f"{where}: {name} is {part.dtype} {part.shape} in the target, but {state[name].dtype} "
                f"{state[name].shape} in the restored state"
            )
    codes, scales = (jnp.asarray(state[name]) for name in list(expected)[:2])
    tensor_scale = jnp.asarray(state["tensor_scale"]) if "tensor_scale" in state else None
    return target.replace(codes=codes, scales=scales, tensor_scale=tensor_scale, tangent=None)

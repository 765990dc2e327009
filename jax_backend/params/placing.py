"""Placement of whole parameter trees on a mesh: `shard_params`, PartitionSpecs for shard_map, `unshard_params`.

Plain arrays are sharded by JAX. For a quantized array, each rank stores what `storage` defines, and JAX sees all ranks' parts
concatenated, so uneven rows and blocks that span ranks are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from blockfp.definition import layout
from blockfp.formats import Format
from blockfp.sharding.placement import Sharding
from blockfp.sharding.steps import grid_span

from ..arrays import storage
from ..arrays.array import QuantizedArray, is_quantized
from ..arrays.sharded import core_mesh, sharding_of
from ..implementations import explicit
from ..implementations.explicit import axis_names
from .params import shares_scale
from .trees import check_alike, map_with_path


def shard_params(tree: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """Places parameters on a mesh, each leaf sharded by its PartitionSpec.

    Each rank gets the codes and scales of its part of a quantized leaf, wherever the cuts are: uneven rows are padded, and each
    rank that shares a block gets its scale. An axis before the last two of a stack can also be cut, evenly: experts of
    `grouped_linear` over its `expert_axis`.

    Args:
        tree: whole parameters.
        mesh: the devices.
        specs: a tree of PartitionSpecs, where one may cover a whole subtree. For [out, in] with tensor parallelism "tp" under
            FSDP "fsdp": P(("tp", "fsdp")) for a column-parallel layer, P("fsdp", "tp") for a row-parallel one.

    Raises:
        TypeError: `mesh` is not a mesh.
        ValueError: a spec doesn't fit its leaf or names an axis that the mesh lacks; the message names the leaf's path.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    plan = core_mesh(mesh)

    def check(path: str, leaf, spec) -> Sharding | None:
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"specs must hold PartitionSpecs, got {type(spec).__name__}")
        if not hasattr(leaf, "shape"):
            raise TypeError(f"parameters are arrays, got {type(leaf).__name__}")
        named = [name for entry in spec for name in axis_names(entry)]
        if len(set(named)) < len(named):
            raise ValueError(f"spec {spec} names mesh axis {max(named, key=named.count)!r} twice")
        if is_quantized(leaf):
            if leaf.sharding is not None:
                raise ValueError(f"is already sharded ({leaf.sharding}): use unshard_params first")
            check_even(leaf.shape[:-2], spec, "of a stack of quantized matrices")
            return sharding_of(leaf.shape, plan, spec)
        if len(spec) > leaf.ndim:
            raise ValueError(f"spec {spec} has {len(spec)} entries for an array of shape {leaf.shape}")
        check_even(leaf.shape, spec, "of a plain array")
        return None

    def check_even(shape, spec, what: str) -> None:
        for size, entry in zip(shape, spec, strict=False):
            ranks = math.prod(plan.axis_size(name) for name in axis_names(entry))
            if size % ranks:
                raise ValueError(f"an axis of {size} {what} can't be divided evenly over {entry!r} ({ranks} ranks)")

    specs = _broadcast(specs, tree)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantized)
    shardings = structure.flatten_up_to(map_with_path(check, tree, specs))

    @jax.jit
    def cut(whole):
        kept = [(q.without_carrier(), s) for q, s in zip(whole, shardings, strict=True) if s is not None]
        return [_lying_alike(partial(_stored, sharding=s), q) for q, s in kept]

    # None marks plain leaves; all others are cut in one program.
    stored = iter(cut([q if s is not None else None for q, s in zip(leaves, shardings, strict=True)]))
    placed = [
        _put(next(stored), mesh, spec) if s is not None else jax.device_put(leaf, NamedSharding(mesh, spec))
        for leaf, s, spec in zip(leaves, shardings, structure.flatten_up_to(specs), strict=True)
    ]
    return structure.unflatten(placed)


def named_shardings(tree: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """Returns the NamedShardings of a tree whose leaves are sharded by PartitionSpecs, for JAX's own functions.

    `jax.device_put(q, NamedSharding(mesh, spec))` applies one sharding to codes, scales and tensor scale, which only works if
    all of them have these axes and divide evenly. This tree has a sharding per part, for `jax.device_put`, `jit(in_shardings=,
    out_shardings=)` and, part by part, `jax.make_array_from_callback`. The program sees whole arrays, and XLA partitions its
    operations; for `jax.shard_map` and uneven cuts use `shard_params`.

    Args:
        tree: whole parameters, or their shapes.
        mesh: the devices.
        specs: a tree of PartitionSpecs, where one may cover a whole subtree.

    Returns:
        The tree with a NamedSharding for each array. Parts stay whole along axes that the mesh doesn't divide evenly.

    Raises:
        ValueError: a spec doesn't fit its leaf or names an axis that the mesh lacks, or a leaf comes from `shard_params`.

    Example:
        >>> params = jax.device_put(params, bfp.named_shardings(params, mesh, P("data")))
    """

    def lie(path: str, leaf, spec):
        def part(x) -> NamedSharding:
            entries = (*spec, *(None,) * (x.ndim - len(spec)))[: x.ndim]
            return NamedSharding(mesh, explicit.even(entries, x.shape, mesh))

        if not is_quantized(leaf):
            return NamedSharding(mesh, spec)
        if leaf.sharding is not None:
            raise ValueError(f"is already sharded ({leaf.sharding}): use unshard_params first")
        if len(spec) > leaf.ndim:
            raise ValueError(f"spec {spec} has {len(spec)} entries for an array of shape {leaf.shape}")
        unknown = [name for entry in spec for name in axis_names(entry) if name not in mesh.shape]
        if unknown:
            raise ValueError(f"spec {spec} names {unknown[0]!r}, and the mesh has {', '.join(map(repr, mesh.axis_names))}")
        return jax.tree.map(part, leaf)

    return map_with_path(lie, tree, _broadcast(specs, tree))


def _put(stored: QuantizedArray, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> QuantizedArray:
    specs = _specs_of(stored, spec)
    return jax.tree.map(lambda part, spec: jax.device_put(part, NamedSharding(mesh, spec)), stored, specs)


def _mesh_of(placed: Any) -> jax.sharding.Mesh:
    sharding = (placed.codes if is_quantized(placed) else placed).sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
        raise ValueError(f"params must be on a mesh, as returned by shard_params, got arrays with {sharding}")
    return sharding.mesh


def shard_state(state: Any, params: Any) -> Any:
    """Places an optimizer's state on the mesh of its parameters: masters and moments are sharded like `params`.

    Args:
        state: from an optimizer's `init` on the whole parameters.
        params: the parameters from `shard_params`. Subtrees of the state with their structure are sharded like them, everything
            else is replicated.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_leaf)
    if not leaves:
        return state
    mesh = _mesh_of(leaves[0])
    shapes = [_whole_shape(leaf) for leaf in leaves]

    def like_params(tree) -> bool:
        found, its_structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
        if its_structure != structure:
            return False
        return all(x is None or jnp.shape(x) == shape for x, shape in zip(found, shapes, strict=True))

    def place(tree):
        if not like_params(tree):
            return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
        return jax.tree.map(_like, tree, params, is_leaf=_is_leaf)

    return jax.tree.map(place, state, is_leaf=like_params)


def _is_leaf(leaf: Any) -> bool:
    return leaf is None or is_quantized(leaf)


def _whole_shape(param: Any) -> tuple[int, ...]:
    if not is_quantized(param) or param.sharding is None:
        return param.shape
    return (*param.codes.shape[:-2], *param.sharding.shape)


def _like(x: jax.Array | None, param) -> jax.Array | None:
    """Places an array of a parameter's whole shape like the parameter."""
    if x is None:
        return None
    if not is_quantized(param):
        return jax.device_put(x, param.sharding)
    sharding = param.sharding
    for dim in (0, 1):
        x = _take(x, _element_places(sharding, dim), dim - 2)
    return jax.device_put(x, NamedSharding(_mesh_of(param), _specs_of(param).codes))


def partition_specs(tree: Any, specs: Any = PartitionSpec()) -> Any:  # noqa: B008
    """Returns the tree's PartitionSpecs, leaf by leaf, for `in_specs` and `out_specs` of shard_map.

    Args:
        tree: parameters from `shard_params`, as arrays or shapes.
        specs: specs for arrays without a sharding of their own (inside jit), as a tree or one for all: for plain leaves, and
            for the leading axes of quantized ones.
    """

    def spec(path: str, leaf, given):
        if is_quantized(leaf):
            return _specs_of(leaf, given) if leaf.sharding is not None else jax.tree.map(lambda _: PartitionSpec(), leaf)
        own = getattr(leaf, "sharding", None)
        return own.spec if isinstance(own, NamedSharding) and given == PartitionSpec() else given

    return map_with_path(spec, tree, _broadcast(specs, tree))


def unshard_params(tree: Any) -> Any:
    """Joins sharded quantized leaves to whole arrays, for checkpoints and other meshes; inverts `shard_params`.

    Their codes and scales become JAX arrays of the whole shape, still sharded over the devices if that is even.
    """

    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantized)
    cut = [leaf for leaf in leaves if is_quantized(leaf) and leaf.sharding is not None]
    join = jax.jit(lambda cut: [_lying_alike(_whole, q) for q in cut], out_shardings=[_even(q) for q in cut])
    whole = iter(join(cut) if cut else [])
    return structure.unflatten([next(whole) if is_quantized(q) and q.sharding is not None else q for q in leaves])


def _even(q: QuantizedArray) -> QuantizedArray:
    """Returns NamedShardings for the parts of the whole of `q`: sharded like `q` if that is even."""
    shapes, mesh = _shapes(_whole, q), _mesh_of(q)

    def even(part, spec):
        entries = (*spec, *(None,) * (part.ndim - len(spec)))
        return NamedSharding(mesh, explicit.even(entries, part.shape, mesh))

    specs = _specs_of(q).replace(sharding=None, columns=shapes.columns, tangent=None)
    return jax.tree.map(even, shapes, specs)


def unshard_state(state: Any, params: Any) -> Any:
    """Joins an optimizer's state to whole masters and moments; inverts `shard_state`.

    Args:
        state: a state sharded like `params`.
        params: the sharded parameters.
    """
    structure = jax.tree.structure(params, is_leaf=_is_leaf)

    def like_params(tree) -> bool:
        return jax.tree.structure(tree, is_leaf=_is_leaf) == structure

    def whole(x, param):
        if x is None or not is_quantized(param) or param.sharding is None:
            return x
        for dim in (0, 1):
            x = _take(x, _first_of_each(_element_places(param.sharding, dim)), dim - 2)
        return x

    def gather(tree):
        return jax.tree.map(whole, tree, params, is_leaf=_is_leaf) if like_params(tree) else tree

    return jax.tree.map(gather, state, is_leaf=like_params)


def _broadcast(specs: Any, tree: Any) -> Any:
    """Broadcasts a tree of specs, where one may cover a subtree, to the leaves of `tree`."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    check_alike(specs, tree, is_spec)
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda _: spec, subtree, is_leaf=is_quantized), specs, tree, is_leaf=is_spec
    )


def _specs_of(q: QuantizedArray, given: PartitionSpec = PartitionSpec()) -> Any:  # noqa: B008
    """Returns the PartitionSpecs of `q`'s stored parts as a QuantizedArray; leading axes use `q`'s own spec, or `given`."""
    sharding, stacked = q.sharding, q.codes.ndim - 2
    assert sharding is not None
    own = getattr(q.codes, "sharding", None)
    spec = own.spec if given == PartitionSpec() and isinstance(own, NamedSharding) else given
    leading = (*spec, *(None,) * stacked)[:stacked]
    cut = PartitionSpec(*leading, *(sharding.order(dim) or None for dim in (0, 1)))
    # One scale per matrix of a stack, or one for all.
    of_tensor = PartitionSpec() if shares_scale(q) else PartitionSpec(*leading)
    tensor_scale = None if q.tensor_scale is None else of_tensor
    tangent = None if q.tangent is None else cut
    scales = of_tensor if q.format.per_tensor else cut
    return q.replace(codes=cut, scales=scales, tensor_scale=tensor_scale, tangent=tangent)


def _shapes(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the shapes of function(tree), independent of its arrays' placement."""
    return jax.eval_shape(function, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree))


def _lying_alike(function: Callable[[Any], Any], tree: Any) -> Any:
    """Runs function(tree), which maps each array to one; with Explicit axes, results keep the arrays' sharding if it is
    even."""
    mesh = explicit.mesh_of(tree)
    if mesh is None:
        return function(tree)
    shapes, structure = jax.tree.flatten(_shapes(function, tree))
    lie = [explicit.even(explicit.spec_of(x), s.shape, mesh) for x, s in zip(jax.tree.leaves(tree), shapes, strict=True)]
    return explicit.left_to_xla(function, mesh, structure.unflatten(lie), tree)


def _take(x: jax.Array, places: np.ndarray, axis: int) -> jax.Array:
    return _lying_alike(lambda x: storage.take(x, places, axis), x)


def _stored(q: QuantizedArray, sharding: Sharding) -> QuantizedArray:
    """Cuts a whole array into all ranks' stored parts, concatenated along the cut axes."""
    format, bits = q.format, q.format.element.bits
    columns = storage.length(sharding, 1)

    codes, scales = layout.unpack(q.codes, bits, q.columns), q.scales
    for dim in (0, 1):
        codes = storage.take(codes, _element_places(sharding, dim), dim - 2)
        if not format.per_tensor:
            scales = storage.take(scales, _scale_places(format, sharding, dim), dim - 2)
    if columns:
        # Each rank's columns are packed separately.
        codes = layout.pack(codes.reshape(*codes.shape[:-1], -1, columns), bits)
        codes = codes.reshape(*codes.shape[:-2], -1)
    return QuantizedArray(codes, scales, q.tensor_scale, format, columns, q.dtype, sharding=sharding)


def _element_places(sharding: Sharding, dim: int) -> np.ndarray:
    """Returns the index in the whole of each stored row (or column), -1 for padding."""
    size = storage.length(sharding, dim)
    return _places(sharding, dim, size, lambda rank: sharding.span(dim, rank))


def _scale_places(format: Format, sharding: Sharding, dim: int) -> np.ndarray:
    size = storage.scale_length(format, sharding, dim)
    return _places(sharding, dim, size, lambda rank: grid_span(format, sharding.region(rank), dim))


def _places(sharding: Sharding, dim: int, size: int, span: Callable[[int], tuple[int, int]]) -> np.ndarray:
    ranks = sharding.mesh.group(0, sharding.order(dim))
    places = np.full((len(ranks), size), -1, np.int32)
    for row, rank in zip(places, ranks, strict=True):
        start, count = span(rank)
        row[:count] = np.arange(start, start + count)
    return places.reshape(-1)


def _first_of_each(places: np.ndarray) -> np.ndarray:
    """Returns the first storage index of each entry of the whole; several ranks may store a block's scale."""
    entries, first = np.unique(places, return_index=True)
    return first[entries >= 0]


def _whole(q: QuantizedArray) -> QuantizedArray:
    """Joins all ranks' stored parts to the whole array."""
    sharding, format, bits = q.sharding, q.format, q.format.element.bits
    assert sharding is not None
    columns = q.columns
    codes = q.codes
    if columns:
        codes = codes.reshape(*codes.shape[:-1], -1, layout.packed_columns(columns, bits))
        codes = layout.unpack(codes, bits, columns)
        codes = codes.reshape(*codes.shape[:-2], -1)
    scales = q.scales
    for dim in (0, 1):
        codes = storage.take(codes, _first_of_each(_element_places(sharding, dim)), dim - 2)
        if not format.per_tensor:
            scales = storage.take(scales, _first_of_each(_scale_places(format, sharding, dim)), dim - 2)
    codes = layout.pack(codes, bits)
    return QuantizedArray(codes, scales, q.tensor_scale, format, sharding.shape[1], q.dtype)

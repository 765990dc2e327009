"""Meshes with Explicit axes, as `jax.make_mesh` makes them: there every array's sharding is in its type.

JAX refuses to reshape an axis that is cut, which blocks and packed codes are made by, unless it is told where the result
lies. That is known here: codes, scales and values lie as what they are made of, along every axis that their sizes let the mesh
divide evenly. So an operation runs with these axes left to XLA (`jax.sharding.auto_axes`), and its results' types say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from blockfp.definition import layout
from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format

from .choice import Choice


def mesh_of(*arrays: Any) -> AbstractMesh | None:
    """The mesh of the first array that lies on one with Explicit axes, or None."""
    for array in jax.tree.leaves(arrays):
        mesh = jax.typeof(array).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def run(choice: Choice, function: Callable, specs: Callable[[], Any], *operands: Any) -> Any:
    """function(choice, *operands), its results lying as `specs()` says where operands lie on a mesh with Explicit axes."""
    mesh = mesh_of(*operands)
    if mesh is None:
        return function(choice, *operands)
    if not choice.asked and mesh.size > 1:
        choice = Choice("xla", False)
    return left_to_xla(partial(function, choice), mesh, specs(), *operands)


def left_to_xla(function: Callable, mesh: AbstractMesh, specs: Any, *operands: Any) -> Any:
    """function(*operands) with a mesh's Explicit axes left to XLA, its results lying as `specs` says."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    lie = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=lie)(*operands)


def lying_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """x, cut as an array of its shape is: packed codes can't be cut wherever their values can."""
    if mesh_of(other) is None or jax.typeof(x).sharding == jax.typeof(other).sharding:
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding)


def spec_of(x: jax.Array) -> tuple:
    """The mesh axes that each axis of x is cut over, as its type says."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def even(entries, shape, mesh: AbstractMesh | Mesh) -> PartitionSpec:
    """The entries, without those that don't divide their axis evenly."""
    sizes = (math.prod(mesh.shape[name] for name in names_of(entry)) for entry in entries)
    kept = (entry if n % size == 0 else None for entry, n, size in zip(entries, shape, sizes, strict=True))
    return PartitionSpec(*kept)


def without(entry: Any, names: set[str]) -> Any:
    """An entry of a PartitionSpec without some mesh axes."""
    kept = tuple(name for name in names_of(entry) if name not in names)
    return kept if len(kept) > 1 else kept[0] if kept else None


def of_quantized(x: jax.Array, format: Format, *, transposed: bool = False) -> Quantized:
    """Where codes and scales of x lie, or of x.mT."""
    mesh, entries, shape = jax.typeof(x).sharding.mesh, spec_of(x), x.shape
    if transposed:
        entries, shape = (*entries[:-2], entries[-1], entries[-2]), (*shape[:-2], shape[-1], shape[-2])
    codes = even(entries, layout.codes_shape(shape, format), mesh)
    tensor_scale = PartitionSpec() if format.scale.two_level else None
    return Quantized(codes, _of_scales(entries, shape, format, mesh), tensor_scale)


def of_amax(x: jax.Array, format: Format) -> Amax:
    """Where the amaxes of x lie."""
    blocks = _of_scales(spec_of(x), x.shape, format, jax.typeof(x).sharding.mesh)
    return Amax(blocks, None if format.element.has_nan else blocks, PartitionSpec() if format.scale.two_level else None)


def _of_scales(entries, shape, format: Format, mesh: AbstractMesh) -> PartitionSpec:
    scales = layout.scales_shape(shape, format)
    return PartitionSpec(*(None,) * len(scales)) if format.per_tensor else even(entries, scales, mesh)


def of_values(codes: jax.Array, columns: int) -> PartitionSpec:
    """Where the values of codes lie."""
    return even(spec_of(codes), (*codes.shape[:-1], columns), jax.typeof(codes).sharding.mesh)


def of_transposed(codes: jax.Array, scales: jax.Array, format: Format, columns: int) -> tuple[PartitionSpec, PartitionSpec]:
    """Where the codes and scales of a transposed array lie."""
    mesh, entries, lies = jax.typeof(codes).sharding.mesh, spec_of(codes), spec_of(scales)
    shape = layout.codes_shape((*codes.shape[:-2], columns, codes.shape[-2]), format)
    return even((*entries[:-2], entries[-1], entries[-2]), shape, mesh), PartitionSpec(*lies[:-2], lies[-1], lies[-2])

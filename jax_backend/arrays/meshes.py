"""The core's values of JAX's meshes and PartitionSpecs."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from blockfp.sharding.placement import Mesh, Sharding, from_partition_spec


def core_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Mesh:
    """The core's value of a JAX mesh."""
    return Mesh(tuple(mesh.shape[name] for name in mesh.axis_names), tuple(mesh.axis_names))


def sharding_of(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> Sharding:
    """The `Sharding` of the matrices of an array of `shape`, its last two axes.

    Raises:
        ValueError: the spec doesn't fit.
    """
    entries = tuple(spec) + (None,) * (len(shape) - len(tuple(spec)))
    return Sharding(shape[-2:], mesh, from_partition_spec(entries[len(shape) - 2 :], mesh, 2))

"""Meshes with Explicit axes, as from `jax.make_mesh`, where each array's type contains its sharding.

JAX refuses to reshape a sharded axis, as blocks and packing require, unless it is told the result's sharding. This module knows
it: codes, scales and values have the sharding of their source, along axes that the mesh divides evenly. So an operation runs
with these axes left to XLA (`jax.sharding.auto_axes`), with the shardings of its results given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from blockfp.definition import layout
from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format


def mesh_of(*arrays: Any) -> AbstractMesh | None:
    """Returns the mesh of the first array on a mesh with Explicit axes, or None."""
    for array in jax.tree.leaves(arrays):
        mesh = jax.typeof(array).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def left_to_xla(function: Callable, mesh: AbstractMesh, specs: Any, *operands: Any) -> Any:
    """Runs function(*operands) with the mesh's Explicit axes left to XLA; results are sharded as `specs`."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    lie = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=lie)(*operands)


def check_not_cut(function: str, **operands: Any) -> None:
    """Raises ValueError if an operand of a function without a sharding rule is cut over Explicit axes."""
    for name, array in operands.items():
        # Look only at the codes: taking the array apart would lose its carrier.
        array = getattr(array, "codes", array)
        if array is None:
            continue
        for axis in (axis for entry in spec_of(array) for axis in axis_names(entry)):
            if axis in jax.typeof(array).sharding.mesh.explicit_axes:
                raise ValueError(
                    f"{name} is cut over {axis!r}, a mesh axis of type Explicit, where {function} runs inside jax.shard_map "
                    "alone: call it there, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, ..)"
                )


def resharded_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Reshards x like another array of its shape, because packed codes can't be cut everywhere that values can."""
    if mesh_of(other) is None or jax.typeof(x).sharding == jax.typeof(other).sharding:
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding)


def zeros_beside(codes: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros of the shape of codes' values, sharded like the codes along axes that divide evenly.

    JAX's `zeros_like` with a shape replicates the result.
    """
    if not isinstance(codes, Tracer):
        lies = getattr(codes, "sharding", None)
        if isinstance(lies, NamedSharding):
            entries = (*lies.spec, *(None,) * (len(shape) - len(lies.spec)))
            lies = NamedSharding(lies.mesh, even(entries, shape, lies.mesh))
        return jnp.zeros(shape, dtype, device=lies if isinstance(lies, NamedSharding | SingleDeviceSharding) else None)
    # Derived from the codes, so that under shard_map they vary over the same axes.
    zeros, mesh = jnp.zeros_like(codes, dtype=dtype, shape=shape), mesh_of(codes)
    return zeros if mesh is None else jax.sharding.reshard(zeros, NamedSharding(mesh, even(spec_of(codes), shape, mesh)))


def spec_of(x: jax.Array) -> tuple:
    """Returns the mesh axes that cut each axis of x, by its type."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


def axis_names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def even(entries, shape, mesh: AbstractMesh | Mesh) -> PartitionSpec:
    """Drops entries that don't divide their axis evenly."""
    sizes = (math.prod(mesh.shape[name] for name in axis_names(entry)) for entry in entries)
    kept = (entry if n % size == 0 else None for entry, n, size in zip(entries, shape, sizes, strict=True))
    return PartitionSpec(*kept)


def without(entry: Any, names: set[str]) -> Any:
    """Drops some mesh axes from an entry of a PartitionSpec."""
    kept = tuple(name for name in axis_names(entry) if name not in names)
    return kept if len(kept) > 1 else kept[0] if kept else None


def specs_of_quantized(x: jax.Array, *_: Any, format: Format, **options: Any) -> Quantized:
    """Returns the specs of x's codes and scales."""
    return _of_quantized(spec_of(x), x.shape, format, jax.typeof(x).sharding.mesh)


def specs_of_columnwise(x: jax.Array, *_: Any, format: Format, **options: Any) -> Quantized:
    """Returns the specs of x.mT's codes and scales."""
    return _of_quantized(_swapped(spec_of(x)), _swapped(x.shape), format, jax.typeof(x).sharding.mesh)


def specs_of_both(x: jax.Array, *_: Any, format: Format, **options: Any) -> tuple[Quantized, Quantized]:
    """Returns the specs of the codes and scales of x and of x.mT."""
    return specs_of_quantized(x, format=format), specs_of_columnwise(x, format=format)


def specs_of_amax(x: jax.Array, *, format: Format) -> Amax:
    """Returns the specs of x's amaxes."""
    blocks = _of_scales(spec_of(x), x.shape, format, jax.typeof(x).sharding.mesh)
    return Amax(blocks, None if format.element.has_nan else blocks, PartitionSpec() if format.scale.two_level else None)


def specs_of_values(codes: jax.Array, *_: Any, columns: int, **options: Any) -> PartitionSpec:
    """Returns the spec of the codes' values."""
    return even(spec_of(codes), (*codes.shape[:-1], columns), jax.typeof(codes).sharding.mesh)


def specs_of_transposed(
    codes: jax.Array, scales: jax.Array, format: Format, columns: int
) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the specs of a transposed array's codes and scales."""
    mesh = jax.typeof(codes).sharding.mesh
    shape = layout.codes_shape((*codes.shape[:-2], columns, codes.shape[-2]), format)
    return even(_swapped(spec_of(codes)), shape, mesh), PartitionSpec(*_swapped(spec_of(scales)))


def _of_quantized(entries, shape, format: Format, mesh: AbstractMesh) -> Quantized:
    codes = even(entries, layout.codes_shape(shape, format), mesh)
    tensor_scale = PartitionSpec() if format.scale.two_level else None
    return Quantized(codes, _of_scales(entries, shape, format, mesh), tensor_scale)


def _of_scales(entries, shape, format: Format, mesh: AbstractMesh) -> PartitionSpec:
    scales = layout.scales_shape(shape, format)
    return PartitionSpec(*(None,) * len(scales)) if format.per_tensor else even(entries, scales, mesh)


def _swapped(axes: tuple) -> tuple:
    return (*axes[:-2], axes[-1], axes[-2])


# ---- axes inside shard_map


Axes = frozenset[str]


def axis_index(name: str) -> jax.Array:
    """Like `lax.axis_index`, but raises ValueError if the surrounding shard_map doesn't have the axis."""
    try:
        return lax.axis_index(name)
    except NameError as error:
        manual = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "none"
        raise ValueError(
            f"mesh axis {name!r} is unknown here: call this inside jax.shard_map over a mesh that has it (axes here: {manual})"
        ) from error


def max_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Returns the integer maximum over mesh axes."""
    return lax.pmax(x, tuple(axes))


def varying(x: Any) -> Axes:
    """Returns the mesh axes that a value varies over, as far as JAX tracks them."""
    return frozenset(jax.typeof(x).mat.varying)


def vary(x: jax.Array, over: Axes) -> jax.Array:
    """Marks x as varying over these mesh axes, which JAX can't infer for a kernel's results."""
    missing = tuple(sorted(over - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def sum_like(cotangent: jax.Array, primal: Axes | None, axes: Iterable[str]) -> jax.Array:
    """Sums cotangents over the mesh axes that a primal doesn't vary over, or over `axes` if JAX doesn't track them."""
    over = _excess(cotangent, primal, tuple(axes))
    return lax.psum(cotangent, over) if over else cotangent


def max_like(cotangent: jax.Array, primal: Axes | None) -> jax.Array:
    """Returns the maximum of non-negative cotangents over tracked mesh axes that the primal doesn't vary over."""
    over = _excess(cotangent, primal, ())
    return max_over(cotangent.view("int32"), over).view("float32") if over else cotangent


def _excess(cotangent: jax.Array, primal: Axes | None, axes: tuple[str, ...]) -> tuple[str, ...]:
    if axes and not varying(axis_index(axes[0])):
        return axes
    return tuple(sorted(varying(cotangent) - (primal or frozenset())))


@jax.tree_util.register_static
@dataclass(frozen=True)
class VaryingAxes:
    """The mesh axes that a linear layer's primals vary over; kept for its backward."""

    x: Axes | None
    carrier: Axes | None
    bias: Axes | None
    state: Axes | None

    @classmethod
    def of(cls, x, carrier, bias, state) -> VaryingAxes:
        """Collects the varying axes of a call's arguments; None stays None."""
        history = None if state is None else state.gradient_amax_history
        return cls(*(None if a is None else varying(a) for a in (x, carrier, bias, history)))


def on_device(kernel: Callable[..., Any], definition: Callable[..., Any], *operands: Any) -> Any:
    """Runs the kernel on CUDA devices and the definition elsewhere; results vary over the operands' mesh axes."""
    over = frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(operands)))

    def vary_all(run):
        return lambda *operands: jax.tree.map(lambda part: vary(part, over), run(*operands))

    return lax.platform_dependent(*operands, cuda=vary_all(kernel), default=vary_all(definition))

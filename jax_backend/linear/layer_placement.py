"""Placement of a linear layer inside shard_map, derived from its weight's placement and the data-parallel axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from blockfp.sharding import plans
from blockfp.sharding.pieces import check_splits
from blockfp.sharding.placement import Placement, Replicate, Shard, Sharding

from ..arrays import reducing, sharded, storage
from ..arrays.array import QuantizedArray
from ..implementations import explicit
from .products import Matrix


@dataclass(frozen=True)
class LayerPlacement:
    """The placement of a layer; a value.

    Attributes:
        weight: placement of the stored weight; None if every rank has all of it.
        data_axes: the mesh axes that divide the batch, in the mesh's order.
        sequence: whether tokens outside the layer are cut over the tensor-parallel axis.
        runs: number of consecutive sequences in the tokens, if tokens are cut; each sequence is cut in the same way.
        splits: number of pieces in which all ranks together contract the axis that tensor parallelism cuts; None for one
            per rank, whose sums have no order.
    """

    weight: Sharding | None
    data_axes: tuple[str, ...]
    sequence: bool
    runs: int = 1
    splits: int | None = None

    @classmethod
    def of(cls, weight, data_axes: Sequence[str], sequence: bool, splits: int | None = None) -> LayerPlacement:
        """Derives the placement of a call.

        Raises TypeError if data_axes is a string, and ValueError for an unknown axis, for several tensor-parallel axes, for
        sequence parallelism or splits without tensor parallelism, or for splits that don't fit.
        """
        if isinstance(data_axes, str):
            raise TypeError(f"data_axes must be a tuple of mesh axes, got {data_axes!r}: pass ({data_axes!r},)")
        data_axes, names = tuple(data_axes), jax.sharding.get_abstract_mesh().axis_names
        if set(data_axes) <= set(names):
            data_axes = tuple(name for name in names if name in data_axes)
        for name in data_axes:
            explicit.axis_index(name)
        placement = cls(weight.sharding if isinstance(weight, QuantizedArray) else None, data_axes, sequence, splits=splits)
        tensor = placement._tensor_axes
        if len(tensor) > 1:
            raise ValueError(
                f"the weight is placed as {placement.weight}: besides the data-parallel axes {data_axes}, only one axis "
                f"may shard it (tensor parallelism), got {', '.join(tensor)}; FSDP's axes belong in data_axes"
            )
        if sequence and not tensor:
            raise ValueError("sequence = True needs a weight that a tensor-parallel axis cuts (see shard_params)")
        if splits is not None and not tensor:
            raise ValueError(
                f"splits = {splits!r} needs a weight that a tensor-parallel axis cuts (see shard_params), if only over one rank"
            )
        if splits is not None and sequence:
            raise ValueError(
                f"splits = {splits!r} is not for sequence = True: gradients of norms would be sums over each rank's tokens"
            )
        check_splits(splits, placement._tensor_size(), f"{placement.tensor!r}")
        return placement

    @property
    def _cut(self) -> tuple[str, ...]:
        if self.weight is None:
            return ()
        pairs = zip(self.weight.mesh.names, self.weight.placements, strict=True)
        return tuple(name for name, placement in pairs if not isinstance(placement, Replicate))

    @cached_property
    def _tensor_axes(self) -> tuple[str, ...]:
        mesh = None if self.weight is None else self.weight.mesh
        # One rank has pieces, too.
        least = 1 if self.splits is None else 0
        return tuple(name for name in self._cut if name not in self.data_axes and mesh and mesh.axis_size(name) > least)

    @property
    def fsdp(self) -> tuple[str, ...]:
        """The axes that the weight is gathered over."""
        return tuple(name for name in self._cut if name in self.data_axes)

    @property
    def tensor(self) -> str | None:
        """The tensor-parallel axis, or None."""
        return self._tensor_axes[0] if self._tensor_axes else None

    @property
    def kind(self) -> Literal["column", "row"] | None:
        """ "column" if tensor parallelism cuts the weight's out axis, "row" if it cuts the in axis, else None."""
        if self.tensor is None or self.weight is None:
            return None
        return "column" if self.tensor in self.weight.order(0) else "row"

    @property
    def gathers_input(self) -> bool:
        """Whether x is gathered: column parallel with sequence parallelism."""
        return self.sequence and self.kind == "column"

    @property
    def gathers_gradient(self) -> bool:
        """Whether y's cotangent is gathered: row parallel with sequence parallelism."""
        return self.sequence and self.kind == "row"

    def piece_count(self, contracted: Literal["column", "row"]) -> int | None:
        """Returns the number of pieces on this rank of a product that contracts what this kind of tensor parallelism cuts; None
        for a whole product."""
        return None if self.splits is None or self.kind != contracted else self.splits // self._tensor_size()

    def _tensor_size(self) -> int:
        return self.weight.mesh.axis_size(self.tensor) if self.weight and self.tensor else 1

    def gathered_shape(self, weight) -> tuple[int, int]:
        """Returns (rows, columns) of the weight's matrices after the FSDP gather; raises ValueError unless it is a
        rank's part."""
        if self.weight is None:
            return tuple(weight.shape[-2:])
        stored = storage.shape(self.weight)
        if tuple(weight.shape[-2:]) != stored:
            raise ValueError(
                f"weight is placed as {self.weight}, so a rank holds {stored}, but it has shape {tuple(weight.shape)}: "
                "call this inside jax.shard_map over this mesh, with in_specs of partition_specs(params)"
            )
        return storage.shape(self.weight.gathered(self.fsdp) if self.fsdp else self.weight)

    def check(self, x: jax.Array, weight, bias) -> None:
        """Raises ValueError if the shapes on this rank don't match."""
        rows, columns = self.gathered_shape(weight)
        if x.shape[-1] != columns:
            raise ValueError(f"x must be [..., in] with in = {columns} as in the weight [{rows}, {columns}], got {x.shape}")
        if bias is not None and bias.shape != (rows,):
            raise ValueError(f"bias must have shape ({rows},) as the weight [{rows}, {columns}] wants, got {bias.shape}")
        if self.sequence and (x.ndim < 2 or (self.gathers_gradient and x.shape[-2] % self._tensor_size())):
            raise ValueError(
                f"sequence = True cuts tokens evenly over {self._tensor_size()} ranks of {self.tensor!r}, on axis -2 of x, "
                f"which has shape {x.shape}"
            )

    def of_sequences(self, leading: tuple[int, ...]) -> LayerPlacement:
        """Returns the placement for x with these leading axes, the last of which are a sequence's tokens."""
        if not self.sequence:
            return self
        # Without tokens nothing is cut, and XLA can't gather arrays without elements.
        return replace(self, runs=math.prod(leading[:-1])) if math.prod(leading) else replace(self, sequence=False)

    def leading_axes(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the leading axes of y; sequence parallelism changes the number of tokens."""
        if not self.sequence:
            return leading
        *sequences, tokens = leading
        size = self._tensor_size()
        return *sequences, tokens * size if self.gathers_input else tokens // size

    def coordinate(self) -> jax.Array | None:
        """Returns this rank's row-major position on the data-parallel axes, or None without such axes."""
        if not self.data_axes:
            return None
        place = jnp.int32(0)
        for name in self.data_axes:
            place = place * lax.axis_size(name) + explicit.axis_index(name)
        return place

    def operand(self, x: jax.Array, *, gradient: bool) -> Sharding | None:
        """Returns the `Sharding` of one data-parallel rank's input or gradient, or None if each rank has all of it.

        If tokens are cut, it describes a single sequence.
        """
        cut_tokens = self.gathers_gradient if gradient else self.gathers_input
        cut_features = self.kind == ("column" if gradient else "row")
        if self.weight is None or not (cut_tokens or cut_features):
            return None
        mesh = self.weight.mesh
        rows, columns = x.shape
        # Features are cut like the weight, possibly unevenly; tokens are cut within one sequence.
        whole = (rows // self.runs * self._tensor_size(), columns)
        shape = whole if cut_tokens else (rows, self.weight.shape[0 if gradient else 1])
        cut: Placement = Shard(0 if cut_tokens else 1)
        return Sharding(shape, mesh, tuple(cut if name == self.tensor else Replicate() for name in mesh.names))

    def own(self, x: jax.Array, *, gradient: bool) -> jax.Array:
        """Zeroes the padding of an input or gradient [tokens, features], which exists if ranks have unequal features."""
        sharding = self.operand(x, gradient=gradient)
        return x if sharding is None else storage.only_own(x, sharding)

    def gathered(self, weight):
        """Gathers the weight's FSDP shards."""
        if not self.fsdp:
            return weight
        plan = self._gather(weight.format)
        local = sharded.run(plan, sharded.Local(None, weight.codes, weight.scales, weight.tensor_scale))
        return sharded.as_array(local, weight.format, plan.target, weight.dtype)

    def _gather(self, format):
        assert self.weight is not None
        return plans.gather_weight(format, self.weight, self.fsdp)

    def scatter_weight(self, gradient: jax.Array, format) -> jax.Array:
        """Sums the weight's gradient over its FSDP axes; each rank keeps its part."""
        return sharded.scatter_sum(gradient, self._gather(format)) if self.fsdp else gradient

    def sum_output(self, y: jax.Array, bias: jax.Array | None, dtype: np.dtype) -> jax.Array:
        """Sums y of a row-parallel layer over ranks, and adds its bias [1 or tokens, out] once; the result is in `dtype`."""
        if self.kind != "row":
            return y
        if self.splits is not None and self.tensor is not None:
            return reducing.sum_over_ranks(y, self.tensor, bias, dtype)
        y = self._scatter_tokens(y) if self.sequence else lax.psum(y, self.tensor)
        return y if bias is None else (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)

    def sum_input(self, gradient: jax.Array, primal: explicit.Axes | None, dtype: np.dtype) -> jax.Array:
        """Sums the input's cotangent over ranks; the result is in `dtype`. `primal` are the axes that x varies over."""
        if self.piece_count("column") is not None and self.tensor is not None:
            return explicit.sum_like(reducing.sum_over_ranks(gradient, self.tensor, None, dtype), primal, ())
        gradient = self._scatter_tokens(gradient) if self.gathers_input else gradient
        summed = (self.tensor,) if self.kind == "column" and self.tensor and not self.sequence else ()
        return explicit.sum_like(gradient, primal, summed)

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        """Gathers each sequence's tokens [rows, features] over ranks."""
        rows, features = x.shape
        x = x.reshape(self.runs, rows // self.runs, features)
        return lax.all_gather(x, self.tensor, axis=1, tiled=True).reshape(rows * self._tensor_size(), features)

    def _scatter_tokens(self, x: jax.Array) -> jax.Array:
        rows, features = x.shape
        x = x.reshape(self.runs, rows // self.runs, features)
        x = lax.psum_scatter(x, self.tensor, scatter_dimension=1, tiled=True)
        return x.reshape(rows // self._tensor_size(), features)


# ---- Explicit meshes


@dataclass(frozen=True)
class ExplicitLayout:
    """Shardings for a product x [.., in] times w [out, in] on an Explicit mesh: of y, and of w as the product needs it.

    w is gathered over axes that cut tokens. An axis that cuts `in` of both stays, and y is summed over it.
    """

    mesh: AbstractMesh
    result: PartitionSpec
    weight: PartitionSpec

    @classmethod
    def of(cls, x: jax.Array, weight: Matrix) -> ExplicitLayout | None:
        """Derives the shardings from the operands' types; returns None without Explicit axes."""
        codes = weight.codes if isinstance(weight, QuantizedArray) else weight
        mesh = explicit.mesh_of(x, codes)
        if mesh is None:
            return None
        *tokens, x_in = explicit.spec_of(x)
        out, w_in = explicit.spec_of(codes)
        taken = {name for entry in tokens for name in explicit.axis_names(entry)}
        contracted = set(explicit.axis_names(x_in))
        out = explicit.without(out, taken | contracted)
        kept = w_in if w_in == x_in else None
        # Axes of a surrounding shard_map stay Manual.
        within = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        return cls(within, PartitionSpec(*tokens, out), PartitionSpec(out, kept))

    def constrained(self, weight: Matrix) -> Matrix:
        """Constrains the weight's codes and scales to the product's sharding."""
        if not isinstance(weight, QuantizedArray):
            return weight

        def constrain(part):
            if part is None or part.ndim != 2:
                return part
            lies = NamedSharding(self.mesh, explicit.even(self.weight, part.shape, self.mesh))
            return jax.lax.with_sharding_constraint(part, lies)

        return weight.replace(codes=constrain(weight.codes), scales=constrain(weight.scales))

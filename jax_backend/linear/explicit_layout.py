"""The layout of the operands and the result of `linear` on a mesh with Explicit axes, outside shard_map."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..arrays.array import QuantizedArray
from ..implementations import explicit
from .products import Matrix


@dataclass(frozen=True)
class ExplicitLayout:
    """The layout of a product x [.., in] times w [out, in]: of y, and of w as the product needs it.

    Axes that cut tokens don't cut w: it is gathered over them. One that cuts both along `in` stays, and sums y.
    """

    mesh: AbstractMesh
    result: PartitionSpec
    weight: PartitionSpec

    @classmethod
    def of(cls, x: jax.Array, weight: Matrix) -> ExplicitLayout | None:
        """Derives the layout from the operands' types; returns None where no axis is Explicit."""
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
        # Axes of a shard_map around stay Manual.
        within = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        return cls(within, PartitionSpec(*tokens, out), PartitionSpec(out, kept))

    def constrained(self, weight: Matrix) -> Matrix:
        """Brings the weight to where the product needs it: codes and scales, not their values."""
        if not isinstance(weight, QuantizedArray):
            return weight

        def constrain(part):
            if part is None or part.ndim != 2:
                return part
            lies = NamedSharding(self.mesh, explicit.even(self.weight, part.shape, self.mesh))
            return jax.lax.with_sharding_constraint(part, lies)

        return weight.replace(codes=constrain(weight.codes), scales=constrain(weight.scales))

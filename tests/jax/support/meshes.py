"""Meshes of the eight host devices, and how a weight [out, in] lies on each."""

import math
from typing import NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


class Case(NamedTuple):
    """A mesh, the spec of a weight, the data-parallel axes, and the specs of x, y, the bias and a gathered weight."""

    sizes: dict[str, int]
    weight: P
    data: tuple[str, ...]
    x: P
    y: P
    bias: P
    gathered: P

    @property
    def mesh(self):
        return jax.make_mesh(tuple(self.sizes.values()), tuple(self.sizes), axis_types=(AxisType.Auto,) * len(self.sizes))

    @property
    def data_ranks(self):
        return math.prod(self.sizes[name] for name in self.data)


FSDP_TP = {"fsdp": 4, "tp": 2}
CASES = {
    "FSDP 8": Case({"fsdp": 8}, P("fsdp"), ("fsdp",), P("fsdp"), P("fsdp"), P(), P()),
    "HSDP 2x4": Case(
        {"replicate": 2, "fsdp": 4},
        P("fsdp"),
        ("replicate", "fsdp"),
        P(("replicate", "fsdp")),
        P(("replicate", "fsdp")),
        P(),
        P(),
    ),
    "FSDP 4 x TP 2, column": Case(FSDP_TP, P(("tp", "fsdp")), ("fsdp",), P("fsdp"), P("fsdp", "tp"), P("tp"), P("tp")),
    "FSDP 4 x TP 2, row": Case(FSDP_TP, P("fsdp", "tp"), ("fsdp",), P("fsdp", "tp"), P("fsdp"), P(), P(None, "tp")),
}

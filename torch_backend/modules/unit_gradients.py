"""Adds the gradients of a batch's units in a fixed tree, in place of FSDP2's sums over ranks.

each unit        FSDP2's reduction adds unsharded gradients to this rank's subtree and sends nothing
  | after the last unit
  v
reduction        subtrees are split into the ranks' shards, exchanged, and added in rank order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..sharded.reduce_scatter import TreeSum, tree_sum

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass
class Progress:
    """The current unit of a run.

    Attributes:
        units: number of units over all ranks.
        own: number of this rank's units.
        unit: index of this rank's running unit, from 0; None outside of a run.
    """

    units: int
    own: int
    unit: int | None = None


class UnitReduction:
    """Replaces the reduce-scatter of one FSDP module (`FSDPModule.set_custom_reduce_scatter`)."""

    def __init__(self, path: str, progress: Progress, world: int):
        self.path, self.progress, self.world = path, progress, world
        self.begin()

    def begin(self) -> None:
        """Discards what an earlier run has left."""
        self.tree, self.count = TreeSum(), 0

    def attach(self, module: FSDPModule) -> None:
        """Routes a module's gradients here."""
        module.set_custom_reduce_scatter(self)  # pyright: ignore[reportArgumentType]
        if self.world == 1:
            # On one rank FSDP2 skips the reduce-scatter.
            module.set_all_reduce_hook(self._alone)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Adds this unit's gradients [ranks, shard]; after the last unit writes the mean over all units to [shard].

        Raises RuntimeError outside of a run or on a second call in a unit, and ValueError if FSDP2 scales gradients itself or
        the group isn't the run's mesh.
        """
        if op != dist.ReduceOp.AVG or group.size() != self.world:
            raise ValueError(
                f"{self.path}: Reproducible takes the mean over a mesh of {self.world} ranks itself, in float32, got {op} over "
                f"{group.size()}: leave out set_gradient_divide_factor and set_force_sum_reduction_for_comms, reduce in "
                "float32 or bfloat16 (MixedPrecisionPolicy), and give it the mesh that fully_shard got"
            )
        self._add(input_tensor)
        if self.count < self.progress.own:
            output_tensor.zero_()
            return
        own = self.tree.total()
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own, group=group)
        output_tensor.copy_(tree_sum(received.view(self.world, -1)).div_(self.progress.units))

    def _alone(self, gradients: Tensor) -> None:
        self._add(gradients)
        if self.count < self.progress.own:
            gradients.zero_()
        else:
            gradients.copy_(self.tree.total().div_(self.progress.units))

    def _add(self, gradients: Tensor) -> None:
        if self.progress.unit is None:
            raise RuntimeError(f"{self.path}: a model of Reproducible has its backward in Reproducible.backward, not by itself")
        if gradients.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{self.path}: gradients must be reduced in float32 or bfloat16, got {gradients.dtype}")
        if self.count != self.progress.unit:
            raise RuntimeError(
                f"{self.path} must take part once per unit, but this is its gradient number {self.count + 1} in unit "
                f"{self.progress.unit + 1} of this rank: apply fully_shard to modules that every unit calls exactly once"
            )
        self.tree.add(gradients)
        self.count += 1

    def finish(self, *, has_gradients: bool) -> None:
        """Raises RuntimeError unless every unit gave gradients, or none did and there are none."""
        if self.count != (self.progress.own if has_gradients else 0):
            raise RuntimeError(
                f"{self.path} took part in {self.count} of this rank's {self.progress.own} units, but must in each: "
                "call it in every unit, and leave set_custom_reduce_scatter and set_all_reduce_hook to Reproducible"
            )

"""Gradients of the units of a batch, added in a fixed tree: where FSDP2 would sum over ranks, and of plain parameters.

each unit        FSDP2 reduces its gradients: they join this rank's subtree, unsharded, and nothing is sent
the last unit    subtrees are cut into the ranks' shards, sent, and added in the order of the ranks
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
    """The unit that a run has come to.

    Attributes:
        units: of all ranks together.
        own: of this rank.
        unit: this rank's unit that runs, from 0; None outside of a run.
    """

    units: int
    own: int
    unit: int | None = None


class UnitReduction:
    """Stands in for the reduce-scatter of one FSDP module (`FSDPModule.set_custom_reduce_scatter`)."""

    def __init__(self, path: str, progress: Progress, world: int):
        self.path, self.progress, self.world = path, progress, world
        self.begin()

    def begin(self) -> None:
        """Forgets what a run has left."""
        self.tree, self.count = TreeSum(), 0

    def attach(self, module: FSDPModule) -> None:
        """Makes a module's gradients come here."""
        module.set_custom_reduce_scatter(self)  # pyright: ignore[reportArgumentType]
        if self.world == 1:
            # Of one rank FSDP2 scatters nothing.
            module.set_all_reduce_hook(self._alone)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Makes memory for what FSDP2 reduces."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Adds this unit's gradients [ranks, shard]; after the last unit writes the mean of all ranks' to [shard].

        Raises:
            RuntimeError: outside of a run, or the module has had its turn in this unit.
            ValueError: gradients that FSDP2 scales by itself, or a group that isn't the mesh of the run.
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
                f"{self.path} must take part once in each unit, and this is its gradient number {self.count + 1} in unit "
                f"{self.progress.unit + 1} of this rank's: fully_shard modules that every unit calls, and once"
            )
        self.tree.add(gradients)
        self.count += 1

    def finish(self, *, has_gradients: bool) -> None:
        """Raises RuntimeError where some units had no gradients, or they went elsewhere."""
        if self.count != (self.progress.own if has_gradients else 0):
            raise RuntimeError(
                f"{self.path} took part in {self.count} of this rank's {self.progress.own} units, and must in each: let every "
                "unit call it, and leave set_custom_reduce_scatter and set_all_reduce_hook to Reproducible"
            )

"""`OuterStep`: averages models that ranks train by themselves, with updates sent as codes and error feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.formats import Format
from blockfp.sharding.reducing import check_reduce_format, sent_layout

from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..sharded.all_reduce import Keys, sum_together
from ..weights.cast_weight import CastWeight


class OuterStep:
    """DiLoCo's outer optimizer (arXiv 2311.08105) over ranks that trained by themselves, with updates sent as codes.

    Each rank takes inner steps with its own optimizer. `step` sends how far the rank has come, in the format; what rounding
    loses is added the next time (error feedback), on the way to the sum and on the way back. The outer optimizer then moves the
    common weights against the mean, and all ranks go on from these: their bits are equal.

    Args:
        params: the model's parameters: plain tensors, DTensors that every rank shards alike, or weights with
            weights="high_precision".
        optimizer: makes the outer optimizer of the fp32 common weights, such as
            `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
        format: with blocks of one row and one level of scales; vectors are sent uncompressed.
        group: the ranks among which updates are averaged; all by default. With shards, the ranks that hold the same ones.

    Attributes:
        common: the fp32 common weights (this rank's shards), in the order of `params`.

    Raises:
        TypeError, ValueError: there are no parameters, or one is quantized; or rows of the format share scales.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        format: Format | str = "mxfp8_e4m3",
        *,
        group: dist.ProcessGroup | None = None,
    ):
        self.format, self._group = check_reduce_format(format, "format"), group
        self._params = [param for param in params if param.requires_grad]
        if not self._params:
            raise ValueError("params holds no parameter that requires a gradient")
        ranks = dist.get_world_size(group)
        with torch.no_grad():
            self.common = [self._local(param).to(torch.float32, copy=True) for param in self._params]
        self.optimizer = optimizer(self.common)
        self._errors: list[tuple[Tensor, Tensor]] = []
        shapes = tuple(tuple(one.shape) or (1,) for one in self.common)
        for one, part in zip(self.common, sent_layout(self.format, shapes, ranks, 4).parts, strict=True):
            size = part.rows * part.columns
            self._errors.append((one.new_zeros((ranks, size)), one.new_zeros((1, size))))

    @staticmethod
    def _local(param: Tensor) -> Tensor:
        local = sharding.local_of(param)
        local = local.values if isinstance(local, CastWeight) else local
        if isinstance(local, QuantizedTensor):
            raise TypeError(
                "params holds a quantized weight, whose codes have no mean: convert the model with weights='high_precision'"
            )
        return local.detach()

    @torch.no_grad()
    def step(self) -> None:
        """Averages the ranks' updates, steps the outer optimizer, and writes the common weights into the parameters."""
        locals = [self._local(param) for param in self._params]
        updates = [
            (common - local.float()).reshape(local.shape or (1,)) for common, local in zip(self.common, locals, strict=True)
        ]
        none: Keys = [None] * len(updates)
        ranks = dist.get_world_size(self._group)
        means = sum_together(updates, self.format, self._group, (none, none), factor=1 / ranks, errors=self._errors)
        for common, mean in zip(self.common, means, strict=True):
            common.grad = mean.view(common.shape)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param, common in zip(self._params, self.common, strict=True):
            # Through the parameter, so that a weight notes that it was written.
            sharding.local_of(param.detach()).copy_(common)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state: common weights, errors, and the outer optimizer's state dict."""
        errors = [list(pair) for pair in self._errors]
        return {"common": list(self.common), "errors": errors, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict` of the same rank."""
        for own, saved in zip(self.common, state["common"], strict=True):
            own.copy_(saved)
        for own, saved in zip(self._errors, state["errors"], strict=True):
            for mine, theirs in zip(own, saved, strict=True):
                mine.copy_(theirs)
        self.optimizer.load_state_dict(state["optimizer"])

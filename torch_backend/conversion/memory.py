"""The memory behind a model on this rank: each storage once, with what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..distributed_internals import reshard
from ..linear.scale_watch import RecipeLayer
from ..modules.model_names import state_of
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import FakeTensor


class MemoryRow(NamedTuple):
    """A row of `Summary.memory`.

    Attributes:
        holds: what the memory holds.
        device: where it is, such as "cuda:0".
        bytes: bytes of its storages, those of earlier rows aside.
    """

    holds: str
    device: str
    bytes: int


def memory_of(model: nn.Module, optimizers: list[Optimizer], batch: Any) -> tuple[MemoryRow, ...]:
    """Returns the rows of what a model and its optimizers hold, and of what a forward of `batch` keeps unless that is None."""
    counted = _Counted()
    params = [param for param in model.parameters() if not is_lazy(param)]
    local = [sharding.local_of(param) for param in params]
    quantized = [one for one in local if isinstance(one, QuantizedTensor)]
    counted.add("codes and scales", quantized)
    counted.add("other parameters", local)
    counted.add("originals, until the first step", [one.initial for one in quantized if one.initial is not None])
    for param in params:
        for name, kept in state_of(optimizers, param).items():
            if isinstance(kept, Tensor):
                counted.add(f"optimizer: {name}", [kept])
    counted.add("gradients", [param.grad for param in params if param.grad is not None])
    counted.add("buffers", model.buffers())
    if batch is not None:
        with _forward(model, batch) as saved:
            counted.add("kept for the backward", saved)
    return counted.rows()


class _Counted:
    """Storages that were counted, and their bytes by what they hold and device."""

    def __init__(self):
        self.seen: set[Any] = set()
        self.bytes: dict[tuple[str, str], int] = {}

    def add(self, holds: str, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of tensors that weren't counted before."""
        for tensor in tensors:
            for plain in _plain_parts(tensor):
                # Tensors without memory have no address; they count what they would take.
                without = plain.is_meta or isinstance(plain, FakeTensor)
                storage = plain.untyped_storage()
                key = id(plain) if without else (plain.device, storage.data_ptr())
                if key not in self.seen and storage.nbytes():
                    self.seen.add(key)
                    place = holds, str(plain.device)
                    self.bytes[place] = self.bytes.get(place, 0) + storage.nbytes()

    def rows(self) -> tuple[MemoryRow, ...]:
        return tuple(MemoryRow(*place, size) for place, size in self.bytes.items())


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors of which a tensor is made; each may have parts of its own."""
    tensor = sharding.local_of(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # pyright: ignore[reportAttributeAccessIssue]
        yield from _plain_parts(getattr(tensor, name))


@contextmanager
def _forward(model: nn.Module, batch: Any) -> Iterator[list[Tensor]]:
    """Calls the model as a training step does, and yields the tensors that it keeps for the backward.

    Buffers, random states and notes of recorded amaxes are put back, and FSDP2's gathered weights freed.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    layers = [(layer, layer.recorded) for layer in model.modules() if isinstance(layer, RecipeLayer)]
    devices = {param.device.index for param in model.parameters() if param.is_cuda}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    try:
        keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.random.fork_rng(sorted(devices)), torch.enable_grad(), keeping:
            if isinstance(batch, Mapping):
                y = model(**batch)
            else:
                y = model(*batch) if isinstance(batch, Sequence) else model(batch)
        yield saved
        # Until here it holds the graph.
        del y
    finally:
        saved.clear()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for layer, recorded in layers:
            layer.recorded = recorded
        reshard(model)

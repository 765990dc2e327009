"""Experiments in PyTorch: gradients and updates sent as codes under FSDP2, DDP and between trainings, and OsciReset."""

from ..recipes import OsciReset
from ..torch_backend.optimizer.osci_reset import osci_reset
from ..torch_backend.optimizer.outer_step import OuterStep
from ..torch_backend.sharded.all_reduce import QuantizedAllReduce, quantize_all_reduce
from ..torch_backend.sharded.reduce_scatter import QuantizedReduceScatter, quantize_reduce_scatter

__all__ = [
    "OsciReset",
    "OuterStep",
    "QuantizedAllReduce",
    "QuantizedReduceScatter",
    "osci_reset",
    "quantize_all_reduce",
    "quantize_reduce_scatter",
]

for _public in (
    OuterStep,
    QuantizedAllReduce,
    QuantizedReduceScatter,
    osci_reset,
    quantize_all_reduce,
    quantize_reduce_scatter,
):
    _public.__module__ = __name__

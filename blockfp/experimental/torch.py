"""Experiments in PyTorch: gradients sent as codes under FSDP2, and OsciReset."""

from ..recipes import OsciReset
from ..torch_backend.optimizer.osci_reset import osci_reset
from ..torch_backend.sharded.reduce_scatter import QuantizedReduceScatter, quantize_reduce_scatter

__all__ = ["OsciReset", "QuantizedReduceScatter", "osci_reset", "quantize_reduce_scatter"]

for _public in (QuantizedReduceScatter, osci_reset, quantize_reduce_scatter):
    _public.__module__ = __name__

"""PyTorch as a backend of `blockfp check`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from blockfp.check.pieces import ByPieces
from blockfp.definition.numerics import Quantized
from blockfp.formats import Format

from .quantized_tensor.quantize import quantize
from .quantized_tensor.tensor import QuantizedTensor


class TorchBackend:
    """`blockfp.torch` behind NumPy arrays: its custom ops on CPU tensors, as users get them.

    Sets torch to one thread: whole formats run side by side, and its own threads would only wait for each other.
    """

    name = "torch"

    def __init__(self):
        torch.set_num_threads(1)

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} on the CPU"

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        q = quantize(to_torch(x), format)
        return _to_numpy(Quantized(q.codes, q.scales, q.tensor_scale))

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        tensor = QuantizedTensor.from_parts(*_to_torch(q), format=format, columns=columns, dtype=getattr(torch, dtype))
        return to_numpy(tensor.dequantize())


class TorchDefinition(ByPieces):
    """The definition (`definition.numerics`) run by PyTorch's own operations, as `blockfp.torch` does without kernels.

    Sets torch to one thread, as `TorchBackend` does.
    """

    name = "torch-definition"
    version = TorchBackend.version

    def __init__(self):
        torch.set_num_threads(1)

    def give(self, x: np.ndarray) -> torch.Tensor:
        return to_torch(x)

    def take(self, x: torch.Tensor) -> np.ndarray:
        return to_numpy(x)


def to_torch(x: np.ndarray) -> torch.Tensor:
    """Shares x's memory as a tensor; copies a read-only x, such as a NumPy scalar."""
    x = x if x.flags.writeable else np.array(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Shares the memory of a CPU tensor as an array."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _to_torch(q: Quantized) -> Quantized:
    return Quantized(*(None if part is None else to_torch(part) for part in q))


def _to_numpy(q: Quantized) -> Quantized:
    return Quantized(*(None if part is None else to_numpy(part) for part in q))

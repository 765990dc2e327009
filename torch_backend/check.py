"""PyTorch backends for `blockfp check`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from blockfp.check.pieces import ByPieces
from blockfp.definition.matrix_units import Summation
from blockfp.definition.numerics import Quantized
from blockfp.definition.products import Operand
from blockfp.formats import Format
from blockfp.kernels import cuda_library, native
from blockfp.kernels.routes import HOPPER

from .ops.product.gpu_products import on_codes
from .quantized_tensor.quantize import quantize
from .quantized_tensor.tensor import QuantizedTensor


class TorchBackend:
    """Runs `blockfp.torch`'s custom ops on CPU tensors, from and to NumPy arrays.

    Sets torch to one thread, because whole formats run in parallel and torch's threads would only compete.
    """

    name = "torch"
    device = "cpu"

    def __init__(self):
        torch.set_num_threads(1)

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} on the CPU"

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        q = quantize(to_torch(x).to(self.device), format)
        return _to_numpy(Quantized(q.codes, q.scales, q.tensor_scale))

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        return to_numpy(self._tensor(q, format, dtype, columns).dequantize())

    @property
    def summations(self) -> tuple[str, ...]:
        return native.summations()

    def product(self, a: Operand, b: Operand, summation: Summation, **options: Any) -> np.ndarray:
        given = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        return to_numpy(self._product(a.converted(to_torch), b.converted(to_torch), summation, **given))

    def _product(self, a: Operand, b: Operand, summation: Summation, **options: Any) -> torch.Tensor:
        return native.product(a, b, summation, **options)

    def _tensor(self, q: Quantized, format: Format, dtype: str, columns: int) -> QuantizedTensor:
        codes, scales = (to_torch(part).to(self.device) for part in q[:2])
        tensor_scale = None if q.tensor_scale is None else to_torch(q.tensor_scale).to(self.device)
        options = {"format": format, "columns": columns, "dtype": getattr(torch, dtype)}
        return QuantizedTensor.from_parts(codes, scales, tensor_scale, **options)


class TorchCuda(TorchBackend):
    """Runs `blockfp.torch` on the current CUDA device."""

    name = "torch-cuda"
    device = "cuda"

    def __init__(self):
        """Raises ImportError if there is no CUDA device."""
        if not torch.cuda.is_available():
            raise ImportError(f"PyTorch {torch.__version__} finds no CUDA device")
        super().__init__()

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}; {cuda_library.status()}"

    @property
    def summations(self) -> tuple[str, ...]:
        """Those of the library's own kernel, which is Hopper's; cuBLASLt's sums aren't defined."""
        here = torch.cuda.get_device_capability() == HOPPER and cuda_library.available()
        return ("hopper_fp8",) if here else ()

    def _product(
        self,
        a: Operand,
        b: Operand,
        summation: Summation,
        *,
        dtype: str = "float32",
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert a.format is not None
        assert b.format is not None
        (m, k), n = a.codes.shape, b.codes.shape[0]
        kinds = getattr(torch, dtype), None if bias is None else bias.dtype
        run = on_codes(
            torch.device(self.device), a.format, b.format, m, n, k, *kinds, accumulate=addend is not None, exact_order=True
        )
        left, right = ([part.to(self.device) for part in (x.codes, x.scales) if part is not None] for x in (a, b))
        out = None if addend is None else addend.to(self.device, kinds[0], copy=True)
        return run(left, right, None if bias is None else bias.to(self.device), out=out)


class TorchCompiled(TorchBackend):
    """Runs `blockfp.torch` through `torch.compile`, with one program per format and shape."""

    name = "torch-compiled"

    def __init__(self):
        super().__init__()
        self._compiled: dict[tuple[object, ...], Callable[..., object]] = {}
        self._one_at_a_time = threading.Lock()

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} compiled, on the CPU"

    @property
    def summations(self) -> tuple[str, ...]:
        return ()

    def _run(self, function: Callable[..., object], x: torch.Tensor, format: Format) -> object:
        key = (function, x.shape, x.dtype, format)
        # PyTorch compiles in one thread at a time.
        with self._one_at_a_time:
            if key not in self._compiled:
                run = lambda x: function(x, format)  # noqa: E731
                # A separate code object: PyTorch stops compiling code that it has compiled for many shapes.
                own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
                self._compiled[key] = torch.compile(own, dynamic=False, fullgraph=True)
            return self._compiled[key](x)

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        q: QuantizedTensor = self._run(quantize, to_torch(x), format)  # pyright: ignore[reportAssignmentType]
        return _to_numpy(Quantized(q.codes, q.scales, q.tensor_scale))

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        values = self._run(_dequantize, self._tensor(q, format, dtype, columns), format)
        return to_numpy(values)  # pyright: ignore[reportArgumentType]


def _dequantize(q: QuantizedTensor, format: Format) -> torch.Tensor:
    return q.dequantize()


class TorchDefinition(ByPieces):
    """Runs `definition.numerics` with PyTorch's operations, as `blockfp.torch` does without kernels.

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
    """Returns a tensor that shares x's memory; copies a read-only x, such as a NumPy scalar."""
    x = x if x.flags.writeable else np.array(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Returns an array that shares a CPU tensor's memory; copies from other devices."""
    x = x.cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _to_numpy(q: Quantized) -> Quantized:
    return Quantized(*(None if part is None else to_numpy(part) for part in q))

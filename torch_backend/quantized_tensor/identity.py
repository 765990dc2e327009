"""The identity of a wrapped parameter to other tools: its address, its storage, copies of it, `.data`.

torch keeps a tensor subclass without memory of its own, whose address is 0 whatever it wraps. Accelerate, transformers and
safetensors tell parameters apart by address, so `Wrapper` answers with the address of the wrapped tensor: views of one memory
share it, and it is 0 where there is no memory.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

NO_POINTER = 64
"""Bits by which the address of codes is shifted. It tells tensors apart like any number, but fits in no pointer.

Under the dtype and the shape of the values there are fewer bytes than these say, so who reads memory by them must not find any:
with such an address ctypes has a null pointer, and Triton and C++ overflow.
"""


class Wrapper(Tensor):
    """A tensor subclass around others, which is known by the address of one of them."""

    def memory(self) -> Tensor:
        """The tensor by whose address this one is known."""
        raise NotImplementedError

    def shift(self) -> int:
        """The number of bits by which its address is shifted: 0 where memory of this dtype and shape is there."""
        raise NotImplementedError

    def adopt(self, other: Self) -> None:
        """Wraps what another tensor of this class wraps."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        return self.memory().data_ptr() << self.shift()

    def untyped_storage(self) -> torch.UntypedStorage:
        """torch's own storage of the subclass, without memory; its `data_ptr()` is that of the wrapped tensor's storage."""
        storage: Any = super().untyped_storage()
        inner, shift = self.memory().untyped_storage(), self.shift()
        storage.data_ptr = lambda: inner.data_ptr() << shift
        return storage

    @property
    def data(self) -> Self:
        return Tensor.data.__get__(self)  # pyright: ignore

    @data.setter
    def data(self, other: Self) -> None:
        """Wraps what another tensor wraps; torch's own setter leaves that where it is.

        Raises:
            TypeError: it is of another class.
        """
        if type(other) is not type(self):
            ours, theirs = type(self).__name__, type(other).__name__
            raise TypeError(
                f".data of a {ours} must be a {ours}, got a {theirs} of {other.dtype}: write values into it with "
                "blockfp.torch.load_high_precision_(parameter, values). FullyShardedDataParallel with use_orig_params and "
                "ZeroRedundancyOptimizer with parameters_as_bucket_view set such views: leave these out, or use fully_shard"
            )
        Tensor.data.__set__(self, other)  # pyright: ignore
        self.adopt(other)

    def _no_values(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses what torch does to memory itself, where it asks no subclass."""
        raise NotImplementedError(
            f"a {type(self).__name__} has no memory of {self.dtype} for NumPy, DLPack or Python: take dequantize() of a "
            "QuantizedTensor, values of a CastWeight"
        )

    numpy = apply_ = map_ = map2_ = __dlpack__ = _no_values  # pyright: ignore

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(f"a {type(self).__name__} that was computed from others can't be copied: detach() it first")
        with torch.no_grad():
            new: Any = self.clone()
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            if name not in new.__dict__:
                new.__dict__[name] = copy.deepcopy(value, memo)
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

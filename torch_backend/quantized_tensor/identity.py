"""`Wrapper`: the address, storage, copies and `.data` of tensor subclasses that wrap other tensors.

torch gives a wrapper subclass no memory and the address 0. Accelerate, transformers and safetensors identify parameters by
address, so `Wrapper` reports the wrapped tensor's: views of one memory share it, and without memory it is 0.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from blockfp.definition.checks import array_function

NO_POINTER = 64
"""Bits by which the address of codes is shifted, so that it identifies a tensor but fits in no pointer.

Codes have fewer bytes than the nominal dtype and shape suggest, so reading memory at this address must fail: ctypes gets a null
pointer, Triton and C++ overflow.
"""


class Wrapper(Tensor):
    """A tensor subclass around other tensors, identified by the address of one of them."""

    def memory(self) -> Tensor:
        """Returns the tensor whose address identifies this one."""
        raise NotImplementedError

    def shift(self) -> int:
        """Returns by how many bits the address is shifted; 0 if its memory has this dtype and shape."""
        raise NotImplementedError

    def adopt(self, other: Self) -> None:
        """Wraps the tensors that `other` wraps."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        return self.memory().data_ptr() << self.shift()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns torch's empty storage of the subclass; its `data_ptr()` is the wrapped storage's, shifted."""
        storage: Any = super().untyped_storage()
        inner, shift = self.memory().untyped_storage(), self.shift()
        storage.data_ptr = lambda: inner.data_ptr() << shift
        return storage

    @property
    def data(self) -> Self:
        return Tensor.data.__get__(self)  # pyright: ignore

    @data.setter
    def data(self, other: Self) -> None:
        """Wraps the tensors that `other` wraps, which torch's setter doesn't change; raises TypeError for another class."""
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
        """Raises for methods that access memory without dispatching to subclasses."""
        raise NotImplementedError(
            f"a {type(self).__name__} has no memory of {self.dtype} for NumPy, DLPack or Python: take dequantize() of a "
            "QuantizedTensor, values of a CastWeight"
        )

    numpy = apply_ = map_ = map2_ = __dlpack__ = _no_values  # pyright: ignore
    __array_function__ = array_function

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

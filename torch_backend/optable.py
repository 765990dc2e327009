"""The op table: every torch operation that a `QuantizedTensor` answers, and what it does to codes and scales.

None of them looks at values. Whatever is not here raises and names itself; nothing dequantizes on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from blockfp import layout, numerics

from . import ops

if TYPE_CHECKING:
    from .tensor import QuantizedTensor

aten = torch.ops.aten

_TABLE: dict[Any, Callable[..., Any]] = {}
_VIEWS: set[Any] = set()


def _implements(*functions, view: bool = False):
    """Enters the decorated handler, which takes the op's own arguments, into the table.

    view: the result shares memory with the first argument, which autograd and functionalization must be told.
    """

    def register(handler):
        _TABLE.update(dict.fromkeys(functions, handler))
        if view:
            _VIEWS.update(functions)
        return handler

    return register


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Carries out one operation.

    Raises:
        NotImplementedError: the operation is not in the table, or not with these arguments.
    """
    handler = _TABLE.get(func)
    if handler is None:
        raise _refusal(func, "it needs values", "call dequantize() on the quantized tensor first")
    result = handler(*args, **kwargs)
    return return_and_correct_aliasing(func, args, kwargs, result) if func in _VIEWS else result


def _refusal(func: Any, reason: str, remedy: str) -> NotImplementedError:
    return NotImplementedError(f"{func} is not defined for a QuantizedTensor: {reason}; {remedy}")


def _map(q: QuantizedTensor, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    tensor_scale = None if q.tensor_scale is None else function(q.tensor_scale)
    return q.with_parts(function(q.codes), function(q.scales), tensor_scale)


@_implements(ops.dequantize_tensor)
def _dequantize(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    origin = list(q.origin)
    return ops.dequantize(q.codes, q.scales, q.tensor_scale, q.format.name, dtype, q.shape[-1], origin)


@_implements(aten.detach.default, aten.alias.default, view=True)
def _alias(q: QuantizedTensor) -> QuantizedTensor:
    return _map(q, aten.alias.default)


@_implements(aten.view.default, view=True)
def _view(q: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    if tuple(shape) != tuple(q.shape):
        raise _refusal(
            aten.view.default,
            f"blocks of the shape {tuple(q.shape)} are no blocks of {tuple(shape)}",
            "reshape before quantizing",
        )
    return _alias(q)


@_implements(aten.as_strided.default, view=True)
def _as_strided(q: QuantizedTensor, shape: Sequence[int], stride: Sequence[int], offset: int | None = None):
    # What functionalization asks for where a compiled function returns an alias of its argument.
    if tuple(shape) != tuple(q.shape) or tuple(stride) != q.stride() or offset:
        raise _refusal(
            aten.as_strided.default,
            f"strides {tuple(stride)} say nothing about codes and blocks",
            "slice whole rows, and where a compiled function returns a slice of its argument, slice outside it",
        )
    return _alias(q)


@_implements(aten.clone.default)
def _clone(q: QuantizedTensor, *, memory_format: torch.memory_format | None = None) -> QuantizedTensor:
    return _map(q, lambda part: aten.clone.default(part, memory_format=torch.contiguous_format))


@_implements(aten._to_copy.default)
def _to_copy(q: QuantizedTensor, *, dtype: torch.dtype | None = None, **where: Any) -> QuantizedTensor:
    if dtype is not None and dtype != q.dtype:
        raise _refusal(aten._to_copy.default, f"a cast to {dtype} has no codes", f"use dequantize({dtype})")
    if where.get("layout") not in (None, torch.strided):
        raise _refusal(aten._to_copy.default, f"codes have no layout {where['layout']}", "keep torch.strided")
    return _map(q, lambda part: aten._to_copy.default(part, **where))


@_implements(aten.copy_.default)
def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    from .tensor import QuantizedTensor

    op = aten.copy_.default
    if not isinstance(source, QuantizedTensor):
        raise _refusal(op, f"the source holds {source.dtype} values", "copy quantize(source, format) into it")
    if not isinstance(destination, QuantizedTensor):
        raise _refusal(op, f"the destination holds {destination.dtype} values", "copy source.dequantize() into it")
    for name in ("format", "shape", "dtype"):
        ours, theirs = getattr(destination, name), getattr(source, name)
        if ours != theirs:
            raise ValueError(f"copy_ needs equal quantized tensors: {name} is {ours}, that of the source is {theirs}")
    if destination.scales.shape != source.scales.shape or _phase(destination) != _phase(source):
        raise ValueError(
            f"copy_ needs the same blocks: the origin is {destination.origin}, that of the source is {source.origin}"
        )
    for ours, theirs in zip(_parts(destination), _parts(source), strict=True):
        aten.copy_.default(ours, theirs, non_blocking)
    return destination


def _parts(q: QuantizedTensor) -> list[Tensor]:
    return [part for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def _phase(q: QuantizedTensor) -> tuple[int, int]:
    rows, columns = q.format.block or (1, 1)
    return q.origin[0] % rows, q.origin[1] % columns


@_implements(aten.empty_like.default)
def _empty_like(q: QuantizedTensor, *, dtype: torch.dtype | None = None, memory_format=None, **where: Any) -> Tensor:
    if dtype is not None:
        return torch.empty(q.shape, dtype=dtype, **_on_device_of(q, where))
    return _map(q, lambda part: aten.empty_like.default(part, memory_format=torch.contiguous_format, **where))


@_implements(aten.zeros_like.default)
def _zeros_like(q: QuantizedTensor, *, dtype: torch.dtype | None = None, memory_format=None, **where: Any) -> Tensor:
    if dtype is None:
        raise _refusal(aten.zeros_like.default, "it may mean zero codes or zero values", "name a dtype for values")
    return torch.zeros(q.shape, dtype=dtype, **_on_device_of(q, where))


def _on_device_of(q: QuantizedTensor, where: dict[str, Any]) -> dict[str, Any]:
    return {**where, "device": where.get("device") or q.device}


@_implements(aten.t.default)
def _t(q: QuantizedTensor) -> QuantizedTensor:
    return _swap_matrix(q)


@_implements(aten.transpose.int)
def _transpose(q: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    if {dim0 % q.ndim, dim1 % q.ndim} != {q.ndim - 2, q.ndim - 1}:
        raise _refusal(aten.transpose.int, f"axes {dim0} and {dim1} are not the matrix", "swap the last two axes")
    return _swap_matrix(q)


@_implements(aten.permute.default)
def _permute(q: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    swapped = [*range(q.ndim - 2), q.ndim - 1, q.ndim - 2]
    if [dim % q.ndim for dim in dims] != swapped:
        raise _refusal(aten.permute.default, f"{tuple(dims)} moves more than the matrix", "swap the last two axes")
    return _swap_matrix(q)


def _swap_matrix(q: QuantizedTensor) -> QuantizedTensor:
    codes, scales = numerics.transpose(q.codes, q.scales, q.format, columns=q.shape[-1])
    # Unpacked codes come back as a view; codes are contiguous everywhere.
    codes, scales = (part.clone(memory_format=torch.contiguous_format) for part in (codes, scales))
    tensor_scale = None if q.tensor_scale is None else q.tensor_scale.clone()
    return q.with_parts(codes, scales, tensor_scale, columns=q.shape[-2], origin=(q.origin[1], q.origin[0]))


@_implements(aten.slice.Tensor, view=True)
def _slice(q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1):
    op, axis = aten.slice.Tensor, dim % q.ndim
    size = q.shape[axis]
    first, last, _ = slice(start, end).indices(size)
    last = max(first, last)
    if step != 1:
        raise _refusal(op, f"a slice with step {step} cuts blocks apart", "slice with step 1")
    if (first, last) == (0, size):
        return _alias(q)
    if axis == q.ndim - 1:
        raise _refusal(op, "a slice of columns cuts blocks and packed bytes apart", "slice rows, or dequantize() first")
    return _narrow(q, axis, first, last)


def _narrow(q: QuantizedTensor, axis: int, first: int, last: int) -> QuantizedTensor:
    """Elements first .. last along an axis that isn't the last."""
    codes = aten.slice.Tensor(q.codes, axis, first, last)
    origin, scale_first, scale_last = q.origin, first, last
    if axis == q.ndim - 2:
        origin = (q.origin[0] + first, q.origin[1])
        if q.format.block is not None:
            rows = q.format.block[0]
            scale_first = origin[0] // rows - q.origin[0] // rows
            scale_last = scale_first + layout.block_grid(last - first, rows, origin[0])
    if q.format.block is None:
        scales = aten.alias.default(q.scales)
    else:
        scales = aten.slice.Tensor(q.scales, axis, scale_first, scale_last)
    tensor_scale = None if q.tensor_scale is None else aten.alias.default(q.tensor_scale)
    return q.with_parts(codes, scales, tensor_scale, origin=origin)


@_implements(aten.split.Tensor, view=True)
def _split(q: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    length = q.shape[dim]
    starts = range(0, length, size) if length else (0,)
    return [_slice(q, dim, start, start + size) for start in starts]


@_implements(aten.split_with_sizes.default, view=True)
def _split_with_sizes(q: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    if sum(sizes) != q.shape[dim]:
        raise ValueError(f"split sizes {list(sizes)} must add up to {q.shape[dim]}, the length of axis {dim}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(q, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]

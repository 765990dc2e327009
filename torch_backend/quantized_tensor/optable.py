"""The op table: torch operations on a `QuantizedTensor` as operations on its codes and scales.

None of them needs values. An operation that isn't here raises; nothing dequantizes implicitly.

`fully_shard` calls, in order: split, new_zeros (the padded shard), slice, copy_, view(-1), slice, detach, and new_empty if
there are more ranks than rows; empty_like for materialized meta tensors; as_strided at the first gather. `geometry` explains
how they pass on the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import layout, numerics

from ..ops.library import DTYPES
from .bucket import flat
from .dispatch import implements, run, viewing
from .geometry import Base, Geometry
from .refusals import FLAT, FLATTENERS, refused
from .tensor import QuantizedTensor

aten = torch.ops.aten


def _map(q: QuantizedTensor, function: Callable[[Tensor], Tensor], geometry: Geometry | None = None) -> QuantizedTensor:
    return q.with_parts(*(function(part) for part in q.parts), geometry=geometry)


# ---- aliases


@implements(aten.detach.default, aten.alias.default, view=True)
def _alias(q: QuantizedTensor) -> QuantizedTensor:
    return _map(q, aten.alias.default)


@implements(aten.view.default)
def _view(q: QuantizedTensor, shape: Sequence[int]) -> Tensor:
    # FSDP2 only stores `shard.view(-1)`; any other result would make it access a storage.
    if tuple(shape) == tuple(q.shape) or (tuple(shape) == (-1,) and q.geometry.base):
        return run(aten.alias.default, (q,), {})
    if tuple(shape) in ((-1,), (q.numel(),)):
        return flat(q)
    raise refused(aten.view.default, f"blocks of the shape {tuple(q.shape)} aren't blocks of {tuple(shape)}", FLAT, FLATTENERS)


@implements(aten.as_strided.default, view=True)
def _as_strided(q: QuantizedTensor, shape: Sequence[int], stride: Sequence[int], storage_offset: int | None = None):
    # Requested by functionalization for a compiled function that returns an alias of its argument, and by FSDP2 for a whole
    # weight.
    if tuple(shape) != tuple(q.shape) or tuple(stride) != q.stride() or storage_offset:
        raise refused(
            aten.as_strided.default,
            f"strides {tuple(stride)} say nothing about codes and blocks",
            "slice whole rows, and if a compiled function returns a slice of its argument, slice outside of it",
        )
    return _alias(q)


# ---- copies


@implements(aten.clone.default)
def _clone(q: QuantizedTensor, *, memory_format: torch.memory_format | None = None) -> QuantizedTensor:
    initial = None if q.initial is None else q.initial.clone()
    geometry = q.geometry.copy(initial=initial)
    return _map(q, lambda part: aten.clone.default(part, memory_format=torch.contiguous_format), geometry)


@implements(aten._to_copy.default)
def _to_copy(q: QuantizedTensor, *, dtype: torch.dtype | None = None, **where: Any) -> QuantizedTensor:
    dtype = q.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise refused(aten._to_copy.default, f"the nominal dtype can't be {dtype}", f"cast to one of {names}, or dequantize()")
    if where.get("layout") not in (None, torch.strided):
        raise refused(aten._to_copy.default, f"codes have no layout {where['layout']}", "keep torch.strided")
    where["memory_format"] = torch.contiguous_format
    moved = (aten._to_copy.default(part, **where) for part in q.parts)
    return q.with_parts(*moved, dtype=dtype, geometry=q.geometry.copy(initial=q.initial))


@implements(aten._pin_memory.default)
def _pin_memory(q: QuantizedTensor, device: torch.device | None = None) -> QuantizedTensor:
    return _map(q, lambda part: aten._pin_memory.default(part, device), q.geometry.copy(initial=q.initial))


@implements(aten.is_pinned.default)
def _is_pinned(q: QuantizedTensor, device: torch.device | None = None) -> bool:
    return all(aten.is_pinned.default(part, device) for part in q.parts)


@implements(aten.record_stream.default)
def _record_stream(q: QuantizedTensor, stream: torch.Stream) -> None:
    for part in q.parts:
        aten.record_stream.default(part, stream)


@implements(aten.copy_.default)
def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    op = aten.copy_.default
    if not isinstance(source, QuantizedTensor) and isinstance(destination, QuantizedTensor) and _keeps(destination, source):
        destination.geometry.copied = source.detach().clone()
        return destination
    if not isinstance(source, QuantizedTensor):
        raise refused(
            op,
            f"the source holds {getattr(source, 'dtype', type(source))} values, and the scales of a shard may depend on what "
            "other ranks hold",
            "use blockfp.torch.load_high_precision_(parameter, values) (for an initializer blockfp.torch.init_(parameter, "
            "function)), or copy quantize(values, format) into it",
        )
    if not isinstance(destination, QuantizedTensor):
        raise refused(
            op,
            f"the destination holds {destination.dtype} values",
            "copy source.dequantize() into it; torch.autograd.graph.save_on_cpu takes quantized weights with pin_memory=False",
        )
    for name in ("format", "shape", "dtype"):
        ours, theirs = getattr(destination, name), getattr(source, name)
        if ours != theirs:
            raise ValueError(f"copy_ needs equal quantized tensors: {name} is {ours}, the source's is {theirs}")
    scales = destination.scales
    if destination.geometry.origin is None:
        destination.geometry.bind(source.geometry, source.origin)
        scales = scales[tuple(slice(size) for size in source.scales.shape)]
    elif scales.shape != source.scales.shape or _phase(destination) != _phase(source):
        raise ValueError(f"copy_ needs the same blocks: the origin is {destination.origin}, the source's is {source.origin}")
    elif destination.geometry.shares:
        raise refused(
            op,
            "the destination is a part of a tensor and shares a scale or an optimizer's original values with the rest",
            "copy into the whole tensor, or use blockfp.torch.load_high_precision_(parameter, values) with all of it",
        )
    else:
        destination.geometry.initial = None if source.initial is None else source.initial.clone()
        destination.geometry.copied = source.geometry.copied
        destination.geometry.loaded = source.geometry.loaded or "codes"
    aten.copy_.default(destination.codes, source.codes, non_blocking)
    aten.copy_.default(scales, source.scales, non_blocking)
    if destination.tensor_scale is not None and source.tensor_scale is not None:
        aten.copy_.default(destination.tensor_scale, source.tensor_scale, non_blocking)
    return destination


def _keeps(shard: QuantizedTensor, source: Tensor) -> bool:
    """Returns whether a copy into a shard is kept for `load_state_dict`: of values, or of the empty stand-in
    (`names.no_values`).

    torch's state dict utilities copy what rank 0 has broadcast into shards before they load the parameters.
    """
    geometry = shard.geometry
    if geometry.gathered or not (geometry.cut or geometry.base) or shard.is_meta:
        return False
    if not isinstance(source, Tensor) or source.dtype not in DTYPES:
        return False
    return source.shape == shard.shape or (source.ndim == shard.ndim + 1 and source.shape[0] == 0)


def _phase(q: QuantizedTensor) -> tuple[int, int]:
    rows, columns = q.format.block or (1, 1)
    return q.origin[0] % rows, 0 if q.format.per_row else q.origin[1] % columns


# ---- new memory: codes if it may hold this tensor or a part of it, else values


@implements(aten.empty_like.default)
def _empty_like(q: QuantizedTensor, *, dtype: torch.dtype | None = None, memory_format=None, **where: Any) -> Tensor:
    if dtype is not None:
        return torch.empty(q.shape, dtype=dtype, **_on_device_of(q, where))
    like = {**where, "memory_format": torch.contiguous_format}
    return _map(q, lambda part: aten.empty_like.default(part, **like), q.geometry.copy(initial=None))


@implements(aten.new_zeros.default)
def _new_zeros(q: QuantizedTensor, shape: Sequence[int], *, dtype: torch.dtype | None = None, **where: Any) -> Tensor:
    if dtype is not None:
        return torch.zeros(tuple(shape), dtype=dtype, **_on_device_of(q, where))
    if len(shape) != q.ndim or tuple(shape[1:]) != tuple(q.shape[1:]):
        raise refused(
            aten.new_zeros.default,
            f"a buffer of shape {tuple(shape)} isn't a run of the first axis of {tuple(q.shape)}",
            "shard on dim 0 only (a shard_placement_fn of fully_shard must return Shard(0)), or name a dtype for values",
        )
    scales = list(q.scales.shape)
    if q.format.block is not None:
        # Enough for any position: these rows can't touch more blocks.
        scales[0] = -(-shape[0] // q.format.block[0]) + 1 if q.ndim == 2 else shape[0]
    where = _on_device_of(q, where)
    return q.with_parts(
        q.codes.new_zeros((shape[0], *q.codes.shape[1:]), **where),
        q.scales.new_zeros(scales, **where),
        None if q.tensor_scale is None else q.tensor_scale.new_zeros((), **where),
        geometry=q.geometry.buffer(q.shape, shape[0], q.origin),
    )


@implements(aten.new_empty.default)
def _new_empty(q: QuantizedTensor, shape: Sequence[int], *, dtype: torch.dtype | None = None, **where: Any) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype or q.dtype, **_on_device_of(q, where))


@implements(aten.zeros_like.default)
def _zeros_like(q: QuantizedTensor, *, dtype: torch.dtype | None = None, memory_format=None, **where: Any) -> Tensor:
    return torch.zeros(q.shape, dtype=dtype or q.dtype, **_on_device_of(q, where))


def _on_device_of(q: QuantizedTensor, where: dict[str, Any]) -> dict[str, Any]:
    return {**where, "device": where.get("device") or q.device}


# ---- the transposed matrix


@implements(aten.t.default)
def _t(q: QuantizedTensor) -> QuantizedTensor:
    return _swap_matrix(q)


@implements(aten.transpose.int)
def _transpose(q: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    if {dim0 % q.ndim, dim1 % q.ndim} != {q.ndim - 2, q.ndim - 1}:
        raise refused(aten.transpose.int, f"axes {dim0} and {dim1} are not the matrix", "swap the last two axes")
    return _swap_matrix(q)


@implements(aten.permute.default)
def _permute(q: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    swapped = [*range(q.ndim - 2), q.ndim - 1, q.ndim - 2]
    if [dim % q.ndim for dim in dims] != swapped:
        raise refused(aten.permute.default, f"{tuple(dims)} moves more than the matrix", "swap the last two axes")
    return _swap_matrix(q)


def _swap_matrix(q: QuantizedTensor) -> QuantizedTensor:
    codes, scales = numerics.transpose(q.codes, q.scales, q.format, columns=q.shape[-1])
    # Unpacked codes come back as a view; codes must be contiguous.
    codes, scales = (part.clone(memory_format=torch.contiguous_format) for part in (codes, scales))
    tensor_scale = None if q.tensor_scale is None else q.tensor_scale.clone()
    # torch regards the result as a view.
    with viewing(q):
        return q.with_parts(codes, scales, tensor_scale, columns=q.shape[-2], geometry=Geometry((q.origin[1], q.origin[0])))


# ---- parts


@implements(aten.slice.Tensor, view=True)
def _slice(q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1):
    axis = dim % q.ndim
    first, last, _ = slice(start, end).indices(q.shape[axis])
    if step != 1:
        raise refused(aten.slice.Tensor, f"a slice with step {step} cuts blocks apart", "slice with step 1")
    return _narrow(q, axis, first, max(first, last))


@implements(aten.split.Tensor, view=True)
def _split(q: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    length = q.shape[dim]
    starts = range(0, length, size) if length else (0,)
    return _divide(q, dim, [(start, min(start + size, length)) for start in starts])


@implements(aten.split_with_sizes.default, view=True)
def _split_with_sizes(q: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    if sum(sizes) != q.shape[dim]:
        raise ValueError(f"split sizes {list(sizes)} must add up to {q.shape[dim]}, the length of axis {dim}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return _divide(q, dim, [(end - size, end) for end, size in zip(ends, sizes, strict=True)])


def _divide(q: QuantizedTensor, dim: int, spans: list[tuple[int, int]]) -> list[QuantizedTensor]:
    axis = dim % q.ndim
    parts = [_narrow(q, axis, first, last) for first, last in spans]
    if axis == 0:
        for part in parts:
            # A new geometry even for all of q, which must not get a base.
            part.geometry = replace(part.geometry, base=Base(tuple(q.shape), q.origin))
    return parts


def _narrow(q: QuantizedTensor, axis: int, first: int, last: int) -> QuantizedTensor:
    """Slices elements first .. last along an axis: any rows; only whole blocks of columns unless a row has one scale."""
    bytes_first, bytes_last = (first, last) if axis < q.ndim - 1 else _bytes(q, first, last)
    columns = q.shape[-1] if axis < q.ndim - 1 else last - first
    codes = aten.slice.Tensor(q.codes, axis, bytes_first, bytes_last)
    tensor_scale = None if q.tensor_scale is None else aten.alias.default(q.tensor_scale)
    scales, geometry = aten.alias.default(q.scales), q.geometry
    if q.geometry.origin is not None:
        from_last = axis - q.ndim
        if q.format.block is not None:
            block = q.format.block[from_last] if from_last >= -2 else 1
            start = q.origin[from_last] if from_last >= -2 else 0
            scales_first = (start + first) // block - start // block
            scales_last = scales_first + layout.block_grid(last - first, block, start + first)
            scales = aten.slice.Tensor(q.scales, axis, scales_first, scales_last)
        if (first, last) != (0, q.shape[axis]):
            geometry = q.geometry.part(axis, first, last, q.ndim)
            geometry.shares |= _shares(q, axis, first, last)
    elif first or axis:
        raise refused(aten.slice.Tensor, "nothing was copied into this new buffer yet", "take its first rows")
    elif last == 0 and q.format.block is not None:
        scales = aten.slice.Tensor(q.scales, 0, 0, 0)
    return q.with_parts(codes, scales, tensor_scale, columns=columns, geometry=geometry)


def _shares(q: QuantizedTensor, axis: int, first: int, last: int) -> bool:
    """Returns whether elements first .. last along an axis share a scale or original values with the rest of the tensor."""
    base, block = q.geometry.base, q.format.block
    if base is not None and axis == first == 0 and (q.ndim > 2 or q.origin[0] + last == base.end[0]):
        # Only padding follows, in FSDP2's buffer of a short shard.
        return False
    if q.initial is not None or block is None or q.tensor_scale is not None:
        return True
    if axis == q.ndim - 1:
        return q.format.per_row
    rows = block[0] if axis == q.ndim - 2 else 1
    return any((q.origin[0] + cut) % rows for cut in (first, last) if 0 < cut < q.shape[axis])


def _bytes(q: QuantizedTensor, first: int, last: int) -> tuple[int, int]:
    """Returns the byte range in a row of codes for columns first .. last, which must be whole blocks."""
    # Any part of a row keeps the row's scale.
    block = q.format.block[1] if q.format.block and not q.format.per_row else 1
    cuts = [cut for cut in (first, last) if 0 < cut < q.shape[-1]]
    bits, together = q.format.element.bits, q.format.element.codes_per_group
    if any((q.origin[1] + cut) % block or cut % together for cut in cuts):
        raise refused(
            aten.slice.Tensor,
            f"columns {first} .. {last} of {q.shape[-1]} divide blocks of {block} or packed bytes",
            f"slice columns at multiples of {block}, or dequantize() first",
        )
    return layout.packed_columns(first, bits), layout.packed_columns(last, bits)


@implements(aten.select.int, view=True)
def _select(q: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    axis = dim % q.ndim
    if axis >= q.ndim - 2:
        raise refused(aten.select.int, "one row or column isn't a matrix", "slice one with q[i : i + 1]")
    codes = aten.select.int(q.codes, axis, index)
    scales = aten.select.int(q.scales, axis, index if q.format.block else 0)
    tensor_scale = None if q.tensor_scale is None else aten.alias.default(q.tensor_scale)
    initial = None if q.initial is None else q.initial.select(axis, index)
    geometry = Geometry(q.origin, None, initial, q.geometry.gathered, q.geometry.loaded)
    geometry.shares = q.geometry.shares or q.initial is not None or q.format.block is None or tensor_scale is not None
    return q.with_parts(codes, scales, tensor_scale, geometry=geometry)


@implements(aten.unbind.int, view=True)
def _unbind(q: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(q, dim, index) for index in range(q.shape[dim])]

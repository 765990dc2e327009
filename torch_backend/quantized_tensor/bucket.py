"""`Bucket`: concatenated quantized weights, for DistributedDataParallel's broadcasts from rank 0.

    q.view(-1)                     a bucket of one weight
    cat([q.view(-1), plain, ..])   a bucket of copies of several
    broadcast(bucket)              sends their codes, scales and plain values as one byte buffer
    bucket[i:j].view(q.shape)      one whole weight again

A bucket has the length and dtype of the values but doesn't store them; all other operations raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.library import DTYPES
from ..torch_internals import NO_TORCH_FUNCTION, forbid_pointer, make_wrapper_subclass
from . import agreement
from .refusals import FLAT, FLATTENERS, refused

if TYPE_CHECKING:
    from .tensor import QuantizedTensor

aten = torch.ops.aten

Piece = Tensor
"""A whole quantized tensor, or a plain 1-D tensor."""


class Bucket(Tensor):
    """The concatenation of whole quantized tensors and plain 1-D tensors (`pieces`)."""

    pieces: tuple[Piece, ...]

    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, pieces: Sequence[Piece]):
        length = sum(piece.numel() for piece in pieces)
        return make_wrapper_subclass(cls, (length,), dtype=pieces[0].dtype, device=pieces[0].device)

    def __init__(self, pieces: Sequence[Piece]):
        self.pieces = tuple(pieces)
        forbid_pointer(self)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Bucket({', '.join(map(repr, self.pieces))})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        handler = _TABLE.get(func)
        if handler is None:
            raise refused(func, "weights laid end to end have no values", FLAT, FLATTENERS)
        return handler(*args, **(kwargs or {}))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Bucket:
    if any(tensor.ndim != 1 for tensor in tensors):
        raise refused(aten.cat.default, "blocks don't cross tensors", FLAT, FLATTENERS)
    pieces = [piece for tensor in tensors for piece in (tensor.pieces if isinstance(tensor, Bucket) else (tensor,))]
    return Bucket([piece.detach().clone() for piece in pieces])


def _view(bucket: Bucket, shape: Sequence[int]) -> Tensor:
    (piece, *more) = bucket.pieces
    if tuple(shape) in ((-1,), tuple(bucket.shape)):
        return bucket
    if more or tuple(shape) != tuple(piece.shape):
        raise refused(
            aten.view.default, f"these are weights of shape {[tuple(p.shape) for p in bucket.pieces]}", FLAT, FLATTENERS
        )
    # Autograd rejects a view that is its own base, and a bucket of one weight holds that weight.
    return piece.detach()


def _slice(bucket: Bucket, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    first, last, _ = slice(start, end).indices(bucket.shape[0])
    ends = list(accumulate(piece.numel() for piece in bucket.pieces))
    spans = zip([0, *ends], ends, bucket.pieces, strict=False)
    inside = [piece for begin, stop, piece in spans if first <= begin < stop <= last]
    if step != 1 or not inside or sum(piece.numel() for piece in inside) != last - first:
        raise refused(aten.slice.Tensor, f"elements {first} .. {last} are not whole weights", FLAT, FLATTENERS)
    return inside[0] if len(inside) == 1 and inside[0].ndim == 1 else Bucket(inside)


def _broadcast(tensors: Sequence[Tensor], group: Any, root: int, root_tensor: int, *options: Any, **more: Any) -> Any:
    """Broadcasts codes, scales, plain values, and the original values that rank `root` keeps for masters.

    Raises ValueError if ranks hold different kinds of weights, which would misread the codes.
    """

    def send(parts: Sequence[Tensor]) -> Any:
        sent = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        _, work = torch.ops.c10d.broadcast_.default([sent], group, root, root_tensor, *options, **more)
        work.wait()
        for part, received in zip(parts, sent.split([part.nbytes for part in parts]), strict=True):
            # Clone first: a slice of the byte buffer may be misaligned for the dtype.
            part.copy_(received.clone().view(part.dtype).view(part.shape))
        return work

    pieces = [piece for tensor in tensors for piece in (tensor.pieces if isinstance(tensor, Bucket) else (tensor,))]
    weights: list[Any] = [piece for piece in pieces if hasattr(piece, "codes")]
    together = {f"weight {i} of the {len(weights)} in a bucket": agreement.kind_of(q) for i, q in enumerate(weights)}
    remedy = (
        "DistributedDataParallel sends weights that are alike on all ranks; convert the model with the same recipe everywhere"
    )
    if agreement.agree([dist.ProcessGroup.unbox(group)], together, tensors[0].device, remedy):
        raise ValueError(f"ranks have other numbers of quantized weights in one bucket: {remedy}")
    held = [0 if q.initial is None else 1 + DTYPES.index(q.initial.dtype) for q in weights]
    kinds = torch.tensor(held, dtype=torch.uint8, device=tensors[0].device)
    send([kinds])
    originals = []
    for q, kind in zip(weights, kinds.tolist(), strict=True):
        if kind:
            values = torch.empty(q.shape, dtype=DTYPES[kind - 1], device=q.device)
            originals.append((q, values if q.initial is None else values.copy_(q.initial)))
    parts = [part for q in weights for part in q.parts]
    plain = [piece for piece in pieces if not hasattr(piece, "codes")]
    work = send([*parts, *plain, *(values for _, values in originals)])
    for q in weights:
        q.initial = None
        q.geometry.loaded = "codes"
    for q, values in originals:
        q.initial = values.to("cpu", copy=True)
    return list(tensors), work


def flat(q: QuantizedTensor) -> Bucket:
    """Returns a quantized tensor as a bucket of one."""
    return Bucket([q])


_TABLE: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda bucket: bucket,
    aten.alias.default: lambda bucket: bucket,
    aten.clone.default: lambda bucket, **_: Bucket([piece.clone() for piece in bucket.pieces]),
    aten.cat.default: _cat,
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
}

if dist.is_available():
    _TABLE[torch.ops.c10d.broadcast_.default] = _broadcast

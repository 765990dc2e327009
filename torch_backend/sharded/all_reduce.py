"""Sums over ranks whose terms and totals travel as codes, defined in `sharding.reducing`; also as DDP's communication hook.

x of each rank [rows, columns]   quantized whole, sent all-to-all by rows
this rank's rows of the sum      terms added in rank order in fp32, rounded to x's dtype, quantized again
the sum on every rank            codes of all ranks gathered: every rank has the same bits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.definition.layout import DTYPES
from blockfp.definition.rounding import Key, fold_in, key_words
from blockfp.formats import Format
from blockfp.sharding.reducing import SentPart, check_reduce_format, sent_layout, term_keys

from ..ops.library import name_of
from .reduce_scatter import _CountedReductions, read_terms, sum_in_order, write_terms

Keys = Sequence[Tensor | None]


def all_reduce(x: Tensor, format: Format | str, *, group: dist.ProcessGroup | None = None, key: Key | None = None) -> Tensor:
    """Sums x over ranks, with terms and totals sent as codes: about half of bfloat16's bytes, twice. Collective.

    Every rank gets the same bits, those of `blockfp.jax.all_reduce`. An Inf becomes NaN. The result has no gradient.

    Args:
        x: float32, float16 or bfloat16 [rows, columns], of the same shape and dtype on all ranks.
        format: a format with blocks of one row and one level of scales.
        group: the ranks; all by default.
        key: of stochastic rounding, the same on all ranks, each of which draws its own bits; None rounds to nearest even.

    Raises:
        TypeError, ValueError: x has another number of axes or dtype, is a DTensor or requires a gradient; or rows of the format
            share scales.
    """
    format = check_reduce_format(format, "format")
    if not isinstance(x, Tensor) or name_of(x.dtype) not in DTYPES:
        raise TypeError(f"x must be a tensor of {', '.join(DTYPES)}, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 2 or type(x) not in (Tensor, nn.Parameter):
        raise ValueError(f"x must be a plain tensor [rows, columns], got {type(x).__name__} of shape {tuple(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x requires a gradient, which all_reduce doesn't have: pass x.detach()")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    keys: tuple[Keys, Keys] = ([None], [None])
    if key is not None:
        words = key_words(key)
        first, second = int(words[0]) & 0xFFFFFFFF, int(words[1]) & 0xFFFFFFFF
        keys = ([_on(x, fold_in((first, second), rank))], [_on(x, fold_in(fold_in((first, second), ranks), rank))])
    (total,) = sum_together([x], format, group, keys)
    return total


def _on(x: Tensor, words: Any) -> Tensor:
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32)).to(x.device)


def sum_together(
    xs: Sequence[Tensor],
    format: Format,
    group: dist.ProcessGroup | None,
    keys: tuple[Keys, Keys],
    *,
    factor: float = 1.0,
    errors: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> list[Tensor]:
    """Returns the sums of several tensors of one dtype times `factor`; two collectives in all.

    Tensors with one axis, such as gradients of biases, are sent as values. `keys` are those of terms and of totals. `errors`
    are each tensor's (what its term lacked so far, what its total lacked on this rank's rows), float32; they are added, and
    overwritten with what is lost now.
    """
    ranks = dist.get_world_size(group)
    layout = sent_layout(format, tuple(tuple(x.shape) for x in xs), ranks, xs[0].element_size())
    sent = xs[0].new_empty((ranks, layout.size), dtype=torch.uint8)
    for i, (x, part, key) in enumerate(zip(xs, layout.parts, keys[0], strict=True)):
        term = _parted(x, part, ranks)
        if errors is not None:
            wanted = term.float().add_(errors[i][0])
            term = wanted.to(x.dtype)
        write_terms(sent, term, part, format, key)
        if errors is not None:
            errors[i][0].copy_(wanted.sub_(read_terms(sent, part, format, x.dtype).view(wanted.shape)))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    own = sent[:1]
    for i, (x, part, key) in enumerate(zip(xs, layout.parts, keys[1], strict=True)):
        total = sum_in_order(read_terms(received, part, format, x.dtype)).view(1, -1)
        total = total if factor == 1 else total.mul_(factor)
        if errors is not None:
            wanted = total.add_(errors[i][1])
            total = wanted.clone()
        write_terms(own, total.to(x.dtype), part, format, key)
        if errors is not None:
            errors[i][1].copy_(wanted.sub_(read_terms(own, part, format, x.dtype).view(wanted.shape)))
    dist.all_gather(list(received), own[0].clone(), group=group)
    totals = [read_terms(received, part, format, x.dtype) for x, part in zip(xs, layout.parts, strict=True)]
    return [total.flatten()[: x.numel()].view(x.shape).to(x.dtype) for x, total in zip(xs, totals, strict=True)]


def _parted(x: Tensor, part: SentPart, ranks: int) -> Tensor:
    """Returns a copy of x as the message's [ranks, rows * columns], padded with zeros."""
    parts = x.new_zeros(ranks * part.rows * part.columns)
    parts[: x.numel()].copy_(x.detach().reshape(-1))
    return parts.view(ranks, -1)


# ---- DDP


class QuantizedAllReduce(_CountedReductions):
    """The communication hook of `quantize_all_reduce`."""

    def __init__(self, model: nn.Module, format: Format, key: tuple[int, int] | None, group: Any):
        self._group = group
        self._numbers: dict[Tensor, int] = {param: i for i, param in enumerate(model.parameters())}
        super().__init__(format, key, len(self._numbers))

    def reduce(self, buffer: Tensor, gradients: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
        """Overwrites the gradients, views of DDP's buffer, with their mean over ranks."""
        ranks, rank = self._group.size(), self._group.rank()
        if ranks == 1:
            return buffer
        numbers = [self._numbers[param] for param in params]
        counts = np.array([self.reductions[number] for number in numbers])
        for number in numbers:
            self.reductions[number] += 1
        keys: tuple[Keys, Keys] = ([None] * len(numbers), [None] * len(numbers))
        if self.key is not None:
            # Ranks of terms are 0 .. ranks - 1; the totals' come after them.
            first, second = (
                torch.from_numpy(term_keys(self.key, numbers, counts, place)).to(buffer.device)
                for place in (rank, ranks + rank)
            )
            keys = (list(first), list(second))
        # A tensor without axes goes as a vector.
        flat = [gradient if gradient.ndim else gradient.view(1) for gradient in gradients]
        for gradient, total in zip(flat, sum_together(flat, self.format, self._group, keys, factor=1 / ranks), strict=True):
            gradient.copy_(total)
        return buffer


def _hook(state, bucket):  # DDP compares annotations, which must not be strings here
    buffer = bucket.buffer()
    done: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(state.reduce(buffer, bucket.gradients(), bucket.parameters()))
    return done


def quantize_all_reduce(
    model: nn.parallel.DistributedDataParallel, format: Format | str = "mxfp8_e5m2", *, key: Key | None = 0
) -> QuantizedAllReduce:
    """Makes DDP average a model's gradients as codes and scales; call it once, before the first forward.

    Each rank's gradient is rounded once to the format, the terms are added in fp32 in rank order and divided by the number of
    ranks, and the mean is rounded once more and gathered. Gradients with fewer than two axes are sent uncompressed and added in
    the same way. An Inf becomes NaN. Every rank gets the same bits, whatever DDP's buckets.

    Args:
        model: a `DistributedDataParallel`.
        format: with blocks of one row and one level of scales.
        key: key of stochastic rounding, whose mean error is zero; pass the same on all ranks. None rounds to nearest even.

    Returns:
        The hook's state. Save its `state_dict` in checkpoints to resume with the same random bits.

    Raises:
        TypeError, ValueError: model is not DDP's, the key is bad, or rows of the format share scales.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(f"model must be a DistributedDataParallel, got {type(model).__name__}")
    found, words = check_reduce_format(format, "format"), None
    if key is not None:
        first, second = key_words(key)
        words = int(first) & 0xFFFFFFFF, int(second) & 0xFFFFFFFF
    state = QuantizedAllReduce(model.module, found, words, model.process_group)
    model.register_comm_hook(state, _hook)
    return state

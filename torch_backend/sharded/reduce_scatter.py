"""FSDP2's reduce-scatter of gradients as codes, defined in `sharding.reducing`.

    FSDP2's buffer [ranks, ..]            for each rank, its rows of every parameter's gradient, one parameter after another
      | quantize each gradient at once: [ranks, rows, columns], with blocks and random bits as if unsharded
      v
    one all-to-all of bytes               codes and scales; 1-D gradients uncompressed
      | dequantize, add in rank order in fp32, divide by the number of ranks
      v
    FSDP2's output [..]                   rounded once to its dtype

FSDP2 passes only the buffer; its calling frame tells which gradients are in it (`distributed_internals.reduced_together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.definition.layout import packed_columns
from blockfp.definition.rounding import Key, key_words
from blockfp.formats import Format, FormatName
from blockfp.kernels import switch
from blockfp.sharding.reducing import SentPart, check_reduce_format, sent_layout, term_keys

from ..distributed_internals import Reduced, fsdp_name, fsdp_params, fsdp_places, reduced_together, shard_dim
from ..ops.dequantize_plans import dequantize_parts
from ..ops.kernels import kernels_for
from ..torch_internals import frame_above
from ..torch_internals import functional_collectives as collectives

_AT_ONCE = 64
"""Keys are created for this many reductions at once; a single one costs as much, plus a copy to the device."""


class _CountedReductions:
    """Reductions of a model's gradients as codes, counted.

    Attributes:
        format: format in which gradients are sent.
        key: two words for stochastic rounding, or None.
        reductions: number of reductions of each gradient so far, in the order of `model.parameters()`; folded into the key.
            `state_dict` saves it, so that a resumed run draws the same random bits.
    """

    def __init__(self, format: Format, key: tuple[int, int] | None, parameters: int):
        self.format, self.key, self.reductions = format, key, [0] * parameters

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the number of reductions of each parameter's gradient: {"reductions": int64 [parameters]}."""
        return {"reductions": torch.tensor(self.reductions, dtype=torch.int64, device="cpu")}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Restores a `state_dict` of a model with the same number of parameters."""
        found = state_dict["reductions"].tolist()
        if len(found) != len(self.reductions):
            raise ValueError(
                f"state_dict counts the reductions of {len(found)} parameters, and the model has {len(self.reductions)}"
            )
        self.reductions = found


class QuantizedReduceScatter(_CountedReductions):
    """The reduce-scatter that FSDP2 calls after `quantize_reduce_scatter`."""

    def __init__(self, model: nn.Module, format: Format, key: tuple[int, int] | None):
        numbers: dict[int, int] = {}
        self._numbers: dict[tuple[nn.Module, str], int] = {}
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                self._numbers[module, name] = numbers.setdefault(id(param), len(numbers))
        super().__init__(format, key, len(numbers))
        # Keys of coming reductions, int32 [_AT_ONCE, parameters, 2], by the parameters reduced together.
        self._tables: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the buffers of FSDP2's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Writes this rank's part of the ranks' sum or mean; overwrites each Inf in its own input with NaN."""
        reduced = _reduced(frame_above(1))
        if async_op:
            raise ValueError("async_op = True: a quantized reduce-scatter is finished when it returns")
        ranks = group.size()
        factor = _factor(op, ranks, reduced.divisor)
        if ranks == 1:
            output_tensor.copy_(input_tensor if factor == 1 else input_tensor * factor)
            return
        layout = sent_layout(self.format, reduced.shapes, ranks, input_tensor.element_size())
        keys = self._keys(reduced, group, input_tensor.device)
        given = input_tensor.view(ranks, -1)
        sent = torch.empty((ranks, layout.size), dtype=torch.uint8, device=given.device)
        for values, part, key in zip(_split(given, layout.parts), layout.parts, keys, strict=True):
            write_terms(sent, values, part, self.format, key)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        del sent
        for own, part in zip(_split(output_tensor.view(1, -1), layout.parts), layout.parts, strict=True):
            total = sum_in_order(read_terms(received, part, self.format, input_tensor.dtype))
            own.copy_((total if factor == 1 else total.mul_(factor)).view(own.shape))

    def _keys(self, reduced: Reduced, group: dist.ProcessGroup, device: torch.device) -> Sequence[Tensor | None]:
        """Returns the key of each parameter's gradient, and counts the reduction."""
        numbers = tuple(self._number(param) for param in reduced.params)
        counts = [self.reductions[number] for number in numbers]
        for number in set(numbers):
            self.reductions[number] += 1
        if self.key is None:
            return [None] * len(numbers)
        rank = group.rank()
        if reduced.replicas is not None:
            rank += reduced.replicas.rank() * group.size()
        firsts = [count // _AT_ONCE for count in counts]
        made = self._tables.get(numbers)
        if made is None or made[0] != firsts:
            reductions = np.array(firsts) * _AT_ONCE + np.arange(_AT_ONCE)[:, None]
            table = torch.from_numpy(term_keys(self.key, numbers, reductions, rank))
            # So small a copy is staged at once; the host doesn't wait.
            made = switch.kept(self._tables, numbers, (firsts, table.to(device, non_blocking=True)))
        return [made[1][count % _AT_ONCE, i] for i, count in enumerate(counts)]

    def _number(self, param: Any) -> int:
        number = self._numbers.get(fsdp_places(param)[0])
        if number is None:
            raise RuntimeError(
                f"parameter {fsdp_name(param)!r} came after quantize_reduce_scatter(model): call it on the finished model"
            )
        return number


def write_terms(sent: Tensor, values: Tensor, part: SentPart, format: Format, key: Tensor | None) -> None:
    """Writes one gradient's codes and scales as bytes, [ranks, elements]."""
    ranks = len(sent)
    if part.scales is None:
        sent[:, part.codes : part.end].copy_(values.view(torch.uint8))
        return
    if not values.numel():
        return
    matrices = values.view(ranks, part.rows, part.columns)
    # Codes saturate Inf; NaN survives, so that a loss scaler detects it.
    torch.nan_to_num_(matrices, nan=torch.nan, posinf=torch.nan, neginf=torch.nan)
    codes, scales, _ = kernels_for(matrices).quantize(matrices, format, key=key)
    for place, stored in ((part.codes, codes), (part.scales, scales)):
        content = stored.reshape(ranks, -1).view(torch.uint8)
        sent[:, place : place + content.shape[1]].copy_(content)


def read_terms(received: Tensor, part: SentPart, format: Format, dtype: torch.dtype) -> Tensor:
    """Returns all ranks' terms of one gradient, float32 [ranks, rows, columns]."""
    shape = (len(received), part.rows, part.columns)
    if part.scales is None:
        return received[:, part.codes : part.end].contiguous().view(dtype).view(shape).to(torch.float32, copy=True)
    if not part.rows * part.columns:
        return torch.empty(shape, dtype=torch.float32, device=received.device)
    # Bytes between codes and scales are alignment padding.
    size = part.rows * packed_columns(part.columns, format.element.bits)
    codes = received[:, part.codes : part.codes + size].reshape(*shape[:2], -1)
    scales = received[:, part.scales : part.end].contiguous().view(getattr(torch, format.scale.dtype))
    return dequantize_parts((codes, scales.view(*shape[:2], -1)), format, torch.float32, part.columns)


def sum_in_order(terms: Tensor) -> Tensor:
    """Returns the sum of the ranks' terms in rank order; overwrites the first."""
    total = terms[0]
    for term in terms[1:]:
        total.add_(term)
    return total


def quantize_reduce_scatter(
    model: nn.Module, format: Format | FormatName = "mxfp8_e5m2", *, key: Key | None = 0
) -> QuantizedReduceScatter:
    """Makes FSDP2 reduce-scatter a model's gradients as codes and scales: about half the bytes of bfloat16.

    Each rank's unsharded gradient is rounded once to the format. Terms are added in fp32 in rank order, divided as FSDP2
    divides, and rounded once to its `reduce_dtype`. 1-D gradients, such as those for biases and norms, are sent uncompressed
    and added in the same way. An Inf becomes NaN.

    With replicas (HSDP), FSDP2 adds their sums by its own all-reduce in `reduce_dtype`. On one rank nothing is sent or rounded.

    Args:
        model: a model to which `fully_shard` was applied; all FSDP2 modules in it are changed.
        format: with blocks of one row and one level of scales.
        key: key of stochastic rounding, whose mean error is zero; pass the same on all ranks, each draws its own bits. None
            rounds to nearest even.

    Returns:
        The object that FSDP2 calls from now on. Save its `state_dict` in checkpoints to resume with the same random bits.

    Raises:
        ValueError: rows of the format share scales, the key is bad, the model has no FSDP2 module, or a parameter is sharded
            along another axis than 0.

    Example:
        fully_shard(model)
        quantize_reduce_scatter(model, "mxfp8_e5m2")
    """
    found, words = check_reduce_format(format, "format"), None
    if key is not None:
        first, second = key_words(key)
        words = int(first) & 0xFFFFFFFF, int(second) & 0xFFFFFFFF
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"model {type(model).__name__} holds no module of FSDP2: call fully_shard on it first")
    for module in modules:
        groups = fsdp_params(module)
        if len(groups) > 1:
            raise ValueError(
                f"model: the parameters of {type(module).__name__} are on several meshes, and FSDP2 takes one reduce-scatter "
                "for them: give fully_shard one mesh a module"
            )
        for param in groups[0] if groups else []:
            if shard_dim(param) != 0:
                raise ValueError(
                    f"model: parameter {fsdp_name(param)!r} is sharded along axis {shard_dim(param)}, but gradients "
                    "travel as codes only along axis 0: remove shard_placement_fn"
                )
    # FSDP2 needs the methods of torch's base class, which has no public name.
    reduce_scatter: Any = QuantizedReduceScatter(model, found, words)
    for module in modules:
        module.set_custom_reduce_scatter(reduce_scatter)
    return reduce_scatter


def _reduced(frame: FrameType) -> Reduced:
    reduced = reduced_together(frame)
    if reduced is None:
        raise RuntimeError("only FSDP2 may call a QuantizedReduceScatter, because only it knows which gradients a buffer holds")
    return reduced


def _factor(op: Any, ranks: int, divisor: float | None) -> float:
    """Returns the factor by which the sum is multiplied."""
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM and divisor is not None:
        return 1 / divisor
    raise ValueError(f"op must be SUM, AVG or PREMUL_SUM, got {op}")


def _split(buffer: Tensor, parts: Sequence[SentPart]) -> Sequence[Tensor]:
    """Returns each gradient's part of FSDP2's buffer [.., elements]."""
    return buffer.split([part.rows * part.columns for part in parts], 1)


# ---- a fixed order of sums


class TreeSum:
    """A pairwise fp32 sum of successive terms; it keeps one partial sum for each power of two."""

    def __init__(self):
        self._partial: list[tuple[int, Tensor]] = []

    def add(self, term: Tensor, *, owned: bool = False) -> None:
        """Adds the next term, of any float dtype; it is written to only if `owned`."""
        count = 1
        if term.dtype is not torch.float32:
            term, owned = term.float(), True
        while self._partial and self._partial[-1][0] == count:
            count, term, owned = 2 * count, self._partial.pop()[1].add_(term), True
        self._partial.append((count, term if owned else term.clone()))

    def total(self) -> Tensor:
        """Returns the sum of all terms (at least one) and resets."""
        _, total = self._partial.pop()
        while self._partial:
            total = self._partial.pop()[1].add_(total)
        return total


def tree_sum(terms: Tensor) -> Tensor:
    """Returns the sum over the first axis, float32; overwrites float32 terms."""
    tree = TreeSum()
    for term in terms:
        tree.add(term, owned=True)
    return tree.total()


def tree_reduce(terms: Tensor, group: str, ranks: int, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the ranks' float32 terms, added in rank order and rounded once to `dtype`, on every rank.

    Each rank sums its share of the elements; the shares are gathered in the result's dtype.
    """
    if ranks == 1:
        return terms.to(dtype)
    share = -(-terms.numel() // ranks)
    sent = torch.nn.functional.pad(terms.flatten(), (0, share * ranks - terms.numel())).view(ranks, share)
    ones = [1] * ranks
    received = collectives.wait_tensor(collectives.all_to_all_single(sent, ones, ones, group))
    own = tree_sum(received).to(dtype)
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(own, ranks, group))
    return whole.flatten()[: terms.numel()].view(terms.shape)

"""FSDP2's reduce-scatter of gradients as codes: what `sharding.reducing` says, with PyTorch's collectives.

    FSDP2's buffer [ranks, ..]            of each rank, its rows of every parameter's gradient, one parameter after another
      | quantize, each gradient in one go: [ranks, rows, columns] has the blocks and the random bits of the unsharded one
      v
    one all-to-all of bytes               codes and scales; gradients of one axis as they are
      | dequantize, add in the order of the ranks in fp32, multiply by one over the number of ranks
      v
    what FSDP2 wants [..]                 rounded once to its dtype

FSDP2 tells nothing but the buffer: its frame knows what lies in it (`torch_internals.reduced_together`).
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
from blockfp.formats import Format
from blockfp.sharding.reducing import SentPart, check_reduce_format, sent_layout, term_keys

from ..custom_ops.dequantize_plans import dequantize_parts
from ..custom_ops.kernels import kernels_for
from ..custom_ops.quantize_plans import kept
from ..torch_internals import Reduced, frame_above, fsdp_name, fsdp_params, fsdp_place, reduced_together, shard_dim
from ..torch_internals import functional_collectives as collectives

_AT_ONCE = 64
"""Keys of so many reductions are made at once: those of one cost as much, and a copy to the device."""


class QuantizedReduceScatter:
    """The reduce-scatter that FSDP2 calls for a model, once `quantize_reduce_scatter` has set it.

    Attributes:
        format: in which gradients travel.
        key: the two words of stochastic rounding's, or None.
        reductions: how often the gradient of each parameter was reduced, in the order of `model.parameters()`; folded into
            the key. `state_dict` has it, for a run that goes on with the random bits it would have had.
    """

    def __init__(self, model: nn.Module, format: Format, key: tuple[int, int] | None):
        self.format = format
        self.key = key
        numbers: dict[int, int] = {}
        self._numbers: dict[tuple[nn.Module, str], int] = {}
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                self._numbers[module, name] = numbers.setdefault(id(param), len(numbers))
        self.reductions = [0] * len(numbers)
        # The keys of reductions to come, int32 [_AT_ONCE, parameters, 2], of the parameters that are reduced together.
        self._tables: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns how often the gradient of each parameter was reduced: {"reductions": int64 [parameters]}."""
        return {"reductions": torch.tensor(self.reductions, dtype=torch.int64, device="cpu")}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Continues from a `state_dict` of a model with as many parameters."""
        found = state_dict["reductions"].tolist()
        if len(found) != len(self.reductions):
            raise ValueError(
                f"state_dict counts the reductions of {len(found)} parameters, and the model has {len(self.reductions)}"
            )
        self.reductions = found

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the buffers of FSDP2's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Writes this rank's part of the sum, or the mean, of all ranks' buffers; overwrites an Inf of its own with NaN."""
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
            self._write(sent, values, part, key)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        del sent
        for own, part in zip(_split(output_tensor.view(1, -1), layout.parts), layout.parts, strict=True):
            terms = self._read(received, part, input_tensor.dtype)
            total = terms[0]
            for term in terms[1:]:
                total.add_(term)
            own.copy_((total if factor == 1 else total.mul_(factor)).view(own.shape))

    def _write(self, sent: Tensor, values: Tensor, part: SentPart, key: Tensor | None) -> None:
        """Writes the bytes of one gradient's parts, [ranks, elements]."""
        ranks = len(sent)
        if part.scales is None:
            sent[:, part.codes : part.end].copy_(values.view(torch.uint8))
            return
        if not values.numel():
            return
        matrices = values.view(ranks, part.rows, part.columns)
        # Codes saturate an Inf, which a loss scaler is to see.
        torch.nan_to_num_(matrices, nan=torch.nan, posinf=torch.nan, neginf=torch.nan)
        codes, scales, _ = kernels_for(matrices).quantize(matrices, self.format, key=key)
        for place, stored in ((part.codes, codes), (part.scales, scales)):
            content = stored.reshape(ranks, -1).view(torch.uint8)
            sent[:, place : place + content.shape[1]].copy_(content)

    def _read(self, received: Tensor, part: SentPart, dtype: torch.dtype) -> Tensor:
        """The terms that all ranks have sent of one gradient, float32 [ranks, rows, columns]."""
        shape = (len(received), part.rows, part.columns)
        if part.scales is None:
            return received[:, part.codes : part.end].contiguous().view(dtype).view(shape).to(torch.float32, copy=True)
        if not part.rows * part.columns:
            return torch.empty(shape, dtype=torch.float32, device=received.device)
        # What lies between the codes and their scales is there for alignment.
        size = part.rows * packed_columns(part.columns, self.format.element.bits)
        codes = received[:, part.codes : part.codes + size].reshape(*shape[:2], -1)
        scales = received[:, part.scales : part.end].contiguous().view(getattr(torch, self.format.scale.dtype))
        return dequantize_parts((codes, scales.view(*shape[:2], -1)), self.format, torch.float32, part.columns)

    def _keys(self, reduced: Reduced, group: dist.ProcessGroup, device: torch.device) -> Sequence[Tensor | None]:
        """The keys of these parameters, one after another."""
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
            # The host waits for nothing: the copy of so few bytes is taken at once.
            made = kept(self._tables, numbers, (firsts, table.to(device, non_blocking=True)))
        return [made[1][count % _AT_ONCE, i] for i, count in enumerate(counts)]

    def _number(self, param: Any) -> int:
        number = self._numbers.get(fsdp_place(param))
        if number is None:
            raise RuntimeError(
                f"parameter {fsdp_name(param)!r} came after quantize_reduce_scatter(model): call it on the finished model"
            )
        return number


def quantize_reduce_scatter(
    model: nn.Module, format: Format | str = "mxfp8_e5m2", *, key: Key | None = 0
) -> QuantizedReduceScatter:
    """Lets FSDP2 reduce-scatter a model's gradients as codes and scales: about half of the bytes of bfloat16.

    Each rank's unsharded gradient is rounded once to the format. Terms are added in fp32, in the order of the ranks, divided
    as FSDP2 divides, and rounded once to its `reduce_dtype`. Gradients of one axis, such as those of biases and norms, travel
    as they are, and are added in the same way. An Inf becomes NaN.

    Where FSDP2 has replicas too (HSDP), it adds up their sums itself, as ever: in `reduce_dtype`, by its own all-reduce.
    On one rank nothing is sent, and nothing is rounded.

    Args:
        model: a model to which `fully_shard` was applied; all modules in it that FSDP2 shards change.
        format: in blocks of one row, with one level of scales.
        key: of stochastic rounding, which errs by zero in the mean; equal on all ranks, which draw bits of their own. None
            rounds to nearest even.

    Returns:
        What FSDP2 calls from now on. Its `state_dict` belongs in a checkpoint of a run that is to go on with the same random
        bits.

    Raises:
        ValueError: a format whose rows share scales, a bad key, a model without FSDP2, or a parameter cut along another axis
            than 0.

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
                    f"model: parameter {fsdp_name(param)!r} is cut along axis {shard_dim(param)}; gradients that are cut along "
                    "axis 0 travel as codes, so leave shard_placement_fn out"
                )
    # FSDP2 asks for the methods of torch's base class, which has no public name.
    reduce_scatter: Any = QuantizedReduceScatter(model, found, words)
    for module in modules:
        module.set_custom_reduce_scatter(reduce_scatter)
    return reduce_scatter


def _reduced(frame: FrameType) -> Reduced:
    reduced = reduced_together(frame)
    if reduced is None:
        raise RuntimeError("a QuantizedReduceScatter is called by FSDP2 alone: only that tells which gradients a buffer holds")
    return reduced


def _factor(op: Any, ranks: int, divisor: float | None) -> float:
    """The factor that the sum is multiplied with."""
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM and divisor is not None:
        return 1 / divisor
    raise ValueError(f"op must be SUM, AVG or PREMUL_SUM, got {op}")


def _split(buffer: Tensor, parts: Sequence[SentPart]) -> Sequence[Tensor]:
    """The part of each gradient in FSDP2's buffer [.., elements]."""
    return buffer.split([part.rows * part.columns for part in parts], 1)


# ---- a fixed order of sums


class TreeSum:
    """A sum of terms that come one after another, in fp32; it keeps a partial sum for each power of two."""

    def __init__(self):
        self._partial: list[tuple[int, Tensor]] = []

    def add(self, term: Tensor, *, owned: bool = False) -> None:
        """Adds the next term.

        Args:
            term: of any float dtype; left as it is, unless it is owned.
            owned: whether it may be kept and written to.
        """
        count = 1
        if term.dtype is not torch.float32:
            term, owned = term.float(), True
        while self._partial and self._partial[-1][0] == count:
            count, term, owned = 2 * count, self._partial.pop()[1].add_(term), True
        self._partial.append((count, term if owned else term.clone()))

    def total(self) -> Tensor:
        """Returns the sum of all terms, at least one, and begins anew."""
        _, total = self._partial.pop()
        while self._partial:
            total = self._partial.pop()[1].add_(total)
        return total


def tree_sum(terms: Tensor) -> Tensor:
    """Returns the sum over the first axis, float32; a float32 tensor of terms is written over."""
    tree = TreeSum()
    for term in terms:
        tree.add(term, owned=True)
    return tree.total()


def tree_reduce(terms: Tensor, group: str, ranks: int, dtype: torch.dtype) -> Tensor:
    """Sums the ranks' terms, float32, in the order of the ranks, and rounds once to a dtype; every rank gets all of it.

    Each rank adds its share of the elements up, and the shares are gathered in the result's dtype.
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

"""`Route`: where each row of a rank's tokens goes, and where it stands when it has arrived (`blockfp.sharding.dispatching`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels.operand_cast import operand_cast
from blockfp.recipes import Cast
from blockfp.sharding.dispatching import chunk_of

from ..ops.collectives import max_reduce
from ..ops.quantize import part_ops
from ..ops.quantize.operand_ops import quantize_operand
from ..quantized_tensor.tensor import QuantizedTensor
from ..torch_internals import assert_on_device
from ..torch_internals import functional_collectives as collectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share experts.

    Attributes:
        name: of the process group; None for one rank.
        ranks: how many.
        rank: this rank's number.
    """

    name: str | None = None
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None) -> Group:
        """Makes it of torch's group, or of a mesh of one axis.

        Raises:
            TypeError: it is neither.
            ValueError: a mesh of more axes, or a group that this rank is not in.
        """
        if group is None:
            return cls()
        if dist.is_available():
            from torch.distributed.device_mesh import DeviceMesh

            if isinstance(group, DeviceMesh):
                if group.ndim != 1:
                    raise ValueError(f"group must be a mesh of one axis, got {group}: take one by its name, such as mesh['ep']")
                return cls(group.get_group().group_name, group.size(), group.get_local_rank())
            if isinstance(group, dist.ProcessGroup):
                rank = dist.get_rank(group)
                if rank < 0:
                    raise ValueError(f"group: this rank, {dist.get_rank()}, is not in it")
                return cls(group.group_name, group.size(), rank)
        raise TypeError(f"group must be a process group, a mesh of one axis, or None, got {type(group).__name__}")


@dataclass(frozen=True, eq=False)
class Route:
    """The way of a rank's rows to the experts, and back.

    Attributes:
        group: the ranks that share the experts.
        experts: how many there are on all ranks.
        tokens, k: how many tokens this rank has, and to how many experts each goes.
        slots: int64 [tokens * k], the slot of each row that is sent (`dispatching.sending`).
        sent, came: how many rows go to each rank, and come from each.
        arrival: int64 [rows], which of the rows that came stands at each place; None where they stand as they came.
        offs: int32 [own experts], the end of each one's rows.
        counts: how many rows each has; None where the host doesn't know.
    """

    group: Group
    experts: int
    tokens: int
    k: int
    slots: Tensor
    sent: list[int]
    came: list[int]
    arrival: Tensor | None
    offs: Tensor
    counts: list[int] | None

    @property
    def first(self) -> int:
        """Number of this rank's first expert."""
        return min(self.group.rank * chunk_of(self.experts, self.group.ranks), self.experts)

    def token_of(self) -> Tensor:
        """The token of each row that is sent."""
        return self.slots // max(self.k, 1)

    def there(self, rows: Tensor) -> Tensor:
        """Moves rows [tokens * k, columns], in the order of `slots`, to the experts' ranks, and sorts them by expert there."""
        came = self._exchange(rows, self.sent, self.came)
        return came if self.arrival is None else came.index_select(0, self.arrival)

    def back(self, rows: Tensor) -> Tensor:
        """Moves rows, as `there` left them, back, and returns them by slot: [tokens * k, columns]."""
        if self.arrival is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.arrival, rows)
        came = self._exchange(rows, self.came, self.sent)
        return torch.empty_like(came).index_copy_(0, self.slots, came)

    def _exchange(self, rows: Tensor, sent: list[int], came: list[int]) -> Tensor:
        if self.group.name is None:
            return rows
        # Bytes: not every backend sends every dtype.
        received = collectives.wait_tensor(collectives.all_to_all_single(as_bytes(rows), came, sent, self.group.name))
        return received.view(rows.dtype) if received.numel() else rows.new_empty((sum(came), rows.shape[1]))


def route(experts: Tensor, total: int, group: Group) -> Route:
    """Works out the way of tokens to their experts.

    Ranks tell each other how many rows go to each expert, and the host waits for these numbers: collectives take sizes from it.
    On one rank there is nothing to tell, and no waiting.

    Args:
        experts: int64 [tokens, k].
        total: how many experts there are.
        group: the ranks that share them.

    Raises:
        ValueError: a number of an expert that isn't there; on one GPU alone the device says so instead.
    """
    tokens, k = experts.shape
    flat, slots = experts.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(total, device=flat.device), right=True)
    if group.name is None:
        if flat.is_cpu:
            _check(not len(flat) or (int(flat[0]) >= 0 and int(flat[-1]) < total), total)
        elif len(flat):
            assert_on_device((flat[0] >= 0) & (flat[-1] < total))
        return Route(group, total, tokens, k, slots, [], [], None, ends.int(), None)
    chunk = chunk_of(total, group.ranks)
    counts = ends.new_zeros(group.ranks * chunk)
    counts[:total] = torch.diff(ends, prepend=ends.new_zeros(1))
    if len(flat):
        # Numbers below 0 are before the first expert's rows, and would count as its own.
        counts[0] -= (flat < 0).sum()
    each = [chunk] * group.ranks
    came = collectives.wait_tensor(collectives.all_to_all_single(counts, each, each, group.name)).view(group.ranks, chunk)
    to_host = torch.cat([counts, came.reshape(-1)]).tolist()
    sent = [sum(to_host[rank * chunk : (rank + 1) * chunk]) for rank in range(group.ranks)]
    matrix = [to_host[(group.ranks + rank) * chunk : (group.ranks + rank + 1) * chunk] for rank in range(group.ranks)]
    _check(sum(sent) == len(flat), total)
    own = max(0, min(chunk, total - group.rank * chunk))
    by_expert = [sum(row[expert] for row in matrix) for expert in range(own)]
    rows = sum(by_expert)
    numbers = torch.arange(chunk, device=flat.device).repeat(group.ranks)
    arrival = numbers.repeat_interleave(came.reshape(-1), output_size=rows).argsort(stable=True)
    offs = came.sum(0)[:own].cumsum(0, dtype=torch.int32)
    return Route(group, total, tokens, k, slots, sent, [sum(row) for row in matrix], arrival, offs, by_expert)


def _check(fits: bool, total: int) -> None:
    if not fits:
        raise ValueError(f"experts must be numbers from 0 to {total - 1}, as num_experts={total} says")


# ---- rows as codes


def quantize_rows(x: Tensor, cast: Cast, eps: float, groups: Sequence[str], key: Tensor | None = None) -> list[Tensor]:
    """Quantizes this rank's rows of a matrix whose rows all ranks of a group have together.

    Args:
        x: [rows, columns].
        cast: how; with a format.
        eps: lifts amaxes.
        groups: names of the process groups whose ranks share the scale of the whole tensor, where the format has one.
        key: of stochastic rounding, int32 [2]; the random index counts this rank's own rows.

    Returns:
        Codes, scales and maybe tensor scale.
    """
    format = cast.format
    assert format is not None
    if not groups or not format.has_tensor_scale:
        keys = None if key is None else key.repeat(2, 1)
        return quantize_operand(x, operand_cast(cast, None, eps, keyed=key is not None), keys=keys).row
    blocks, nan, tensor = part_ops.part_amaxes(x, format.name, False, False, [0, 0])
    if format.per_tensor:
        blocks = max_reduce(blocks, groups)
    else:
        tensor = max_reduce(tensor.view(1), groups).view(())
    return part_ops.quantize_part(x, [blocks, nan, tensor], key, format.name, False, False, [0, 0], list(x.shape), eps)


def joined(parts: Sequence[Tensor], format: Format) -> Tensor:
    """Lays what travels with each row into one row of bytes: its codes, and its scales where it has scales of its own."""
    codes, scales = parts[:2]
    if format.per_tensor:
        return codes
    return torch.cat([codes, as_bytes(scales)], 1)


def parted(rows: Tensor, format: Format, like: Sequence[Tensor]) -> list[Tensor]:
    """Undoes `joined`; scales of the whole tensor are those of `like`."""
    codes, scales, *tensor_scale = like
    if format.per_tensor:
        return [rows, scales]
    width = codes.shape[1]
    own = rows[:, width:].contiguous()
    own = own.view(scales.dtype) if own.numel() else scales.new_empty((len(rows), scales.shape[1]))
    return [rows[:, :width].contiguous(), own, *tensor_scale]


def as_bytes(rows: Tensor) -> Tensor:
    """Returns the bytes of a matrix, [rows, bytes]."""
    rows = rows.contiguous()
    if rows.numel():
        return rows.view(torch.uint8)
    return rows.new_empty((len(rows), rows.shape[1] * rows.itemsize), dtype=torch.uint8)


def tensor_of(parts: Sequence[Tensor], format: Format, columns: int, dtype: torch.dtype) -> QuantizedTensor:
    """Makes a quantized tensor of parts."""
    return QuantizedTensor(parts[0], parts[1], parts[2] if len(parts) > 2 else None, format, columns, dtype)

"""Exchanges results and errors between ranks, so that all ranks of a checkpoint succeed or fail together.

A BaseException such as Ctrl-C or SystemExit is raised unchanged on its own rank; the others get an error that names it.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from blockfp.sharding.placement import Shard, from_dtensor

from ..distributed_internals import unregistered_gloo
from ..quantized_tensor.sharding import as_dtensor
from ..torch_internals import functional_collectives as collectives


def rank_and_world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this rank's index in the group and the group's size; (0, 1) if torch.distributed isn't initialized."""
    return (dist.get_rank(group), dist.get_world_size(group)) if _distributed() else (0, 1)


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every rank's value, on every rank."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_first_rank(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Runs an action on the group's first rank; every rank returns its result or raises its error."""
    first = rank_and_world(group)[0] == 0
    outcome, error = _tried(action) if first else (None, None)
    ((outcome, sent), *_) = gather((outcome, _sendable(error)), group)
    raise_first([sent], error)
    return outcome


def on_every_rank(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Runs an action on every rank; each returns its own result, or all raise."""
    own, error = _tried(action)
    raise_first(gather(_sendable(error), group), error)
    return own


def raise_first(errors: list[Exception | None], own: BaseException | None) -> None:
    """Raises this rank's own error, or else the first of the other ranks'."""
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error is not None:
            error.add_note(f"(on rank {rank})")
            raise error


def _tried(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:
        return None, error


def check_alike(
    function: str, action: Callable[[], tuple[Any, Mapping[str, Any], Mapping[str, str]]], group: dist.ProcessGroup | None
) -> Any:
    """Runs an action on every rank and raises on all if one fails or their arguments differ.

    The action returns (result, settings, descriptions). Settings must be equal everywhere; descriptions only where ranks hold
    the same name, as pipeline stages hold different ones. A ValueError gives the name and both ranks' values.
    """
    outcome, error = _tried(action)
    result, settings, described = outcome or (None, {}, {})
    digest = hashlib.sha256(repr(sorted(described.items())).encode()).digest()
    everyones = gather((_sendable(error), function, dict(settings), digest), group)
    if error is None or isinstance(error, Exception):
        _refuse_differences([{"the function that was called": name} for _, name, _, _ in everyones])
    raise_first([sent for sent, _, _, _ in everyones], error)
    _refuse_differences([settings for _, _, settings, _ in everyones])
    if any(digest != other for _, _, _, other in everyones):
        _refuse_differences(gather(dict(described), group))
    return result


def _refuse_differences(everyones: list[dict[str, Any]]) -> None:
    first: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(everyones):
        for name, value in values.items():
            other, theirs = first.setdefault(name, (rank, value))
            if theirs != value:
                raise ValueError(f"{name} is {theirs} on rank {other} and {value} on rank {rank}: it must be the same on all")


def _sendable(error: BaseException | None) -> Exception | None:
    """Returns a picklable Exception with the same text."""
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = error
    return sent if sent is None or (isinstance(sent, Exception) and sent is not error) else RuntimeError(told(error))


def told(error: BaseException | None) -> str:
    """Returns an error's type and text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Exchange:
    """Gathers values on the first rank of a process group and scatters others back; one rank without torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.rank, self.world = rank_and_world(group)

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value on the first rank, [] elsewhere."""
        if not _distributed():
            return [value]
        values: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, dst=self._first(), group=self._group)
        return values or []

    def scatter(self, values: list[Any]) -> Any:
        """Returns this rank's entry of the first rank's `values`."""
        if not _distributed():
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, values if self.rank == 0 else None, src=self._first(), group=self._group)
        return own[0]

    def _first(self) -> int:
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def together(
        self,
        error: Callable[[str], Exception],
        each: Callable[[], Any],
        first: Callable[[list[Any]], list[Any]] | None = None,
    ) -> Any:
        """Runs `each` on every rank, then `first` on the first rank with all results; returns this rank's entry of its result.

        If anything fails, every rank raises `error` of all failures' text; a BaseException is raised unchanged on its own rank.
        """
        result, own = _tried(each)
        everyones = self.gather(result if own is None else _Failure(told(own)))
        given: list[Any] = []
        if self.rank == 0:
            failed = {rank: one.text for rank, one in enumerate(everyones) if isinstance(one, _Failure)}
            if not failed:
                given, own = _tried(lambda: [None] * self.world if first is None else first(everyones))
                failed = {} if own is None else {0: told(own)}
            if failed:
                ranks = {text: rank for rank, text in reversed(failed.items())}
                text = "; ".join(f"rank {rank}: {text}" for text, rank in reversed(ranks.items()))
                given = [_Failure(text)] * self.world
        outcome = self.scatter(given)
        if own is not None and not isinstance(own, Exception):
            raise own
        if isinstance(outcome, _Failure):
            raise error(outcome.text) from own
        return outcome


class _Failure:
    """Stands for a result that could not be computed."""

    def __init__(self, text: str):
        self.text = text


class _Apart(Exchange):
    """An exchange over a gloo group that torch doesn't register, so `destroy_process_group` leaves it alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__(group)
        token = on_first_rank(lambda: secrets.token_hex(8), group)
        self._gloo = unregistered_gloo(f"blockfp-{token}", self.rank, self.world)
        self._group = None  # `_apart` must not keep it alive

    def gather(self, value: Any) -> list[Any]:
        if self.rank:
            self._send(value, 0)
            return []
        return [value, *(self._receive(rank) for rank in range(1, self.world))]

    def scatter(self, values: list[Any]) -> Any:
        if self.rank:
            return self._receive(0)
        for rank in range(1, self.world):
            self._send(values[rank], rank)
        return values[0]

    def _send(self, value: Any, rank: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for part in (torch.tensor([content.numel()]), content):
            self._gloo.send([part], rank, 0).wait()

    def _receive(self, rank: int) -> Any:
        length = self._received(torch.empty(1, dtype=torch.int64, device="cpu"), rank)
        return pickle.loads(self._received(torch.empty(int(length), dtype=torch.uint8, device="cpu"), rank).numpy().tobytes())

    def _received(self, memory: Tensor, rank: int) -> Tensor:
        self._gloo.recv([memory], rank, 0).wait()
        return memory


_apart: WeakKeyDictionary[Any, Exchange] = WeakKeyDictionary()


def apart(group: dist.ProcessGroup | None) -> Exchange:
    """Returns the group's separate exchange, for use by a thread during training; one per process group."""
    if not _distributed():
        return Exchange(None)
    key = dist.group.WORLD if group is None else group
    if key not in _apart:
        _apart[key] = _Apart(group)
    return _apart[key]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


# ---- rows


Key = tuple[str, str]
"""(parameter name, part name)."""


@dataclass(frozen=True)
class Rows:
    """This rank's rows (`read`) of a tensor that `ranks` ranks of `group` hold in equal shares; `shape` is the whole's."""

    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    ranks: int
    group: str


def rows_of(param: Tensor, shape: tuple[int, ...], read: Callable[[], Tensor]) -> Rows | None:
    """Describes one part of a parameter as equal row shards; None if it isn't exactly the concatenation of the ranks' rows."""
    dtensor = as_dtensor(param)
    if dtensor is None or from_dtensor(dtensor.placements) != (Shard(0),):
        return None
    mesh, own = dtensor.device_mesh, read()
    if not own.ndim or own.device.type != mesh.device_type or (mesh.size() * own.shape[0], *own.shape[1:]) != shape:
        return None
    return Rows(read, shape, mesh.size(), mesh.get_group().group_name)


def gather_rows(rows: Mapping[Key, Rows]) -> dict[Key, Tensor]:
    """Gathers whole tensors on every rank, with one collective per group; all ranks must pass the same keys."""
    groups: dict[str, list[Key]] = {}
    for key, one in rows.items():
        groups.setdefault(one.group, []).append(key)
    found: dict[Key, Tensor] = {}
    for group, keys in groups.items():
        # As bytes, so that one collective takes all dtypes.
        own = [rows[key].read().contiguous() for key in keys]
        sent = [one.reshape(-1).view(torch.uint8) for one in own]
        received = collectives.all_gather_into_tensor_coalesced(sent, rows[keys[0]].ranks, group)
        for key, one, whole in zip(keys, own, received, strict=True):
            found[key] = collectives.wait_tensor(whole).view(one.dtype).view(rows[key].shape)
    return found

"""Exchanges between ranks around a checkpoint, and torch's errors as errors that a program can catch."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def rank_and_world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this rank's number in a group and the group's size; (0, 1) where torch.distributed isn't initialized."""
    return (dist.get_rank(group), dist.get_world_size(group)) if _distributed() else (0, 1)


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every rank's value."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_first_rank(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Runs an action on the group's first rank: every rank returns its result, or raises its error."""
    outcome: Any = None
    if rank_and_world(group)[0] == 0:
        try:
            outcome = action()
        except Exception as error:
            outcome = _sendable(error)
    (outcome, *_) = gather(outcome, group)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def on_every_rank(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Runs an action on every rank: each returns its own result, or all raise the first rank's error."""
    try:
        own, error = action(), None
    except Exception as raised:
        own, error = None, raised
    raise_first(gather(None if error is None else _sendable(error), group), error)
    return own


def raise_first(errors: list[Exception | None], own: Exception | None) -> None:
    """Raises this rank's own error, or that of the first rank that has one."""
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error is not None:
            error.add_note(f"(on rank {rank})")
            raise error


def check_alike(action: Callable[[], tuple[Any, Mapping[str, Any], Mapping[str, str]]], group: dist.ProcessGroup | None) -> Any:
    """Runs an action on every rank, and raises on all of them where one does, or where their arguments differ.

    Args:
        action: gives what is returned; settings that must be equal, plain values by name; and what is held, by name. Ranks need
            not hold the same names, such as those of a pipeline's stages, but under one name the same.
        group: the ranks.

    Raises:
        ValueError: the name, and two ranks' values; the same on every rank.
    """
    result, settings, described, error = None, {}, {}, None
    try:
        result, settings, described = action()
    except Exception as raised:
        error = raised
    digest = hashlib.sha256(repr(sorted(described.items())).encode()).digest()
    everyones = gather((None if error is None else _sendable(error), dict(settings), digest), group)
    raise_first([error for error, _, _ in everyones], error)
    _refuse_differences([settings for _, settings, _ in everyones])
    if any(digest != other for _, _, other in everyones):
        _refuse_differences(gather(dict(described), group))
    return result


def _refuse_differences(everyones: list[dict[str, Any]]) -> None:
    first: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(everyones):
        for name, value in values.items():
            other, theirs = first.setdefault(name, (rank, value))
            if theirs != value:
                raise ValueError(f"{name} is {theirs} on rank {other} and {value} on rank {rank}: it must be the same on all")


def _sendable(error: Exception) -> Exception:
    """Returns the error, or one that says the same where it can't be sent to other ranks."""
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return sent if isinstance(sent, Exception) else RuntimeError(str(error))


@contextmanager
def failing_as(kind: type[Exception], what: str) -> Iterator[None]:
    """Raises `kind` where DCP raises its CheckpointException, which is no Exception and says nothing of the checkpoint.

    Args:
        kind: the error.
        what: what went wrong then; each rank's reason follows it.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = {f"{type(reason).__name__}: {reason}": rank for rank, (reason, _) in reversed(error.failures.items())}
        told = "; ".join(f"rank {rank}: {reason}" for reason, rank in reversed(reasons.items()))
        raise kind(f"{what}: {told}") from error


_gloo_groups: list[tuple[Any, Any]] = []


def background_group() -> dist.ProcessGroup | None:
    """Returns a group of all ranks for writing while the training goes on: one for each time that torch is initialized."""
    if not _distributed():
        return None
    world = dist.group.WORLD
    if not _gloo_groups or _gloo_groups[-1][0] is not world:
        _gloo_groups[:] = [(world, dist.new_group(backend="gloo"))]
    return _gloo_groups[-1][1]


@contextmanager
def ignoring_missing_groups() -> Iterator[None]:
    """Ignores DCP's warning that torch.distributed isn't initialized, which is no news here."""
    if _distributed():
        yield
        return
    with warnings.catch_warnings():
        ignore_missing_groups()
        yield


def ignore_missing_groups() -> None:
    """Ignores it from now on, where there is no process group: torch's thread that saves would warn too, and later."""
    if not _distributed():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()

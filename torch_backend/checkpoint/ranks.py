"""What ranks tell each other around a checkpoint, and torch's errors as errors that a program can catch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def rank_and_world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in a group, and how many there are; (0, 1) where torch.distributed isn't initialized."""
    return (dist.get_rank(group), dist.get_world_size(group)) if _distributed() else (0, 1)


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_all(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Has the group's first rank do something: every rank gets what it returns, or raises what it raises."""
    outcome: Any = None
    if rank_and_world(group)[0] == 0:
        try:
            outcome = action()
        except Exception as error:
            outcome = error
    (outcome, *_) = gather(outcome, group)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


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


_made: list[tuple[Any, Any]] = []


def own_group() -> dist.ProcessGroup | None:
    """A group of all ranks for what is written behind the training's back: made once for each time torch is initialized."""
    if not _distributed():
        return None
    world = dist.group.WORLD
    if not _made or _made[-1][0] is not world:
        _made[:] = [(world, dist.new_group(backend="gloo"))]
    return _made[-1][1]


@contextmanager
def without_groups_quietly() -> Iterator[None]:
    """DCP warns that it is alone where torch.distributed isn't initialized, which is no news here."""
    if _distributed():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()

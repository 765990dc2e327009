"""Calls that a process makes once, whichever of its threads asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Keeps a function's results by its arguments, and lets no two threads run it at the same time.

    `functools.cache` runs it in each thread that asks before the first has its result, which libraries that take a name once
    (XLA's custom calls) refuse. A call that raises is made again by the next.
    """
    kept: dict[tuple[Any, ...], T] = {}
    lock = threading.RLock()

    @wraps(function)
    def run(*arguments: Any) -> T:
        if arguments in kept:
            return kept[arguments]
        with lock:
            if arguments not in kept:
                kept[arguments] = function(*arguments)
            return kept[arguments]

    return run

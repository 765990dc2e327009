"""Runs a function once per process, whichever thread calls it first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Caches a function's results by arguments and never runs it in two threads at once.

    `functools.cache` may run it in several threads before the first result is stored, which libraries that register a name once
    (XLA's custom calls) refuse. A call that raises isn't cached.
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

"""Bounds of what `blockfp check` does at once: threads, and the memory of the arrays in work."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..formats import Format
from .pieces import PIECE

MOST_BYTES = 1 << 30
"""Bytes of checks that run at once. A check that needs more runs alone."""

_BYTES_AN_ELEMENT = 16
"""Codes and values of two backends and their float32 intermediates."""


def usable_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of CPUs that this process may use, by its affinity and by its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cpus, math.ceil(int(allowed) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max"
        return cpus


def bytes_of(x: np.ndarray, format: Format) -> int:
    """Returns about how much memory checking x in a format takes: all of x for a tensor scale, else a piece at a time."""
    return _BYTES_AN_ELEMENT * (x.size if format.has_tensor_scale else min(x.size, PIECE))


class InFlight:
    """A bound on the bytes in work, shared by threads."""

    def __init__(self, most: int = MOST_BYTES):
        self.most = most
        self._now = 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Waits until `nbytes` more stay within the bound, or nothing else is in work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._now or self._now + nbytes <= self.most)
            self._now += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._now -= nbytes
                self._changed.notify_all()

"""Timing on a shared machine: figures taken while other processes were busy are taken again."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUSY = 0.06
"""Others are busy where they take more than this share of all cores."""

_STAT = Path("/proc/stat")


class Stopwatch:
    """Median times of calls, and how many could not be taken undisturbed.

    Args:
        patience: seconds to wait for quiet, over all calls together.
    """

    def __init__(self, patience: float):
        self.patience = patience
        self.measured = 0
        self.disturbed = 0

    def seconds(self, call: Callable[[], Any], budget: float = 0.5) -> float:
        """Returns the median time of a call: two warm-ups, then 3 to 30 calls within the budget."""
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats = min(30, max(3, int(budget / once)))
        self.measured += 1
        while True:
            began, others = time.perf_counter(), _others()
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            share = (_others() - others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
            if share < BUSY:
                return statistics.median(times)
            if self.patience <= 0:
                self.disturbed += 1
                return statistics.median(times)
            time.sleep(1)
            self.patience -= time.perf_counter() - began


def _others() -> float:
    """Returns the processor seconds of other processes and of the host's other machines; 0 if unknown."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9])
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks - own.user - own.system

"""Shared parts of the single-GPU benchmarks: contenders that take turns, the kernels of a step, the record."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], object]


def milliseconds(step: Step, steps: int, warm: int | None = None) -> float:
    """Returns the mean milliseconds of `steps` steps on the GPU's clock, after `warm` others (as many by default)."""
    # The clock follows the GPU's power: what ran before must not help or hinder.
    for _ in range(steps if warm is None else warm):
        step()
    if not torch.cuda.is_available():
        # Tests run the benchmarks so.
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return 1000 * (time.perf_counter() - began) / steps
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps


def in_turns(contenders: dict[str, Step], rounds: int, steps: int, warm: int | None = None) -> dict[str, list[float]]:
    """Returns each contender's milliseconds by round; a round times all of them, one after another."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            times[name].append(milliseconds(step, steps, warm))
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}


def kernels(step: Step) -> str:
    """Returns a table of the kernels of three steps, slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    lines = []
    for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:24]:
        lines.append(f"{event.self_device_time_total / 3000:8.3f} ms {event.count / 3:6.1f} x  {event.key[:110]}")
    return "\n".join(lines)


def write_record(path: Path | None, results: dict[str, Any], **about: Any) -> None:
    """Writes a JSON file of the results, the date and machine, and further remarks."""
    if path is None:
        return
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps({"about": {"date": date, **where, **about}, "results": results}, indent=1) + "\n")

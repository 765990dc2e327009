"""Shared parts of the multi-GPU benchmarks: starting ranks, timing a step, running contenders one after another, reporting."""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def start() -> torch.device:
    """Returns this rank's device, with a process group over all ranks of torchrun. Without GPUs, all times are zero."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def timed(step: Callable[[], None]) -> float:
    """Returns the milliseconds of one step on this rank's GPU."""
    if not torch.cuda.is_available():
        step()
        return 0.0
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak_bytes(step: Callable[[], object]) -> int:
    """Returns the peak bytes allocated on this rank's GPU in a step."""
    if not torch.cuda.is_available():
        step()
        return 0
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def slowest(figures: Iterable[float], device: torch.device) -> list[float]:
    """Returns each figure's largest value over ranks."""
    found = torch.tensor(list(figures), dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def measured(names: Iterable[str], measure: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row per contender, each starting with freed memory; rank 0 prints them as they come."""
    rows = []
    for name in names:
        try:
            rows.append(measure(name))
        except ImportError as error:
            rows.append({"contender": name, "left_out": str(error)})
        if dist.get_rank() == 0:
            print({key: value for key, value in rows[-1].items() if key not in ("profile", "losses")}, flush=True)
        forget()
    return rows


def say(what: str) -> None:
    """Prints on rank 0 what it is about to do."""
    if dist.get_rank() == 0:
        print(what, flush=True)


def forget() -> None:
    """Frees compiled code, reference cycles and cached memory."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(path: Path, rows: list[dict[str, Any]], **about: Any) -> None:
    """Writes, on rank 0, a JSON file of the rows, the machine, and further remarks."""
    if dist.get_rank() == 0:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        where = {"gpu": gpu, "gpus": dist.get_world_size(), "torch": torch.__version__, "cuda": torch.version.cuda}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"date": date, **where, **about, "rows": rows}, indent=1) + "\n")
        print(path)


def finish() -> None:
    """Ends this process without destroying the groups, which hangs if a CUDA graph has recorded one of their collectives."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)

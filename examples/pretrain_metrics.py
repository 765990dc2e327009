"""Metrics of `pretrain.py`: JSON lines, the SQNR of operands, a plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import blockfp.torch as bfp


class Metrics:
    """A file of JSON lines, one per logged step.

    Args:
        path: the file.
        first_step: the step from which the run resumes; lines of later steps, which will be repeated, are removed.
    """

    def __init__(self, path: Path, first_step: int):
        self.path = path
        kept = [line for line in read(path) if line["step"] <= first_step]
        # Whole under its name, whatever happens.
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        new.replace(path)

    def add(self, line: dict) -> None:
        """Appends a line, which must contain "step"; non-finite numbers become null."""
        with self.path.open("a") as file:
            file.write(f"{json.dumps(_plain(line))}\n")


def read(path: Path) -> list[dict]:
    """Returns the lines of such a file, without a truncated last one; none if the file doesn't exist."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            found.append(json.loads(line))
    return found


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sqnr_of_operands(records: Iterable[bfp.Observed]) -> dict[str, dict[str, float]]:
    """Returns the SQNR in dB of each operand: "mean" over the layers, and "least"."""
    found: dict[str, list[float]] = {}
    for record in records:
        found.setdefault(record.operand, []).append(record.sqnr)
    return {operand: {"mean": sum(all_) / len(all_), "least": min(all_)} for operand, all_ in found.items()}


@torch.no_grad()
def sqnr_of_weights(model: nn.Module, optimizer: bfp.AdamW, reduce: bool) -> dict[str, dict[str, float]]:
    """Returns the SQNR of quantized weights against their masters, as `sqnr_of_operands` does; empty without masters.

    Args:
        model, optimizer: after a step.
        reduce: adds what the ranks hold; all of them must call it.
    """
    sums: list[Tensor] = []
    for p in model.parameters():
        local = p.to_local() if isinstance(p, torch.distributed.tensor.DTensor) else p
        if isinstance(local, bfp.QuantizedTensor) and "master" in optimizer.state[p]:
            master = optimizer.state[p]["master"].double()
            error = master - local.dequantize(torch.float32).double()
            sums.append(torch.stack([master.square().sum(), error.square().sum()]))
    if not sums:
        return {}
    both = torch.stack(sums)
    if reduce:
        dist.all_reduce(both)
    decibels = [10 * math.log10(signal / noise) if noise else math.inf for signal, noise in both.tolist()]
    return {"weight": {"mean": sum(decibels) / len(decibels), "least": min(decibels)}}


def draw(path: Path, lines: list[dict], title: str) -> None:
    """Plots losses and SQNR so far; does nothing if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    losses, sqnr = figure.subplots(1, 2)
    for key, style in (("loss", "-"), ("held_out_loss", "o-")):
        points = [(line["tokens"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            losses.plot(*zip(*points, strict=True), style, label=key.replace("_", " "), markersize=3, linewidth=1)
    for operand in next((line["sqnr"] for line in lines if line.get("sqnr")), {}):
        points = [(line["tokens"], line["sqnr"][operand]["mean"]) for line in lines if line.get("sqnr")]
        sqnr.plot(*zip(*points, strict=True), label=operand, linewidth=1)
    losses.set(xlabel="tokens", ylabel="loss, nats a byte", yscale="log")
    sqnr.set(xlabel="tokens", ylabel="SQNR, dB (mean over layers)")
    for axes in (losses, sqnr):
        axes.grid(alpha=0.3, which="both")
        if axes.lines:
            axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)

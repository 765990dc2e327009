"""Measures a step of Muon on matrices that FSDP2 shards: ours, which divides matrices among ranks, beside torch's.

    torchrun --nproc_per_node=4 benchmarks/muon_ranks.py [--layers 4] [--hidden 512] [--rounds 9] [--json FILE]

Contenders: `ours`; `gathered`, torch.optim.Muon on every rank with whole gradients, momenta and matrices, of which a rank
writes its part back; and `dtensors`, torch.optim.Muon on the sharded parameters, whose products move parts between ranks. They
take turns; a round's figure is its slowest rank's. Figures are medians, `share` is the median of a round's time over
`gathered`'s. Runs on GPUs with NCCL, otherwise on a CPU with gloo; there set OMP_NUM_THREADS to the cores of a rank.
torchtitan's DistMuon takes GPUs alone, and is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import blockfp.torch as bfp

SETTINGS = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1}


class Matrices(nn.Module):
    """The matrices of a transformer's blocks."""

    def __init__(self, layers: int, hidden: int):
        super().__init__()
        shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden)] * 2 + [(hidden, 4 * hidden)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes * layers)


def sharded(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Returns the model with a gradient of every parameter, the same for all contenders."""
    torch.manual_seed(0)
    model = Matrices(args.layers, args.hidden).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    for param in model.parameters():
        param.grad = distribute_tensor(torch.randn(param.shape, device=device), param.device_mesh, param.placements)
    return model


def gathered(model: nn.Module) -> Callable[[], object]:
    """Returns a step of torch.optim.Muon on whole matrices, the same on every rank."""
    params = list(model.parameters())
    whole = [nn.Parameter(param.detach().full_tensor().clone()) for param in params]
    optimizer = torch.optim.Muon(whole, **SETTINGS)

    def step() -> None:
        for param, each in zip(params, whole, strict=True):
            each.grad = param.grad.full_tensor()
        optimizer.step()
        with torch.no_grad():
            for param, each in zip(params, whole, strict=True):
                local = param.to_local()
                local.copy_(each.tensor_split(dist.get_world_size())[dist.get_rank()][: len(local)])

    return step


def steps(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], object]]:
    return {
        "ours": bfp.Muon(sharded(args, device).parameters(), **SETTINGS).step,
        "gathered": gathered(sharded(args, device)),
        "dtensors": torch.optim.Muon(sharded(args, device).parameters(), **SETTINGS).step,
    }


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a step that all ranks begin together."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    sync()
    dist.barrier()
    begin = time.perf_counter()
    step()
    sync()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 512), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = ranks.start()
    load, contenders = os.getloadavg()[0], steps(args, device)
    for step in contenders.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        figures = ranks.slowest([seconds(step, device) for step in contenders.values()], device)
        for name, figure in zip(contenders, figures, strict=True):
            times[name].append(figure)
    rows = [
        {
            "contender": name,
            "ms": round(1000 * statistics.median(each), 2),
            "share": round(statistics.median(a / b for a, b in zip(each, times["gathered"], strict=True)), 3),
        }
        for name, each in times.items()
    ]
    for row in rows:
        ranks.say(str(row))
    if args.json is not None:
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": round(load, 1)}
        ranks.report(args.json, rows, **about, layers=args.layers, hidden=args.hidden, rounds=args.rounds)
    ranks.finish()


if __name__ == "__main__":
    main()

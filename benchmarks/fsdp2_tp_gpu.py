"""Times a training step under FSDP2 x tensor parallelism with sequence parallelism on 4 GPUs: blockfp's recipes and bf16.

    torchrun --nproc-per-node 4 benchmarks/fsdp2_tp_gpu.py                    # FSDP 2 x TP 2, a transformer of 1.0B parameters
    torchrun --nproc-per-node 4 benchmarks/fsdp2_tp_gpu.py --mode reduce-overhead       # the same in CUDA graphs
    torchrun --nproc-per-node 1 benchmarks/fsdp2_tp_gpu.py --memory --contenders mxfp8  # memory of the wrapping itself

Reports milliseconds per step (the median of timed steps, slowest rank), a rank's peak memory, and the megabytes that a rank
receives in a step: weights and gradients of FSDP2, activations and gradients of tensor parallelism. "bf16" is torch's own
layers, sharded by `parallelize_module`; all contenders have the same shapes and compiled blocks.

Gathers count whole, including the rank's own share. In blocks of one row an operand is gathered rowwise and columnwise, in FP8
one byte per element each, which bf16 sends at once; with one scale per tensor the gradient's other orientation is derived.
docs/benchmarks.md has the table.

`--memory` runs on one GPU: the peak of a step with weights as DTensors on a mesh of one rank, with and without sequence
parallelism, and of the same model without parallelization.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import blockfp.torch as bfp


class Block(nn.Module):
    """A `bfp.TransformerLayer` computed by torch's layers."""

    def __init__(self, width: int, hidden: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, self.head_width)).transpose(-4, -3)
        attended = F.scaled_dot_product_attention(*heads.unbind(-2), is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


def block(name: str, options: argparse.Namespace, mesh: DeviceMesh, **parallel: Any) -> nn.Module:
    """Returns one block of a contender, sharded over the tensor-parallel mesh as `parallel` says; unsharded without it."""
    if name != "bf16":
        layer = bfp.TransformerLayer(
            options.width, options.hidden, options.width // 128, bias=False, recipe=name, norm="rms_norm", eps=1e-6
        )
        return bfp.parallelize(layer, mesh, **parallel) if parallel else layer
    column, row = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    norm = SequenceParallel(use_local_output=True)
    plan = {"norm": norm, "mlp_norm": norm, "qkv": column, "up": column, "out": row, "down": row}
    return parallelize_module(Block(options.width, options.hidden, options.width // 128), mesh, plan)


class ReceivedBytes(TorchDispatchMode):
    """Counts what this rank receives in each kind of collective."""

    def __init__(self):
        super().__init__()
        self.bytes = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name.startswith(("all_", "reduce_scatter")):
            tensors = result if isinstance(result, list) else [result]
            self.bytes[f"tp {name.removesuffix('_coalesced')}"] += sum(tensor.nbytes for tensor in tensors)
        elif func in (torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default):
            self.bytes[f"fsdp {name.strip('_')}"] += args[0].nbytes
        return result


def training(
    name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device, *, compiled: bool = True, **parallel: Any
) -> tuple[Callable[[], None], int]:
    """Returns one training step of a contender, and its number of parameters."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [block(name, options, mesh["tp"], **parallel) for _ in range(options.layers)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for each in blocks:
        if compiled:
            each.compile(fullgraph=name != "bf16", backend=options.backend, mode=options.mode)
        fully_shard(each, mesh=mesh["dp"], mp_policy=policy)
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh["dp"], mp_policy=policy)
    if name == "bf16":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    else:
        optimizer = bfp.AdamW(model.parameters(), lr=1e-4)
    shape = (options.tokens // options.length, options.length // mesh["tp"].size(), options.width)
    # In a CUDA graph its gradient would be overwritten by the next step's.
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=options.mode is None)
    gradient = torch.randn_like(x)

    def step():
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        bfp.update_scales(model)

    return step, sum(p.numel() for p in model.parameters())


def measure(name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    parallel = {"sequence_parallel": True, "reduce_format": options.reduce_format}
    step, parameters = training(name, options, mesh, device, **parallel)
    with torch.compiler.set_stance("force_eager"), ReceivedBytes() as received:
        step()
    for _ in range(3):
        step()
    times: list[float] = []
    peak = ranks.peak_bytes(lambda: times.extend(ranks.timed(step) for _ in range(options.steps)))
    ms, peak = ranks.slowest((statistics.median(times), peak / 2**30), device)
    return {
        "contender": name,
        "ms": round(ms, 2),
        "peak_gib": round(peak, 2),
        "received_mb": {kind: round(size / 1e6, 2) for kind, size in sorted(received.bytes.items())},
        "parameters": parameters,
    }


def measure_memory(name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Returns the peak MiB of a step for each way to wrap the model, in eager and compiled code."""
    ways = {"plain": {}, "tp": {"sequence_parallel": False}, "tp+sequence": {"sequence_parallel": True}}
    row: dict[str, Any] = {"contender": name}
    for compiled in (False, True):
        for way, parallel in ways.items():
            step, _ = training(name, options, mesh, device, compiled=compiled, **parallel)
            for _ in range(3):
                step()
            row[f"{way} {'compiled' if compiled else 'eager'} mib"] = round(ranks.peak_bytes(step) / 2**20, 1)
            del step
            ranks.forget()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default="bf16,fp8_current,fp8_delayed,fp8_block,mxfp8")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks; FSDP2 has the others")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per tensor-parallel group")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reduce-format", help="format of reduce-scattered terms, such as mxfp8_e5m2")
    parser.add_argument("--mode", help="mode of torch.compile, such as reduce-overhead")
    parser.add_argument("--memory", action="store_true", help="peak memory with and without the wrapping, on one GPU")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    options = parser.parse_args()
    device = ranks.start()
    tp = 1 if options.memory else options.tp
    mesh = init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    # A graph for each block, whose parameters are others.
    torch._dynamo.config.recompile_limit = 4 * options.layers
    kind, run = ("memory", measure_memory) if options.memory else (options.mode or "default", measure)
    rows = ranks.measured(options.contenders.split(","), lambda name: run(name, options, mesh, device))
    setting = {k: v for k, v in vars(options).items() if k not in ("out", "contenders")}
    date = datetime.datetime.now(datetime.UTC).date()
    path = options.out / f"fsdp2-tp-{kind}-{dist.get_world_size()}x{options.tokens}-{date}.json"
    ranks.report(path, rows, **setting)
    ranks.finish()


if __name__ == "__main__":
    main()

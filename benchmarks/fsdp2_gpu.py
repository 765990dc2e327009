"""Times a training step under FSDP2 on several GPUs: blockfp's recipes, bf16 and torchao in one run.

    torchrun --nproc-per-node 2 benchmarks/fsdp2_gpu.py --model stack --tokens 16384
    torchrun --nproc-per-node 2 benchmarks/fsdp2_gpu.py --model transformer --contenders bf16,torchao_fp8_gather,fp8_current
    torchrun --nproc-per-node 2 benchmarks/fsdp2_gpu.py --few-tokens --contenders bf16,torchao,fp8_current,fp8_block

Reports milliseconds per step (the median of timed steps, slowest rank), the milliseconds in which the host launches a step on
an idle GPU, a rank's peak memory, and the bytes that a rank receives in all-gathers. All contenders start from the same weights
and get the same input; each block is compiled separately. "RECIPE+high" keeps weights in high precision and gathers them
quantized; "RECIPE+bf16" gives weights, and so gradients, the nominal dtype bfloat16; "RECIPE+recompute" repeats casts in the
backward. `--few-tokens` measures steps limited by the host: the transformer with 4,096 tokens per GPU and the stack with 2,048,
with and without CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp

HEADS_WIDTH = 128
FEW_TOKENS = [(*model, mode) for mode in (None, "reduce-overhead") for model in (("transformer", 4096), ("stack", 2048))]
MS_GOALS = {("transformer", 4096, None): 45, ("stack", 2048, None): 50}
"""Milliseconds of a step that recipes are to reach on two H200s, by model, tokens of a GPU and mode."""
GIB_GOALS = {("stack", 16384): 18.5, ("stack", 2048): 12.5}
"""Most memory of a rank, by model and tokens of a GPU."""


class MLPBlock(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class AttentionBlock(nn.Module):
    """Causal attention with a residual, then `MLPBlock`."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = MLPBlock(width, hidden)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, HEADS_WIDTH)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(attended.transpose(-2, -3).flatten(-2)))


class Recomputed(nn.Module):
    """A block whose backward repeats the casts of its forward."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, context_fn=bfp.keep_products)


@contextlib.contextmanager
def received_bytes() -> Iterator[list[int]]:
    """Collects the sizes that this rank receives in FSDP2's all-gathers; a dispatch mode would prevent compiled graphs from
    running.
    """
    sizes: list[int] = []
    # What FSDP2 calls: from torch 2.13 on, and before.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def counting(output, *args, **kwargs):
        sizes.append(output.nbytes)
        return gather(output, *args, **kwargs)

    setattr(dist, name, counting)
    try:
        yield sizes
    finally:
        setattr(dist, name, gather)


def convert_torchao(blocks: nn.ModuleList, fp8_gather: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=Float8LinearConfig(enable_fsdp_float8_all_gather=fp8_gather))


def nothing(model: nn.Module) -> None:
    pass


def torchao_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


Contender = tuple[Callable[[nn.ModuleList], object], Callable[..., torch.optim.Optimizer], Callable[[nn.Module], object]]


def contender(name: str) -> Contender:
    """Returns (convert, optimizer, what follows each optimizer step) of a contender."""

    def fused(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    if name == "bf16":
        return nothing, fused, nothing
    if name == "torchao":
        return (lambda blocks: convert_torchao(blocks, False)), fused, nothing
    if name == "torchao_fp8_gather":
        return (lambda blocks: convert_torchao(blocks, True)), fused, torchao_scales
    recipe, _, option = name.partition("+")
    weights = "high_precision" if option == "high" else "quantized"
    return (lambda blocks: bfp.convert(blocks, recipe, weights=weights)), bfp.AdamW, bfp.update_scales


def measure(name: str, options: argparse.Namespace, device: torch.device) -> dict:
    convert, optimizer_class, after_step = contender(name)
    torch.manual_seed(0)
    block = {"stack": MLPBlock, "transformer": AttentionBlock}[options.model]
    with torch.device(device):
        blocks = nn.ModuleList(block(options.width, options.hidden) for _ in range(options.layers))
    parameters = sum(p.numel() for p in blocks.parameters())
    convert(blocks)
    if name.endswith("+bf16"):
        blocks.to(torch.bfloat16)
    if name.endswith("+recompute"):
        blocks = nn.ModuleList(map(Recomputed, blocks))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for each in blocks:
        each.compile(fullgraph=True, mode=options.mode)
        fully_shard(each, mp_policy=policy)
    model = fully_shard(nn.Sequential(*blocks), mp_policy=policy)
    optimizer = optimizer_class(model.parameters(), lr=1e-4)
    rows = options.tokens // options.length
    # In a CUDA graph its gradient would be overwritten by the next step's.
    with_gradient = options.mode is None
    x = torch.randn(rows, options.length, options.width, device=device, dtype=torch.bfloat16, requires_grad=with_gradient)
    gradient = torch.randn_like(x)

    def step():
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)

    # CUDA graphs are recorded in the first steps.
    for _ in range(3 if options.mode is None else 8):
        step()
    with received_bytes() as received:
        step()
    times: list[float] = []
    peak = ranks.peak_bytes(lambda: times.extend(ranks.timed(step) for _ in range(options.steps)))
    host = statistics.median([host_time(step) for _ in range(5)])
    ms, host, peak, fastest = ranks.slowest((statistics.median(times), host, peak / 2**30, -host), device)
    profiled = {"profile": profile(step)} if options.profile else {}
    ours = not name.startswith(("bf16", "torchao"))
    goals = {
        "goal_ms": MS_GOALS.get((options.model, options.tokens, options.mode)) if ours else None,
        "goal_gib": GIB_GOALS.get((options.model, options.tokens)) if ours else None,
    }
    return {
        "contender": name,
        "ms": round(ms, 2),
        "host_ms": round(host, 2),
        "host_ms_fastest_rank": round(-fastest, 2),
        "peak_gib": round(peak, 2),
        "gathered_mb": round(sum(received) / 1e6, 1),
        "parameters": parameters,
        **goals,
        **profiled,
    }


def profile(step: Callable[[], None]) -> dict[str, list[dict[str, Any]]]:
    """Splits the time of a step: "ops" as seen by torch's profiler, and "host", the slowest Python functions.

    Both profilers slow a step down, Python's by a factor of three: compare shares, not sums.
    """
    with torch.profiler.profile() as seen:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    ops = [
        {"name": op.key, "calls": op.count, "host_us": op.cpu_time_total, "own_us": op.self_cpu_time_total}
        | {"gpu_us": op.device_time_total}
        for op in seen.key_averages()
    ]
    python = cProfile.Profile()
    # The backward in this thread, where it is seen.
    with torch.autograd.set_multithreading_enabled(False):
        python.runcall(step)
    host = [
        {"name": f"{Path(file).name}:{line} {name}", "calls": calls, "host_us": total * 1e6, "own_us": own * 1e6}
        for (file, line, name), (_, calls, own, total, _) in pstats.Stats(python).stats.items()  # pyright: ignore[reportAttributeAccessIssue]
    ]
    return {
        kind: [
            {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
            for row in sorted(found, key=lambda row: -row["own_us"])[:25]
        ]
        for kind, found in (("ops", ops), ("host", host))
    }


def host_time(step: Callable[[], None]) -> float:
    """Returns the milliseconds in which the host launches a step on an idle GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("stack", "transformer"), default="stack")
    parser.add_argument("--contenders", default="bf16,torchao,torchao_fp8_gather,fp8_current,fp8_delayed,fp8_block,mxfp8")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per GPU")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=16384)
    parser.add_argument(
        "--layers", type=int, help="default: 12 for the stack and 5 for the transformer, 1.6 and 1.0 billion parameters"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mode", help="mode of torch.compile, such as reduce-overhead")
    parser.add_argument("--profile", action="store_true", help="also write a profile of a step into the JSON file")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    parser.add_argument(
        "--few-tokens", action="store_true", help="steps limited by the host; ignores --model, --tokens, --mode"
    )
    options = parser.parse_args()
    device = ranks.start()
    given = options.layers
    for model, tokens, mode in FEW_TOKENS if options.few_tokens else [(options.model, options.tokens, options.mode)]:
        options.model, options.tokens, options.mode = model, tokens, mode
        options.layers = given or {"stack": 12, "transformer": 5}[model]
        run(options, device)
    ranks.finish()


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Measures all contenders in one mode of training, and writes the file."""
    # torchao's layers compile anew for every block.
    torch._dynamo.config.recompile_limit = 4 * options.layers
    rows = ranks.measured(options.contenders.split(","), lambda name: measure(name, options, device))
    sizes = {key: getattr(options, key) for key in ("model", "mode", "tokens", "length", "width", "hidden", "layers")}
    date, mode = datetime.datetime.now(datetime.UTC).date(), "" if options.mode is None else f"-{options.mode}"
    path = options.out / f"fsdp2-{options.model}-{dist.get_world_size()}x{options.tokens}{mode}-{date}.json"
    ranks.report(path, rows, **sizes)


if __name__ == "__main__":
    main()

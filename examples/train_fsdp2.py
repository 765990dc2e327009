"""Trains a byte-level transformer under FSDP2 in bf16, MXFP8, FP8 blocks and NVFP4; prints losses and bytes, and plots losses.

    python examples/train_fsdp2.py                                      # two processes on the CPU
    torchrun --nproc-per-node 4 examples/train_fsdp2.py                 # on GPUs, with NCCL

Each recipe starts from the same weights and sees the same batches. Weights are stored and gathered as codes and scales; AdamW
updates fp32 masters and writes new codes and scales. With --save and --resume, a run continues from a checkpoint of this
program or of train_jax.py, with the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import byte_text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import blockfp.torch as bfp


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it and a residual."""

    def __init__(self, config: byte_text.Config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Maps bytes [batch, length] to logits of the next byte [batch, length, 256]."""

    def __init__(self, config: byte_text.Config):
        super().__init__()
        self.embedding = nn.Embedding(byte_text.VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, byte_text.VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that one rank receives in all-gathers."""

    def __init__(self):
        super().__init__()
        self.received = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.received += args[0].nbytes
        return func(*args, **(kwargs or {}))


def build(
    config: byte_text.Config, recipe: str, seed: int, device: torch.device, saved: dict[str, torch.Tensor] | None = None
) -> nn.Module:
    """Builds the sharded model, with initial or saved weights."""
    model = Transformer(config)
    weights = byte_text.first_weights(config, seed)
    model.load_state_dict({f"{name}.weight": torch.from_numpy(value) for name, value in weights.items()})
    if recipe != "bf16":
        bfp.convert(model, recipe, filter_fn=lambda name, module: name != "head")
    for name, key in byte_text.first_keys(config, seed).items():
        # The same on every rank.
        if getattr(model.get_submodule(name), "rng_key", None) is not None:
            model.get_submodule(name).rng_key.copy_(torch.from_numpy(key))
    if saved is not None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                # Codes and scales are copied as they are; another format raises.
                p.copy_(saved[name.removesuffix(".weight")])
            for name, (buffer, _) in buffers_of(model).items():
                buffer.copy_(saved[name])
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


# What layers keep beside their weights: the name in a file (`byte_text`), and the dtype there.
BUFFERS = {name: (name, torch.float32) for name in byte_text.SCALING}
BUFFERS |= {"rng_key": ("rng_key", torch.uint32), "step": ("rng_step", torch.int32)}


def buffers_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """Returns the layers' buffers by their names in a file, with the dtypes used there."""
    found = {}
    for key, buffer in model.named_buffers():
        layer, _, own = key.rpartition(".")
        kind, dtype = BUFFERS[own]
        found[f"{kind}.{layer}"] = buffer, dtype
    return found


# What AdamW's state has, and its name in a file (`byte_text`).
KINDS = {"master": "master", "exp_avg": "first", "exp_avg_sq": "second"}


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gathers the state of a run and writes it on rank 0."""
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=gather)
    if dist.get_rank() != 0:
        return
    tensors = {"step": torch.tensor(step, dtype=torch.int32)}
    tensors |= {name: buffer.cpu().to(dtype) for name, (buffer, dtype) in buffers_of(model).items()}
    for key, p in model.named_parameters():
        name, local = key.removesuffix(".weight"), p.to_local()
        tensors[name] = weights[key]
        if isinstance(local, bfp.QuantizedTensor):
            parts = weights[f"{key}_codes"], weights[f"{key}_scale"], weights.get(f"{key}_tensor_scale")
            tensors[name] = bfp.QuantizedTensor.from_parts(*parts, format=local.format, columns=p.shape[-1], dtype=local.dtype)
        state = states["state"][key]
        tensors |= {f"{kind}.{name}": state[own] for own, kind in KINDS.items() if own in state}
    path.parent.mkdir(parents=True, exist_ok=True)
    bfp.save(path, tensors)


def load_state(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Loads this rank's part of a file's masters and moments into the optimizer."""
    state = {}
    for i, (key, _) in enumerate(model.named_parameters()):
        name = key.removesuffix(".weight")
        state[i] = {own: saved[f"{kind}.{name}"] for own, kind in KINDS.items() if f"{kind}.{name}" in saved}
        state[i]["step"] = saved["step"]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy in nats per byte; rows: int64 [batch, context + 1]."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(recipe: str, options: argparse.Namespace, progress: Progress | None) -> dict:
    """Trains once and returns the measurements. Every rank returns the same losses."""
    config, rank, ranks = byte_text.Config(), dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    text, held_out = byte_text.read_text()
    begin, saved = options.resume and byte_text.saved(options.resume, recipe), None
    if begin is not None:
        saved = bfp.load(begin)
    steps = range(options.steps) if saved is None else byte_text.steps_left(int(saved["step"]), options, begin)
    model = build(config, recipe, options.seed, device, saved)
    # Before the first forward: FSDP2 leaves the root's own parameters whole after one.
    weight_bytes = sum(stored_bytes(p) for p in model.parameters())
    optimizer = bfp.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    if saved is not None:
        load_state(optimizer, model, saved)
    task = progress.add_task(recipe, total=len(steps), loss=float("nan")) if progress else None

    def rows_of(source, rows, **which) -> torch.Tensor:
        rows = byte_text.batch(source, rows, config.context, **which)[rank::ranks]
        return torch.from_numpy(rows).to(device, torch.int64)

    losses, gathered, began = [], 0, time.perf_counter()
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = byte_text.learning_rate(step, options.steps)
        with GatheredBytes() as bytes_now:
            loss = loss_of(model, rows_of(text, options.batch, seed=options.seed, step=step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM)
        losses.append(float(loss) / (1 if device.type == "cuda" else ranks))
        gathered = bytes_now.received
        if progress:
            progress.update(task, advance=1, loss=losses[-1])
        if options.save is not None and step + 1 == (options.save_at or options.steps):
            save(byte_text.saved(options.save, recipe), model, optimizer, step + 1)
    seconds = time.perf_counter() - began

    with torch.no_grad():
        loss = loss_of(model, rows_of(held_out, options.held_out, seed=0, step=0)) / ranks
        dist.all_reduce(loss)
    return {
        "recipe": recipe,
        "first_step": steps.start,
        "losses": losses,
        "held_out": float(loss),
        "gathered_bytes_a_step": gathered,
        "weight_bytes": weight_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
    }


def stored_bytes(parameter: torch.Tensor) -> int:
    """Returns the bytes of this rank's shard of a parameter."""
    local = parameter.to_local()
    if not isinstance(local, bfp.QuantizedTensor):
        return local.nbytes
    return sum(part.nbytes for part in (local.codes, local.scales, local.tensor_scale) if part is not None)


def worker(options: argparse.Namespace) -> None:
    """Trains on one process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    columns = ("{task.description:>10}", BarColumn(), MofNCompleteColumn(), "loss {task.fields[loss]:.3f}", TimeElapsedColumn())
    bars = Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns), disable=dist.get_rank() != 0)
    with bars:
        results = [train(recipe, options, bars if dist.get_rank() == 0 else None) for recipe in options.recipes.split(",")]
    if dist.get_rank() == 0:
        found = {"framework": f"PyTorch {torch.__version__}", "ranks": dist.get_world_size(), "runs": results}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))
    # A gloo process that exits by itself now and then aborts while another still waits.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="bf16,mxfp8,fp8_block,nvfp4", help="separated by commas")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step, over all ranks")
    parser.add_argument("--held-out", type=int, default=64, help="pieces of held-out text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="processes to start without torchrun")
    parser.add_argument("--save", type=Path, help="folder for each run's weights and optimizer state, RECIPE.safetensors")
    parser.add_argument("--save-at", type=int, help="step after which to save; default: the last")
    parser.add_argument("--resume", type=Path, help="folder to resume from, written by --save of this program or train_jax.py")
    parser.add_argument("--out", type=Path, default=Path("train_fsdp2.json"))
    options = byte_text.parsed(parser)
    if "LOCAL_RANK" in os.environ:
        worker(options)
        return
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([*run, __file__, *sys.argv[1:]], check=True, env=environment)

    import training_report

    training_report.show([options.out])


if __name__ == "__main__":
    main()

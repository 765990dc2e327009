"""Times transformers' Llama and Qwen3 on one GPU: forward, backward and optimizer step in each recipe, bf16 and torchao.

    python benchmarks/hf_gpu.py [--models llama] [--cases eager compiled graphs] [--contenders bf16 fp8_current] [--out FOLDER]

    eager       2,048 tokens
    compiled    16,384 tokens, each decoder layer compiled separately
    graphs      2,048 tokens, each decoder layer compiled with mode="reduce-overhead": CUDA graphs
    jax         8,192 tokens, each decoder layer compiled separately: what `llama_gpu_jax.py` times, with its model `llama-jax`
                and --length 4096

Models are built from their configurations (1.1 and 0.9 billion parameters); nothing is downloaded. The decoder layers' linear
layers are converted. bf16 and torchao use torch's fused AdamW on bfloat16 parameters, recipes use `bfp.AdamW` with fp32
masters: "state" is the part of the peak for weights, gradients and optimizer, in bytes per parameter. Milliseconds are medians
of whole steps and of their parts on the GPU's clock; host_ms is the time in which the host launches a step on an idle GPU,
step_host_ms its optimizer's part. Contenders that don't fit into `--seconds` are skipped and named.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import blockfp.torch as bfp

RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
CONTENDERS = ("bf16", "torchao", *RECIPES)
GOALS = {
    ("llama", "eager"): dict.fromkeys(RECIPES, 75) | {"fp8_delayed": 65},
    ("llama", "compiled"): {"fp8_current": 165, "fp8_delayed": 160, "fp8_block": 170},
}
"""Milliseconds of a step to reach, on an H200."""


class Case(NamedTuple):
    """One mode of training.

    Attributes:
        tokens: tokens of a step, in sequences of `length`.
        compiled: whether each decoder layer is compiled.
        mode: mode of torch.compile.
    """

    tokens: int
    compiled: bool
    mode: str | None = None


CASES = {
    "eager": Case(2048, False),
    "compiled": Case(16384, True),
    "graphs": Case(2048, True, "reduce-overhead"),
    "jax": Case(8192, True),
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8},
}
SIZES["llama-jax"] = SIZES["llama"] | {"num_attention_heads": 16, "vocab_size": 32768}
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config, "llama-jax": LlamaConfig}
COMMON = {"num_hidden_layers": 16, "vocab_size": 32000, "max_position_embeddings": 4096}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
"""Options that make a model small, for tests."""


class Clock:
    """Times on the GPU's clock, or on this process's without a GPU."""

    def __init__(self):
        self.on_gpu = torch.cuda.is_available()

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Returns the milliseconds between two times, once `wait` has been called."""
        return begin.elapsed_time(end) if self.on_gpu else (end - begin) * 1e3

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def make_model(name: str, contender: str, device: str, small: bool) -> nn.Module:
    """Builds the model in bfloat16 and converts its decoder layers for the contender."""
    settings = {**COMMON, **SIZES[name], **(TINY if small else {})}
    if name == "qwen3":
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    config = CONFIGS[name](**settings, tie_word_embeddings=False, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    layers = model.model.layers
    if contender == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(layers)
    elif contender != "bf16":
        recipe, _, option = contender.partition("+")
        bfp.convert(layers, recipe, weights="high_precision" if option == "high" else "quantized", keep_init=False)
    return model.train()


def optimizer_of(contender: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if contender in ("bf16", "torchao"):
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return bfp.AdamW(parameters, lr=1e-4)


def measure(name: str, case: Case, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a contender's row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(name, contender, device, options.tiny)
    if case.compiled:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, mode=case.mode)
    parameters = list(model.parameters())
    optimizer = optimizer_of(contender, parameters)
    tokens = 64 if options.tiny else case.tokens
    length = min(tokens, options.length)
    ids = torch.randint(0, model.config.vocab_size, (tokens // length, length), device=device)
    clock = Clock()

    def step() -> tuple[list[Any], float]:
        """Returns a step's times, and the host's milliseconds in the optimizer."""
        if case.mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        times = [clock.now()]
        loss = model(input_ids=ids, labels=ids).loss
        times.append(clock.now())
        loss.backward()
        times.append(clock.now())
        begin = time.perf_counter()
        optimizer.step()
        host = (time.perf_counter() - begin) * 1e3
        times.append(clock.now())
        optimizer.zero_grad()
        return times, host

    for _ in range(options.warm if case.mode is None else options.warm + 4):
        step()
    clock.wait()
    if clock.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken = [step() for _ in range(options.steps)]
    clock.wait()
    peak = torch.cuda.max_memory_allocated() if clock.on_gpu else 0
    host = []
    for _ in range(3):
        clock.wait()
        begin = time.perf_counter()
        step()
        host.append((time.perf_counter() - begin) * 1e3)
    parts = [[clock.ms(begin, end) for begin, end in itertools.pairwise(times)] for times, _ in taken]
    forward, backward, update = (statistics.median(part) for part in zip(*parts, strict=True))
    ms = statistics.median(sum(part) for part in parts)
    count = sum(p.numel() for p in parameters)
    return {
        "ms": round(ms, 2),
        "forward_ms": round(forward, 2),
        "backward_ms": round(backward, 2),
        "step_ms": round(update, 2),
        "host_ms": round(statistics.median(host), 2),
        "step_host_ms": round(statistics.median(host for _, host in taken), 2),
        "peak_gib": round(peak / 2**30, 2),
        "state_bytes_a_parameter": round(state_bytes(parameters, optimizer) / count, 2),
        "parameters": count,
        "tensors": len(parameters),
    }


def state_bytes(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of stored weights, of gradients in their dtype, and of the optimizer's state."""
    total = 0
    for p in parameters:
        stored = p.parts if isinstance(p, bfp.QuantizedTensor) else [p]
        total += sum(part.nbytes for part in stored) + p.numel() * p.dtype.itemsize
        total += sum(value.nbytes for value in optimizer.state[p].values() if isinstance(value, Tensor))
    return total


def forget() -> None:
    """Frees compiled code, reference cycles and cached memory."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rows(options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Yields a row per model, case and contender; torchao is compared where it is compiled, as its users run it."""
    begin, found = time.monotonic(), []
    for name in options.models:
        for case in options.cases:
            for contender in options.contenders:
                if contender == "torchao" and case == "eager":
                    continue
                row: dict[str, Any] = {"model": name, "case": case, "contender": contender}
                if time.monotonic() - begin > options.seconds:
                    row["left_out"] = f"after {options.seconds:.0f} seconds"
                else:
                    try:
                        row |= measure(name, CASES[case], contender, options)
                    except (ImportError, torch.OutOfMemoryError) as error:
                        row["left_out"] = str(error).splitlines()[0]
                    forget()
                row["goal"] = None if options.tiny else GOALS.get((name, case), {}).get(contender)
                found.append(row)
                report(row)
    return found


def show(row: dict[str, Any]) -> None:
    where = f"{row['model']:6} {row['case']:9} {row['contender']:12}"
    if "left_out" in row:
        print(f"{where} left out: {row['left_out']}", flush=True)
        return
    parts = f"{row['forward_ms']:.1f} + {row['backward_ms']:.1f} + {row['step_ms']:.1f}"
    goal = "" if row["goal"] is None else f"  goal {row['goal']} {'ok' if row['ms'] <= row['goal'] else 'SHORT'}"
    print(
        f"{where} {row['ms']:8.1f} ms ({parts})  host {row['host_ms']:7.1f}, step {row['step_host_ms']:5.2f}"
        f"  peak {row['peak_gib']:6.2f} GiB, state {row['state_bytes_a_parameter']:5.2f} B{goal}",
        flush=True,
    )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llama", "qwen3"], choices=CONFIGS)
    parser.add_argument("--cases", nargs="*", default=["eager", "compiled"], choices=CASES)
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), help="bf16, torchao, RECIPE or RECIPE+high")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=3, help="warm-up steps")
    parser.add_argument("--seconds", type=float, default=210, help="start no contender after this time")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters, 64 tokens")
    parser.add_argument("--out", type=Path, help="folder of a JSON file")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    # torchao's layers compile anew for every decoder layer.
    torch._dynamo.config.recompile_limit = 64
    found = rows(options, show)
    if options.out is None:
        return
    versions = {}
    for name in ("blockfp", "torch", "transformers", "torchao"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {
        "date": date,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "python": platform.python_version(),
        "versions": versions,
        "length": options.length,
        "steps": options.steps,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"hf-{'-'.join(options.models)}-{'-'.join(options.cases)}-{date[:10]}.json"
    path.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()

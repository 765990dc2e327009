"""Activation and cast on one GPU: from one read of gate and up, and one operation after the other.

    python benchmarks/gated_gpu.py [--tokens 16384] [--features 14336] [--json FILE]

Rows: the forward's cast of silu(gate) * up and of gelu (tanh), both ways, by format; and the activation's gradients. The share
is that of a copy's bandwidth which the fused kernels reach, by the bytes that they have to read and write. Figures are medians
of rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from blockfp.torch_backend.custom_ops.activations import activate, gate_and_up, gradients, joined
from blockfp.torch_backend.custom_ops.gated_ops import gated_gradient, quantize_gated
from blockfp.torch_backend.custom_ops.quantize_plans import quantize_matrix

from blockfp.formats import Format
from blockfp.kernels import cuda_library

FORMATS = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1", "nvfp4")
CASES = (("silu", "apart"), ("silu", "pairs"), ("gelu_tanh", "alone"))


def milliseconds(run: Callable[[], object], steps: int = 20) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps


def copy_milliseconds(elements: int) -> float:
    x = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    return milliseconds(lambda: y.copy_(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 14336), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert cuda_library.available(), cuda_library.status()
    rows, columns = options.tokens, options.features
    elements = rows * columns
    copy = 4 * elements / copy_milliseconds(elements) / 1e6
    print(f"copy: {copy:.0f} GB/s")
    results = {}
    for activation, layout in CASES:
        way = "apart" if layout == "alone" else layout
        width = 2 * columns if layout == "pairs" else columns
        gate = torch.randn((rows, width), device="cuda").bfloat16()
        up = torch.randn((rows, width), device="cuda").bfloat16() if layout == "apart" else None
        inputs = 1 if layout == "alone" else 2
        cases: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {}
        for name in FORMATS:
            f = Format.parse(name)
            reads = 2 if f.has_tensor_scale else 1
            written = 2 * (f.element.bits / 8 + (4 / f.block[1] if f.block and f.scale.dtype == "float32" else 1 / 32))

            def fused(f: Format = f, gate=gate, up=up, activation=activation, way=way) -> object:
                return quantize_gated(gate, up, activation, way, f, f, None, None, False, 0.0)

            def apart(f: Format = f, gate=gate, up=up, activation=activation, way=way) -> object:
                made = activate(*gate_and_up(gate, up, way), activation)
                return quantize_matrix(made, f, f, None, None, None, (False, False), False, 0.0)

            cases[name] = (fused, apart, elements * (2 * inputs * reads + written))
        gradient = torch.randn((rows, columns), device="cuda").bfloat16()

        def fused_gradient(gate=gate, up=up, activation=activation, way=way, gradient=gradient) -> object:
            return gated_gradient(gradient, gate, up, activation, way)

        def gradient_apart(gate=gate, up=up, activation=activation, way=way, gradient=gradient) -> object:
            d_gate, d_up = gradients(gradient, *gate_and_up(gate, up, way), activation)
            return d_gate if d_up is None or way == "apart" else joined(d_gate, d_up, way)

        cases["gradient"] = (fused_gradient, gradient_apart, elements * 2 * (1 + 2 * inputs))
        for name, (fused, apart, moved) in cases.items():
            times = [(milliseconds(fused), milliseconds(apart)) for _ in range(options.rounds)]
            ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
            share = moved / ours / 1e6 / copy
            results[f"{activation} {layout} {name}"] = {"ms": ours, "apart": theirs, "share of a copy": share}
            print(
                f"{activation:10} {layout:6} {name:16} {ours:7.3f} ms, one by one {theirs:7.3f} ms, {theirs / ours:5.2f}x, "
                f"{share:.2f} of a copy",
                flush=True,
            )
    if options.json:
        about = {
            "shape": [rows, columns],
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

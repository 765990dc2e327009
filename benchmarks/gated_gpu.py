"""Times activation plus cast on one GPU: fused, and as separate operations.

    python benchmarks/gated_gpu.py [--tokens 16384] [--features 14336] [--only silu] [--json FILE]

Rows: the forward's cast of silu(gate) * up and of gelu (tanh) in both directions, by format; the activation's gradients; and
the cast of these by a given scale in both directions (delayed scaling). The share is the part of a copy's bandwidth that fused
kernels reach, for the bytes that they must read and write. Figures are medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from blockfp.torch_backend.ops.layer.activations import activate, gate_and_up, gradients, joined
from blockfp.torch_backend.ops.layer.gated_ops import gated_gradient, quantize_gated, quantize_gradient
from blockfp.torch_backend.ops.quantize.quantize_plans import quantize_matrix
from turns import milliseconds, write_record

from blockfp.formats import Format
from blockfp.kernels import cuda_library
from blockfp.kernels.operand_cast import OperandCast

FORMATS = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1", "nvfp4")
STEPS, WARM = 20, 3
CASES = (("silu", "apart"), ("silu", "pairs"), ("gelu_tanh", "alone"))


def copy_milliseconds(elements: int) -> float:
    x = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    return milliseconds(lambda: y.copy_(x), STEPS, WARM)


def written_bytes(f: Format, directions: int) -> float:
    """Returns bytes of codes and scales per element."""
    return directions * (f.element.bits / 8 + (4 / f.block[1] if f.block and f.scale.dtype == "float32" else 1 / 32))


Case = tuple[list[Callable[[], object]], float]
"""What is compared, the fused one first and the operations one by one second, and the bytes that the first has to move."""


def gated_cases(activation: str, layout: str, rows: int, columns: int) -> dict[str, Case]:
    elements, inputs = rows * columns, 1 if layout == "alone" else 2
    way = "apart" if layout == "alone" else layout
    width = 2 * columns if layout == "pairs" else columns
    gate = torch.randn((rows, width), device="cuda").bfloat16()
    up = torch.randn((rows, width), device="cuda").bfloat16() if layout == "apart" else None
    cases: dict[str, Case] = {}
    for name in FORMATS:
        f = Format.parse(name)
        reads = 2 if f.has_tensor_scale else 1

        def fused(f: Format = f) -> object:
            return quantize_gated(gate, up, activation, way, OperandCast(f, f))

        def apart(f: Format = f) -> object:
            made = activate(*gate_and_up(gate, up, way), activation)
            return quantize_matrix(made, OperandCast(f, f))

        cases[name] = [fused, apart], elements * (2 * inputs * reads + written_bytes(f, 2))
    gradient = torch.randn((rows, columns), device="cuda").bfloat16()

    def gradient_apart() -> object:
        d_gate, d_up = gradients(gradient, *gate_and_up(gate, up, way), activation)
        return d_gate if d_up is None or way == "apart" else joined(d_gate, d_up, way)

    both = [lambda: gated_gradient(gradient, gate, up, activation, way), gradient_apart]
    cases["gradient"] = both, elements * 2 * (1 + 2 * inputs)
    f, scale = Format.parse("fp8_e5m2"), torch.ones((), device="cuda")
    cast = OperandCast(f, f, "multiplier")

    def fused_gradient() -> object:
        ways = (False, True) if layout == "apart" else (False,)
        return [quantize_gradient(gradient, gate, up, activation, way, of_up, cast, scale) for of_up in ways]

    def cast_gradient() -> object:
        return [quantize_matrix(one, cast, None, scale) for one in gated_gradient(gradient, gate, up, activation, way)]

    reads = 5 if layout == "apart" else 1 + inputs
    cases["gradient fp8_e5m2"] = [fused_gradient, cast_gradient], elements * (2 * reads + inputs * written_bytes(f, 2))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 14336), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=[*dict.fromkeys(activation for activation, _ in CASES)])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert cuda_library.available(), cuda_library.status()
    rows, columns = options.tokens, options.features
    copy = 4 * rows * columns / copy_milliseconds(rows * columns) / 1e6
    print(f"copy: {copy:.0f} GB/s")
    results = {}
    for kind, layout in CASES:
        if options.only not in (None, kind):
            continue
        for name, (runs, moved) in gated_cases(kind, layout, rows, columns).items():
            times = [[milliseconds(run, STEPS, WARM) for run in runs] for _ in range(options.rounds)]
            ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
            share = moved / ours / 1e6 / copy
            results[" ".join(filter(None, (kind, layout, name)))] = {
                "ms": ours,
                "apart": theirs,
                "share of a copy": share,
            }
            print(
                f"{kind:10} {layout:6} {name:22} {ours:7.3f} ms, one by one {theirs:7.3f} ms, {theirs / ours:5.2f}x, "
                f"{share:.2f} of a copy",
                flush=True,
            )
    write_record(options.json, results, shape=[rows, columns])


if __name__ == "__main__":
    main()

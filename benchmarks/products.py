"""TFLOP/s of FP8 products in blocks, on one Hopper GPU: this library's own kernel, cuBLASLt through PyTorch, and bf16.

    python benchmarks/products.py [--out products.json]

Values are Gaussian. Kinds take turns, each for about 30 ms, so that all find the GPU as warm; a figure is the median of nine
such turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from blockfp.torch_backend.custom_ops import cuda
from torch.nn.functional import ScalingType

import blockfp.torch as bfp
from blockfp.definition import layout
from blockfp.kernels import cuda_library

FORWARD = (
    (8192, 8192, 8192),
    (16384, 16384, 4096),
    (16384, 4096, 16384),
    (4096, 4096, 4096),
    (4096, 7168, 2048),
    (512, 4096, 4096),
)
WEIGHTS = (
    (8192, 8192, 8192),
    (4096, 16384, 16384),
    (16384, 4096, 16384),
    (6144, 4096, 8192),
    (4096, 4096, 8192),
    (2048, 768, 8192),
)
GROUPED = ((8, 16384, 14336, 4096), (64, 65536, 768, 2048), (128, 65536, 1536, 4096))
ROWS, SQUARES = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
TURNS = 10


def once(run, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measure(kinds: dict, operations: float) -> dict[str, float]:
    """TFLOP/s of each kind."""
    calls = max(3, int(0.03 * 1e15 / operations))
    times = {name: [] for name in kinds}
    for _ in range(TURNS):
        for name, run in kinds.items():
            times[name].append(once(run, calls))
    return {name: round(operations / statistics.median(each[1:]) / 1e9) for name, each in times.items()}


def operands(m: int, n: int, k: int, weight: str):
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return x, w, bfp.quantize(x, ROWS), bfp.quantize(w, weight)


def dense(m: int, n: int, k: int, weight: str) -> dict[str, float]:
    x, w, a, b = operands(m, n, k, weight)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    codes = [each.codes.view(torch.float8_e4m3fn) for each in (a, b)]
    a_scales = cuda.transpose_words(a.scales)
    if weight == ROWS:
        ours = cuda.transpose_words(b.scales)
        theirs, kind, rows = ours.t(), ScalingType.BlockWise1x128, 1
    else:
        ours = b.scales.contiguous()
        theirs, kind, rows = layout.pad_scales(b.scales, 1, 4).t(), ScalingType.BlockWise128x128, 128
    kinds = {
        "own": lambda: cuda_library.library().block_product(
            a.codes, b.codes, a_scales, ours, None, None, out, 0, 0, rows, False
        ),
        "cublaslt": lambda: F.scaled_mm(
            codes[0], codes[1].t(), a_scales.t(), ScalingType.BlockWise1x128, theirs, kind, output_dtype=torch.bfloat16
        ),
        "bf16": lambda: torch.mm(x, w.t()),
    }
    return measure(kinds, 2 * m * n * k)


def grouped(groups: int, m: int, n: int, k: int) -> dict[str, float]:
    """Uneven groups, whose ends are in device memory."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16)
    shares = 0.5 + torch.rand(groups, generator=torch.Generator().manual_seed(0))
    ends = (shares.cumsum(0) / shares.sum() * m).round().int().cuda()
    ends[-1] = m
    a, b = bfp.quantize(x, ROWS), bfp.quantize(w, SQUARES)
    a_scales, b_scales = cuda.transpose_words(a.scales), b.scales.contiguous()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    kinds = {
        "own": lambda: cuda_library.library().block_product(
            a.codes, b.codes, a_scales, b_scales, ends, None, out, 0, 0, 128, False
        ),
        "bf16": lambda: F.grouped_mm(x, w.mT, offs=ends),
    }
    return measure(kinds, 2 * m * n * k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cublaslt": int(cuda_library.library().cublas_version()),
    }
    for name, shapes, run in (
        ("1x128 by 128x128", FORWARD, lambda *shape: dense(*shape, SQUARES)),
        ("1x128 by 1x128", WEIGHTS, lambda *shape: dense(*shape, ROWS)),
        ("grouped, 1x128 by 128x128", GROUPED, grouped),
    ):
        results[name] = {}
        for shape in shapes:
            results[name][" x ".join(map(str, shape))] = found = run(*shape)
            print(name, shape, found, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

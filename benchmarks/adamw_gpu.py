"""Times the AdamW kernel on one GPU, as a share of a copy measured in the same run, and torch's fused AdamW.

    python benchmarks/adamw_gpu.py --out benchmarks/results

Bytes count once: gradient, master and both moments read; master, both moments, codes and scales written. Formats with a
per-tensor amax (FP8 per tensor, NVFP4) take a second pass over the masters, whose read counts too; the first computes the amax.
The parameters together are far larger than the caches. torch's AdamW updates fp32 parameters and writes no codes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import numpy as np
import torch
from blockfp.torch_backend.ops.optimizer import cuda_steps
from gpu import byte_count, environment, milliseconds

from blockfp.definition import adamw
from blockfp.formats import Format
from blockfp.kernels import step_table
from blockfp.torch import AdamW, quantize

GOAL = 0.85
# The weights of a transformer's layer, several layers of them: about 400 million elements.
SHAPES = [shape for _ in range(6) for shape in ((4096, 4096), (12288, 4096), (4096, 4096))]
KERNEL_CASES = [
    (name, moments, dtype)
    for moments in ("float32", "bfloat16", "fp8")
    for name in ("mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp4_e2m1_32x32", None)
    for dtype in (("bfloat16", "float32") if moments == "float32" else ("bfloat16",))
    if moments == "float32" or name in ("mxfp8_e4m3_32x32", "fp8_e4m3_128x128")
]


def arrays_of(name: str | None, moments: str, dtype: str) -> tuple[list[list[torch.Tensor | None]], np.ndarray]:
    """Returns the arrays of all parameters (`step_table.ARRAYS`), and the prepared table of a kernel call."""
    arrays, rows, kept = [], [], {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.uint8}[moments]
    c = adamw.coefficients(10, 1e-3, (0.9, 0.999), 1e-8, 0.01)
    for shape in SHAPES:
        weight = torch.randn(shape, device="cuda")
        first, second = (torch.full(shape, 0.01, device="cuda").to(kept) for _ in range(2))
        scales = [torch.ones(shape[0], shape[1] // 128, device="cuda") for _ in range(2)] if moments == "fp8" else [None, None]
        out = out_scales = format = None
        if name is not None:
            q = quantize(weight, name)
            out, out_scales, format = q.codes, q.scales, q.format
        gradient = torch.randn(shape, device="cuda").to(getattr(torch, dtype))
        arrays.append([gradient, weight, first, second, *scales, out, out_scales])
        moment = str(kept).removeprefix("torch.")
        rows.append(step_table.row(shape, dtype, moment, None, format, nominal="bfloat16", whole=shape))
    addresses = [[*(0 if x is None else x.data_ptr() for x in own), 0, 0] for own in arrays]
    count = len(SHAPES)
    return arrays, step_table.pack(rows, addresses, range(count), [c] * count, [10] * count, (0, 0))


def bytes_of(arrays: list[list[torch.Tensor | None]]) -> int:
    total = 0
    for gradient, *state, out, out_scales in arrays:
        total += byte_count(gradient) + sum(2 * byte_count(x) for x in state if x is not None)
        total += sum(byte_count(x) for x in (out, out_scales) if x is not None)
    return total


def note(rows: list, name: str, count: int, ms: float, copy: float, goal: float | None = None) -> None:
    speed = count / ms / 1e6
    rows.append(
        {"case": name, "ms": round(ms, 4), "gb_per_s": round(speed, 1), "of_copy": round(speed / copy, 4), "goal": goal}
    )
    mark = "" if goal is None else f"  goal {goal:.2f} {'ok' if speed / copy >= goal else 'SHORT'}"
    print(f"  {name:62s} {ms:8.3f} ms {speed:6.0f} GB/s {speed / copy:6.3f}{mark}", flush=True)


def copy_speed() -> float:
    x = torch.randn(1 << 29, device="cuda")
    out = torch.empty_like(x)
    return 2 * byte_count(x) / milliseconds(lambda: out.copy_(x), 30) / 1e6


def kernels(rows: list, copy: float) -> None:
    for name, moments, dtype in KERNEL_CASES:
        arrays, table = arrays_of(name, moments, dtype)
        on = arrays[0][0]
        ms = milliseconds(lambda table=table, on=on: cuda_steps.adamw(table, on), 30)
        goal = GOAL if moments == "float32" and name in ("mxfp8_e4m3_32x32", "fp8_e4m3_128x128") else None
        note(rows, f"kernel: {name or 'no codes'}, {moments} moments, {dtype} gradient", bytes_of(arrays), ms, copy, goal)
        del arrays, on
        torch.cuda.empty_cache()


def optimizers(rows: list, copy: float) -> None:
    """Times whole optimizer steps, torch's and blockfp's, including host work that isn't hidden."""
    for name in ("mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "fp8_e4m3", "nvfp4_16x16"):
        format = Format.parse(name)
        params = [torch.nn.Parameter(quantize(torch.randn(s, device="cuda").bfloat16(), format)) for s in SHAPES]
        for p in params:
            p.grad = torch.randn(p.shape, device="cuda", dtype=torch.bfloat16)
        optimizer = AdamW(params)
        optimizer.step()
        elements = sum(p.numel() for p in params)
        two_pass = format.has_tensor_scale
        count = int(elements * (2 + 24 + format.bytes_per_element + (4 if two_pass else 0)))
        note(rows, f"AdamW.step: {name}, bfloat16 gradient", count, milliseconds(optimizer.step, 30), copy)
        rows.append({"case": f"AdamW.step: {name}, host", "ms": round(host_milliseconds(optimizer.step), 4)})
        print(f"    host {rows[-1]['ms']} ms for {len(params)} parameters")
        del params, optimizer
        torch.cuda.empty_cache()
    params = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()
    note(
        rows, "torch.optim.AdamW(fused=True): fp32", sum(p.numel() for p in params) * 28, milliseconds(optimizer.step, 30), copy
    )
    rows.append({"case": "torch.optim.AdamW(fused=True), host", "ms": round(host_milliseconds(optimizer.step), 4)})
    print(f"    host {rows[-1]['ms']} ms")


def host_milliseconds(run) -> float:
    """Returns the shortest time until a call returns, with the device idle before it."""
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"), help="folder for the JSON file")
    arguments = parser.parse_args()
    env, rows = environment(), []
    copy = copy_speed()
    elements = sum(height * width for height, width in SHAPES)
    print(f"{env['gpu']}: copy {copy:.0f} GB/s; {len(SHAPES)} parameters, {elements / 1e6:.0f} million elements")
    kernels(rows, copy)
    optimizers(rows, copy)
    short = [row["case"] for row in rows if row.get("goal") and row["of_copy"] < row["goal"]]
    print(f"short of the goal: {', '.join(short) or 'none'}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"adamw-gpu-{env['date'][:10]}.json"
    path.write_text(json.dumps({**env, "copy_gb_per_s": round(copy, 1), "shapes": SHAPES, "rows": rows}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()

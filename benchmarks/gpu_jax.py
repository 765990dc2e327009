"""Pallas kernels against a copy on one GPU, in JAX: correctness on a part first, then GB/s.

Each input byte read and each output byte written counts once. Run: python benchmarks/gpu_jax.py [result.json]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime

import jax
import jax.numpy as jnp
import numpy as np
from blockfp.jax_backend.pallas import arrays

from blockfp import numerics
from blockfp.formats import Format

SHAPES = ((16384, 8192), (4096, 4096), (4095, 4100))
ROW = ("mxfp8_e4m3", "mxfp8_e4m3_floor", "mxfp8_e5m2", "mxint8", "fp8_e4m3_1x128", "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128",
       "fp8_e4m3_128x128_fp32", "mxfp8_e4m3_32x32", "nvfp4", "nvfp4_16x16")  # fmt: skip
COLUMN = ("mxfp8_e4m3", "mxint8", "fp8_e4m3_1x128", "fp8_e4m3_1x128_fp32")
DEQUANTIZE = (
    "fp8_e4m3",
    "mxfp8_e4m3",
    "fp8_e4m3_1x128",
    "mxfp8_e4m3_32x32",
    "fp8_e4m3_128x128",
    "mxint8",
    "nvfp4",
    "mxfp4_e2m1",
)


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def seconds(function, *arguments, calls: int = 40) -> float:
    """Best of three loops, after two warm calls."""
    for _ in range(2):
        jax.block_until_ready(function(*arguments))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def cases(shape: tuple[int, int], x: jax.Array):
    """(kernel, direction, function, its arguments, what a part of the result must equal)."""
    part = np.asarray(x[:256])
    tensor = Format.parse("fp8_e4m3")
    one = jax.block_until_ready(arrays.tensor_amax(x))
    given = numerics.Amax(np.asarray(one).reshape(1, 1), None, None)
    yield "amax", "", lambda x: arrays.tensor_amax(x), (x,), None
    yield (
        "fp8_e4m3, amax given",
        "row",
        lambda x, a: arrays.quantize(x, tensor, amax=a),
        (x, one),
        numerics.quantize(part, tensor, amax=given),
    )
    for rows in (False, True):
        yield (
            "fp8_e4m3, amax given",
            "row + column" if rows else "column",
            lambda x, a, rows=rows: [p for p in arrays.columnwise_quantize(x, tensor, rows=rows, amax=a) if p],
            (x, one),
            None,
        )
    for format in map(Format.parse, ROW):
        if format.scale.two_level:
            given = numerics.amax(part, format)._replace(tensor=np.asarray(one))
            run = lambda x, a, format=format: arrays.quantize(x, format, amax=a)
            yield f"{format}, amax given", "row", run, (x, one), numerics.quantize(part, format, amax=given)
        else:
            yield str(format), "row", lambda x, format=format: arrays.quantize(x, format), (x,), numerics.quantize(part, format)
    for format in map(Format.parse, COLUMN):
        for rows in (False, True):
            yield (
                str(format),
                "row + column" if rows else "column",
                lambda x, format=format, rows=rows: [q for q in arrays.columnwise_quantize(x, format, rows=rows) if q],
                (x,),
                None,
            )
    for format in map(Format.parse, DEQUANTIZE):
        q = jax.jit(lambda x, format=format: numerics.quantize(x, format))(x)
        run = lambda q, format=format: arrays.dequantize_array(*q, format, "bfloat16", columns=shape[1])
        yield str(format), "dequantize", run, (q,), None
    for name in ("mxfp8_e4m3", "nvfp4"):
        yield f"{name}, XLA", "row", lambda x, name=name: numerics.quantize(x, name), (x,), None


def check(result, expected) -> None:
    for got, wanted in zip(result, expected, strict=True):
        if wanted is not None:
            got = np.asarray(got[: wanted.shape[0]] if wanted.ndim else got)
            if got.tobytes() != np.asarray(wanted).tobytes():
                raise SystemExit("a kernel's bits differ from the definition's: nothing is timed")


def main() -> None:
    device = jax.devices()[0]
    results = []
    for shape in SHAPES:
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        copy = jax.jit(jnp.copy)
        copies = []

        def rate_of_copy(x=x, copy=copy):
            return 2 * x.nbytes / seconds(copy, x) / 1e9

        copies.append(rate_of_copy())
        rows = []
        for kernel, direction, function, arguments, expected in cases(shape, x):
            run = jax.jit(function)
            try:
                result = jax.block_until_ready(run(*arguments))
                if expected is not None:
                    check(result, expected)
                rate = (bytes_of(arguments) + bytes_of(result)) / seconds(run, *arguments) / 1e9
            except Exception as error:
                print(kernel, direction, "failed:", str(error)[:300].replace("\n", " "))
                continue
            rows.append({"shape": shape, "kernel": kernel, "direction": direction, "GB/s": round(rate)})
        copies.append(rate_of_copy())
        ceiling = max(copies)
        print(f"{shape}: copy {ceiling:.0f} GB/s (before {copies[0]:.0f}, after {copies[1]:.0f})")
        for row in rows:
            row["share of copy"] = round(row["GB/s"] / ceiling, 3)
            print(f"  {row['kernel']:28} {row['direction']:13} {row['GB/s']:6} {row['share of copy']:.3f}")
        results.append({"shape": shape, "copy GB/s": round(ceiling), "rows": rows})
    if len(sys.argv) > 1:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "GPU": device.device_kind, "driver": driver,
                 "jax": jax.__version__, "numpy": np.__version__, "python": sys.version.split()[0]}  # fmt: skip
        with open(sys.argv[1], "w") as file:
            json.dump({**about, "results": results}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()

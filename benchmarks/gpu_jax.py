"""Times Pallas kernels, and the CUDA library called from JAX, relative to a copy on one GPU, after comparing part of the bits.

Each input byte read and each output byte written counts once.

    python benchmarks/gpu_jax.py [result.json] [--only WORD]    # kernels whose names contain it, such as silu
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from blockfp.jax_backend.implementations import activations, choice, cuda
from blockfp.jax_backend.implementations.backend import marked
from blockfp.jax_backend.implementations.pallas import arrays
from blockfp.jax_backend.linear import grouped_codes, tiles

from blockfp.definition import groups, numerics
from blockfp.formats import Format
from blockfp.kernels.calls import ACTIVATIONS
from blockfp.kernels.operand_cast import OperandCast
from blockfp.recipes import Cast

GROUPS = 8
SHAPES = ((16384, 8192), (4096, 4096), (4095, 4100))
ROW = ("mxfp8_e4m3", "mxfp8_e4m3_floor", "mxfp8_e5m2", "mxint8", "fp8_e4m3_1x128", "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128",
       "fp8_e4m3_128x128_fp32", "mxfp8_e4m3_32x32", "nvfp4", "nvfp4_16x16")  # fmt: skip
COLUMN = ("mxfp8_e4m3", "mxint8", "fp8_e4m3_1x128", "fp8_e4m3_1x128_fp32")
FFI = ("mxfp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3_32x32", "nvfp4")
MADE = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3")
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


def seconds(function, *arguments, calls: int = 100) -> float:
    """Returns the best of three loops, after two warm calls."""
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
    """Returns (kernel, direction, function, its arguments, expected first 256 rows of the result)."""
    part = np.asarray(x[:256])
    one = jax.block_until_ready(arrays.tensor_amax(x))
    multiplier = jnp.float32(1.0)
    yield "amax", "", arrays.tensor_amax, (x,), None
    codes = numerics.encode(part, "fp8_e4m3", np.ones((1, 1), np.float32))
    yield "fp8_e4m3, given scale", "row", partial(_cast, directions=("row",)), (x, multiplier), [codes]
    yield "fp8_e4m3, given scale", "column", partial(_cast, directions=("column",)), (x, multiplier), None
    yield "fp8_e4m3, given scale", "row + column", partial(_cast, directions=("row", "column")), (x, multiplier), None
    for format in map(Format.parse, ROW):
        if format.scale.two_level:
            expected = numerics.quantize(part, format, amax=numerics.amax(part, format)._replace(tensor=np.asarray(one)))
            yield f"{format}, amax given", "row", partial(_row, format), (x, one), expected
        else:
            yield str(format), "row", partial(_row, format), (x,), numerics.quantize(part, format)
    for format in map(Format.parse, COLUMN):
        yield str(format), "column", partial(_column, format, rows=False), (x,), None
        yield str(format), "row + column", partial(_column, format, rows=True), (x,), None
    for format in map(Format.parse, DEQUANTIZE):
        q = jax.jit(partial(numerics.quantize, format=format))(x)
        yield str(format), "dequantize", partial(_dequantize, format, columns=shape[1]), (q,), None
    up = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    for format in map(Format.parse, MADE):
        for by in ("", ", ffi", ", XLA and a cast"):
            if by == ", ffi" and (choice.missing("ffi") is not None or not OperandCast(format, format).of_made(*shape)):
                continue
            yield f"{format} of silu * up{by}", "row + column", partial(_made, format, by), (x, up), None
    if choice.missing("ffi") is None:
        for format in map(Format.parse, FFI):
            whole = one if format.scale.two_level else None
            arguments = (x,) if whole is None else (x, whole)
            yield f"{format}, ffi", "row", partial(_ffi, format, both=False), arguments, None
            if format.block[0] == 1:  # pyright: ignore[reportOptionalSubscript]
                yield f"{format}, ffi", "row + column", partial(_ffi, format, both=True), arguments, None
        for name in ("fp8_e4m3", "fp8_e4m3_1x128"):
            for directions in (("row",), ("row", "column")):
                run = partial(_grouped, Format.parse(name), directions=directions)
                yield f"{name}, {GROUPS} groups, ffi", " + ".join(directions), run, (x,), None
    for name in ("mxfp8_e4m3", "nvfp4"):
        yield f"{name}, XLA", "row", partial(numerics.quantize, format=name), (x,), None


def _row(format, x, amax=None):
    return arrays.quantize(x, format, amax=amax)


def _column(format, x, *, rows):
    return [q for q in arrays.columnwise_quantize(x, format, rows=rows) if q is not None]


def _cast(x, multiplier, *, directions):
    """Returns only codes, because the caller gives the scale."""
    format = Format.parse("fp8_e4m3")
    if directions == ("row",):
        return [arrays.quantize(x, format, amax=multiplier).codes]
    both = arrays.columnwise_quantize(x, format, rows="row" in directions, amax=multiplier)
    return [q.codes for q in both if q is not None]


def _ffi(format, x, amax=None, *, both):
    library = choice.choose("ffi", "quantize", format=format)
    return (library.quantize_both if both else library.quantize)(x, None, amax, format=format)


def _made(format, by, gate, up):
    """Casts silu(gate) * up in both directions, by one Pallas kernel or as `by` says, with scales marked by an Inf."""
    if by == ", ffi":
        return cuda.quantize_made((gate, up), OperandCast(format, format), None, "quantize_gated", ACTIVATIONS["silu"])
    if by:
        cast = marked(partial(arrays.columnwise_quantize, format=format, rows=True))
        return cast(activations.activated(gate, up, "silu"))
    return arrays.quantize_made(gate, up, "silu", format, rows=True, columns=True)


def _grouped(format, x, *, directions):
    """Returns cases with groups of uneven sizes, one of them empty."""
    shares = np.random.default_rng(0).dirichlet([4.0] * (GROUPS - 1))
    ends = np.rint(np.cumsum([0.0, *shares]) * x.shape[0]).astype(np.int32)
    places = tiles.Tiles.of(jnp.asarray([0, *np.diff(ends)], jnp.int32), x.shape[0], groups.UNIT)
    casts = tuple(Cast(format) if way in directions else None for way in ("row", "column"))
    both = grouped_codes.quantize_groups(x, places, casts, tiles.Scaling(0.0))
    return [(q.codes, q.scales) for q in both if q is not None]


def against_torch(x: jax.Array) -> list[dict]:
    """Compares the same kernels from jitted JAX and from PyTorch in one process, by the host's clock."""
    import torch
    from blockfp.torch_backend.ops import cuda

    on_torch, rows = torch.from_dlpack(x), []

    def torch_seconds(call, calls: int = 100) -> float:
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / calls)
        return best

    for format in map(Format.parse, FFI):
        if format.scale.two_level:
            continue  # PyTorch's face looks for the tensor's amax itself
        directions = {"row": (False, cuda.quantize)}
        if format.block[0] == 1:  # pyright: ignore[reportOptionalSubscript]
            directions["row + column"] = (True, cuda.quantize_both)
        for direction, (both, call) in directions.items():
            ours = seconds(jax.jit(partial(_ffi, format, both=both)), x)
            theirs = torch_seconds(partial(call, on_torch, format))
            rows.append({"kernel": str(format), "direction": direction, "JAX us": round(ours * 1e6, 1),
                         "PyTorch us": round(theirs * 1e6, 1), "JAX / PyTorch": round(ours / theirs, 3)})  # fmt: skip
            print(f"  {format!s:28} {direction:13} JAX {ours * 1e6:.1f} us, PyTorch {theirs * 1e6:.1f} us: {ours / theirs:.3f}")
    return rows


def _dequantize(format, q, *, columns):
    return arrays.dequantize_array(*q, format, "bfloat16", columns=columns)


def check(result, expected) -> None:
    for got, wanted in zip(result, expected, strict=True):
        if wanted is not None:
            got = np.asarray(got[: wanted.shape[0]] if wanted.ndim else got)
            if got.tobytes() != np.asarray(wanted).tobytes():
                raise SystemExit("a kernel's bits differ from the definition's: nothing is timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", nargs="?")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    device = jax.devices()[0]
    results, beside = [], []
    for shape in SHAPES:
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        copy = jax.jit(jnp.copy)
        copies = []

        def rate_of_copy(x=x, copy=copy):
            return 2 * x.nbytes / seconds(copy, x) / 1e9

        copies.append(rate_of_copy())
        rows = []
        for kernel, direction, function, arguments, expected in cases(shape, x):
            if options.only not in kernel:
                continue
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
            print(f"  {row['kernel']:38} {row['direction']:13} {row['GB/s']:6} {row['share of copy']:.3f}")
        results.append({"shape": shape, "copy GB/s": round(ceiling), "rows": rows})
        if shape == SHAPES[0] and choice.missing("ffi") is None and not options.only:
            beside = against_torch(x)
    if options.json:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "GPU": device.device_kind, "driver": driver,
                 "jax": jax.__version__, "numpy": np.__version__, "python": sys.version.split()[0]}  # fmt: skip
        with open(options.json, "w") as file:
            json.dump({**about, "results": results, "against PyTorch": beside}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()

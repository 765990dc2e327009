"""Times all-gathers of quantized arrays over two GPUs inside shard_map, and bf16's of the same arrays: bytes and milliseconds.

    python benchmarks/gather_gpu_jax.py [--rows 16384] [--columns 4096] [--weights 16] [--formats NAME ...] [--json FILE]

Three cases: one weight, sharded along rows as for FSDP; a list of weights in one program (16 make 1.07 billion parameters);
activations sharded along tokens, which are quantized and then gathered. Bytes are what each device sends to each other one,
read from the all-gathers of the compiled program. Each format takes turns with bf16, both warmed up by as many calls as are
timed; figures are medians. To try it on the CPU (where XLA gathers bf16 as float32), prefix
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 and append --rows 512 --columns 256.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_gpu_jax import milliseconds

import blockfp.jax as bfp

WEIGHTS = ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp8_e4m3_32x32", "mxfp6_e3m2_32x32", "mxfp4_e2m1_32x32", "nvfp4_16x16")
ACTIVATIONS = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4")
AXIS = "fsdp"


def normal(index: int, shape: tuple[int, int], mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns bf16 values, sharded along their rows."""
    x = jax.random.normal(jax.random.key(index), shape, jnp.bfloat16)
    return jax.device_put(x, NamedSharding(mesh, P(AXIS)))


def program(body: Callable[..., Any], mesh: jax.sharding.Mesh, operands: Any, specs: Any) -> Callable[[], Any]:
    """Returns the compiled program that runs `body` on each device's part and replicates its result."""
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(operands).compile()


def gather_values(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.all_gather(x, AXIS, tiled=True) for x in arrays]


def gather_quantized(arrays: list[Any], format: str | None = None) -> list[Any]:
    gathered = [bfp.all_gather(x, AXIS, format) for x in arrays]
    return [(q.codes, q.scales, q.tensor_scale) for q in gathered]


def bytes_sent(run: Any, devices: int) -> int:
    """Counts the bytes that a device sends to each other one: the operands of the program's all-gathers."""
    total = 0
    for kind, start in re.findall(r" = (\S.*?) all-gather(-start)?\(", run.as_text()):
        size = sum(
            _ITEM[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
            for dtype, sizes in re.findall(r"([a-z]+\d+[a-z0-9]*)\[([\d,]*)\]", kind)
        )
        # An asynchronous one names its operands beside its results.
        total += size // (devices + 1 if start else devices)
    return total


_ITEM = {"u8": 1, "s8": 1, "bf16": 2, "f16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


def compare(base: Any, run: Any, operands: tuple[Any, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns bytes and median times of bf16's program and a quantized one, taking turns."""
    times: dict[str, list[float]] = {"bf16": [], "quantized": []}
    calls = [partial(base, operands[0]), partial(run, operands[1])]
    for _ in range(options.rounds):
        for each, call in zip(times.values(), calls, strict=True):
            each.append(milliseconds(call, options.calls))
    bf16, ms = (statistics.median(each) for each in times.values())
    sent = [bytes_sent(each, jax.device_count()) for each in (base, run)]
    return {"bf16 bytes": sent[0], "bytes": sent[1], "share of bytes": sent[1] / sent[0], "bf16 ms": bf16, "ms": ms,
            "share of time": ms / bf16, "rounds": times}  # fmt: skip


def check(gathered: list[Any], whole: list[Any]) -> None:
    for parts, q in zip(gathered, whole, strict=True):
        for part, expected in zip(parts, (q.codes, q.scales, q.tensor_scale), strict=True):
            if expected is not None and np.asarray(part).tobytes() != np.asarray(expected).tobytes():
                raise SystemExit(f"a gathered array in {q.format} differs from the whole's quantization: nothing is timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = (("rows", 16384), ("columns", 4096), ("weights", 16), ("rounds", 5), ("calls", 20))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--formats", nargs="*", help="formats of the weights and the activations; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if jax.device_count() < 2:
        raise SystemExit(f"two devices are wanted, JAX has {jax.device_count()}")
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    shape = (options.rows, options.columns)
    about = {"date": datetime.date.today().isoformat(), "shape": shape, "weights": options.weights,
             "devices": jax.device_count(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}  # fmt: skip
    print(json.dumps(about), flush=True)
    results: list[dict[str, Any]] = []

    def report(case: str, format: str, result: dict[str, Any]) -> None:
        results.append({"case": case, "format": format, **result})
        line = f"{case:12} {format:18} {result['bytes'] / 1e6:9.2f} MB ({result['share of bytes']:.3f} of bf16)"
        print(f"{line}  {result['ms']:8.3f} ms, bf16 {result['bf16 ms']:8.3f} ms ({result['share of time']:.3f})", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")

    wanted = options.formats or [*WEIGHTS, *ACTIVATIONS]
    for case, count in (("one weight", 1), (f"{options.weights} weights", options.weights)):
        values = [normal(i, shape if i % 2 == 0 else shape[::-1], mesh) for i in range(count)]
        base = program(gather_values, mesh, values, P(AXIS))
        for format in (f for f in WEIGHTS if f in wanted):
            whole = [bfp.quantize(x, format) for x in values]
            placed = bfp.shard_params(whole, mesh, P(AXIS))
            run = program(gather_quantized, mesh, placed, bfp.partition_specs(placed))
            if count == 1:
                check(run(placed), whole)
            del whole
            report(case, format, compare(base, run, (values, placed), options))
    values = [normal(0, shape, mesh)]
    base = program(gather_values, mesh, values, P(AXIS))
    for format in (f for f in ACTIVATIONS if f in wanted):
        run = program(partial(gather_quantized, format=format), mesh, values, P(AXIS))
        check(run(values), [bfp.quantize(values[0], format)])
        report("activations", format, compare(base, run, (values, values), options))


if __name__ == "__main__":
    main()

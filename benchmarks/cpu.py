"""Times quantize and dequantize on this CPU, for every format and backend, relative to a copy of the same bytes.

    python benchmarks/cpu.py [--formats mxfp8_e4m3 nvfp4] [--rows 4096] [--columns 8192] [--write]

One run measures everything: a copy, the kernels with each instruction set, the definition in NumPy, `blockfp.torch`,
`blockfp.jax` jitted, the plain casts of torch and ml_dtypes, and torchao's `to_mx`. GB/s count each byte of the input and of
the output once; figures are medians. The copy and the kernels write to existing memory; all others allocate their results, as
in users' calls. `--write` puts the tables into docs/benchmarks.md and the figures into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cpu_tables import CAST_SHAPE, jax_tables, tables
from quiet import Stopwatch

from blockfp.definition import numerics
from blockfp.definition.layout import DTYPES
from blockfp.formats import NAMES, Format
from blockfp.kernels import native

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKERS = ("<!-- benchmarks/cpu.py begins -->", "<!-- benchmarks/cpu.py ends -->")
PACKAGES = ("blockfp", "apache-tvm-ffi", "numpy", "ml_dtypes", "torch", "jax", "torchao")


class Measured(NamedTuple):
    """Gigabytes per second of one backend, quantizing and dequantizing; NaN if not measured."""

    quantize: float
    dequantize: float = float("nan")


stopwatch = Stopwatch(patience=900)


def rate(call: Callable[[], Any], size: float) -> float:
    return size / stopwatch.seconds(call) / 1e9


def bytes_of(x: np.ndarray, format: Format) -> float:
    """Returns the bytes of the array and of its codes and scales."""
    return x.nbytes + x.size * format.bytes_per_element


def gaussian(rows: int, columns: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    return x.astype(DTYPES["bfloat16"])


def copy_rate(size: int) -> float:
    """Returns the GB/s of a copy into existing memory whose reads and writes total `size` bytes, on all cores if torch is
    installed.
    """
    half = np.ones(size // 2, np.uint8)
    try:
        import torch
    except ImportError:
        target = np.empty_like(half)
        return rate(lambda: np.copyto(target, half), size)
    source = torch.from_numpy(half)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), size)


def measure_module(module, x, format: Format) -> Measured:
    """Times `native` or `numerics` on a NumPy array."""
    size = bytes_of(x, format)
    parts = module.quantize(x, format)
    columns = x.shape[-1]
    return Measured(
        rate(lambda: module.quantize(x, format), size),
        rate(lambda: module.dequantize(*parts, format, "bfloat16", columns=columns), size),
    )


@contextlib.contextmanager
def kernel(instruction_set: str):
    """Returns the kernels with this instruction set; each call reuses the output memory of the last one of its shapes."""
    outputs: dict[tuple, np.ndarray] = {}
    allocate = native._numpy.empty

    def reuse(shape, dtype):
        key = (tuple(shape), dtype, len(shape))
        if key not in outputs:
            outputs[key] = allocate(shape, dtype)
        return outputs[key]

    native.use_instruction_set(instruction_set)
    native._numpy.empty = reuse
    try:
        yield
    finally:
        native._numpy.empty = allocate
        native.use_instruction_set(native.instruction_sets()[0])


def measure_kernel(instruction_set: str, x: np.ndarray, format: Format) -> Measured:
    with kernel(instruction_set):
        return measure_module(native, x, format)


def measure_torch(x: np.ndarray, format: Format) -> Measured:
    import torch

    import blockfp.torch as bfp

    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    q = bfp.quantize(tensor, format)
    size = bytes_of(x, format)
    return Measured(rate(lambda: bfp.quantize(tensor, format), size), rate(q.dequantize, size))


def measure_jax(x: np.ndarray, format: Format) -> Measured:
    import jax

    import blockfp.jax as bfp

    array = jax.numpy.asarray(x)
    quantize = jax.jit(lambda a: bfp.quantize(a, format))
    dequantize = jax.jit(lambda q: q.dequantize())
    q = quantize(array)
    size = bytes_of(x, format)
    return Measured(
        rate(lambda: jax.block_until_ready(quantize(array)), size),
        rate(lambda: dequantize(q).block_until_ready(), size),
    )


def measure_formats(formats: list[Format], rows: int, columns: int) -> tuple[dict[str, dict[str, Measured]], list[str]]:
    """Returns each backend's rates by format, and notes on what could not be measured."""
    whole, part = gaussian(rows, columns), gaussian(max(rows // 16, 1), columns)
    notes = [f"NumPy (the definition) and JAX were measured on {part.shape[0]} of the {rows} rows."]
    backends: dict[str, Callable[[Format], Measured]] = {}
    if native.available():
        for name in native.instruction_sets():
            backends[f"kernel, {name}"] = lambda format, name=name: measure_kernel(name, whole, format)
    else:
        notes.append(native.status())
    backends["NumPy"] = lambda format: measure_module(numerics, part, format)
    for name, measure, x in (("torch", measure_torch, whole), ("JAX", measure_jax, part)):
        try:
            measure(gaussian(2, 256), formats[0])
        except ImportError as error:
            notes.append(f"{name} was not measured: {error}.")
            continue
        backends[name] = lambda format, measure=measure, x=x: measure(x, format)
    # The copy is measured beside each format: on a shared machine speeds change from minute to minute.
    rates: dict[str, dict[str, Measured]] = {name: {} for name in ("copy", *backends)}
    for format in formats:
        rates["copy"][str(format)] = Measured(*[copy_rate(int(bytes_of(whole, format)))] * 2)
        for name, measure in backends.items():
            rates[name][str(format)] = measure(format)
        print(f"{format!s:28}", *(f"{name} {rates[name][str(format)].quantize:.2f}" for name in rates), flush=True)
    return rates, notes


def measure_peers(rows: int, columns: int) -> tuple[dict[str, float], list[str]]:
    """Returns the GB/s of peers on this CPU: plain casts to E4M3 without scales, and torchao's MXFP8."""
    import ml_dtypes

    x = gaussian(rows, columns)
    part = x[: max(rows // 16, 1)]
    rates = {"ml_dtypes: astype(float8_e4m3fn)": rate(lambda: part.astype(ml_dtypes.float8_e4m3fn), part.size * 3)}
    notes = []
    try:
        import torch
    except ImportError as error:
        return rates, [f"torch's cast was not measured: {error}."]
    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    rates["torch: to(float8_e4m3fn)"] = rate(lambda: tensor.to(torch.float8_e4m3fn), x.size * 3)
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        notes.append(f"torchao was not measured: {error}.")
    else:
        size = x.size * (3 + 1 / 32)
        for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):
            name = f"torchao: to_mx, E4M3, {mode.value}, eager"
            rates[name] = rate(lambda mode=mode: to_mx(tensor, torch.float8_e4m3fn, 32, mode), size)
    return rates, notes


CAST_FORMATS = ("mxfp8_e4m3", "mxfp8_e4m3_32x32", "fp8_e4m3", "fp8_e4m3_128x128", "mxfp4_e2m1", "nvfp4")


def jax_casts() -> dict[str, dict[str, float]]:
    """Returns milliseconds of one quantize by format: an equal copy, the NumPy face, jitted JAX by the kernels and by XLA."""
    try:
        import jax

        import blockfp
        import blockfp.jax as bfp
    except ImportError:
        return {}

    x = gaussian(*CAST_SHAPE)
    array = jax.numpy.asarray(x)
    found = {}
    for name in CAST_FORMATS:
        calls = {"copy": lambda: np.copy(x), "NumPy face": lambda name=name: blockfp.quantize(x, name)}
        for label, asked in (("JAX", None), ("JAX, the definition", "xla")):
            quantize = jax.jit(lambda a, name=name, asked=asked: bfp.quantize(a, name, implementation=asked))
            calls[label] = lambda quantize=quantize: jax.block_until_ready(quantize(array))
        found[name] = {label: stopwatch.seconds(call) * 1e3 for label, call in calls.items()}
    return found


def compile_times() -> dict[str, dict[str, float]]:
    """Returns the seconds from `jax.jit` to a compiled step of a scanned transformer by recipe, its StableHLO lines, and XLA's
    share.

    The best of three; the first row is the unquantized step.
    """
    try:
        import scanned_transformer
    except ImportError:
        return {}

    found = {}
    for recipe in ("none", "mxfp8", "fp8_current", "fp8_block", "mxfp6", "mxfp4", "nvfp4"):
        kernels = scanned_transformer.compiled(recipe, implementation=None)
        found[recipe] = {"seconds": kernels.seconds, "lines": kernels.lines}
        if recipe in ("mxfp8", "fp8_block", "nvfp4"):
            found[recipe]["definition"] = scanned_transformer.compiled(recipe, implementation="xla", times=1).seconds
    return found


def import_times() -> dict[str, float]:
    """Returns the seconds of each import in a fresh interpreter, minus the interpreter's own start; the best of five."""

    def run(statement: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            if subprocess.run([sys.executable, "-c", statement], capture_output=True).returncode:
                return float("nan")
            times.append(time.perf_counter() - start)
        return min(times)

    empty = run("pass")
    statements = ("import blockfp", "import jax", "import blockfp.jax", "import torch", "import blockfp.torch")
    times = {statement: run(statement) - empty for statement in statements}
    times["first kernel call"] = run("from blockfp.kernels import native; native.available()") - times["import blockfp"] - empty
    return times


def call_overheads() -> dict[str, float]:
    """Returns the microseconds of quantizing a [16, 64] bfloat16 array to MXFP8."""
    x, name = gaussian(16, 64), "mxfp8_e4m3"
    calls: dict[str, Callable[[], Any]] = {"numerics.quantize (NumPy)": lambda: numerics.quantize(x, name)}
    if native.available():
        calls["native.quantize (NumPy)"] = lambda: native.quantize(x, name)
    try:
        import torch

        import blockfp.torch as bfp

        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if native.available():
            calls["native.quantize (torch)"] = lambda: native.quantize(tensor, name)
        calls["blockfp.torch.quantize"] = lambda: bfp.quantize(tensor, name)
        calls["torch: to(float8_e4m3fn)"] = lambda: tensor.to(torch.float8_e4m3fn)
    except ImportError:
        pass
    try:
        import jax

        import blockfp.jax as bfj

        array = jax.numpy.asarray(x)
        quantize = jax.jit(lambda a: bfj.quantize(a, name))
        calls["blockfp.jax.quantize, jitted"] = lambda: jax.block_until_ready(quantize(array))
    except ImportError:
        pass

    def hundred(call):
        return lambda: [call() for _ in range(100)]

    return {label: stopwatch.seconds(hundred(call)) * 1e4 for label, call in calls.items()}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(result: dict[str, Any]) -> None:
    """Writes the tables between the page's markers and the figures into their own file."""
    begins, ends = MARKERS
    text = DOCUMENT.read_text()
    if begins not in text or ends not in text:
        raise SystemExit(f"{DOCUMENT} has no markers {begins!r} and {ends!r} to write between")
    before, rest = text.split(begins, 1)
    after = rest.split(ends, 1)[1]
    DOCUMENT.write_text(f"{before}{begins}\n{tables(result)}\n{ends}{after}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"cpu-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {DOCUMENT} and {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(NAMES), metavar="NAME", help="default: all")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--jax", action="store_true", help="measure JAX's casts and compile times only, and print them")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md and benchmarks/results/")
    arguments = parser.parse_args()
    formats = [Format.parse(name) for name in arguments.formats]
    shape = (arguments.rows, arguments.columns)
    print(native.status())
    if arguments.jax:
        print("\n".join(jax_tables({"jax_casts": jax_casts(), "compile_times": compile_times()})))
        return
    rates, notes = measure_formats(formats, *shape)
    peers, more_notes = measure_peers(*shape)
    result = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "versions": versions(),
        "shape": shape,
        "copy": statistics.median(measured.quantize for measured in rates["copy"].values()),
        "formats": [str(format) for format in formats],
        "rates": {
            backend: {name: measured._asdict() for name, measured in by_format.items()} for backend, by_format in rates.items()
        },
        "peers": peers,
        "jax_casts": jax_casts(),
        "compile_times": compile_times(),
        "imports": import_times(),
        "overheads": call_overheads(),
    }
    disturbed = f"{stopwatch.disturbed} of {stopwatch.measured} figures were taken while other processes were busy."
    result["notes"] = [*notes, *more_notes, disturbed]
    print(tables(result))
    if arguments.write:
        write(result)


if __name__ == "__main__":
    main()

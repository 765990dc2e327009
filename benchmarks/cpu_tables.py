"""The tables of docs/benchmarks.md that cpu.py writes."""

from __future__ import annotations

from textwrap import fill
from typing import Any

CAST_SHAPE = (2048, 2048)
"""The size of the arrays that JAX's implementations are timed on."""

WIDTH = 128

SHOWN = ("fp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp8_e4m3_32x32")
SHOWN += ("mxfp6_e3m2", "mxfp4_e2m1", "mxint8", "nvfp4", "nvfp4_16x16", "nvfp4_4over6")
"""The formats of the page, one of each element and shape of block; the record has all that were measured."""


def tables(result: dict[str, Any]) -> str:
    """Returns the figures as Markdown."""
    rows, columns = result["shape"]
    used = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    definition = [rate["quantize"] for rate in result["rates"].get("NumPy", {}).values()]
    peers = (f"{name} {value / result['copy']:.2f}" for name, value in result["peers"].items())
    imports = (f"`{name}` {value:.2f} s" for name, value in result["imports"].items())
    about = f"{result['date']}; {result['processor']}; {used}. The record is `cpu-{result['date']}.json`."
    casts = (
        f"Quantize bfloat16 [{rows}, {columns}] / dequantize to bfloat16, as a share of a copy of the same bytes "
        f"({result['copy']:.1f} GB/s in the median). The copy and the kernels write to memory that is there already; all "
        "others allocate their results."
    )
    others = (
        f"Quantizing by others: {'; '.join(peers)}.",
        f"The definition in NumPy: {min(definition):.3f} to {max(definition):.2f} GB/s." if definition else "",
        f"Imports: {', '.join(imports)}.",
    )
    lines = [fill(" ".join([about, *result["notes"]]), WIDTH), "", fill(casts, WIDTH), "", *_by_format(result), ""]
    return "\n".join([*lines, fill(" ".join(filter(None, others)), WIDTH), *jax_tables(result)])


def jax_tables(result: dict[str, Any]) -> list[str]:
    """Returns JAX's casts and compile times as Markdown."""
    lines: list[str] = []
    casts = result.get("jax_casts")
    if casts:
        labels = list(next(iter(casts.values())))
        rows = (f"`{name}` {' / '.join(f'{row[label]:.2f}' for label in labels)}" for name, row in casts.items())
        shape = "x".join(map(str, CAST_SHAPE))
        what = f"Quantize bfloat16 {shape} into new memory, ms of {' / '.join(labels)}: {'; '.join(rows)}."
        lines += ["", fill(what, WIDTH)]
    compiled = result.get("compile_times")
    if compiled:
        plain = compiled["none"]["seconds"]
        compiled = {name: row for name, row in compiled.items() if name != "none"}
        rows = (f"`{name}` {row['seconds'] / plain:.2f}" for name, row in compiled.items())
        alone = (f"`{name}` {row['definition'] / plain:.0f}" for name, row in compiled.items() if "definition" in row)
        what = (
            f"Tracing, lowering and compiling `value_and_grad` of 12 scanned transformer layers takes {plain:.2f} s without "
            f"quantization (the best of three), and so many times that with: {', '.join(rows)}. By the definition alone: "
            f"{', '.join(alone)}."
        )
        lines += ["", fill(what, WIDTH)]
    return lines


def _by_format(result: dict[str, Any]) -> list[str]:
    rates = {backend: rates for backend, rates in result["rates"].items() if backend not in ("copy", "NumPy")}
    lines = [f"| format | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    for name in filter(result["formats"].__contains__, SHOWN):
        copy = result["rates"]["copy"][name]
        cells = (" / ".join(f"{by[name][way] / copy[way]:.2f}" for way in ("quantize", "dequantize")) for by in rates.values())
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines

"""The tables of docs/benchmarks.md that cpu.py writes."""

from __future__ import annotations

from typing import Any

CAST_SHAPE = (2048, 2048)
"""The size of the arrays that JAX's implementations are timed on."""


def tables(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    copy = result["copy"]
    rows, columns = result["shape"]
    used = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['date']}; {result['processor']}; {used}.",
        "",
        f"Input bfloat16 [{rows}, {columns}]. A copy of the same bytes ran at {copy:.1f} GB/s (median).",
        "In brackets the share of the copy measured beside the figure. The copy and the kernels write to memory that is",
        "there already; all others allocate their results.",
        *result["notes"],
        "",
        "Quantize, GB/s:",
        "",
    ]
    lines += _by_format(result, "quantize")
    lines += ["", "Dequantize to bfloat16, GB/s:", ""]
    lines += _by_format(result, "dequantize")
    lines += ["", "What others offer, GB/s:", "", "| call | GB/s |", "|---|---|"]
    lines += [f"| {name} | {value:.2f} ({value / copy:.2f}) |" for name, value in result["peers"].items()]
    lines += jax_tables(result)
    lines += ["", "| import | seconds |", "|---|---|"]
    lines += [f"| `{name}` | {value:.2f} |" for name, value in result["imports"].items()]
    lines += ["", "| one call on a bfloat16 [16, 64] array, MXFP8 | microseconds |", "|---|---|"]
    lines += [f"| `{name}` | {value:.1f} |" for name, value in result["overheads"].items()]
    return "\n".join(lines)


def jax_tables(result: dict[str, Any]) -> list[str]:
    """JAX's casts and compile times as Markdown."""
    lines: list[str] = []
    casts = result.get("jax_casts")
    if casts:
        labels = list(next(iter(casts.values())))
        shape = "x".join(map(str, CAST_SHAPE))
        lines += ["", f"Quantize of bfloat16 {shape}, the copy and all results in new memory, ms:", ""]
        lines += [f"| format | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
        lines += [f"| `{name}` | {' | '.join(f'{row[label]:.2f}' for label in labels)} |" for name, row in casts.items()]
    compiled = result.get("compile_times")
    if compiled:
        plain = compiled["none"]["seconds"]
        lines += [
            "",
            "Tracing, lowering and compiling `value_and_grad` of 12 scanned transformer layers (D = 64), best of three:",
            "",
            "| recipe | seconds | of the unquantized step's | lines of StableHLO | seconds by the definition alone (once) |",
            "|---|---|---|---|---|",
        ]
        for name, row in compiled.items():
            alone = f"{row['definition']:.1f}" if "definition" in row else ""
            lines.append(f"| {name} | {row['seconds']:.2f} | {row['seconds'] / plain:.2f} | {row['lines']:.0f} | {alone} |")
    return lines


def _by_format(result: dict[str, Any], direction: str) -> list[str]:
    rates = result["rates"]
    lines = [f"| format | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    for name in result["formats"]:
        copy = rates["copy"][name][direction]
        cells = [f"{copy:.1f}"]
        for backend in list(rates)[1:]:
            value = rates[backend][name][direction]
            cells.append(f"{value:.1f} ({value / copy:.2f})" if value / copy >= 0.01 else f"{value:.2f}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines

"""MX operands aligned on one GPU: straight from one read of x, and in a pass of its own behind the cast.

    python benchmarks/aligned_gpu.py [--tokens 16384] [--features 8192] [--json FILE]

Rows: the casts of a bfloat16 matrix along its rows, its columns and both, aligned in both directions or, as for a forward that
keeps codes, along the rows alone; and both of eight uneven groups. The share is that of a copy's bandwidth which the direct
kernels reach, by the bytes that they have to read and write. Figures are medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from blockfp.torch_backend.custom_ops import cuda_groups, cuda_layouts
from blockfp.torch_backend.custom_ops.quantize_plans import quantize_matrix
from gated_gpu import copy_milliseconds, milliseconds

from blockfp.formats import Format
from blockfp.kernels import cuda_library

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4_e2m1")
CASES = {
    "rows": (True, False, (True, False)),
    "columns": (False, True, (False, True)),
    "both": (True, True, (True, True)),
    "rows, and columns as stored": (True, True, (True, False)),
}
"""Rows, columns, which of them are aligned."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("features", 8192), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert cuda_library.available(), cuda_library.status()
    tokens, features = options.tokens, options.features
    elements = tokens * features
    copy = 4 * elements / copy_milliseconds(elements) / 1e6
    print(f"copy: {copy:.0f} GB/s")
    x = torch.randn((tokens, features), device="cuda").bfloat16()
    shares = torch.tensor([1, 3, 2, 5, 4, 7, 6, 4])
    ends = (shares.cumsum(0) * tokens // shares.sum()).to(torch.int32).cuda()
    words = cuda_groups.group_rows(ends, tokens)
    results = {}
    for name in FORMATS:
        format = Format.parse(name)
        stored = format.element.bits / 8 + 1 / 32
        cases: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {}
        for case, (row, column, aligned) in CASES.items():
            formats = [format if wanted else None for wanted in (row, column)]

            def direct(formats=formats, aligned=aligned) -> object:
                return quantize_matrix(x, *formats, None, None, None, (False, False), False, 0.0, aligned)

            def after(formats=formats, aligned=aligned, format=format) -> object:
                parts = quantize_matrix(x, *formats, None, None, None, (False, False), False, 0.0)
                made = [cuda_layouts.align(*parts[:2], format, columns=features)] if aligned[0] else []
                return made + ([cuda_layouts.align(*parts[-2:], format, columns=tokens)] if aligned[1] else [])

            written = sum(
                (1 + 1 / 32 if shift else stored) for wanted, shift in zip((row, column), aligned, strict=True) if wanted
            )
            cases[case] = (direct, after, elements * (2 + written))

        def groups_direct(format=format) -> object:
            return cuda_groups.quantize_groups(x, words, len(shares), format, format, aligned=(True, True))

        def groups_after(format=format) -> object:
            made = cuda_groups.quantize_groups(x, words, len(shares), format, format)
            width = made.column[0].shape[1] * 8 // format.element.bits
            row = cuda_layouts.align(*made.row, format, columns=features)
            return row, cuda_layouts.align(*made.column, format, columns=width)

        cases["both, of groups"] = (groups_direct, groups_after, elements * (4 + 1 / 16))
        times: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
        for _ in range(options.rounds):
            for case, (direct, after, _) in cases.items():
                times[case][0].append(milliseconds(direct))
                times[case][1].append(milliseconds(after))
        for case, (_, _, moved) in cases.items():
            ours, theirs = (statistics.median(own) for own in times[case])
            share = moved / ours / 1e6 / copy
            results[f"{name}, {case}"] = {"ms": ours, "apart": theirs, "share": share}
            print(f"{name:12} {case:28} {ours:7.3f} ms, apart {theirs:7.3f} ({theirs / ours:.2f}x), {share:.2f} of the copy")
    if options.json:
        about = {"shape": [tokens, features], "copy": copy, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        about["python"] = platform.python_version()
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

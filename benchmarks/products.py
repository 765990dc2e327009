"""Measures TFLOP/s of FP8 products on one Hopper GPU: blockfp's kernel, cuBLASLt, PyTorch's, bf16, and DeepGEMM if installed.

    python benchmarks/products.py [--kinds squares rows ..] [--tiles] [--out products.json] [--table]

Values are Gaussian; scales are in the kernels' order, except for `as called`, which has them as stored. Kinds take turns, each
for about 12 ms, so that all find the GPU equally warm; figures are medians of eight turns. `--tiles` adds a figure for each
tile shape of the own kernel, `--table` writes the results to blockfp/kernels/product_table.py, by which products choose.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from blockfp.torch_backend.ops.quantize import cuda_layouts
from torch.nn.functional import ScalingType
from turns import in_turns

import blockfp.torch as bfp
from blockfp.definition import layout
from blockfp.definition.groups import columns_for
from blockfp.formats import Format
from blockfp.kernels import cuda_library, product_table
from blockfp.kernels.products import plan

SHAPES = (
    (8192, 8192, 8192),
    # The MLP of linear_gpu.py: forward and both gradients.
    (16384, 16384, 4096),
    (16384, 4096, 16384),
    (4096, 16384, 16384),
    # Layers of Llama 3 and Qwen3.
    (8192, 14336, 4096),
    (8192, 6144, 4096),
    (4096, 4096, 4096),
    (4096, 7168, 2048),
    (8192, 1536, 4096),
    (512, 4096, 4096),
    (64, 8192, 4096),
    (8190, 4094, 4100),
)
WEIGHTS = (
    (8192, 8192, 8192),
    (16384, 4096, 16384),
    (4096, 16384, 16384),
    (14336, 4096, 8192),
    (6144, 4096, 8192),
    (4096, 4096, 8192),
    (7168, 2048, 4096),
    (2048, 768, 8192),
)
GROUPED = ((8, 16384, 14336, 4096), (64, 65536, 768, 2048), (128, 65536, 1536, 4096))
TENSOR, ROWS, SQUARES = "fp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128"
TILES = ("128x192", "wide 128x128")
TURNS, SECONDS = 9, 0.012


def measure(kinds: dict[str, Callable[[], object]], operations: float) -> dict[str, int | str]:
    """Returns the TFLOP/s of each kind, or the error that it raises."""
    found: dict[str, int | str] = {}
    for name, run in list(kinds.items()):
        try:
            run()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            del kinds[name]
    calls = max(2, int(SECONDS * 8e14 / operations))
    times = in_turns(kinds, TURNS, calls, warm=0)
    return found | {name: round(operations / statistics.median(each[1:]) / 1e9) for name, each in times.items()}


def ordered(scales: torch.Tensor) -> torch.Tensor:
    return F.pad(scales.mT, (0, -scales.shape[-2] % 4)).contiguous()


class Product:
    """Calls the library's product of two operands, writing to `out`."""

    def __init__(self, a, b, out: torch.Tensor, ends: torch.Tensor | None = None, along_k: bool = False):
        self.a, self.b, self.out, self.ends = a, b, out, ends
        formats = [Format.parse(x.format) for x in (a, b)]
        n, k = b.codes.shape[-2:]
        groups = 0 if ends is None else ends.shape[0]
        self.plan = plan(
            *formats, a.codes.shape[0], n, k, capability=torch.cuda.get_device_capability(), cublas=cublas_version(),
            dtype="bfloat16", groups=groups, along_k=along_k,
        )  # fmt: skip
        self.scales = [ordered(x.scales) if f.block == (1, 128) else x.scales for x, f in zip((a, b), formats, strict=True)]
        self.rows = [f.block == (1, 128) for f in formats]
        self.workspace = torch.empty(96 * 2**20 + self.plan.workspace, dtype=torch.uint8, device="cuda")

    def by(self, *, own: bool, tile: int = -1, fast: bool = False, stored: bool = False) -> Callable[[], object]:
        orders = [False, False] if stored else self.rows
        scales = (self.a.scales, self.b.scales) if stored else self.scales
        numbers = (*self.plan.numbers[:4], *orders, own, tile, fast, False)
        codes, run = (self.a.codes, self.b.codes), cuda_library.library().product
        return lambda: run(*codes, *scales, self.ends, None, self.out, self.workspace, *numbers)


def cublas_version() -> int:
    return int(cuda_library.library().cublas_version())


def own_kinds(product: Product, tiles: bool) -> dict[str, Callable[[], object]]:
    kinds = {"own": product.by(own=True), "as called": product.by(own=True, stored=True)}
    if tiles:
        kinds |= {name: product.by(own=True, tile=tile) for tile, name in enumerate(TILES)}
    return kinds


@functools.cache
def deep_gemm_package() -> ModuleType | None:
    """Returns DeepGEMM, or says once why it is missing. An OSError comes from a library built for another torch."""
    try:
        import deep_gemm
    except (ImportError, OSError) as error:
        print({"contender": "deep_gemm", "left_out": f"{type(error).__name__}: {error}"}, flush=True)
        return None
    return deep_gemm


def deep_gemm(a, b, out: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Returns DeepGEMM's product of 1x128 by 128x128, if installed."""
    package = deep_gemm_package()
    if package is None:
        return {}
    left, right = ((x.codes.view(torch.float8_e4m3fn), x.scales.contiguous()) for x in (a, b))
    return {"deep_gemm": lambda: package.fp8_gemm_nt(left, right, out)}


def dense(m: int, n: int, k: int, formats: tuple[str, str], tiles: bool) -> dict[str, int | str]:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    a, b = (bfp.quantize(values, format) for values, format in ((x, formats[0]), (w, formats[1])))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    product = Product(a, b, out)
    kinds = own_kinds(product, tiles) | {"cublaslt": product.by(own=False), "bf16": lambda: torch.mm(x, w.t())}
    codes = [each.codes.view(torch.float8_e4m3fn) for each in (a, b)]
    if formats[0] == TENSOR:
        scales = [each.scales.reshape(()) for each in (a, b)]
        kinds["cublaslt fast"] = product.by(own=False, fast=True)
        kinds["_scaled_mm"] = lambda: torch._scaled_mm(codes[0], codes[1].t(), *scales, out_dtype=torch.bfloat16)
    elif m % 4 == n % 16 == k % 16 == 0:
        a_scales = cuda_layouts.transpose_words(a.scales).t()
        if formats[1] == ROWS:
            b_scales, kind = cuda_layouts.transpose_words(b.scales).t(), ScalingType.BlockWise1x128
        else:
            b_scales, kind = layout.pad_scales(b.scales, 1, 4).t(), ScalingType.BlockWise128x128
            kinds |= deep_gemm(a, b, out)
        kinds["scaled_mm"] = lambda: F.scaled_mm(
            codes[0], codes[1].t(), a_scales, ScalingType.BlockWise1x128, b_scales, kind, output_dtype=torch.bfloat16
        )
    return measure(kinds, 2 * m * n * k)


def split(groups: int, rows: int) -> torch.Tensor:
    """Returns the ends of uneven groups, in device memory."""
    shares = 0.5 + torch.rand(groups, generator=torch.Generator().manual_seed(0))
    ends = (shares.cumsum(0) / shares.sum() * rows).round().int()
    ends[-1] = rows
    return ends.cuda()


def by_rows(groups: int, m: int, n: int, k: int, formats: tuple[str, str], tiles: bool) -> dict[str, int | str]:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16)
    ends, out = split(groups, m), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    product = Product(bfp.quantize(x, formats[0]), bfp.quantize(w, formats[1]), out, ends)
    kinds = own_kinds(product, tiles) | {"bf16": lambda: F.grouped_mm(x, w.mT, offs=ends)}
    return measure(kinds, 2 * m * n * k)


def along_k(groups: int, rows: int, n: int, k: int, formats: tuple[str, str], tiles: bool) -> dict[str, int | str]:
    """Times weight gradients [n, k] of each group. Codes are quantized as laid out, since only group starts matter here."""
    ends, padded = split(groups, rows), columns_for(rows, groups)
    g, x = (torch.randn(lines, padded, device="cuda", dtype=torch.bfloat16) for lines in (n, k))
    out = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16)
    product = Product(bfp.quantize(g, formats[0]), bfp.quantize(x, formats[1]), out, ends, along_k=True)
    kinds = own_kinds(product, tiles) | {"bf16": lambda: F.grouped_mm(g[:, :rows], x[:, :rows].t(), offs=ends)}
    return measure(kinds, 2 * rows * n * k)


KINDS = {
    "squares": (dense, SHAPES, (ROWS, SQUARES)),
    "rows": (dense, WEIGHTS, (ROWS, ROWS)),
    "tensor": (dense, SHAPES, (TENSOR, TENSOR)),
    "groups of rows": (by_rows, GROUPED, (ROWS, SQUARES)),
    "groups along k": (along_k, GROUPED, (ROWS, ROWS)),
    "groups of rows, one scale": (by_rows, GROUPED, (TENSOR, TENSOR)),
}


def write_table(results: dict) -> None:
    """Writes figures of own kernel and cuBLASLt into the table by which products choose; kinds not measured are kept."""
    path, measured = Path(product_table.__file__), dict(product_table.MEASURED)
    for kind, theirs in (("squares", ""), ("rows", ""), ("tensor", ""), ("tensor fast", " fast")):
        found = results.get(kind.split()[0], {}).items()
        rows = [(*map(int, shape.split(" x ")), each["own"], each[f"cublaslt{theirs}"]) for shape, each in found]
        measured[kind] = tuple(row for row in rows if all(isinstance(x, int) for x in row)) or measured[kind]
    lines = []
    for kind, rows in measured.items():
        # As the formatter writes it.
        listed = f"{rows[0]}," if len(rows) == 1 else "\n" + "".join(f"        {row},\n" for row in rows) + "    "
        lines.append(f'    "{kind}": ({listed}),\n')
    before, after = path.read_text().split(" = {\n")[0], path.read_text().split("\n}\n")[1]
    path.write_text(before + " = {\n" + "".join(lines) + "}\n" + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    about = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    results: dict = {**about, "cublaslt": cublas_version()}
    for name in arguments.kinds:
        run, shapes, formats = KINDS[name]
        results[name] = {}
        for shape in shapes:
            results[name][" x ".join(map(str, shape))] = found = run(*shape, formats, arguments.tiles)
            print(name, shape, found, flush=True)
    for name in ("squares", "rows", "groups of rows"):
        figures = [each["own"] for each in results.get(name, {}).values() if isinstance(each["own"], int)]
        if figures:
            print(f"{name}: geometric mean of own {math.exp(statistics.fmean(map(math.log, figures))):.0f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.table:
        write_table(results)


if __name__ == "__main__":
    main()

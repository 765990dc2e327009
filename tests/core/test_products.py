"""Plans of products on FP8 codes: who multiplies, and the scratch memory."""

import re
from pathlib import Path

import pytest

from blockfp.definition.groups import columns_for
from blockfp.formats import Format
from blockfp.kernels import products
from blockfp.kernels.calls import ELEMENTS
from blockfp.kernels.product_table import MEASURED

ROWS, SQUARES, TENSOR, GRADIENT = (Format.parse(f"fp8_{name}") for name in ("e4m3_1x128", "e4m3_128x128", "e4m3", "e5m2"))
GEMM = Path(__file__).parents[2] / "kernels/cuda/products/gemm.h"
HOPPER, CUBLAS = (9, 0), 130100


def plan(a, b, m=256, n=256, k=512, *, capability=HOPPER, cublas=CUBLAS, dtype="bfloat16", **options):
    return products.plan(a, b, m, n, k, capability=capability, cublas=cublas, dtype=dtype, **options)


@pytest.mark.parametrize("kind", MEASURED)
def test_the_faster_one_multiplies(kind):
    a, b = {"squares": (ROWS, SQUARES), "rows": (ROWS, ROWS)}.get(kind, (TENSOR, TENSOR))
    for m, n, k, own, cublas in MEASURED[kind]:
        if not (m % 4 or n % 16 or k % 16):
            assert plan(a, b, m, n, k, fast=kind == "tensor fast").own == (own >= cublas)


def test_what_cublas_does_not_take_is_multiplied_by_the_own_kernel():
    for a, b, options in (
        (TENSOR, TENSOR, {"n": 33}),
        (TENSOR, TENSOR, {"k": 40}),
        (TENSOR, TENSOR, {"cublas": 0}),
        (TENSOR, TENSOR, {"groups": 3}),
        (TENSOR, TENSOR, {"bias": "float32"}),
        (GRADIENT, GRADIENT, {}),
        (ROWS, SQUARES, {"m": 77}),
        (ROWS, SQUARES, {"cublas": 120000}),
        (SQUARES, SQUARES, {}),
        (ROWS, TENSOR, {}),
    ):
        assert plan(a, b, **options).own
        assert plan(a, b, **options).adds_bias


def test_without_the_own_kernel_the_bias_may_come_after():
    blackwell = plan(TENSOR, TENSOR, capability=(10, 0), bias="float32", dtype="float32")
    assert (blackwell.own, blackwell.adds_bias) == (False, False)
    assert plan(TENSOR, TENSOR, capability=(10, 0), bias="bfloat16").adds_bias
    with pytest.raises(ValueError, match="multiples of 16"):
        plan(TENSOR, TENSOR, k=40, capability=(10, 0))


def test_scratch_memory_is_what_the_library_takes():
    """Codes to rows of 16 bytes and scales to the product's order, each piece on 256 bytes."""
    assert plan(TENSOR, TENSOR, cublas=0).workspace == 0
    assert plan(ROWS, SQUARES, 331, cublas=0).workspace == 4 * 332 * 4 + 64
    assert plan(ROWS, SQUARES, 333, cublas=0, ordered=(True, False)).workspace == 0
    assert plan(TENSOR, TENSOR, 3, 5, 40, cublas=0).workspace == 256 + 256
    assert plan(ROWS, ROWS, 64, 32, 256, groups=3).workspace == 2 * 64 * 4 + 3 * 2 * 32 * 4
    assert plan(ROWS, ROWS, 64, 32, 256, groups=3, along_k=True).workspace == 2 * 64 * 4 + 2 * 32 * 4


def test_sums_of_blocks_keep_their_bits():
    assert plan(TENSOR, TENSOR, fast=True).numbers[-2] == 1
    assert plan(ROWS, SQUARES, fast=True).numbers[-2] == 0


@pytest.mark.parametrize("counts", [(0,), (1, 0, 128), (127, 129, 255), (5,) * 40])
def test_columns_hold_any_split(counts):
    filled = sum(-(-count // 128) * 128 for count in counts)
    assert filled <= columns_for(sum(counts), len(counts)) <= filled + 128 * len(counts)


def test_bands_are_the_own_kernels():
    """Wherever cuBLASLt would be faster with a scale for each row: it reads more of them."""
    rows = Format.parse("fp8_e4m3_1x128")
    options = {"capability": (9, 0), "cublas": 130100, "dtype": "bfloat16", "ordered": (True, True)}
    for m, n, k in ((8192, 8192, 8192), (16, 4096, 4096), (5, 7, 48)):
        chosen = plan(rows, rows, m, n, k, bands=True, **options)
        assert chosen.own
        assert chosen.workspace == 0
        assert chosen.numbers[:6] == (0, 1, 0, 32, 1, 1)
        assert plan(rows, rows, m, n, k, **options).numbers[:4] == (0, 1, 0, 1)


@pytest.mark.parametrize(("k", "row"), [(64, 0), (1, 16), (75, 160)])
def test_bfloat16_is_the_own_kernels(k, row):
    """Rows whose bytes are no multiple of 16 are copied first, those of both operands."""
    found = products.plan_values(30, 50, k, matrices=2)
    assert found.own
    assert found.workspace == sum(-(-rows * row // 256) * 256 for rows in (30, 2 * 50))
    (number,) = re.findall(r"struct Values \{\s*static constexpr int kId = (\d+);", GEMM.read_text())
    assert found.numbers[0] == found.numbers[2] == int(number)
    assert int(number) not in ELEMENTS.values()

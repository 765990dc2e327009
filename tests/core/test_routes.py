"""The table of products: what runs on codes and scales where, how the rest is multiplied, and the scratch memory."""

import re
from pathlib import Path

import numpy as np
import pytest

from blockfp.definition import layout, numerics
from blockfp.definition.groups import columns_for
from blockfp.formats import FORMATS, Format
from blockfp.kernels import products, routes
from blockfp.kernels.calls import ELEMENTS
from blockfp.kernels.product_table import MEASURED
from blockfp.recipes import PRODUCTS, RECIPES

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.mark.parametrize(
    ("a", "b", "capability", "mode"),
    [
        ("fp8_e4m3", "fp8_e4m3", HOPPER, "tensor"),
        ("fp8_e5m2", "fp8_e4m3_pow2", HOPPER, "tensor"),
        ("fp8_e5m2", "fp8_e5m2", HOPPER, "tensor"),
        ("fp8_e5m2", "fp8_e5m2", BLACKWELL, "dequantize"),
        ("fp8_e4m3_1x128", "fp8_e4m3_128x128", HOPPER, "block"),
        ("fp8_e4m3_128x128", "fp8_e4m3_1x128_fp32", HOPPER, "block"),
        ("fp8_e4m3_128x128", "fp8_e5m2_1x128", HOPPER, "block"),
        ("fp8_e4m3_1x128", "fp8_e4m3_1x128", HOPPER, "block"),
        ("fp8_e4m3_128x128", "fp8_e4m3_128x128", HOPPER, "block"),
        ("fp8_e4m3_1x128", "fp8_e4m3", HOPPER, "block"),
        ("fp8_e4m3_row", "fp8_e4m3_row_pow2", HOPPER, "block"),
        ("fp8_e4m3", "fp8_e5m2_row", HOPPER, "block"),
        ("fp8_e4m3_row", "fp8_e4m3_128x128", HOPPER, "dequantize"),
        ("fp8_e4m3_row", "fp8_e4m3_row", BLACKWELL, "dequantize"),
        ("fp8_e4m3_1x128", "mxfp8_e4m3", HOPPER, "dequantize"),
        ("mxfp8_e4m3", "mxfp8_e4m3_32x32", HOPPER, "aligned"),
        ("mxfp8_e5m2_floor", "mxfp8_e5m2", HOPPER, "aligned"),
        ("mxfp6_e3m2", "mxfp4_e2m1_32x32", HOPPER, "aligned"),
        ("mxint8", "mxfp8_e4m3_32x32", HOPPER, "dequantize"),
        ("mxfp8_e4m3", "nvfp4", HOPPER, "dequantize"),
        ("mxfp8_e4m3", "mxfp8_e5m2_32x32_floor", BLACKWELL, "mx"),
        ("nvfp4", "nvfp4_16x16", BLACKWELL, "nvfp4"),
        ("nvfp4", "mxfp4_e2m1", BLACKWELL, "dequantize"),
        ("fp8_e4m3_1x128", "fp8_e4m3_128x128", BLACKWELL, "dequantize"),
        ("fp8_e4m3", "fp8_e4m3", AMPERE, "dequantize"),
        ("fp8_e4m3", None, HOPPER, "dequantize"),
        (None, None, HOPPER, "plain"),
    ],
)
def test_routes(a, b, capability, mode):
    assert routes.route(a, b, platform="cuda", capability=capability).mode == mode


def test_exact_products_keep_mx_codes_as_they_are():
    pair = ("mxfp8_e4m3", "mxfp8_e4m3_32x32")
    for options, why in (({"exact": True}, "exact products"), ({"library": False}, "library")):
        chosen = routes.route(*pair, platform="cuda", capability=HOPPER, **options)
        assert (chosen.mode, chosen.dtype) == ("dequantize", "bfloat16")
        assert why in chosen.reason
    # Modes that take codes and scales as they are stay.
    assert routes.route(*pair, platform="cuda", capability=BLACKWELL, exact=True).mode == "mx"
    # Any lengths: what is aligned is filled up.
    any_length = routes.route(*pair, platform="cuda", capability=HOPPER, m=3, n=8, k=7)
    assert any_length.mode == "aligned"
    assert "copied" not in any_length.reason


def test_a_cpu_dequantizes_everything_to_float32():
    for a in FORMATS:
        for b in (*FORMATS, None):
            route = routes.route(a, b, platform="cpu")
            assert (route.mode, route.dtype, route.scale_product) == ("dequantize", "float32", False)
    assert routes.route(None, None, platform="cpu").mode == "plain"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, AMPERE])
def test_every_recipe_multiplies_in_bfloat16_or_better(name, capability):
    """No named recipe needs float32 matrix products, the slow ones of a GPU."""
    recipe = RECIPES[name]()
    for a, b in PRODUCTS.values():
        route = routes.route(recipe.cast(*a).format, recipe.cast(*b).format, platform="cuda", capability=capability)
        assert route.dtype in ("bfloat16", None)


LENGTHS = [
    (HOPPER, 33, 48, "tensor", "n = 33 is no multiple of 8"),
    (HOPPER, 32, 40, "tensor", "k = 40 is no multiple of 16"),
    (BLACKWELL, 33, 48, "dequantize", "n = 33"),
    (BLACKWELL, 32, 40, "dequantize", "k = 40"),
    (BLACKWELL, 32, 48, "tensor", ""),
]


@pytest.mark.parametrize(("capability", "n", "k", "mode", "named"), LENGTHS)
def test_lengths_that_cost_or_are_dequantized_are_named(capability, n, k, mode, named):
    route = routes.route("fp8_e4m3", "fp8_e4m3", platform="cuda", capability=capability, n=n, k=k)
    assert route.mode == mode
    assert named in route.reason


def test_hopper_takes_blocks_of_any_lengths():
    fits = routes.route("fp8_e4m3_1x128", "fp8_e4m3_128x128", platform="cuda", capability=HOPPER, m=77, n=32, k=48)
    assert (fits.mode, fits.reason.count(";")) == ("block", 0)


def test_without_the_library_codes_are_dequantized():
    for a, b in (("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3_1x128", "fp8_e4m3_128x128")):
        route = routes.route(a, b, platform="cuda", capability=HOPPER, library=False)
        assert route.mode == "dequantize"
        assert "library" in route.reason


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_called_exact_in_bfloat16_is(format):
    """Every code under the scales of ordinary blocks, the scale of the whole tensor set to one."""
    if not routes.exact_in_bfloat16(format):
        assert format.block is not None
        assert format.scale.name == "fp32"
        return
    count = 1 << format.element.bits
    codes = np.arange(count, dtype=np.uint8)
    if format.element.packed:
        codes = layout.pack(codes[None], format.element.bits)[0]
    for stored in {"uint8": (30, 60, 90, 0x7E), "float32": (2.0**-40, 1.0, 2.0**40)}[format.scale.dtype]:
        tall = 1 if format.block is None else format.block[0]
        rows = np.repeat(codes[None], tall, axis=0)
        grid = (1, 1) if format.block is None else (1, -(-count // format.block[1]))
        scales = np.full(grid, 1.0 if format.per_tensor else stored, format.scale.dtype)
        tensor_scale = np.float32(1) if format.scale.two_level else None
        with np.errstate(over="ignore", invalid="ignore"):
            exact, rounded = (
                np.asarray(numerics.dequantize(rows, scales, tensor_scale, format, dtype, columns=count), np.float32)
                for dtype in ("float32", "bfloat16")
            )
        np.testing.assert_array_equal(exact, rounded)


def test_the_table_names_every_rule():
    lines = routes.table()
    products = [how for _, _, how in lines if "scaled_mm" in how or "cuBLASLt" in how]
    assert len(products) == sum(len(rule.capabilities) for rule in routes.RULES)
    assert lines[-1][0] == "CPU"


def test_the_table_says_where_kernels_were_run_and_the_wheel_has_them():
    casts = [operands for _, operands, _ in routes.table() if operands.startswith("casts, ")]
    assert [operands.removeprefix("casts, compute capability ") for operands in casts] == ["9.0", "8.0, 8.9, 10.0, 12.0"]
    build = Path(routes.__file__).parents[2] / "kernels" / "cuda" / "CMakeLists.txt"
    if not build.is_file():
        build = Path(routes.__file__).parent / "cuda" / "CMakeLists.txt"
    built = build.read_text().partition("CMAKE_CUDA_ARCHITECTURES ")[2].partition(")")[0]
    for major, minor in (*routes.RUN, *routes.COMPILED):
        assert f"{major}{minor}{'a' if major >= 9 else ''}-real" in built.split()


@pytest.mark.parametrize(
    ("a", "options", "message"),
    [
        ("mxfp9", {"platform": "cpu"}, "mxfp9"),
        ("nvfp4", {"platform": "tpu"}, "platform must be"),
        ("nvfp4", {"platform": "cuda"}, "needs a capability"),
    ],
)
def test_bad_questions(a, options, message):
    with pytest.raises(ValueError, match=message):
        routes.route(a, Format.parse("nvfp4"), **options)


ROWS, SQUARES, TENSOR, GRADIENT = (Format.parse(f"fp8_{name}") for name in ("e4m3_1x128", "e4m3_128x128", "e4m3", "e5m2"))
GEMM = Path(__file__).parents[2] / "kernels/cuda/products/gemm.h"
HOPPER_CUBLAS, CUBLAS = (9, 0), 130100


def plan(a, b, m=256, n=256, k=512, *, capability=HOPPER_CUBLAS, cublas=CUBLAS, dtype="bfloat16", **options):
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

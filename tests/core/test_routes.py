"""The table of products: what runs on codes and scales where, and in what the rest is multiplied exactly."""

from pathlib import Path

import numpy as np
import pytest

from blockfp.definition import layout, numerics
from blockfp.formats import FORMATS, Format
from blockfp.kernels import routes
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


def test_hopper_takes_any_lengths_and_names_those_that_cost():
    fits = routes.route("fp8_e4m3_1x128", "fp8_e4m3_128x128", platform="cuda", capability=HOPPER, m=77, n=32, k=48)
    assert (fits.mode, fits.reason.count(";")) == ("block", 0)
    for n, k, named in ((33, 48, "n = 33 is no multiple of 8"), (32, 40, "k = 40 is no multiple of 16")):
        route = routes.route("fp8_e4m3", "fp8_e4m3", platform="cuda", capability=HOPPER, n=n, k=k)
        assert route.mode == "tensor"
        assert named in route.reason


def test_lengths_that_do_not_fit_are_dequantized_and_named():
    assert routes.route("fp8_e4m3", "fp8_e4m3", platform="cuda", capability=BLACKWELL, n=32, k=48).mode == "tensor"
    for n, k, named in ((33, 48, "n = 33"), (32, 40, "k = 40")):
        route = routes.route("fp8_e4m3", "fp8_e4m3", platform="cuda", capability=BLACKWELL, n=n, k=k)
        assert route.mode == "dequantize"
        assert named in route.reason


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

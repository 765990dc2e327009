"""`kernels.calls` against the C++ functions that it describes, by their names in the sources, and against the layout."""

import re
from pathlib import Path

import pytest

from blockfp.definition import bits, groups, layout
from blockfp.formats import FORMATS, Format
from blockfp.kernels import calls, cuda_library
from blockfp.kernels.calls import PARTS, PARTS_T
from blockfp.kernels.operand_cast import OperandCast

ROOT = Path(__file__).resolve().parents[2] / "kernels"
NAMES = {"first_row": "row", "first_column": "column", "index_rows": "rows", "index_columns": "columns", "given": "amax"}
"""What the sources call them -> what they are called in `calls`."""
TENSORS = ("TensorView", "MaybeTensor", "Optional<TensorView>")


def functions(folder):
    """name -> [(type, name) ..] of the functions that a library exports."""
    found = {}
    for path in [*(ROOT / folder).rglob("*.cu"), *(ROOT / folder).rglob("*.cc")]:
        text = path.read_text()
        for name in re.findall(r"EXPORT_TYPED_FUNC\((\w+), \w+\)", text):
            if match := re.search(rf"^\w+ {name}\(([^)]*)\)", text, re.MULTILINE):
                found[name] = [tuple(one.split()) for one in match[1].split(",") if one.strip()]
    return found


SOURCES = {"cuda": functions("cuda"), "cpu": functions("cpu")}
CPU = [name for name in calls.SIGNATURES if name.startswith("cpu.") or name.endswith("_arrays")]


@pytest.mark.parametrize("name", calls.SIGNATURES)
def test_arguments_have_the_order_of_the_sources(name):
    arguments = SOURCES["cpu" if name in CPU else "cuda"][name.removeprefix("cpu.")]
    arrays, numbers = calls.SIGNATURES[name]
    named = [NAMES.get(one, one) for _, one in arguments]
    described = [*arrays, *numbers]
    assert named[-len(described) :] == described
    # All that comes before are arrays, and numbers are none.
    kinds = [kind for kind, _ in arguments]
    assert set(kinds[: len(kinds) - len(described)]) <= set(TENSORS)
    assert not set(kinds[len(kinds) - len(numbers) :]) & set(TENSORS)


def test_every_quantizing_function_of_the_gpu_is_described():
    wanted = [name for name in cuda_library._FUNCTIONS if re.match("quantize|encode|requantize|dequantize|align|product", name)]
    assert not set(wanted) - set(calls.SIGNATURES)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (True, True)])
def test_casts(format, rows, columns):
    """Outputs have the layout's shapes, and exactly one word tells of an Inf; amaxes of whole lines are scratch."""
    shape, cast = (3, 64, 160), OperandCast(format if rows else None, format if columns else None)
    call = calls.quantize(shape, "bfloat16", cast)
    for names, lines, wanted in ((PARTS, shape, rows), (PARTS_T, (3, 160, 64), columns)):
        parts = [*layout.parts(lines, format), None][:3] if wanted else [None] * 3
        assert [call.arrays[name] for name in names] == parts
    words = {"amax" if format.has_tensor_scale else "recorded": ((1,), "int32")}
    if format.per_row:
        words["amax"] = ((3 * (64 * rows + 160 * columns),), "int32")
    assert {name: call.arrays[name] for name in ("amax", "recorded") if call.arrays[name]} == words
    assert tuple(call.numbers.values())[:4] == calls.format_numbers(format)
    assert call.numbers["measure"] == format.has_tensor_scale
    nominal = bits.LARGEST_FINITE["bfloat16"] if format.scale.dtype == "float32" else bits.FP32_MAX
    assert call.numbers["largest_bits"] == nominal


def test_what_is_given_is_not_made():
    format = Format.parse("fp8_e4m3")
    given, delayed = (calls.quantize((32, 32), "float32", OperandCast(format, None, how)) for how in ("amax", "multiplier"))
    assert (given.arrays["amax"], given.arrays["recorded"], given.numbers["measure"]) == (None, None, False)
    assert (delayed.arrays["amax"], delayed.arrays["recorded"]) == (None, ((1,), "int32"))


def test_rotated_columns_have_an_amax_of_their_own():
    format = Format.parse("nvfp4")
    for row, column, words in ((format, format, 2), (None, format, 2), (format, None, 1)):
        cast = OperandCast(row, column, rotate=True)
        assert calls.quantize((32, 32), "float32", cast).arrays["amax"] == ((words,), "int32")
        assert calls.quantize_groups((32, 32), "float32", cast, 5).arrays["amax"] == ((5, 2) if words == 2 else (5,), "int32")


@pytest.mark.parametrize("grouped", [False, True])
def test_straight_to_aligned_codes(grouped):
    """Where rounding is to nearest; columns may stay those of the format, rows may not."""
    format, shape = Format.parse("mxfp8_e4m3"), (256, 384)

    def call(*cast, **options):
        one = OperandCast(*cast, **options)
        return calls.quantize_groups(shape, "bfloat16", one, 2) if grouped else calls.quantize(shape, "bfloat16", one)

    width = groups.columns_for(256, 2) if grouped else 256
    both = call(format, format, laid=(True, True))
    assert both.function.endswith("_aligned")
    assert (both.arrays["codes"], both.arrays["scales"]) == (((256, 384), "uint8"), ((3, 256), "float32"))
    assert both.arrays["codes_t"] == ((384, width), "uint8")
    assert call(format, format, laid=(True, False)).arrays["stored_t"] == ((384, width), "uint8")
    for options in (
        {"laid": (False, True)},
        {"laid": (True, True), "random": (False, True)},
        {"laid": (True, True), "rotate": True},
    ):
        assert not call(format, format, **options).function.endswith("_aligned")


@pytest.mark.parametrize(("name", "blocks"), [("fp8_e4m3_1x128", (3, 1)), ("fp8_e5m2_row", (1, 1))])
def test_scales_in_the_order_of_products(name, blocks):
    """[blocks, lines filled up to four] of the directions that come laid out, by the function that stores others."""
    format, shape = Format.parse(name), (37, 300)
    for laid in ((True, True), (True, False), (False, True)):
        call = calls.quantize(shape, "bfloat16", OperandCast(format, format, laid=laid))
        assert (call.function, call.numbers["rows_ordered"], call.numbers["columns_ordered"]) == ("quantize", *laid)
        rows, columns = layout.parts(shape, format), layout.parts(shape[::-1], format)
        assert [call.arrays["codes"], call.arrays["codes_t"]] == [rows[0], columns[0]]
        assert call.arrays["scales"] == (((blocks[0], 40), "float32") if laid[0] else rows[1])
        assert call.arrays["scales_t"] == (((blocks[1], 300), "float32") if laid[1] else columns[1])
        if format.per_row:
            assert call.arrays["amax"] == ((337,), "int32")

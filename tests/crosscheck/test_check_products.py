"""`blockfp check --products`: products of every backend, where a wrong one begins to differ, and reports with products."""

import json
from dataclasses import replace

import numpy as np
import pytest
from command import plain, run
from samples import sample

from blockfp.check import backends, products
from blockfp.check.crosscheck import Definition
from blockfp.definition import bits
from blockfp.definition import products as definition
from blockfp.definition.matrix_units import SUMMATIONS
from blockfp.formats import Format

BLOCKS, TENSOR, MX = "fp8_e4m3_1x128", "fp8_e4m3", "mxfp8_e4m3"
WEIGHT = sample("bf16_valued", (300, 400))
ROWS, COLUMNS = slice(256, 264), slice(128, 400)
"""What forward takes of it."""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, w=WEIGHT)
    return path


def late(a, b, summation, **options):
    """Chunks of 128 are promoted two at a time."""
    return definition.product(a, b, replace(summation, promotion=256), **options)


def without_a_product(a, b, summation, **options):
    """The last element of the second step counts as zero, where a sum has so many."""
    codes = a.codes.copy()
    codes[:, 63:64] = 0
    return definition.product(a._replace(codes=codes), b, summation, **options)


def with_another_scale(a, b, summation, **options):
    other = np.where(a.scales == 1, 1, a.scales * 1.25).astype(np.float32)
    return definition.product(a._replace(scales=other), b, summation, **options)


def truncated(a, b, summation, *, dtype="float32", **options):
    """bfloat16 are cut off."""
    exact = definition.product(a, b, summation, **options)
    return exact if dtype == "float32" else bits.to_float(exact.view(np.int32) & -0x10000, dtype)


def without_bias(a, b, summation, *, bias=None, **options):
    return definition.product(a, b, summation, **options)


def added_twice(a, b, summation, *, addend=None, **options):
    return definition.product(a, b, summation, addend=None if addend is None else 2 * addend, **options)


class Wrong(Definition):
    """A backend whose products, or one code of whose cast of the weight, are wrong."""

    name = "wrong"

    def __init__(self, change=definition.product, code=None):
        self.change, self.code = change, code

    def quantize(self, x, format):
        q = super().quantize(x, format)
        if self.code is not None and np.array_equal(x, WEIGHT[ROWS, COLUMNS]):
            q.codes[self.code] ^= 1
        return q

    def product(self, a, b, summation, **options):
        return self.change(a, b, summation, **options)


@pytest.mark.parametrize(
    ("change", "format", "summation", "places"),
    [
        # forward, dgrad and wgrad; sums of forward begin in column 128
        (late, TENSOR, "hopper_fp8", [("promotion", "256 to 384 of k")] + [("promotion", "128 to 256 of k")] * 2),
        (without_a_product, TENSOR, "hopper_fp8", [("sums", "160 to 192 of k")] + [("sums", "32 to 64 of k")] * 2),
        (without_a_product, BLOCKS, "hopper_fp8", [("sums", "160 to 192 of k")] + [("sums", "32 to 64 of k")] * 2),
        (without_a_product, MX, "blackwell_mx", [("sums", "160 to 192 of k")] + [("sums", "32 to 64 of k")] * 2),
        (without_a_product, TENSOR, "ada_fp8", [("sums", "176 to 192 of k")] + [("sums", "48 to 64 of k")] * 2),
        (with_another_scale, BLOCKS, "hopper_fp8", [("scales", "128 to 256 of k")] + [("scales", "0 to 128 of k")] * 2),
        (truncated, MX, "hopper_fp8", [("rounding", "to bfloat16")] * 2 + [None]),
        (without_bias, BLOCKS, "hopper_fp8", [("bias", ""), None, None]),
        (added_twice, BLOCKS, "hopper_fp8", [None, None, ("addend", "")]),
    ],
)
def test_where_a_product_begins_to_differ_is_named(change, format, summation, places):
    found = products.check_products(WEIGHT, Format.parse(format), [Definition(), Wrong(change)], SUMMATIONS[summation])
    located = {one.product: (one.stage, one.where) for one in found.differences}
    for product, place in zip(("forward", "dgrad", "wgrad"), places, strict=True):
        assert located.get(product) == place


def test_a_wrong_code_of_an_operand_is_named():
    [one] = products.check_products(WEIGHT, Format.parse(BLOCKS), [Definition(), Wrong(code=(3, 40))]).differences
    assert (one.product, one.stage, one.where, one.index) == ("forward", "operand", "codes of weight", (259, 168))
    assert str(one) == f"wrong: forward: codes of weight[259, 168] is {one.found}, expected {one.expected}"


def test_a_result_that_another_run_does_not_give():
    calls = []

    def once(*operands, **options):
        calls.append(1)
        y = definition.product(*operands, **options)
        return y + (len(calls) == 3) * np.ones_like(y)

    [one] = products.check_products(WEIGHT, Format.parse(BLOCKS), [Definition(), Wrong(once)]).differences
    assert (one.product, one.stage) == ("wgrad", "unsteady")


@pytest.mark.parametrize("format", [TENSOR, BLOCKS, "fp8_e5m2_row", "mxfp6_e3m2_32x32", "mxfp4_e2m1"])
def test_every_backend_multiplies(format):
    names = ["numpy", "kernels"]
    for library, more in (("jax", ["jax"]), ("torch", ["torch", "torch-definition"])):
        pytest.importorskip(library)
        names += more
    loaded = backends.load(names)
    for weight in (WEIGHT, sample("special", (3, 5, 33), "float16")):
        found = products.check_products(weight, Format.parse(format), loaded)
        assert (found.differences, found.compared, found.without) == ((), tuple(names[1:]), {})
        assert found.sums == 64 * 3 if weight is WEIGHT else 8 * 5 + 8 * 8 + 5 * 8


def test_activations_are_the_same_everywhere():
    """Sums of four numbers of 16 bits, times 32 in every 16th column; reports of two machines depend on these bits."""
    x = products._drawn(2, 3, 0, np.dtype(np.float32))
    assert x.view(np.uint32).tolist() == [[0x426B0100, 0x3F3A0800, 0xBF805300], [0xC250AE00, 0xBEDCEC00, 0x3D366000]]


def test_a_format_and_a_backend_without_products_are_said(file):
    class Bare:
        name, version = "bare", "1"
        quantize, dequantize = Definition().quantize, Definition().dequantize

    found = products.check_products(WEIGHT, Format.parse("nvfp4"), [Definition()])
    assert (found.summation, found.reason) == (None, "no summation takes them")
    found = products.check_products(WEIGHT, Format.parse("mxfp4_e2m1"), [Definition()], SUMMATIONS["ampere_bf16"])
    assert "ampere_bf16 doesn't take them, but fp32_in_order, " in found.reason
    found = products.check_products(WEIGHT, Format.parse(MX), [Definition(), Bare()])
    assert (found.compared, found.without) == ((), {"bare": "bare has no products"})
    with pytest.raises(ValueError, match=r"backend 'wrong', product of fp8_e4m3 in hopper_fp8: must be bfloat16 of shape"):
        products.check_products(WEIGHT, Format.parse(TENSOR), [Definition(), Wrong(lambda *_, **__: np.ones((2, 2)))])


# ---- The command


def check(file, *more):
    return run("check", file, "--products", *more)


def test_the_table_and_the_report(file, tmp_path):
    chosen = ("--format", BLOCKS, "--format", "nvfp4", "--backend", "numpy", "--backend", "kernels")
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    result = check(file, *chosen, "--report", report, "--plot", plot)
    assert result.exit_code == 0, result.output
    rows = [line.split()[:3] for line in result.stdout.splitlines()[:3]]
    assert rows == [["format", "equal", "products"], [BLOCKS, "yes", "yes"], ["nvfp4", "yes", "-"]]
    said = plain(result.stdout)
    assert "no products of nvfp4: no summation takes them" in said
    assert "products by hopper_fp8 of 1 of 1 tensor (forward, dgrad, wgrad; at most 8 x 8 sums of 384 each): 192 sums" in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    blocks, nvfp4 = json.loads(report.read_text())["files"][0]["tensors"][0]["checks"]
    assert (blocks["products"]["summation"], blocks["products"]["compared"]) == ("hopper_fp8", ["kernels"])
    assert blocks["products"]["identical"]
    assert nvfp4["products"]["summation"] is None
    assert "products" not in run("check", file, *chosen).stdout.splitlines()[0]


def test_a_difference_fails_the_check(file, tmp_path, monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "kernels", lambda: Wrong(late))
    report = tmp_path / "report.json"
    result = check(file, "--format", TENSOR, "--backend", "numpy", "--backend", "kernels", "--report", report, "--per-tensor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split()[:4] == ["w", TENSOR, "yes", "NO"]
    assert f"{file}, w, {TENSOR}: wrong: forward[" in result.stdout
    assert ", first in promotion 256 to 384 of k" in result.stdout
    found = json.loads(report.read_text())
    assert not found["identical"]
    assert found["files"][0]["tensors"][0]["checks"][0]["products"]["differences"][0]["stage"] == "promotion"


def test_some_tensors_of_many_are_multiplied(tmp_path):
    path = tmp_path / "many.npz"
    np.savez(path, **{f"w{i}": WEIGHT[:8, :32] for i in range(9)})
    result = check(path, "--format", MX, "--backend", "numpy", "--backend", "kernels")
    assert "products by hopper_fp8 of 3 of 9 tensors" in plain(result.stdout)
    assert products.chosen(9) == {0, 4, 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--products", "--summation", "hopper"),
            "unknown summation 'hopper', expected one of fp32_in_order,",
        ),
        (
            ("--products", "--summation", "hopper_bf16"),
            "hopper_bf16: multiplies none of mxfp4_e2m1; fp32_in_order, ",
        ),
        (
            ("--products", "--summation", "blackwell_mxfp4"),
            "--summation blackwell_mxfp4: kernels has no blackwell_mxfp4, but volta_fp16, ",
        ),
        (("--summation", "hopper_fp8"), "--summation says how --products adds; add --products"),
    ],
)
def test_summations_that_are_refused(file, arguments, message):
    result = run("check", file, "--format", "mxfp4_e2m1", "--backend", "numpy", "--backend", "kernels", *arguments)
    assert result.exit_code == 2
    assert message in plain(result.stderr)
    assert result.stdout == ""


def test_a_summation_of_a_device_that_is_not_here(file):
    result = check(file, "--format", MX, "--summation", "blackwell_mx", "--backend", "numpy", "--backend", "kernels")
    assert result.exit_code == 0, result.output
    assert "each): 192 sums, all bits equal" in plain(result.stdout)


def test_a_check_without_any_product_fails(file):
    result = check(file, "--format", "mxint8", "--backend", "numpy", "--backend", "kernels")
    assert result.exit_code == 2
    assert "products of 1 of 1 tensor (forward, dgrad, wgrad; at most 8 x 8 sums of 384 each): none" in plain(result.stdout)


# ---- Reports


@pytest.fixture
def reports(file, tmp_path):
    made = {}
    for name, more in (("a", ("--products",)), ("plain", ()), ("mx", ("--products", "--summation", "blackwell_mx"))):
        made[name] = tmp_path / f"{name}.json"
        run("check", file, "--format", MX, "--backend", "numpy", "--backend", "kernels", "--report", made[name], *more)
    return made


def test_reports_with_products_are_compared(reports):
    result = run("check", "--compare", reports["a"], reports["a"])
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()[:2]] == [
        ["format", "equal", "products", "tensors"],
        [MX, "yes", "yes", "1"],
    ]
    changed = json.loads(reports["a"].read_text())
    changed["files"][0]["tensors"][0]["checks"][0]["products"]["products_sha256"] = "0" * 64
    other = reports["a"].with_name("other.json")
    other.write_text(json.dumps(changed))
    result = run("check", "--compare", reports["a"], other)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split()[:3] == [MX, "yes", "NO"]
    assert ".. and 000000000000.." in result.stdout


@pytest.mark.parametrize(
    ("other", "sums", "status", "verdict"),
    [
        ("plain", "hopper_fp8 and none", 0, "all bits equal"),
        ("mx", "hopper_fp8 and blackwell_mx", 2, "all casts equal, no products compared"),
    ],
)
def test_products_of_one_report_alone_are_not_compared(reports, other, sums, status, verdict):
    """Where both have products, a comparison of none of them doesn't pass, as a check of none doesn't."""
    result = run("check", "--compare", reports["a"], reports[other])
    assert result.exit_code == status, result.output
    assert f"A and B differ in products: {sums}; 1 not compared, counted per format" in plain(result.stdout)
    assert result.stdout.splitlines()[1].split() == ["format", "equal", "tensors"]
    assert result.stdout.splitlines()[-1] == f"1 tensor in 1 format, counted per format: {verdict}"


@pytest.mark.parametrize("value", [7, None, {"summation": 3}, {"summation": MX}])
def test_a_report_of_other_types(reports, value):
    changed = json.loads(reports["a"].read_text())
    changed["files"][0]["tensors"][0]["checks"][0]["products"] = value
    other = reports["a"].with_name("other.json")
    other.write_text(json.dumps(changed))
    result = run("check", "--compare", reports["a"], other)
    assert result.exit_code == 2
    assert "is not a report of blockfp check" in plain(result.stderr)

"""Products with defined bits by the CPU library, against the definition."""

import hopper_products
import ml_dtypes
import numpy as np
import pytest
import torch
from hopper_products import KINDS, PAIRS, columns_of_groups, operand, same_bits, values

from blockfp.definition import numerics
from blockfp.definition.matrix_units import SUMMATIONS
from blockfp.definition.products import Operand, product
from blockfp.formats import FORMATS, Format
from blockfp.kernels import calls, native

SHAPES = ((33, 40, 300), (1, 7, 16), (5, 1, 3), (3, 65, 129))
HERE = [name for name, summation in SUMMATIONS.items() if calls.sums_here(summation)]


@pytest.fixture(params=native.instruction_sets())
def instruction_set(request):
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(before)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch):
    monkeypatch.setattr(hopper_products, "device", lambda: "cpu")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", KINDS)
def test_has_the_definitions_bits(kind):
    for seed, formats in enumerate(PAIRS):
        m, n, k = SHAPES[seed % len(SHAPES)]
        a, b = operand(formats[0], m, k, kind, 2 * seed), operand(formats[1], n, k, kind, 2 * seed + 1)
        same_bits(native.product(a, b, "hopper_fp8"), product(a, b, "hopper_fp8"), f"{formats}, m, n, k = {m, n, k}")


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("name", HERE)
def test_every_summation(name):
    """Of any finite numbers and of infinities and NaN, with the longest sums of the largest codes."""
    summation = SUMMATIONS[name]
    for kind in ("mixed exponents", "specials"):
        for element in summation.elements:
            if element in ("bfloat16", "float16"):
                a, b = (values(rows, 77, kind, rows, getattr(torch, element)) for rows in (5, 40))
            elif summation.scale_block is not None:
                a, b = mx(element, 5, kind), mx(element, 40, kind)
            elif element in ("e4m3", "e5m2"):
                a, b = (operand(f"fp8_{element}", rows, 77, kind, rows) for rows in (5, 40))
            else:
                continue  # no format has these codes without scales of blocks
            same_bits(native.product(a, b, name), product(a, b, name), f"{element}, {kind}")


def mx(element, rows, kind):
    """MX codes of many exponents, with a NaN among the scales in "specials"."""
    rng, format = np.random.default_rng(rows), next(f for f in FORMATS if f.scale.e8m0 and f.element.name == element)
    x = rng.standard_normal((rows, 96)) * np.exp2(rng.integers(-9, 9, (rows, 96)))
    made = numerics.quantize(x.astype(np.float32), format)
    scales = made.scales.copy()
    scales[1, 1] = 0xFF if kind == "specials" else 3
    return Operand(torch.from_numpy(made.codes), torch.from_numpy(scales), format)


@pytest.mark.parametrize("name", ["blackwell_fp8", "hopper_bf16", "hopper_fp8"])
def test_the_largest_sums_fit(name):
    """Every product at its largest, all of one sign: 32 bits don't hold the sums of a step."""
    if name == "hopper_bf16":
        a = Operand(torch.full((3, 96), float.fromhex("0x1.fep20"), dtype=torch.bfloat16), None)
    else:
        a = Operand(torch.full((3, 96), 0x7E, dtype=torch.uint8), torch.ones(1, 1), Format.parse("fp8_e4m3"))
    same_bits(native.product(a, a, name), product(a, a, name), name)


def test_bias_addend_and_dtypes_in_both_libraries():
    a, b = operand(PAIRS[0][0], 9, 200, "normal", 0), operand(PAIRS[0][1], 35, 200, "normal", 1)
    rng = np.random.default_rng(2)
    bias, addend = rng.standard_normal(35).astype(np.float32), rng.standard_normal((9, 35)).astype(ml_dtypes.bfloat16)
    left, right = (Operand(x.codes.numpy(), x.scales.numpy(), x.format) for x in (a, b))
    for dtype in ("float32", "bfloat16", "float16"):
        want = product(left, right, "hopper_fp8", dtype=dtype, bias=bias, addend=addend)
        got = native.product(left, right, "hopper_fp8", dtype=dtype, bias=bias, addend=addend)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
        given = torch.from_numpy(bias), torch.from_numpy(addend.view(np.int16)).view(torch.bfloat16)
        in_torch = native.product(a, b, "hopper_fp8", dtype=dtype, bias=given[0], addend=given[1])
        assert in_torch.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(in_torch.view(torch.uint8).numpy(), want.view(np.uint8))


def test_threads_and_other_rows_change_nothing():
    a, b = operand(PAIRS[1][0], 100, 256, "normal", 0), operand(PAIRS[1][1], 70, 256, "normal", 1)
    whole = native.product(a, b, "hopper_fp8")
    before = native.set_threads(0)
    try:
        native.set_threads(1)
        alone = a._replace(codes=a.codes[41:42], scales=a.scales[41:42])
        same_bits(native.product(alone, b, "hopper_fp8"), whole[41:42], "one row, one thread")
    finally:
        native.set_threads(before)


def test_lengths_of_zero():
    for m, n, k in ((0, 3, 128), (3, 0, 128), (3, 4, 0)):
        a, b = operand(PAIRS[0][0], m, k, "normal", 0), operand(PAIRS[0][1], n, k, "normal", 1)
        same_bits(native.product(a, b, "hopper_fp8"), torch.zeros(m, n), f"m, n, k = {m, n, k}")


def test_says_which_summations_it_has():
    a = Operand(np.ones((2, 8), ml_dtypes.bfloat16), None)
    with pytest.raises(ValueError, match="the CPU library doesn't have fp32_in_order, but volta_fp16, turing_fp16"):
        native.product(a, a, "fp32_in_order")
    with pytest.raises(ValueError, match=r"a and b must have rows of one length, got 8 and 7"):
        native.product(a, Operand(a.codes[:, :7], None), "hopper_bf16")
    with pytest.raises(ValueError, match=r"a must be \[m, k\] and b \[n, k\]"):
        native.product(*(x._replace(codes=x.codes[None]) for x in (a, a)), "hopper_bf16")


def test_columns_of_groups_are_products_of_their_own():
    """Filling a group up with zero codes changes no bit."""
    counts = (100, 1, 129)
    for side, format in enumerate(PAIRS[1]):
        filled, each = columns_of_groups(format, 20, counts, "normal", side)
        at = 0
        for one, count in zip(each, counts, strict=True):
            width = -(-count // 128) * 128
            part = Operand(filled.codes[:, at : at + width], filled.scales[:, at // 128 : (at + width) // 128], filled.format)
            alone = one._replace(codes=torch.nn.functional.pad(one.codes, (0, width - count)))
            same_bits(native.product(part, alone, "hopper_fp8"), native.product(one, one, "hopper_fp8"), f"{count} columns")
            at += width

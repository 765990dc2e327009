"""Products of the library's own Hopper kernel have the bits of `definition.products`, for every plan and any operands."""

import pytest
import torch
from hopper_products import KINDS, PAIRS, columns_of_groups, device, library_product, library_values, operand, same_bits, values

from blockfp.definition.products import Operand, product
from blockfp.formats import Format
from blockfp.kernels.products import plan, plan_values

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)

SHAPES = ((256, 192, 1024), (333, 517, 2064), (1, 7, 16), (129, 200, 144), (77, 33, 41), (130, 264, 1000), (5, 1, 3))
DTYPES = ("float32", "bfloat16", "float16")
ROWS, SQUARES, TENSOR = "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32", "fp8_e4m3"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
def test_every_shape(formats, kind):
    for seed, (m, n, k) in enumerate(SHAPES):
        a, b = operand(formats[0], m, k, kind, 2 * seed), operand(formats[1], n, k, kind, 2 * seed + 1)
        same_bits(library_product(a, b), product(a, b, "hopper_fp8"), f"m, n, k = {m, n, k}")


@pytest.mark.parametrize("cublas", [0, 130100])
@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
def test_every_plan_of_the_own_kernel(formats, cublas):
    """With and without cuBLASLt beside it, and in each tile."""
    m, n, k = 320, 448, 640
    planned = plan(*map(Format.parse, formats), m, n, k, capability=(9, 0), cublas=cublas, dtype="float32")
    assert planned.own or cublas
    a, b = operand(formats[0], m, k, "normal", 0), operand(formats[1], n, k, "mixed exponents", 1)
    want = product(a, b, "hopper_fp8")
    for tile in (-1, 0, 1):
        same_bits(library_product(a, b, tile=tile), want, f"tile {tile}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formats", [(ROWS, SQUARES), (ROWS, ROWS), (TENSOR, TENSOR)], ids="-".join)
@pytest.mark.parametrize("n", [256, 260, 517])
def test_bias_accumulation_and_dtypes(n, formats, dtype):
    m, k = 300, 512
    a, b = operand(formats[0], m, k, "normal", 0), operand(formats[1], n, k, "any finite", 1)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(device())
    before = torch.randn(m, n, generator=torch.Generator().manual_seed(3)).to(device()).to(getattr(torch, dtype))
    for given in (None, bias, bias.half()):
        same_bits(library_product(a, b, bias=given, dtype=dtype), product(a, b, "hopper_fp8", dtype=dtype, bias=given), "")
        want = product(a, b, "hopper_fp8", dtype=dtype, bias=given, addend=before)
        same_bits(library_product(a, b, bias=given, out=before.clone(), accumulate=True), want, "accumulated")


@pytest.mark.parametrize("n", [8, 12, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_have_one_sign_whatever_the_length_of_a_row(n, dtype):
    """A product so small that it rounds to zero keeps its sign, in rows that are written in pieces of any size."""
    a, b = operand(ROWS, 16, 128, "any finite", 0), operand(ROWS, n, 128, "any finite", 1)
    for side, scale in ((a, 2.0**-70), (b, 2.0**-79)):
        side.codes[:] &= 0x83
        side.scales[:] = scale
    want = product(a, b, "hopper_fp8", dtype=dtype)
    assert bool(((want == 0) & want.signbit()).any())
    same_bits(library_product(a, b, dtype=dtype), want, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [ROWS, SQUARES, TENSOR])
def test_groups_of_rows(weight, kind):
    ends, n, k, groups = [0, 101, 101, 357, 900], 320, 200, 5
    a = operand(TENSOR if weight == TENSOR else ROWS, 1000, k, kind, 0)
    each = [operand(weight, n, k, kind, group + 1) for group in range(groups)]
    scales = [one.scales.reshape(1) if weight == TENSOR else one.scales[None] for one in each]
    b = Operand(torch.stack([one.codes for one in each]), torch.cat(scales), Format.parse(weight))
    got = library_product(a, b, ends=ends, out=torch.full((1000, n), 7.0, device=device()))
    begin = 0
    for end, one in zip(ends, each, strict=True):
        if end > begin:
            part = a._replace(codes=a.codes[begin:end], scales=a.scales if weight == TENSOR else a.scales[begin:end])
            same_bits(got[begin:end], product(part, one, "hopper_fp8"), f"rows {begin} to {end}")
        begin = end
    assert bool((got[begin:] == 7).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formats", [(ROWS, ROWS), ("fp8_e5m2_1x128_fp32", ROWS), (TENSOR, TENSOR)], ids="-".join)
def test_groups_along_k(formats, kind):
    counts, m, n = (100, 0, 1, 300, 129), 200, 264
    a, lefts = columns_of_groups(formats[0], m, counts, kind, 0)
    b, rights = columns_of_groups(formats[1], n, counts, kind, 1)
    ends = torch.tensor(counts).cumsum(0).tolist()
    before = torch.randn(len(counts), m, n, generator=torch.Generator().manual_seed(2)).to(device())
    got = library_product(a, b, ends=ends, out=torch.empty_like(before))
    added = library_product(a, b, ends=ends, out=before.clone(), accumulate=True)
    for group, count in enumerate(counts):
        if count == 0:
            assert not bool(got[group].any())
            continue
        same_bits(got[group], product(lefts[group], rights[group], "hopper_fp8"), f"group {group}")
        want = product(lefts[group], rights[group], "hopper_fp8", addend=before[group])
        same_bits(added[group], want, f"group {group}, accumulated")


def test_scales_that_32_rows_share():
    m, n, k = 133, 200, 384
    a, b = operand(ROWS, m, k, "normal", 0), operand(ROWS, n, k, "mixed exponents", 1)
    bands = b.scales[::32].contiguous()
    want = product(a, b._replace(scales=bands.repeat_interleave(32, 0)[:n].contiguous()), "hopper_fp8")
    same_bits(library_product(a, b._replace(scales=bands), b_rows=32), want, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(256, 192, 512), (257, 77, 1000), (1, 1, 1), (64, 8, 8)], ids=str)
def test_bfloat16(shape, kind):
    m, n, k = shape
    assert plan_values(m, n, k).own
    a, b = values(m, k, kind, 0), values(n, k, kind, 1)
    same_bits(library_values(a, b), product(a, b, "hopper_bf16"), "")
    for dtype in DTYPES:
        same_bits(library_values(a, b, dtype=dtype), product(a, b, "hopper_bf16", dtype=dtype), dtype)

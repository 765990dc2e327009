"""Sizes that are no multiple of a vector, and arrays that begin anywhere: the definition's bits, run on the same GPU."""

import pytest
import torch
from blockfp.torch_backend.ops import cuda

from blockfp.definition import layout, numerics
from blockfp.formats import FORMATS, Format

WITH_KERNELS = [f for f in FORMATS if not (f.name.endswith(("_floor", "_fp32", "_pow2")) or f.scale.four_over_six)]
BY_NAME = pytest.mark.parametrize("format", WITH_KERNELS, ids=str)
ONE_OF_EACH = ("fp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1_32x32", "nvfp4")


def numbers(rows, columns, dtype="bfloat16", seed=0):
    """Ties, numbers of all exponents, and now and then a zero, a NaN or an Inf."""
    generator = torch.Generator("cuda").manual_seed(seed)
    random = {"generator": generator, "device": "cuda"}
    x = torch.randint(-24, 25, (rows, columns), **random) * 0.25
    x = torch.where(torch.rand((rows, columns), **random) < 0.5, x, torch.randn((rows, columns), **random))
    x = x * torch.exp2(torch.randint(-3, 4, (rows, 1), **random).float())
    kind = torch.randint(0, 4000, (rows, columns), **random)
    for i, value in enumerate((float("nan"), float("inf"), -0.0, 1e-30)):
        x[kind == i] = value
    return x.to(getattr(torch, dtype))


def same(got, wanted, what):
    for name, one, other in zip(("codes", "scales", "tensor_scale"), got, wanted, strict=True):
        assert (one is None) == (other is None), what
        if one is None:
            continue
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        assert one.shape == other.shape, f"{what}: {name}"
        assert torch.equal(*as_bytes), f"{what}: {int((as_bytes[0] != as_bytes[1]).sum())} bytes of {name} differ"


def check(x, format):
    """Rowwise, columnwise and both at once; back again; and transposed."""
    columns = x.shape[1]
    what = f"{format} {tuple(x.shape)} at {x.data_ptr() % 16}"
    wanted = numerics.quantize(x.contiguous(), format), numerics.quantize(x.mT.contiguous(), format)
    same(cuda.quantize(x, format), wanted[0], f"{what} row")
    both = cuda.quantize_both(x, format)
    same(both.row, wanted[0], f"{what} row of both")
    same(both.column, wanted[1], f"{what} column of both")
    same(cuda.quantize_both(x, format, rows=False).column, wanted[1], f"{what} column")
    q = wanted[0]
    for dtype in ("bfloat16", "float32"):
        got = cuda.dequantize(*q, format, dtype, columns=columns)
        expected = numerics.dequantize(*q, format, dtype, columns=columns)
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), f"{what} to {dtype}"
    if format.square:
        turned = numerics.transpose(q.codes, q.scales, format, columns=columns)
        same((*cuda.transpose(q.codes, q.scales, format, columns=columns), None), (*turned, None), f"{what} transposed")


@BY_NAME
@pytest.mark.parametrize("shape", [(1, 50257), (50257, 1), (1026, 515), (257, 4103), (130, 2050)])
def test_long_and_thin(format, shape):
    check(numbers(*shape), format)


@BY_NAME
def test_every_remainder(format):
    """Of 32 in both lengths, near the sides of tiles."""
    for i in range(33):
        check(numbers(120 + i, 250 - i, seed=i), format)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matrices_that_begin_anywhere(name, dtype):
    """Views at every element of a vector, with rows of other lengths than theirs."""
    for offset in range(8):
        for pitch in (192, 193, 200, 331):
            room = numbers(1, 100 * pitch + 8, dtype, seed=offset)[0]
            check(room[offset : offset + 100 * pitch].view(100, pitch)[:, :189], Format.parse(name))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_large_odd_matrix(name):
    check(numbers(8190, 4094), Format.parse(name))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_codes_that_begin_anywhere(name):
    """Codes and values at every byte, to and from which arrays are dequantized and transposed."""
    format, shape = Format.parse(name), (130, 189)
    q = numerics.quantize(numbers(*shape), format)
    expected = numerics.dequantize(*q, format, "bfloat16", columns=shape[1])
    for offset in range(1, 17):
        room = torch.empty(q.codes.numel() + offset, dtype=torch.uint8, device="cuda")
        codes = room[offset:].view(q.codes.shape)
        codes.copy_(q.codes)
        got = cuda.dequantize(codes, *q[1:], format, "bfloat16", columns=shape[1])
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), offset
        if format.square:
            turned = numerics.transpose(q.codes, q.scales, format, columns=shape[1])
            same((*cuda.transpose(codes, q.scales, format, columns=shape[1]), None), (*turned, None), f"{offset}")


@BY_NAME
def test_nothing_else_is_written(format):
    """Of an odd matrix: outputs lie between guard bands, at any byte, poisoned first."""
    from blockfp.kernels import cuda_library
    from blockfp.kernels.calls import format_numbers

    if format.has_tensor_scale or format.per_row:
        pytest.skip("test_cuda_quantize.py does it, of rows two other functions")
    x, (rows, columns) = numbers(131, 267), (131, 267)
    wanted = numerics.quantize(x, format), numerics.quantize(x.mT.contiguous(), format)
    one = 4 if format.scale.dtype == "float32" else 1
    for shift in (0, 1, 3, 8):
        buffers, inner = [], []
        for shape in ((rows, columns), (columns, rows)):
            for count, size, offset in (
                (layout.codes_shape(shape, format), 1, shift),
                (layout.scales_shape(shape, format), one, 0),
            ):
                count = torch.Size(count).numel() * size
                buffers.append(torch.full((count + 512,), 0xA5, dtype=torch.uint8, device="cuda"))
                part = buffers[-1][256 + offset : 256 + offset + count]
                inner.append(part.view(torch.float32) if size == 4 else part)
        cuda_library.library().quantize(
            x, None, None, None, *inner[:2], None, *inner[2:], None, *format_numbers(format),
            False, 0, 0x7F7F0000, False, False, False, False, 0, 0, 0, 0,
        )  # fmt: skip
        for i, (buffer, part) in enumerate(zip(buffers, inner, strict=True)):
            expected = wanted[i // 2][i % 2].contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(part.view(torch.uint8), expected), f"{format} at {shift}"
            part.view(torch.uint8).fill_(0xA5)
            assert bool((buffer == 0xA5).all()), f"{format} at {shift}: something beside part {i} is written"

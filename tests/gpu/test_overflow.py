"""The kernels that quantize mark what holds an Inf, and nothing else: NaN scales, in each direction, with the CPU's bits."""

import pytest
import torch
from arrays import values
from blockfp.torch_backend.ops.quantize.quantize_plans import quantize_matrix
from cuda_arrays import capture

from blockfp.formats import FORMATS, Format
from blockfp.kernels.operand_cast import OperandCast, given_of

# Tiles put in order, rows alone, ragged ends, less than a block.
SHAPES = ((256, 384), (160, 256), (77, 130), (1, 16))
NAMES = sorted(map(str, FORMATS))


def samples(shape, dtype):
    """(name, values): each kind of what is not finite, at the beginning, inside and at the end."""
    x = values(shape, 1).to(dtype)
    yield "finite", x
    largest = x.clone()
    largest[0, 0], largest[-1, -1] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    yield "largest", largest
    for place in ((0, 0), (shape[0] // 2, shape[1] // 2), (-1, -1)):
        for value in (torch.inf, -torch.inf, torch.nan):
            bad = x.clone()
            bad[place] = value
            yield f"{value} at {place}", bad
    both = x.clone()
    both[0, 0], both[0, 1], both[-1, -1] = torch.nan, torch.inf, torch.nan
    yield "nan beside inf", both
    yield "inf alone", torch.full(shape, torch.inf, dtype=dtype)


def check(x, row, column, multiplier=None):
    given = [None if multiplier is None else multiplier.to(device) for device in ("cpu", "cuda")]
    wanted, found = (
        quantize_matrix(x.to(device), OperandCast(row, column, given_of(None, one)), None, one)
        for device, one in zip(("cpu", "cuda"), given, strict=True)
    )
    for number, (ours, gpu) in enumerate(zip(wanted, found, strict=True)):
        torch.testing.assert_close(
            gpu.cpu(), ours, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=number: f"part {n}: {text}"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_only_an_inf_is_marked(name, dtype):
    format = Format.parse(name)
    for shape in SHAPES:
        for what, x in samples(shape, getattr(torch, dtype)):
            for row, column in ((format, format), (format, None), (None, format)):
                try:
                    check(x, row, column)
                    if format.per_tensor:
                        check(x, row, column, torch.tensor(3.0))
                except AssertionError as error:
                    raise AssertionError(f"{name} {what} {shape} {row} {column}: {error}") from error


@pytest.mark.parametrize("name", NAMES)
def test_a_mark_is_of_one_call(name):
    """Of a graph that is replayed, too."""
    format = Format.parse(name)
    run = lambda x: quantize_matrix(x, OperandCast(format, format))  # noqa: E731
    good = torch.randn((256, 384), device="cuda", dtype=torch.bfloat16)
    bad = good.clone()
    bad[200, 300] = torch.inf
    x = good.clone()
    run(x)
    graph, captured = capture(lambda: run(x))
    wanted = {False: run(good), True: run(bad)}
    assert not torch.equal(wanted[False][-1], wanted[True][-1])
    for overflows in (True, False, True, False):
        x.copy_(bad if overflows else good)
        graph.replay()
        for one, other in zip(captured, wanted[overflows], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(run(x), wanted[overflows], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8_e4m3"])
def test_random_and_rotated_operands_are_marked(name):
    format = Format.parse(name)
    keys = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32)
    for rotate in (False, True) if name == "nvfp4" else (False,):
        for random in ((True, True), (False, True)):
            cast = OperandCast(format, format, random=random, rotate=rotate)
            for _, x in samples((256, 384), torch.bfloat16):
                results = [quantize_matrix(x.to(device), cast, keys=keys.to(device)) for device in ("cpu", "cuda")]
                for ours, gpu in zip(*results, strict=True):
                    torch.testing.assert_close(gpu.cpu(), ours, rtol=0, atol=0, equal_nan=True)

"""PyTorch's ops and plans of operands on a GPU: the CPU's bits, torch's checks, graph capture, more than 2^31 elements."""

import pytest
import torch
from arrays import values
from blockfp.torch_backend.modules.layer_calls import sharing
from blockfp.torch_backend.ops import cuda, dequantize_plans
from blockfp.torch_backend.ops.layer import linear_ops
from blockfp.torch_backend.ops.quantize import quantize_plans
from blockfp.torch_backend.ops.quantize.operand_ops import tensor_amax
from blockfp.torch_backend.ops.quantize.quantize_plans import quantize_matrix
from counted_casts import casts_of
from cuda_arrays import capture
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp.definition import numerics
from blockfp.formats import FORMATS, Format
from blockfp.kernels import cuda_library, switch
from blockfp.kernels.operand_cast import OperandCast, given_of

SHAPES = ((160, 256), (77, 130), (1, 16))


def on_both(x, row, column, amax=None, multiplier=None, keys=None, random=(False, False), rotate=False, eps=0.0):
    """Asserts that a GPU quantizes a CPU matrix into the bits that the CPU gives."""
    results, cast = [], OperandCast(row, column, given_of(amax, multiplier), random, rotate, eps)
    for device in ("cpu", "cuda"):
        given = [None if one is None else one.to(device) for one in (amax, multiplier, keys)]
        results.append(quantize_matrix(x.to(device), cast, *given))
    assert len(results[0]) == len(results[1])
    for number, (ours, gpu) in enumerate(zip(*results, strict=True)):
        assert gpu.is_contiguous()
        what = lambda text: f"{row} {column} {tuple(x.shape)} part {number}: {text}"  # noqa: E731, B023
        torch.testing.assert_close(gpu.cpu(), ours, rtol=0, atol=0, equal_nan=True, msg=what)
    pointers = [part.untyped_storage().data_ptr() for part in results[1] if part.numel()]
    assert len(set(pointers)) == len(pointers)


def matrices(dtype=None):
    for seed, shape in enumerate(SHAPES):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
        yield x.to(dtype or torch.bfloat16)
        yield x.mT.to(dtype or torch.bfloat16)
    yield torch.full((64, 32), torch.inf, dtype=torch.bfloat16)
    yield torch.zeros((0, 32), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", sorted(FORMATS, key=str), ids=str)
def test_directions(name):
    format = Format.parse(name)
    for x in matrices():
        on_both(x, format, format)
        on_both(x, format, None)
        on_both(x, None, format)
        if format.per_tensor and x.numel():
            on_both(x, format, format, amax=tensor_amax(x.contiguous()))
            for directions in ((format, format), (format, None), (None, format)):
                on_both(x, *directions, multiplier=torch.tensor(7.0))


def test_random_and_rotated():
    keys = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32)
    nvfp4, mx = Format.parse("nvfp4"), Format.parse("mxfp8_e4m3")
    for x in matrices():
        for random in ((True, True), (True, False), (False, True), (False, False)):
            on_both(x, mx, mx, keys=keys, random=random)
            for rotate in (False, True):
                on_both(x, nvfp4, nvfp4, keys=keys, random=random, rotate=rotate)
                on_both(x, None, nvfp4, keys=keys, random=random, rotate=rotate)


def test_mixed_formats():
    for x in matrices(torch.float32):
        for row, column in (
            ("fp8_e4m3", "fp8_e5m2"),
            ("fp8_e4m3", "mxfp8_e4m3"),
            ("fp8_e4m3_1x128", "nvfp4"),
            ("mxint8", "fp8_e4m3"),
        ):
            on_both(x, Format.parse(row), Format.parse(column))
            if x.numel():
                on_both(x, Format.parse(row), Format.parse(column), amax=tensor_amax(x.contiguous()))


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4"])
def test_ops_give_what_direct_calls_give(name):
    """Under a mode everything goes through the ops; their results are those of eager code, and of another shape's plan."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    layer = bfp.Linear(256, 128, recipe=name, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step():
        if layer.step is not None:
            layer.step.zero_()
        leaf = x.clone().requires_grad_()
        layer.weight.grad = None
        y = layer(leaf)
        y.float().square().sum().backward()
        return y, leaf.grad, layer.weight.grad

    direct = step()
    layer(torch.randn(32, 256, device="cuda", dtype=torch.bfloat16))
    with FlopCounterMode(display=False) as counter:
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(direct, watched, strict=True))
    assert counter.get_total_flops() == 3 * 2 * 64 * 256 * 128


def test_the_backward_frees_the_input_before_the_last_product():
    """Codes of the input are 64 MiB here. Its gradient, which comes after them, is 128 MiB, cuBLASLt's workspace 32."""
    layer = bfp.Linear(8192, 128, bias=False, recipe="fp8_current", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    x.grad = layer.weight.grad = None
    y = layer(x)
    gradient = torch.ones_like(y)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(gradient)
    assert torch.cuda.max_memory_allocated() - before < (128 + 32 - 64 + 24) * 2**20


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(switch, "MOST", 16)
    for plans in (linear_ops._forwards, linear_ops._backwards, quantize_plans._plans):
        plans.clear()
    layer = bfp.Linear(64, 32, recipe="fp8_current", device="cuda")
    for length in range(1, 200):
        layer(torch.ones(length, 64, device="cuda")).sum().backward()
    assert max(map(len, (linear_ops._forwards, linear_ops._backwards, quantize_plans._plans))) <= 16


def test_a_cast_is_shared_in_a_graph_and_made_again_by_each_replay():
    first, second = (bfp.Linear(256, 128, bias=False, recipe="mxfp8", device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def both(x):
        with sharing((first, second)):
            return first(x), second(x)

    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert casts_of(both, x)[0] == 1
        graph, (a, b) = capture(lambda: both(x))
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(a, first(x.detach().clone()))
        assert torch.equal(b, second(x.detach().clone()))


ONE_OF_EACH = ("fp8_e4m3", "fp8_e5m2_128x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1", "mxint8_floor", "nvfp4")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_opcheck(name):
    assert cuda_library.available(), cuda_library.status()
    x = values((37, 80), dtype=torch.bfloat16, device="cuda")
    for key in (None, torch.tensor([7, 9], dtype=torch.int64, device="cuda")):
        torch.library.opcheck(dequantize_plans.quantize, (x, name, key))
    q = bfp.quantize(x, name)
    torch.library.opcheck(dequantize_plans.dequantize, (q.codes, q.scales, q.tensor_scale, name, torch.float32, 80, [0, 0]))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_compiles_whole(name):
    torch._dynamo.reset()
    x = values((37, 80), dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(lambda x: bfp.quantize(x, name).dequantize(torch.float32), fullgraph=True, backend="aot_eager")
    expected = bfp.quantize(x, name).dequantize(torch.float32)
    assert torch.equal(compiled(x).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_graph_capture(name):
    x = values((128, 256), dtype=torch.bfloat16, device="cuda")
    bfp.quantize(x, name)
    graph, q = capture(lambda: bfp.quantize(x, name))
    x.copy_(3 * x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    expected = bfp.quantize(x, name)
    assert_equal(q, expected)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4_e2m1"])
@pytest.mark.parametrize("columns", [8192, 8200])
def test_more_than_2_to_the_31_elements(name, columns):
    """Rows and columns of the far end are those of a small array; 8200 columns take the kernels for ragged blocks."""
    rows = 2**31 // columns + 96
    x = torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda")
    x.random_(-256, 257)
    both = cuda.quantize_both(x, name)
    y = cuda.dequantize(*both.row, name, "bfloat16", columns=columns)
    far = rows // 32 * 32 - 64
    expected = numerics.quantize(x[far:], name)
    assert torch.equal(both.row.codes[far:], expected.codes)
    assert torch.equal(both.row.scales[far:], expected.scales)
    values = numerics.dequantize(*expected, name, "bfloat16", columns=columns)
    assert torch.equal(y[far:].view(torch.int16), values.view(torch.int16))
    turned = numerics.quantize(x[far:].mT.contiguous(), name)
    across = turned.codes.shape[-1]
    assert torch.equal(both.column.codes[:, -across:], turned.codes)

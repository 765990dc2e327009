"""Plans of operands on a GPU: both directions have the bits of the CPU's, measured, given or delayed, random and rotated."""

import pytest

from blockfp.formats import FORMATS, Format

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    from blockfp.torch_backend.custom_ops import linear_ops, quantize_plans
    from blockfp.torch_backend.custom_ops.operand_ops import tensor_amax
    from blockfp.torch_backend.custom_ops.quantize_plans import quantize_matrix
    from blockfp.torch_backend.modules.shared_inputs import sharing
    from counted_casts import casts_of

    import blockfp.torch as bfp
    from blockfp.kernels import switch

SHAPES = ((160, 256), (77, 130), (1, 16))


def on_both(x, row, column, amax=None, multiplier=None, keys=None, random=(False, False), rotate=False, eps=0.0):
    """Asserts that a GPU quantizes a CPU matrix into the bits that the CPU gives."""
    results = []
    for device in ("cpu", "cuda"):
        given = [None if one is None else one.to(device) for one in (amax, multiplier, keys)]
        results.append(quantize_matrix(x.to(device), row, column, *given, random, rotate, eps))
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
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a, b = both(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(a, first(x.detach().clone()))
        assert torch.equal(b, second(x.detach().clone()))

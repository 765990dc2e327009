"""Linear layers on a GPU: every recipe against its operands' product, the sums' bound, routes, compilation, graphs."""

import functools
import warnings

import arrays
import pytest
import torch
from blockfp.torch_backend.ops.quantize.key_ops import gradient_keys
from cuda_arrays import capture
from linear_reference import hold_linear
from same_tensors import assert_equal
from training import train

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.kernels import cuda_library, switch
from blockfp.recipes import Cast

# Sums of tensor cores: fp32 with 14 bits or more where they accumulate fast.
FAST, PRECISE = 2.0**-10, 2.0**-12
SHAPE = (256, 384, 512)


values = functools.partial(arrays.values, dtype=torch.bfloat16, device="cuda")
hold = functools.partial(hold_linear, sums=(FAST, PRECISE, PRECISE), device="cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_products(name, dtype):
    assert cuda_library.available(), cuda_library.status()
    hold(name, shape=SHAPE, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("shape", [(144, 48, 80), (77, 33, 50), (1, 16, 16), (0, 32, 48), (400, 256, 144)])
def test_ragged_shapes(name, shape):
    hold(name, shape=shape, dtype=torch.bfloat16)


MIXED = {
    "high-precision backward": {"gradient": Cast(None), "input_columnwise": Cast(None), "weight_columnwise": Cast(None)},
    "e4m3 gradients": {"gradient": Cast("fp8_e4m3")},
    "one-dimensional weight": {"weight": Cast("mxfp8_e4m3")},
    "formats by direction": {"input": Cast("mxfp8_e4m3"), "input_columnwise": Cast("nvfp4")},
    "fp32 block scales": {"weight": Cast("fp8_e4m3_128x128_fp32"), "input": Cast("fp8_e5m2_1x128_fp32")},
}


@pytest.mark.parametrize("case", MIXED)
def test_mixed(case):
    hold(recipes.fp8_current().replace(**MIXED[case]), shape=SHAPE, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "calls"), [("fp8_current", 3), ("fp8_delayed", 3), ("fp8_block", 3), ("fp8_row", 2), ("mxfp8", 3), ("nvfp4", 0)]
)
def test_hopper_multiplies_codes(name, calls, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's table")
    fast = []

    def multiply(*arguments):
        fast.append(arguments[-2] == 1)
        return on_codes(*arguments)

    library = cuda_library.library()
    on_codes = library.product
    monkeypatch.setattr(library, "product", multiply)
    # Plans hold the library's functions.
    with switch.definition_only():
        pass
    hold(name, shape=SHAPE, dtype=torch.bfloat16)
    assert len(fast) == calls
    # Blocks are always summed precisely, and so are aligned operands.
    assert fast == [name not in ("fp8_block", "fp8_row", "mxfp8"), False, False][:calls]
    monkeypatch.undo()
    with switch.definition_only():
        pass


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block", "fp8_row", "nvfp4"])
def test_compiled_layers_have_eager_bits(name):
    """The compiler finds the amaxes of fp8_current while it makes the activations: the codes must be the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = bfp.Linear(512, 256, recipe=name, device="cuda", dtype=torch.bfloat16)
    compiled = bfp.Linear(512, 256, recipe=name, device="cuda", dtype=torch.bfloat16)
    compiled.load_state_dict(layer.state_dict())
    compiled.compile(fullgraph=True)
    for seed in range(3):
        x, gradient = values((128, 512), seed), values((128, 256), seed + 9)
        pair = []
        for one in (layer, compiled):
            leaf = x.clone().requires_grad_()
            y = one(leaf)
            y.backward(gradient)
            pair.append((y, leaf.grad, one.weight.grad, one.bias.grad, *one.buffers()))
            one.zero_grad()
            bfp.update_scales(one)
        # The bias gradient is a float sum.
        torch.testing.assert_close(pair[0][3], pair[1][3])
        for i, (a, b) in enumerate(zip(*pair, strict=True)):
            assert i == 3 or torch.equal(a, b)


def test_amaxes_are_recorded_as_on_a_cpu():
    from blockfp.torch_backend.linear.delayed import record

    for amax in (0.0, 0.5, 3.0, 1e38, float("inf")):
        for newest in (0.0, 1.0, 2e38):
            histories = [torch.tensor([newest, 7.0], device=device) for device in ("cpu", "cuda")]
            for history in histories:
                record(history, torch.tensor([amax], device=history.device).view(torch.int32), now=True)
            assert torch.equal(histories[1].cpu(), histories[0])


def test_keys_are_those_of_a_cpu():
    for key in (torch.tensor([11, 2**32 - 5]), torch.tensor([3, -4], dtype=torch.int32)):
        for options in ({}, {"step": torch.tensor(2**40 + 7), "folds": (5,)}, {"groups": 3, "folds": (0,)}, {"groups": 0}):
            there = {name: value.cuda() if name == "step" else value for name, value in options.items()}
            assert torch.equal(gradient_keys(key.cuda(), **there).cpu(), gradient_keys(key, **options))
    for groups in (None, 3, 100):
        key, (ours, gpu) = torch.tensor([11, 5]), (torch.tensor(7, device=device) for device in ("cpu", "cuda"))
        for _ in range(3):
            wanted = gradient_keys(key, step=ours, folds=(2,), groups=groups, advance=True)
            assert torch.equal(gradient_keys(key.cuda(), step=gpu, folds=(2,), groups=groups, advance=True).cpu(), wanted)
        assert ours == gpu.cpu() == 10


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
def test_graph_of_a_layer(name):
    layer = bfp.Linear(256, 128, recipe=name, device="cuda", dtype=torch.bfloat16)
    x, gradient = values((64, 256), 0).requires_grad_(), values((64, 128), 1)

    def step():
        y = layer(x)
        d_x, d_weight = torch.autograd.grad(y, (x, layer.weight), gradient)
        return y, d_x, d_weight

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    graph, captured = capture(step)
    with torch.no_grad():
        x.copy_(values((64, 256), 5))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(captured, step())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_an_inf_leaves_nothing_finite(name, compiled):
    torch._dynamo.reset()
    layer = bfp.Linear(256, 256, recipe=name, dtype=torch.bfloat16, device="cuda")
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    # In high precision an Inf stays in its row or column.
    casts = recipes.parse(name)
    in_dx, *in_dw = (
        0 if cast.format else 255 / 256 for cast in (casts.gradient, casts.input_columnwise, casts.gradient_columnwise)
    )
    for bad, wanted in ((None, (1, 1, 1)), ("x", (0, 1, in_dw[0])), ("g", (1, in_dx, in_dw[1]))):
        x, g = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if bad is not None:
            {"x": x, "g": g}[bad][7, 33] = -torch.inf
        x.requires_grad_()
        y = run(x)
        grads = torch.autograd.grad(y, (x, layer.weight), g)
        assert tuple(part.isfinite().float().mean().item() for part in (y, *grads)) == wanted


PAIRS = (("nvfp4", "nvfp4_16x16"), ("mxint8", "mxint8_32x32"), ("fp8_e4m3_1x128_fp32", "mxfp4_e2m1_32x32"))


@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(64, 96, 512), (33, 17, 4100), (16, 16, 16384)])
@pytest.mark.parametrize("cancelling", [False, True])
def test_products_of_values(formats, shape, cancelling):
    """In formats that no unit of Hopper multiplies as codes."""
    m, n, k = shape
    x, weight = values((m, k), 0, dtype=torch.float32), values((n, k), 1, dtype=torch.float32) * 0.1
    if cancelling:
        half = k // 2
        x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
    a, b = bfp.quantize(x, formats[0]), bfp.quantize(weight, formats[1])
    recipe = recipes.qat(formats[1], formats[0])
    y = bfp.linear(x, b, recipe=recipe)
    left, right = (q.dequantize(torch.float32).double() for q in (a, b))
    lost = 2 * (k + 4) * 2.0**-24 * (left.abs() @ right.abs().mT)
    wanted = left @ right.mT
    error = (y.detach().double() - wanted).abs()
    assert bool((error <= lost + 2.0**-24 * (wanted.abs() + lost) + 1e-30).all()), f"{(error / lost).max():.3} times the bound"


def layer_of_rows(device):
    made = bfp.Linear(256, 384, recipe="fp8_row", dtype=torch.bfloat16)
    bfp.load_high_precision_(made.weight, values((384, 256), 1, device="cpu"))
    with torch.no_grad():
        made.bias.copy_(values((384,), 2, device="cpu"))
    return made.to(device)


def test_a_layer_is_that_of_a_cpu():
    results = []
    for device in ("cpu", "cuda"):
        one, x = layer_of_rows(device), values((130, 256), 3, device=device).requires_grad_()
        y = one(x)
        y.backward(values((130, 384), 4, device=device))
        results.append([part.cpu().float() for part in (y.detach(), x.grad, one.weight.grad, one.bias.grad)])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7 * float(wanted.abs().max()))


def test_the_optimizer_writes_the_codes_of_the_master():
    one = layer_of_rows("cuda")
    optimizer = bfp.AdamW(one.parameters(), lr=1e-2)
    train(optimizer, lambda seed: one(values((64, 256), seed)).square().mean(), range(3))
    master = optimizer.state[one.weight]["master"]
    wanted = bfp.quantize(master.cpu(), "fp8_e4m3_row_pow2")
    assert torch.equal(one.weight.codes.cpu(), wanted.codes)
    assert torch.equal(one.weight.scales.cpu(), wanted.scales)


def test_groups_are_multiplied_one_after_another_and_that_is_said():
    results, counts = [], [40, 0, 90]
    for device in ("cpu", "cuda"):
        one = bfp.GroupedLinear(3, 256, 128, recipe="fp8_row", dtype=torch.bfloat16, bias=False)
        bfp.load_high_precision_(one.weight, values((3, 128, 256), 5, device="cpu"))
        one, x = one.to(device), values((130, 256), 6, device=device).requires_grad_()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            y = one(x, torch.tensor(counts, device=device))
        y.backward(values((130, 128), 7, device=device))
        results.append([part.cpu().float() for part in (y.detach(), x.grad, one.weight.grad)])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=2.0**-7 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("fp8_e4m3_row", "compressed-tensors"),
        ("mxfp8_e4m3_32x32", "compressed-tensors"),
        ("nvfp4_16x16", "modelopt"),
        ("fp8_e4m3_128x128", "fine-grained-fp8"),
    ],
)
def test_what_a_server_gets_is_what_a_cpu_would_send(format, layout):
    model = torch.nn.Sequential(bfp.Linear(256, 384, recipe=bfp.recipes.mxfp8().replace(weight=bfp.recipes.Cast(format))))
    digests = []
    for device in ("cpu", "cuda"):
        found = {}
        for bucket in bfp.stream_weights(model.to(device), layout=layout):
            found |= bucket.sha256
            assert all(tensor.device.type == device for _, tensor in bucket)
        digests.append(found)
    assert digests[0] == digests[1] != {}

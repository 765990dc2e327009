"""The function of grouped layers gives the bits of groups that are quantized and multiplied one after another."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from arrays import values
from blockfp.torch_backend.linear import linear as linear_module
from blockfp.torch_backend.linear.linear import call_of
from blockfp.torch_backend.linear.tensor_parallel.parallel_layer import ParallelLayer
from same_tensors import assert_equal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import Cast

COUNTS = (20, 0, 133, 1)
MIXED = {
    "a high-precision backward": {"gradient": Cast(None), "input_columnwise": Cast(None)},
    "square blocks": {"input": Cast("mxfp8_e4m3_32x32"), "gradient": Cast("mxfp8_e4m3_32x32")},
    "a weight quantized columnwise alone": {"weight": Cast(None), "weight_columnwise": Cast("mxfp8_e4m3_32x32")},
    "formats by direction": {"input": Cast("mxfp8_e4m3"), "input_columnwise": Cast("nvfp4")},
}


def layer_of(recipe, dtype=torch.bfloat16, weights="quantized"):
    torch.manual_seed(0)
    layer = bfp.GroupedLinear(len(COUNTS), 64, 96, recipe=recipe, dtype=dtype, weights=weights)
    if layer.rng_key is not None:
        layer.rng_key.copy_(torch.tensor([1, 2]))
    return layer


def results(layer, counts=COUNTS, run=None):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(COUNTS), 64, generator=generator).to(layer.bias.dtype).requires_grad_()
    y = (layer if run is None else run)(x, counts)
    gradient = torch.randn(y.shape, generator=generator).to(y.dtype)
    grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), gradient)
    return [y.detach(), *grads, *[buffer.clone() for buffer in layer.buffers()]]


def call_of_parallel(*args):
    return replace(call_of(*args), layer=ParallelLayer)


def one_after_another(monkeypatch, make, *args):
    with monkeypatch.context() as patch:
        patch.setattr(linear_module, "call_of", call_of_parallel)
        return results(make(*args))


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_no_bit_differs(monkeypatch, recipe, dtype, weights):
    wanted = one_after_another(monkeypatch, layer_of, recipe, dtype, weights)
    assert_equal(results(layer_of(recipe, dtype, weights)), wanted)


@pytest.mark.parametrize("case", MIXED)
def test_mixed_recipes(monkeypatch, case):
    recipe = recipes.mxfp8().replace(**MIXED[case])
    assert_equal(results(layer_of(recipe)), one_after_another(monkeypatch, layer_of, recipe))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_compiled_with_counts_in_a_tensor(recipe):
    torch._dynamo.reset()
    layer = layer_of(recipe)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, fullgraph=True, backend=counter)
    assert_equal(results(layer, torch.tensor(COUNTS), run), results(layer_of(recipe)))
    other = torch.tensor(COUNTS).flip(0)
    fresh = layer_of(recipe)
    results(fresh)
    assert_equal(results(layer, other, run), results(fresh, other.tolist()))
    assert counter.frame_count == 1


def test_compiled_grouped_mm():
    torch._dynamo.reset()
    weight = bfp.quantize(torch.randn(3, 96, 64), "mxfp8_e4m3_32x32").requires_grad_()
    x, offs = torch.randn(60, 64, requires_grad=True), torch.tensor([5, 5, 50], dtype=torch.int32)

    def run(x, offs):
        return bfp.grouped_mm(x, weight.mT, offs=offs, recipe="mxfp8")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(one(x, offs).square().sum(), (x, weight)) for one in (run, compiled)]
    assert_equal(*found)


def test_compiled_code_refuses_another_format():
    torch._dynamo.reset()
    weight, offs = bfp.quantize(torch.randn(3, 96, 64), "mxfp6_e3m2_32x32"), torch.tensor([5, 5, 50], dtype=torch.int32)
    calls = [
        lambda x: bfp.grouped_mm(x, weight.mT, offs=offs, recipe="mxfp8"),
        lambda x: bfp.linear(x, bfp.quantize(x, "mxfp6_e3m2_32x32"), recipe="mxfp8"),
    ]
    for call in calls:
        with pytest.raises(Exception, match=r"(?s)weight is in mxfp6_e3m2_32x32.*mxfp8_e4m3_32x32"):
            torch.compile(call, backend="aot_eager")(torch.randn(60, 64))


def test_gradients_of_gradients(monkeypatch):
    def second(layer):
        x = values((sum(COUNTS), 64), 5).bfloat16().requires_grad_()
        first = torch.autograd.grad(layer(x, COUNTS).square().sum(), (x, layer.weight), create_graph=True)
        return torch.autograd.grad(sum(one.float().square().sum() for one in first), (x, layer.weight))

    found = second(layer_of("mxfp8"))
    with monkeypatch.context() as patch:
        patch.setattr(linear_module, "call_of", call_of_parallel)
        assert_equal(found, second(layer_of("mxfp8")))


def test_rows_past_the_last_end_have_no_second_gradient():
    x, w = torch.randn(60, 64, requires_grad=True), torch.randn(2, 96, 64, requires_grad=True)
    y = bfp.grouped_mm(x, w.mT, offs=torch.tensor([20, 50], dtype=torch.int32), recipe="mxfp8")
    with pytest.raises(NotImplementedError, match="rows past the last end"):
        torch.autograd.grad(y.sum(), (x, w), create_graph=True)


def test_a_tensor_of_counts_on_a_cpu_is_checked():
    layer, x = layer_of("mxfp8"), torch.ones(154, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="as many rows as counts add up to"):
        layer(x, torch.tensor([20, 0, 133, 0]))
    assert torch.equal(layer(x, torch.tensor(COUNTS)), layer(x, list(COUNTS)))


def test_observed_layers_look_at_each_group():
    """`observe` measures each group, and finds the same figures as ever."""
    layer = layer_of("mxfp8")
    with bfp.observe(layer) as observation:
        found = results(layer)
        records = observation.step()
    assert [record.elements for record in records] == [154 * 64, 154 * 64, 154 * 96, 154 * 96]
    assert_equal(found, results(layer_of("mxfp8")))


@pytest.mark.parametrize("options", [{}, {"context_fn": bfp.keep_products}], ids=["all", "casts"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "mxfp8"])
def test_checkpointing_changes_nothing(recipe, options):
    again = layer_of(recipe)
    run = lambda x, counts: checkpoint(again, x, counts, use_reentrant=False, **options)  # noqa: E731
    assert_equal(results(again, run=run), results(layer_of(recipe)))


def test_keeping_products_multiplies_once():
    layer, multiplied = layer_of("mxfp8"), []
    x = torch.ones(sum(COUNTS), 64, dtype=torch.bfloat16, requires_grad=True)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            multiplied.append(func is torch.ops.blockfp.grouped_forward.default)
            return func(*args, **(kwargs or {}))

    y = checkpoint(layer, x, COUNTS, use_reentrant=False, context_fn=bfp.keep_products)
    with Watch():
        y.sum().backward()
    assert not any(multiplied)
    assert x.grad.any()

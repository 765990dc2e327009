"""The layers: what they compose, eager and compiled alike, on meta, frozen, tied, checkpointed; what their state dict holds."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from arrays import values, with_scales
from linear_reference import assert_close, expected
from same_tensors import assert_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import Cast

NAMES = tuple(recipes.RECIPES)
LAYERS = {
    "linear": lambda name: bfp.Linear(64, 32, recipe=name),
    "layernorm_linear": lambda name: bfp.LayerNormLinear(64, 32, recipe=name),
    "rmsnorm_mlp_swiglu": lambda name: bfp.LayerNormMLP(64, 96, recipe=name, norm="rms_norm", activation="swiglu"),
    "mlp_relu2": lambda name: bfp.LayerNormMLP(64, 96, recipe=name, activation="relu2"),
    "attention": lambda name: bfp.MultiheadAttention(64, 4, recipe=name, key_value_heads=2),
    "transformer_layer": lambda name: bfp.TransformerLayer(64, 96, 4, recipe=name),
}


def made(make, name):
    torch.manual_seed(0)
    return make(name)


def step(layer, seed, call=None, shape=(2, 12, 64)):
    """Results and gradients of one forward and backward, and of one update of scales."""
    x = values(shape, seed).requires_grad_()
    y = layer(x) if call is None else call(layer, x)
    gradients = torch.autograd.grad(y, (x, *layer.parameters()), values(y.shape, seed + 100))
    bfp.update_scales(layer)
    return [y, *gradients, *(buffer.clone() for buffer in layer.buffers())]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("linear", name) for name in NAMES]
    # A TransformerLayer has a LayerNormLinear.
    + [(kind, name) for kind in LAYERS for name in ("fp8_delayed", "nvfp4") if kind not in ("linear", "layernorm_linear")]
    + [("transformer_layer", "fp8_block")],
)
def test_compiled_whole_with_eager_bits(kind, name):
    """Ten steps, delayed scaling's and the random keys' state included: one graph, no break, a second when scales are there."""
    torch._dynamo.reset()
    layer = made(LAYERS[kind], name)
    compiled = copy.deepcopy(layer)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=counter)
    for seed in range(10 if kind == "linear" else 3):
        assert_equal(step(compiled, seed), step(layer, seed))
    assert counter.frame_count == (2 if name == "fp8_delayed" else 1)


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_inductor(name):
    torch._dynamo.reset()
    layer = made(LAYERS["linear"], name)
    compiled = copy.deepcopy(layer)
    compiled.compile(fullgraph=True)
    for seed in range(2):
        for index, (a, b) in enumerate(zip(step(compiled, seed), step(layer, seed), strict=True)):
            # The gradient of the bias is a float sum of the compiler's.
            torch.testing.assert_close(a, b) if index == 3 else assert_equal([a], [b])


@pytest.mark.parametrize("name", NAMES)
def test_grouped_layers_are_a_layer_for_each_expert(name):
    torch.manual_seed(0)
    recipe = recipes.parse(name)
    layer = with_scales(bfp.GroupedLinear(4, 64, 32, recipe=name))
    counts = [5, 0, 17, 1]
    x, gradient = values((23, 64), 0).requires_grad_(), values((23, 32), 1)
    y = layer(x, torch.tensor(counts))
    y.backward(gradient)
    assert (y.shape, layer.weight.grad.shape, layer.bias.grad.shape) == ((23, 32), (4, 32, 64), (4, 32))
    starts = [sum(counts[:e]) for e in range(5)]
    keys = None
    if layer.rng_key is not None:
        from blockfp.torch_backend.ops.quantize.key_ops import gradient_keys

        keys = gradient_keys(layer.rng_key, step=torch.tensor(0), folds=(0,), groups=4)
    dequantized = layer.weight.detach().dequantize()
    for e, (first, last) in enumerate(itertools.pairwise(starts)):
        # The stack's codes are the operand: quantized once, with one scale where a tensor has one.
        own = recipe.replace(weight=Cast(None), weight_columnwise=Cast(None))
        scale = {"input_scale": layer.input_scale, "gradient_scale": layer.gradient_scale}
        wanted = expected(
            x.detach()[first:last], dequantized[e], gradient[first:last], own, key=None if keys is None else 0, **scale
        )
        assert_close(y[first:last], wanted.y, sums=2.0**-20, bias=layer.bias.detach()[e].double())
        if keys is None:
            assert_close(x.grad[first:last], wanted.d_x, sums=2.0**-20)
            assert_close(layer.weight.grad[e], wanted.d_weight, sums=2.0**-20)
    assert torch.equal(layer.weight.grad[1], torch.zeros(32, 64))


def test_grouped_layers_compile():
    torch._dynamo.reset()
    for name in ("fp8_delayed", "nvfp4"):
        layer = made(lambda name: bfp.GroupedLinear(3, 64, 32, recipe=name), name)
        compiled = copy.deepcopy(layer)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled.compile(fullgraph=True, backend=counter)
        for seed in range(3):
            ours, theirs = (step(one, seed, lambda one, x: one(x, [5, 0, 19]), (24, 64)) for one in (compiled, layer))
            assert_equal(ours, theirs)
        assert counter.frame_count == (2 if name == "fp8_delayed" else 1)


@pytest.mark.parametrize(
    ("counts", "message"),
    [([1, 2], "each of 3"), ([1, 2, 3], "add up"), ([-1, 8, 0], "0 or more"), (torch.tensor([3.0, 4.0, 0.0]), "integers")],
)
def test_counts_that_do_not_fit(counts, message):
    with pytest.raises(ValueError, match=message):
        bfp.GroupedLinear(3, 8, 4, recipe="mxfp8")(torch.ones(7, 8), counts)


def test_layers_compose_what_they_say():
    """Against torch's own modules around `Linear`, bit for bit."""
    x = values((2, 5, 64), 0)
    mlp = made(LAYERS["rmsnorm_mlp_swiglu"], "mxfp8")
    normed = F.rms_norm(x, (64,), mlp.up.norm.weight, 1e-5)
    gate, value = mlp.up.linear(normed).unflatten(-1, (-1, 2)).unbind(-1)
    assert torch.equal(mlp(x), mlp.down(F.silu(gate) * value))
    gelu = bfp.LayerNormMLP(64, 96, recipe="mxfp8")
    hidden = gelu.up.linear(F.layer_norm(x, (64,), gelu.up.norm.weight, gelu.up.norm.bias))
    assert torch.equal(gelu(x), gelu.down(F.gelu(hidden, approximate="tanh")))
    layer = made(LAYERS["transformer_layer"], "mxfp8")
    earlier = layer(x)
    x[:, 3:] += 1
    torch.testing.assert_close(layer(x)[:, :3], earlier[:, :3])
    assert not torch.equal(layer(x)[:, 3:], earlier[:, 3:])


def test_a_norms_output_is_quantized_once_and_not_kept():
    layer = made(LAYERS["layernorm_linear"], "mxfp8")
    x = values((64, 64), 0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    wide = [t for t in saved if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and t.shape == x.shape]
    # The norm's own input, and nothing of the layer behind it.
    assert all(t.data_ptr() == x.data_ptr() for t in wide)
    assert sum(t.dtype == torch.uint8 and t.numel() == x.numel() for t in saved if not isinstance(t, bfp.QuantizedTensor)) == 1


@pytest.mark.parametrize("options", [{}, {"context_fn": bfp.keep_products}], ids=["all", "casts"])
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "mxfp8"])
def test_checkpointing_changes_nothing(name, options):
    """Recomputation records the same amaxes again, and draws no other random bits."""
    layer = made(LAYERS["rmsnorm_mlp_swiglu"], name)
    other = copy.deepcopy(layer)
    again = lambda layer, x: checkpoint(layer, x, use_reentrant=False, **options)  # noqa: E731
    for seed in range(3):
        assert_equal(step(layer, seed), step(other, seed, again))


def test_keeping_products_keeps_no_codes():
    layer, x, saved = made(LAYERS["linear"], "mxfp8"), values((4, 64), 0).requires_grad_(), []
    run = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=bfp.keep_products),
        fullgraph=True, backend="aot_eager_decomp_partition",
    )  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x)
    own = {layer.weight.codes.data_ptr(), layer.weight.scales.data_ptr()}
    assert not [t for t in saved if t.dtype == torch.uint8 and t.data_ptr() not in own]
    assert torch.equal(y, layer(x))
    assert torch.equal(*(torch.autograd.grad(out.sum(), layer.weight)[0] for out in (y, layer(x))))


def test_tied_weights_accumulate():
    first, second = bfp.Linear(32, 32, bias=False, recipe="mxfp8"), bfp.Linear(32, 32, bias=False, recipe="mxfp8")
    second.weight = first.weight
    x = values((4, 32), 0)
    second(first(x)).sum().backward()
    both = first.weight.grad.clone()
    first.weight.grad = None
    hidden = first(x).detach()
    second(hidden).sum().backward()
    only_second = first.weight.grad.clone()
    assert not torch.equal(both, only_second)


def test_evaluation_records_nothing():
    layer = bfp.Linear(32, 16, recipe="fp8_delayed")
    with torch.no_grad():
        layer(values((4, 32), 0))
    assert not layer.input_amax_history.any()
    layer(values((4, 32), 0))
    assert layer.input_amax_history[0] == values((4, 32), 0).abs().max()


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "mxfp8"])
def test_from_meta(name, weights):
    torch.manual_seed(5)
    real = bfp.Linear(64, 32, recipe=name, weights=weights)
    meta = bfp.Linear(64, 32, recipe=name, weights=weights, device="meta")
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    meta.to_empty(device="cpu")
    torch.manual_seed(5)
    meta.reset_parameters()
    for a, b in zip(real.parameters(), meta.parameters(), strict=True):
        assert type(a) is type(b)
        a, b = (p.dequantize() if isinstance(p, bfp.QuantizedTensor) else p.detach().clone() for p in (a, b))
        assert torch.equal(a, b)
    # torch.nn.Linear draws the same values.
    torch.manual_seed(5)
    plain = nn.Linear(64, 32)
    assert torch.equal(plain.bias, meta.bias)
    if weights == "quantized":
        assert torch.equal(meta.weight.initial, plain.weight)


def test_originals_are_kept_only_where_asked():
    assert bfp.Linear(32, 16, recipe="mxfp8").weight.initial is not None
    assert bfp.Linear(32, 16, recipe="mxfp8", keep_init=False).weight.initial is None


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts(name):
    """Only tensors, flat names, and the same bits after loading; high precision loads into quantized weights."""
    layer, other = bfp.Linear(64, 32, recipe=name), bfp.Linear(64, 32, recipe=name)
    step(layer, 0)
    state = layer.state_dict()
    assert all(isinstance(value, torch.Tensor) and "." not in key for key, value in state.items())
    other.load_state_dict(state)
    assert_equal(step(layer, 1), step(other, 1))
    plain = nn.Linear(64, 32)
    other.load_state_dict(plain.state_dict(), strict=False)
    q = bfp.quantize(plain.weight.detach(), other.recipe.weight.format)
    assert_equal(other.weight, q)


def test_weights_in_high_precision_are_quantized_at_use():
    layer = bfp.Linear(64, 32, recipe="fp8_current", weights="high_precision")
    quantized = bfp.Linear(64, 32, recipe="fp8_current")
    quantized.load_state_dict({"weight": layer.weight.detach().clone(), "bias": layer.bias.detach()})
    assert_equal(step(layer, 0), step(quantized, 0))


def test_loss_scaling_leaves_an_overflowing_step_out():
    layer = bfp.Linear(32, 16, recipe="fp8_current", dtype=torch.float16)
    before = [part.clone() for part in (layer.weight.codes, layer.weight.scales)]
    optimizer, scaler = bfp.AdamW(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**30)
    scaler.scale(layer(torch.ones(4, 32, dtype=torch.float16)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal((layer.weight.codes, layer.weight.scales), before)
    assert scaler.get_scale() < 2.0**30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bfp.Linear(8, 4, recipe="mxfp9"), "mxfp9"),
        (lambda: bfp.Linear(8, 4, recipe="mxfp8", weights="bf16"), "weights must be"),
        (lambda: bfp.Linear(8, 4, recipe="mxfp8", compute="bf16"), "compute must be"),
        (lambda: bfp.Linear(-1, 4, recipe="mxfp8"), "in_features must be 0 or more, got -1"),
        (lambda: bfp.GroupedLinear(2, 8, -4, recipe="mxfp8"), "out_features must be 0 or more, got -4"),
        (lambda: bfp.GroupedLinear(0, 8, 4, recipe="mxfp8"), "experts must be"),
        (lambda: bfp.LayerNormLinear(8, 4, recipe="mxfp8", norm="batch_norm"), "norm must be"),
        (lambda: bfp.LayerNormMLP(8, 4, recipe="mxfp8", activation="relu"), "activation must be"),
        (lambda: bfp.TransformerLayer(64, 96, 5, recipe="mxfp8"), "heads must divide"),
        (lambda: bfp.MultiheadAttention(64, 4, recipe="mxfp8", key_value_heads=3), "key_value_heads must divide heads = 4"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: layer(np.ones((4, 8), np.float32)), "x must be a torch.Tensor, got ndarray"),
        (lambda layer: layer(None), "x must be a torch.Tensor, got NoneType"),
        (lambda layer: bfp.parallelize(layer, None, "column"), "tp_mesh must be a DeviceMesh, got NoneType"),
        (lambda layer: bfp.parallelize("layer", None), "module must be a torch.nn.Module, got str"),
        (lambda layer: bfp.parallelize(layer, None, 3), "style must be one, .* got int"),
    ],
)
def test_what_is_of_no_use_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(bfp.Linear(8, 4, recipe="mxfp8"))

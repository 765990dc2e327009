"""A layer behind an RMSNorm as one function: the bits of both one after the other, by a cast that isn't a kernel's."""

import pytest

from blockfp import recipes

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from arrays import with_scales  # noqa: E402
from blockfp.torch_backend.custom_ops.quantize_plans import quantize_matrix  # noqa: E402
from blockfp.torch_backend.linear import norm_function  # noqa: E402
from blockfp.torch_backend.linear.linear import call_of, check_tensors  # noqa: E402
from blockfp.torch_backend.modules import normed_product  # noqa: E402

import blockfp.torch as bfp  # noqa: E402

EPS = 1e-5


def backward(gradient, x, shape, scales, weight, wanted):
    """What the GPU's own operation gives, by autograd's formulas for the operations that a CPU runs."""
    x = x.detach().requires_grad_(wanted[0])
    weight = None if weight is None else weight.detach().requires_grad_(wanted[1])
    torch.testing.assert_close(scales[:, 0], torch.rsqrt(x.detach().float().pow(2).mean(-1) + EPS))
    inputs = [one for one, needed in zip((x, weight), wanted, strict=True) if needed]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(F.rms_norm(x, shape, weight, EPS), inputs, gradient))
    return tuple(next(found) if needed else None for needed in wanted)


def cast(recipe, column):
    def run(inputs, amax, multiplier):
        x, weight, rows = inputs
        rows.copy_(torch.rsqrt(x.float().pow(2).mean(-1) + EPS))
        made = F.rms_norm(x, x.shape[-1:], weight, EPS)
        row = recipe.input.format
        parts = quantize_matrix(made, row, column, None, multiplier, None, (False, False), column is not None and rotates, 0.0)
        if multiplier is None and row.per_tensor:
            parts.append(made.abs().max().float().view(1).view(torch.int32))
        return parts

    rotates = recipe.input_columnwise.rotate
    return run


def behind(norm, layer, x):
    """layer(norm(x)) by the function."""
    recipe, state = layer.linear_recipe, layer.state() if layer.stateful else None
    check_tensors(x, layer.weight, layer.bias, grouped=False, transposed=False)
    call = call_of(x, layer.weight, layer.bias, recipe, state, None, False, None)
    assert call.direct
    column = recipe.input_columnwise.format if call.needs[1] else None
    tensors = ()
    if state is not None:
        delayed = state[:4] if recipe.delayed else (None,) * 4
        tensors = (*delayed, state.rng_key, state.step, None)
    return norm_function.run_normed(x, norm.weight, layer.weight, layer.bias, call, norm.eps, cast(recipe, column), *tensors)


@pytest.fixture(autouse=True)
def own_backward(monkeypatch):
    monkeypatch.setattr(norm_function, "rms_norm_backward", backward)


def layers(name, affine=True):
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(64, eps=EPS, elementwise_affine=affine, dtype=torch.bfloat16)
    layer = with_scales(bfp.Linear(64, 96, recipe=name, dtype=torch.bfloat16))
    if affine:
        norm.weight.data.uniform_(-2, 2)
    return norm, layer


@pytest.mark.parametrize("name", [name for name in recipes.RECIPES if recipes.parse(name).input.format is not None])
@pytest.mark.parametrize("affine", [True, False])
def test_bits_of_both_one_after_the_other(name, affine):
    recipe = recipes.parse(name)
    if recipe.input_columnwise.format != recipe.input.format:
        pytest.skip("no kernel makes such casts")
    results = []
    for run in (behind, lambda norm, layer, x: layer(norm(x))):
        norm, layer = layers(name, affine)
        if layer.stateful and layer.state().rng_key is not None:
            layer.rng_key.fill_(7)
        own = []
        for step in range(2):
            torch.manual_seed(10 + step)
            x = torch.randn(64, 64, dtype=torch.bfloat16).requires_grad_()
            y = run(norm, layer, x)
            y.backward(torch.randn_like(y))
            own += [y.detach(), x.grad, *(p.grad.clone() for p in (*norm.parameters(), *layer.parameters()))]
            own += [buffer.clone() for buffer in layer.buffers()]
            bfp.update_scales(torch.nn.ModuleList([layer]))
            layer.zero_grad()
            norm.zero_grad()
        results.append(own)
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", ["x", "norm", "weight", "all"])
def test_gradients_that_nobody_wants(frozen):
    norm, layer = layers("mxfp8")
    x = torch.randn(64, 64, dtype=torch.bfloat16).requires_grad_(frozen not in ("x", "all"))
    norm.weight.requires_grad_(frozen in ("weight",))
    layer.weight.requires_grad_(frozen not in ("weight", "all"))
    layer.bias.requires_grad_(frozen != "all")
    wanted = [one for one in (x, norm.weight, layer.weight, layer.bias) if one.requires_grad]
    found = []
    for y in (behind(norm, layer, x), layer(norm(x))):
        assert y.requires_grad == bool(wanted)
        found.append([y.detach(), *(torch.autograd.grad(y.sum(), wanted) if wanted else ())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_gradients_of_gradients():
    norm, layer = layers("mxfp8")
    norm.float(), layer.float()
    found = []
    for run in (behind, lambda norm, layer, x: layer(norm(x))):
        torch.manual_seed(3)
        x = torch.randn(64, 64).requires_grad_()
        (d_x,) = torch.autograd.grad(run(norm, layer, x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(d_x.square().sum(), [x, norm.weight, layer.weight]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_elsewhere_both_are_called(monkeypatch):
    """On a CPU nothing is fused; and what isn't torch's own norm, or is watched, is called wherever it lies."""
    asked = []
    monkeypatch.setattr(normed_product, "cast_of", lambda *arguments: "a cast")
    monkeypatch.setattr(normed_product, "normed", lambda *arguments, **named: asked.append(1))
    layer = bfp.LayerNormLinear(64, 96, recipe="mxfp8", norm="rms_norm", dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer.linear(layer.norm(x)))
    assert not asked
    on_gpu = type("OnGpu", (), {"is_cuda": True, "shape": x.shape})()
    monkeypatch.setattr(normed_product, "Tensor", type(on_gpu))

    def fused(norm=layer.norm, linear=layer.linear):
        del asked[:]
        normed_product.fused_norm_product(norm, linear, on_gpu)
        return bool(asked)

    assert fused()
    assert not fused(norm=torch.nn.LayerNorm(64))
    assert not fused(norm=type("Own", (torch.nn.RMSNorm,), {})(64))
    assert not fused(norm=torch.nn.RMSNorm((32, 64)))
    for module in (layer.norm, layer.linear):
        hook = module.register_forward_hook(lambda *arguments: None)
        assert not fused()
        hook.remove()
        module.forward = module.forward
        assert not fused()
        del module.forward
    assert fused()


def test_attention_is_called_where_somebody_looks():
    layer = bfp.TransformerLayer(64, 128, 4, recipe="mxfp8", norm="rms_norm", dtype=torch.bfloat16)
    x, seen = torch.randn(2, 32, 64, dtype=torch.bfloat16), []
    y = layer(x)
    layer.attention.register_forward_hook(lambda *arguments: seen.append(1))
    assert torch.equal(layer(x), y)
    assert seen

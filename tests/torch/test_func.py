"""torch.func of quantized layers: what torch.autograd gives, example by example."""

import copy

import pytest
import torch
from arrays import values
from same_tensors import assert_equal
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

import blockfp.torch as bfp

RECIPES = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")


def model_of(recipe):
    torch.manual_seed(0)
    return nn.Sequential(bfp.Linear(32, 16, recipe=recipe), nn.Tanh(), bfp.Linear(16, 4, recipe=recipe))


def batch():
    return values((8, 32), 1)


def step_back(model):
    """Random steps at their start, so that the next backward draws the bits of the first."""
    for name, buffer in model.named_buffers():
        if name.endswith("step"):
            buffer.zero_()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_autograd(recipe):
    model, x = model_of(recipe), batch()

    def loss(x, params=None):
        return (model(x) if params is None else functional_call(model, params, (x,))).square().sum()

    leaf, params = x.clone().requires_grad_(), dict(model.named_parameters())
    d_x, *d_params = torch.autograd.grad(loss(leaf), [leaf, *params.values()])
    step_back(model)
    assert torch.equal(grad(loss)(x), d_x)
    step_back(model)
    assert torch.equal(vjp(loss, x)[1](torch.ones(()))[0], d_x)
    step_back(model)
    of_params = grad(loss, argnums=1)(x, params)
    assert all(torch.equal(of_params[name], d) for name, d in zip(params, d_params, strict=True))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_second_derivatives(recipe):
    model, x = model_of(recipe), batch()

    def penalty(x, gradient):
        return gradient(lambda x: model(x).square().sum())(x).square().sum()

    def by_autograd(function):
        return lambda x: torch.autograd.grad(function(x), x, create_graph=True)[0]

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(penalty(leaf, by_autograd), leaf)
    assert torch.equal(grad(lambda x: penalty(x, grad))(x), wanted)
    one = leaf[:1]
    (first,) = torch.autograd.grad(model(one)[0, 0], one, create_graph=True)
    rows = torch.stack([torch.autograd.grad(d, leaf, retain_graph=True)[0][0] for d in first[0]])
    torch.testing.assert_close(jacrev(jacrev(lambda x: model(x[None])[0, 0]))(x[0]), rows)
    with pytest.raises(NotImplementedError, match="twice"):
        grad(lambda x: grad(lambda x: penalty(x, grad))(x).sum())(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_examples_are_tensors_of_their_own(recipe):
    model = model_of(recipe).requires_grad_(False)
    several = torch.stack([batch(), batch() * 100, batch() - 3])
    for wanted, got in zip(several, vmap(model)(several), strict=True):
        assert torch.equal(got, model(wanted))
    assert torch.equal(vmap(model[0])(batch())[3], model[0](batch()[3]))


def test_gradients_of_each_example():
    model, x = model_of("mxfp8"), batch()

    def loss(params, x):
        return functional_call(model, params, (x[None],)).square().sum()

    params = dict(model.named_parameters())
    found = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for i in (0, 5):
        wanted = torch.autograd.grad(loss(params, x[i]), list(params.values()))
        assert all(torch.equal(found[name][i], d) for name, d in zip(params, wanted, strict=True))


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp4_rotated"])
def test_stacked_models_keep_their_own_state(recipe):
    """As torch's tutorial of ensembles stacks them: each draws the random bits of its own key and step."""
    models = [bfp.convert(nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)), recipe, weights="high_precision")]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    for model in models:
        for layer in (model[0], model[2]):
            layer.reset_parameters()
            layer.reset_buffers()
    params, buffers = stack_module_state(models)
    x = batch()
    for _ in range(2):
        found = vmap(lambda params, buffers: functional_call(models[0], (params, buffers), (x,)))(params, buffers)
        d_found = torch.autograd.grad(found.square().sum(), list(params.values()))
        for i, model in enumerate(models):
            own = model(x)
            assert torch.equal(found[i], own)
            d_own = torch.autograd.grad(own.square().sum(), list(model.parameters()))
            assert all(torch.equal(found[i], own) for found, own in zip(d_found, d_own, strict=True))
    for i, model in enumerate(models):
        for name, own in model.named_buffers():
            assert torch.equal(buffers[name][i], own)


def test_stacked_models_with_delayed_scaling_are_evaluated_alone():
    models = [nn.Sequential(bfp.Linear(32, 16, recipe="fp8_delayed", weights="high_precision")) for _ in range(2)]
    models[1][0].input_scale.fill_(4)
    state, x = stack_module_state(models), batch()

    def run(params, buffers):
        return functional_call(models[0], (params, buffers), (x,))

    with pytest.raises(NotImplementedError, match="such as fp8_current"):
        vmap(run)(*state)
    with torch.no_grad():
        for model, found in zip(models, vmap(run)(*state), strict=True):
            assert torch.equal(found, model(x))


def test_functional_call_takes_other_parameters():
    model, other = model_of("mxfp8"), model_of("mxfp8")
    other[0].reset_parameters()
    found = functional_call(model, dict(other.named_parameters()), (batch(),))
    assert torch.equal(found, other(batch()))


def test_amaxes_are_recorded_once():
    layers = [bfp.Linear(32, 16, recipe="fp8_delayed") for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    grad(lambda x: layers[0](x).sum())(batch())
    layers[1](batch().requires_grad_()).sum().backward()
    assert_equal(layers[0].buffers(), layers[1].buffers())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 asserts where it looks at frames that a transform runs in")
@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_compiled_transforms_lose_no_gradients(weights):
    """Of an autograd function in their graphs torch makes zeros: they run eagerly, or raise where all has to be one graph."""
    torch._dynamo.reset()
    layer, x = bfp.Linear(32, 16, recipe="mxfp8", weights=weights), batch()
    gradient = grad(lambda x: layer(x).square().sum())
    twice = grad(lambda x: gradient(x).square().sum())
    for function in (gradient, twice):
        assert torch.equal(torch.compile(function, backend="eager")(x), function(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"leave torch\.func out"):
        torch.compile(gradient, backend="eager", fullgraph=True)(x)
    run = torch.compile(lambda params, x: functional_call(layer, params, (x,)), backend="eager", fullgraph=True)
    assert torch.equal(run(dict(layer.named_parameters()), x), layer(x))


# torch's, of what it loads for forward mode.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_forward_mode_is_refused():
    model, x = model_of("mxfp8"), batch()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(model, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        model(forward_ad.make_dual(x, x))

"""torch.compile of layers, by its options."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

WEIGHTS = pytest.mark.parametrize("weights", ["quantized", "high_precision"])


def inputs(length):
    return torch.randn((length, 4, 64), generator=torch.Generator().manual_seed(length), requires_grad=True)


def assert_trains_alike(model, compiled, by, x):
    """Compares outputs and all gradients of a model and of its copy `by`, which runs as `compiled`."""
    found = []
    for one, run in ((model, model), (by, compiled)):
        given = x.detach().clone().requires_grad_()
        y = run(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(param.grad for param in one.parameters())])
        one.zero_grad()
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


CHAINS = {
    "layers": lambda **options: nn.Sequential(bfp.Linear(64, 64, **options), bfp.Linear(64, 64, bias=False, **options)),
    "MLP": lambda **options: nn.Sequential(bfp.LayerNormMLP(64, 64, **options), bfp.LayerNormLinear(64, 64, **options)),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("recipe", ["mxfp8", recipes.fp8_block(eps=1e-4), "nvfp4"], ids=str)
@WEIGHTS
def test_dynamic_lengths_are_one_graph(chain, recipe, weights):
    torch._dynamo.reset()
    model = CHAINS[chain](recipe=recipe, weights=weights)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        # More than one block each: torch takes any length of 1 for a constant, and equal lengths for one.
        for length in (70, 100, 77):
            assert_trains_alike(model, compiled, other, inputs(length))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@WEIGHTS
def test_a_graph_of_operations(mode, recipe, weights):
    """make_fx runs eager code with tensors that are watched, or have no memory, or lengths that are open."""
    model = CHAINS["MLP"](recipe=recipe, weights=weights)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        run = make_fx(lambda state, x: torch.func.functional_call(model, state, (x,)), tracing_mode=mode)
        graph = run(state, inputs(4))
        x = inputs(7 if mode == "symbolic" else 4) * 2
        assert torch.equal(graph(state, x), model(x))


@WEIGHTS
def test_a_cache_tells_weights_apart(weights, monkeypatch):
    made = lambda recipe, dtype=None: bfp.Linear(64, 64, recipe=recipe, weights=weights, dtype=dtype).weight.detach()  # noqa: E731
    named = [made(recipe) for recipe in ("mxfp8", "mxfp6", "fp8_current", "nvfp4")]
    others = [made("mxfp8", torch.bfloat16), made("mxfp8")[:32]]
    found = [weight._stable_hash_for_caching() for weight in (*named, *others)]
    assert len(set(found)) == len(found)
    assert made("mxfp8")._stable_hash_for_caching() == found[0]
    monkeypatch.setattr(blockfp, "__version__", "another")
    assert made("mxfp8")._stable_hash_for_caching() != found[0]


CHECKPOINTS = {
    "": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "products kept": {"use_reentrant": False, "context_fn": bfp.keep_products},
}


@pytest.mark.parametrize(("recipe", "observed"), [("fp8_delayed", False), ("nvfp4", False), ("nvfp4", True)])
@pytest.mark.parametrize("options", CHECKPOINTS)
def test_checkpoints_and_what_layers_keep_between_steps(recipe, options, observed):
    """Compiled code writes buffers before a checkpoint recomputes; backend "eager" alone keeps buffers for it."""
    torch._dynamo.reset()
    # The backward of the last layer runs before the input of the first one is made again.
    model = nn.Sequential(bfp.Linear(64, 64, recipe=recipe), nn.GELU(), bfp.Linear(64, 64, recipe=recipe))
    other, found = copy.deepcopy(model), []
    for name, buffer in other.named_buffers():
        buffer.copy_(model.get_buffer(name))
    for one, backend in ((model, None), (other, "eager")):
        run = lambda x, one=one: checkpoint(one, x, **CHECKPOINTS[options])  # noqa: E731
        run = run if backend is None else torch.compile(run, backend=backend)
        with bfp.observe(one) if observed else contextlib.nullcontext() as observation:
            for step in range(2):
                x = torch.randn((32, 64), generator=torch.Generator().manual_seed(step), requires_grad=True)
                run(x).square().sum().backward()
            figures = torch.tensor([each.sqnr for each in observation.step()] if observed else [])
        found.append([figures, *one.buffers(), x.grad, *(param.grad for param in one.parameters())])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)

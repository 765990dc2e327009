"""`set_recipe`: codes of the masters, state that is carried over, and runs that go on alike on every mesh."""

import copy
import math

import gloo
import pytest
import threaded
import torch
import training
from arrays import tensors_of
from blockfp.torch_backend.linear import scale_watch
from same_tensors import assert_equal
from small_model import device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp import recipes

SWITCHES = [
    ("nvfp4", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("fp8_delayed", "mxfp4"),
    ("mxfp6", "fp8_delayed"),
    ("fp8_block", "fp8_row"),
    ("nvfp4_4over6", "mxfp4_rotated"),
]


def made(recipe, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 37), nn.GELU(), nn.Linear(37, 64))
    return bfp.convert(model, recipe, **options)


def data(step, rank=0):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model, optimizer, steps, rank=0):
    return training.train(optimizer, lambda step: (model(data(step, rank)) - 1).square().mean(), steps)


def weights(model):
    return [layer.weight for layer in model if isinstance(layer, bfp.Linear)]


def assert_quantizes(q, master, format):
    expected = bfp.quantize(master, format)
    assert q.format is expected.format
    assert_equal(q, expected)


@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_codes_are_those_of_the_masters(before, after):
    model = made(before)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    params, states = list(model.parameters()), {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    assert bfp.set_recipe(model, optimizer, after) is model
    assert all(now is then for now, then in zip(model.parameters(), params, strict=True))
    for p, state in states.items():
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in state.items())
    for q in weights(model):
        assert_quantizes(q, optimizer.state[q]["master"], recipes.parse(after).weight.format)
    losses = train(model, optimizer, range(3, 8))
    assert losses[-1] < losses[0]
    for q in weights(model):
        assert_quantizes(q, optimizer.state[q]["master"], recipes.parse(after).weight.format)


@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_the_run_goes_on_as_one_that_was_converted_so(before, after, tmp_path):
    """Against a model of the new recipe that is given the same masters and state; and resumed from a checkpoint."""
    model = made(before)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    bfp.set_recipe(model, optimizer, after)
    other = made(after)
    other_optimizer = bfp.AdamW(other.parameters(), lr=1e-2)
    bfp.save_checkpoint(tmp_path, model, optimizer, step=3)
    bfp.load_checkpoint(tmp_path, other, other_optimizer)
    assert train(model, optimizer, range(3, 7)) == train(other, other_optimizer, range(3, 7))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(p, q)
    assert_equal(model.buffers(), other.buffers())


def test_before_the_first_step_originals_stay_the_masters():
    model, reference = made("nvfp4"), made("mxfp8")
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    bfp.set_recipe(model, optimizer, "mxfp8")
    other = bfp.AdamW(reference.parameters(), lr=1e-2)
    for q, want in zip(weights(model), weights(reference), strict=True):
        assert torch.equal(q.initial, want.initial)
        assert all(map(torch.equal, tensors_of(q), tensors_of(want)))
    assert train(model, optimizer, range(4)) == train(reference, other, range(4))


def test_without_masters_and_frozen_weights():
    model = made("mxfp8", keep_init=False)
    model[0].weight.requires_grad_(False)
    optimizer = bfp.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, master=None)
    train(model, optimizer, range(2))
    values = [q.dequantize(torch.float32).detach().clone() for q in weights(model)]
    bfp.set_recipe(model, optimizer, "fp8_current")
    for q, value in zip(weights(model), values, strict=True):
        assert_quantizes(q, value, "fp8_e4m3")
    train(model, optimizer, range(2))
    assert_quantizes(model[0].weight, values[0], "fp8_e4m3")


def test_state_of_a_recipe_is_carried_over_or_begins_anew():
    model = made("nvfp4")
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    key, step = model[0].rng_key.clone(), model[0].step.clone()
    stochastic = recipes.mxfp8().replace(gradient=recipes.Cast("mxfp8_e4m3", stochastic=True))
    bfp.set_recipe(model, optimizer, stochastic)
    assert torch.equal(model[0].rng_key, key)
    assert torch.equal(model[0].step, step)
    bfp.set_recipe(model, optimizer, recipes.fp8_delayed(history=4))
    assert model[0].rng_key is None
    assert set(scale_watch.delayed_layers(model)) == set(scale_watch.concerned_by(optimizer)) == {model[0], model[2], model[4]}
    train(model, optimizer, range(3))
    history, scale = model[0].input_amax_history.clone(), model[0].input_scale.clone()
    assert scale != 1
    fast = recipes.fp8_delayed(history=4).replace(fast_accum=())
    bfp.set_recipe(model, optimizer, fast)
    assert torch.equal(model[0].input_amax_history, history)
    assert torch.equal(model[0].input_scale, scale)
    bfp.set_recipe(model, optimizer, "fp8_delayed")
    assert model[0].input_amax_history.shape == (1024,)
    assert model[0].input_scale == 0
    bfp.set_recipe(model, optimizer, "fp8_current")
    assert not scale_watch.delayed_layers(model)
    assert not scale_watch.concerned_by(optimizer)
    assert set(model.state_dict()) == set(made("fp8_current").state_dict())
    train(model, optimizer, range(3))


def test_some_layers_by_pattern_and_values_that_were_just_loaded():
    model = made("nvfp4")
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    loaded = torch.randn(37, 80)
    bfp.load_high_precision_(model[2].weight, loaded)
    codes = [part.clone() for part in tensors_of(model[4].weight)]
    bfp.set_recipe(model, optimizer, {"^[02]$": "mxfp8", "": None})
    assert [layer.recipe.name for layer in model if isinstance(layer, bfp.Linear)] == ["mxfp8", "mxfp8", "nvfp4"]
    assert torch.equal(optimizer.state[model[2].weight]["master"], loaded)
    assert_quantizes(model[2].weight, loaded, "mxfp8_e4m3_32x32")
    assert all(map(torch.equal, tensors_of(model[4].weight), codes))
    train(model, optimizer, range(2))


@pytest.mark.parametrize("weights_", ["quantized", "high_precision"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize(("before", "after"), [("nvfp4", "mxfp8"), ("mxfp8", "nvfp4"), ("fp8_current", "fp8_block")])
def test_under_fsdp(before, after, mesh, weights_, tmp_path):
    """Uneven and straddling shards. What the forward gathers is the quantization of the whole masters."""
    # Threads share torch's generator.
    first, second = (made(one, weights=weights_) for one in (before, after))

    def rank(number):
        model = copy.deepcopy(first)
        for layer in model:
            fully_shard(layer, mesh=device_mesh(mesh))
        fully_shard(model, mesh=device_mesh(mesh))
        optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2), number)
        bfp.set_recipe(model, optimizer, after)
        format = recipes.parse(after).weight.format
        shown, numbers = optimizer.state_dict()["state"], {id(p): i for i, p in enumerate(model.parameters())}
        for layer in (model[0], model[2], model[4]):
            if weights_ == "quantized":
                master = shown[numbers[id(layer.weight)]]["master"].full_tensor()
            else:
                master = layer.weight.full_tensor()
                master = master.values if isinstance(master, bfp.CastWeight) else master
            layer.unshard()
            assert_quantizes(layer.weight, master.detach(), format)
            layer.reshard()
        losses = train(model, optimizer, range(2, 5), number)
        bfp.save_checkpoint(tmp_path, model, optimizer, step=5)
        other = copy.deepcopy(second)
        for layer in other:
            fully_shard(layer, mesh=device_mesh(mesh))
        fully_shard(other, mesh=device_mesh(mesh))
        other_optimizer = bfp.AdamW(other.parameters(), lr=1e-2)
        bfp.load_checkpoint(tmp_path, other, other_optimizer)
        assert train(model, optimizer, range(5, 7), number) == train(other, other_optimizer, range(5, 7), number)
        return losses

    assert all(losses[0] > 0 for losses in threaded.run(torch.Size(mesh).numel(), rank))


def test_wrapped_models_get_the_keys_of_plain_ones():
    """What torch.compile and DDP put into paths goes into no pattern and no random bit."""
    plain, compiled = made("mxfp8"), torch.compile(made("mxfp8"), backend="eager")
    for model in (plain, compiled):
        bfp.set_recipe(model, None, {"^0$": "nvfp4", "^[24]$": "mxfp4_rotated"})
    inner = compiled._orig_mod
    for layer, other in zip(plain, inner, strict=True):
        if isinstance(layer, bfp.Linear):
            assert layer.recipe == other.recipe
            assert torch.equal(layer.rng_key, other.rng_key)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer that has another one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer of all parameters, whose state is in others."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([param for one in optimizers for group in one.param_groups for param in group["params"]], {})

    def __iter__(self):
        return iter(self.optimizers)


@pytest.mark.parametrize("kind", [list, Container, lambda parts: Container([Wrapper(part) for part in parts])])
def test_masters_of_several_optimizers(kind):
    model = made("nvfp4")
    params = list(model.parameters())
    parts = [bfp.AdamW(params[:3], lr=1e-2), bfp.Adam(params[3:], lr=1e-2)]
    for step in range(2):
        model(data(step)).square().mean().backward()
        for part in parts:
            part.step()
            part.zero_grad()
    optimizer = kind(parts)
    assert dict(bfp.summary(model, optimizer).states)["master"] == sum(
        4 * layer.weight.numel() for layer in model if isinstance(layer, bfp.Linear)
    )
    bfp.set_recipe(model, optimizer, "mxfp8")
    for q in weights(model):
        master = next(part.state[q]["master"] for part in parts if q in part.state)
        assert_quantizes(q, master, "mxfp8_e4m3_32x32")
    with pytest.raises(ValueError, match=r"4\.weight is trained, and the optimizer doesn't have it"):
        bfp.set_recipe(model, kind(parts[:1]), "nvfp4")
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or None, got str"):
        bfp.set_recipe(model, [*parts, "AdamW"], "nvfp4")


def test_behind_an_evaluation_that_left_weights_gathered():
    first = made("nvfp4")

    def rank(number):
        model = copy.deepcopy(first)
        fully_shard(model, mesh=device_mesh((2,)))
        optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2), number)
        with torch.no_grad():
            before = model(data(9))
            bfp.set_recipe(model, optimizer, "mxfp8")
            after = model(data(9))
            again = model(data(9))
        assert torch.equal(after, again)
        assert not torch.equal(before, after)
        assert {layer.weight.to_local().format.name for layer in _resharded(model)} == {"mxfp8_e4m3_32x32"}
        train(model, optimizer, range(2), number)

    threaded.run(2, rank)


def _resharded(model):
    model.reshard()
    return [layer for layer in model if isinstance(layer, bfp.Linear)]


@gloo.on(2)
def test_under_ddp(rank):
    """DDP counts buffers at its start: those of random keys go and come."""
    model = made("nvfp4")
    replicas = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = bfp.AdamW(replicas.parameters(), lr=1e-2)
    losses = train(replicas, optimizer, range(2), rank)
    for recipe in ("mxfp8", "mxfp4_rotated", "fp8_block"):
        bfp.set_recipe(replicas, optimizer, recipe)
        losses += train(replicas, optimizer, range(2), rank)
    plain = made("mxfp8")
    bfp.set_recipe(plain, None, "mxfp4_rotated")
    bfp.set_recipe(replicas, optimizer, "mxfp4_rotated")
    assert torch.equal(model[0].rng_key, plain[0].rng_key)
    assert all(map(math.isfinite, losses))


def test_what_is_refused_changes_nothing():
    model = made("nvfp4")
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    before = copy.deepcopy(model.state_dict())
    others = bfp.AdamW([model[0].weight], lr=1e-2)
    high = recipes.mxfp8().replace(weight=recipes.HIGH_PRECISION)
    stochastic = recipes.mxfp8().replace(input=recipes.Cast("mxfp8_e4m3", stochastic=True))
    for wrong, message in (
        (lambda: bfp.set_recipe(nn.Linear(4, 4), optimizer, "mxfp8"), "model holds no quantized layer"),
        (lambda: bfp.set_recipe(model, optimizer, "mxfp9"), "recipe 'mxfp9' is not known"),
        (lambda: bfp.set_recipe(model, optimizer, {"up": "mxfp8"}), "pattern 'up' matches no convertible layer"),
        (lambda: bfp.set_recipe(model, others, "mxfp8"), r"2\.weight is trained, and the optimizer doesn't have it"),
        (lambda: bfp.set_recipe(model, optimizer, {"4": high, "": "mxfp8"}), "'4', with recipe nvfp4, has its weight in nvfp4"),
        (lambda: bfp.set_recipe(model, optimizer, {"4": stochastic, "": "mxfp8"}), "only gradients are rounded so"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    for wrong in (("model", optimizer), (model, "AdamW")):
        with pytest.raises(TypeError, match="must be a torch"):
            bfp.set_recipe(*wrong, "mxfp8")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], value) for name, value in after.items() if isinstance(value, torch.Tensor))
    assert {layer.recipe.name for layer in model if isinstance(layer, bfp.Linear)} == {"nvfp4"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = made("mxfp8")

    def forward(self, x):
        return self.layers(x)


def test_compiled_blocks_are_compiled_again():
    torch._dynamo.reset()
    model, plain = Block(), Block()
    model.load_state_dict(plain.state_dict())
    model.compile(fullgraph=True, backend="aot_eager")
    runs = []
    for one in (model, plain):
        optimizer = bfp.AdamW(one.parameters(), lr=1e-2)
        losses = train(one, optimizer, range(2))
        bfp.set_recipe(one, optimizer, "fp8_block")
        runs.append(losses + train(one, optimizer, range(2, 4)))
    torch.testing.assert_close(*map(torch.tensor, runs), rtol=2e-2, atol=0)

"""An optimizer and checkpoints: what is refused leaves it as it was, what it has no state of, and what it keeps of its own."""

import pytest
import threaded
import torch
from resumed import model_of, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint

SHAPES = [(64, 128), (37, 40)]
FORMAT = "mxfp8_e4m3_32x32"


def layers(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(*(bfp.Linear(64, 64, recipe="mxfp8", **options) for _ in range(2)))


def test_a_refused_load_leaves_nothing_behind(tmp_path):
    """No masters of the weights as they were, which the next step would bring back; what was loaded before still counts."""
    bfp.save_checkpoint(tmp_path, layers(), step=1)
    model = layers(1)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-6)
    initial = model[0].weight.initial
    model[1].weight.grad = torch.ones(64, 64)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[model[1].weight].items() if name != "master"}
    bfp.load_high_precision_(model[1].weight, torch.ones(64, 64), keep_init=False)
    with pytest.raises(BadCheckpoint, match="holds no optimizer"):
        bfp.load_checkpoint(tmp_path, model, optimizer)
    assert list(optimizer.state) == [model[1].weight]
    assert all(torch.equal(optimizer.state[model[1].weight][name], value) for name, value in before.items())
    assert torch.equal(model[0].weight.initial, initial)
    optimizer.step()
    assert torch.allclose(optimizer.state[model[1].weight]["master"], torch.ones(64, 64), atol=1e-4)


def test_values_loaded_since_the_last_step_are_saved(tmp_path):
    models = layers(0, bias=False), layers(1, bias=False)
    optimizers = [bfp.AdamW(model.parameters()) for model in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            values = torch.randn((64, 64), generator=torch.Generator().manual_seed(5))
            bfp.load_high_precision_(models[0][0].weight, values)
            bfp.save_checkpoint(tmp_path, models[0], optimizers[0], step=1)
            bfp.load_checkpoint(tmp_path, models[1], optimizers[1])
            assert torch.equal(optimizers[1].state[models[1][0].weight]["master"], values)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizers[0].state[ours][name], optimizers[1].state[theirs][name])


def test_a_save_that_fails_keeps_gradients_and_rates(tmp_path):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model[0].weight.grad = torch.ones(64, 64)
    with pytest.raises(NotImplementedError):
        bfp.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert torch.equal(model[0].weight.grad, torch.ones(64, 64))
    assert model[1].weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["AdamW", "torch's AdamW"])
def test_parameters_without_a_gradient_and_frozen_ones(kind, tmp_path):
    ours = kind == "AdamW"
    make = (bfp if ours else torch.optim).AdamW
    model, other = ((layers(seed) if ours else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for seed in range(2))
    optimizer = make(model.parameters())
    model[0](torch.ones(32, 64 if ours else 8)).sum().backward()
    initial = model[1].weight.initial.clone() if ours else None
    optimizer.step()
    bfp.save_checkpoint(tmp_path, model, optimizer, step=1)
    assert model[1].weight not in optimizer.state
    other[0].weight.requires_grad_(False)
    other_optimizer = make(other.parameters())
    bfp.load_checkpoint(tmp_path, other, other_optimizer)
    # What was saved of a parameter that is frozen now is left there.
    assert other[0].weight not in other_optimizer.state
    assert other_optimizer.state[other[0].bias]["step"] == 1
    # blockfp's own is saved as it would begin, originals and all; torch's begins with its next gradient.
    assert (other[1].weight in other_optimizer.state) == ours
    if ours:
        assert torch.equal(other_optimizer.state[other[1].weight]["master"], initial)
        assert torch.equal(model[1].weight.initial, initial)


def test_what_was_frozen_and_is_trained_in_another_format(tmp_path):
    model, other = layers(), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    bfp.save_checkpoint(tmp_path, model, bfp.AdamW(model.parameters()), step=1)
    for target in (other, other.bfloat16()):
        optimizer = bfp.AdamW(target.parameters())
        bfp.load_checkpoint(tmp_path, target, optimizer, requantize=True)
        assert list(optimizer.state) == [target[0].bias, target[1].weight, target[1].bias]
        dtype = target[0].weight.dtype
        assert torch.equal(target[0].weight, model[0].weight.dequantize(dtype))
        assert torch.equal(target[1].weight, model[1].weight.initial.to(dtype))


def _groups(model, first):
    params = list(model.parameters())
    return [{"params": params[:first]}, {"params": params[first:], "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: bfp.AdamW(_groups(model, 1)), r"group 0 only in the checkpoint: 0\.bias; only here: nothing"),
        (
            lambda model: bfp.AdamW(model.parameters()),
            r"other groups: group 0 only in the checkpoint: nothing; only here: .*1\.bias",
        ),
        (
            lambda model: bfp.AdamW(_groups(model, 2), lr=torch.tensor(0.1)),
            r"groups\.0\.lr is no tensor in the checkpoint and a tensor here",
        ),
    ],
    ids=["other groups", "one group", "a tensor"],
)
def test_an_optimizer_that_does_not_fit(make, match, tmp_path):
    model, other, reference = (model_of(FORMAT, SHAPES, seed) for seed in (0, 50, 50))
    optimizer = bfp.AdamW(_groups(model, 2), lr=0.1)
    train(model, optimizer, 0, 1)
    bfp.save_checkpoint(tmp_path, model, optimizer, step=1)
    other_optimizer = make(other)
    with pytest.raises(BadCheckpoint, match=match):
        bfp.load_checkpoint(tmp_path, other, other_optimizer)
    assert not other_optimizer.state
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("saved", "loading", "match"),
    [
        (bfp.AdamW, torch.optim.AdamW, r"beyond it state\.bias\.master, state\.weight\.master"),
        (lambda params: torch.optim.AdamW(params, maximize=True), bfp.AdamW, "maximize=True, which AdamW doesn't have"),
        (torch.optim.AdamW, bfp.Adam, "decoupled_weight_decay=True, which Adam doesn't have"),
        (torch.optim.SGD, bfp.AdamW, r"lacks param_groups\.0\.betas, param_groups\.0\.eps, and"),
        (bfp.AdamW, torch.optim.SGD, r"lacks param_groups\.0\.dampening, param_groups\.0\.momentum, and"),
    ],
    ids=["masters", "maximize", "weight decay", "from SGD", "into SGD"],
)
def test_what_only_another_kind_of_optimizer_has(saved, loading, match, tmp_path):
    model, other = (nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2))
    bfp.save_checkpoint(tmp_path, model, saved(model.parameters()), step=1)
    before, optimizer = other.weight.clone(), loading(other.parameters())
    # What else the groups have, from an earlier load of torch's state, say, makes no difference.
    optimizer.param_groups[0] |= {"maximize": False, "amsgrad": False, "decoupled_weight_decay": False}
    with pytest.raises(BadCheckpoint, match=match):
        bfp.load_checkpoint(tmp_path, other, optimizer)
    assert torch.equal(other.weight, before)


def test_settings_of_groups_that_only_one_side_has(tmp_path):
    model, others = layers(), [layers(1) for _ in range(2)]
    optimizer = bfp.AdamW(model.named_parameters(), lr=0.5)
    # What a state of torch's AdamW leaves in the groups.
    optimizer.param_groups[0] |= {"foreach": None, "maximize": False, "own": torch.tensor(3.0)}
    CosineAnnealingLR(optimizer, 9)
    bfp.save_checkpoint(tmp_path, model, optimizer, step=1)
    optimizers = [bfp.AdamW(other.parameters(), lr=0.25) for other in others]
    OneCycleLR(optimizers[0], 0.125, 9)
    for other, other_optimizer in zip(others, optimizers, strict=True):
        bfp.load_checkpoint(tmp_path, other, other_optimizer)
        group = other_optimizer.param_groups[0]
        assert (group["lr"], group["initial_lr"], group["own"], group["foreach"]) == (0.5, 0.5, 3, None)
        assert "param_names" not in group
    assert optimizers[0].param_groups[0]["max_lr"] == 0.125
    bfp.save_checkpoint(tmp_path, others[1], bfp.AdamW(others[1].parameters()), step=2)
    bfp.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_groups_that_share_the_tensor_of_their_rate(tmp_path):
    model = layers()
    optimizer = bfp.AdamW(_groups(model, 2), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    bfp.save_checkpoint(tmp_path, model, optimizer, step=1)
    optimizer = bfp.AdamW(_groups(model, 2), lr=torch.tensor(0.125))
    bfp.load_checkpoint(tmp_path, model, optimizer)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.5]


@pytest.mark.parametrize("name", ["NAdam", "Rprop"])
def test_an_optimizer_of_torchs_that_has_taken_no_step(name, tmp_path):
    """torch makes its state by a step with gradients of zero, which leaves Rprop without a step size, say."""
    layer, make = nn.Linear(8, 8), getattr(torch.optim, name)
    bfp.save_checkpoint(tmp_path, layer, make(layer.parameters()), step=0)
    optimizer = make(layer.parameters(), lr=0.5)
    bfp.load_checkpoint(tmp_path, layer, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize(("theirs", "ours"), [("float32", None), (None, "float32")])
def test_the_optimizer_keeps_its_own_choice_of_masters(theirs, ours, tmp_path):
    model, other = layers(), layers(1)
    optimizer, other_optimizer = (bfp.AdamW(m.parameters(), master=which) for m, which in ((model, theirs), (other, ours)))
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    bfp.save_checkpoint(tmp_path, model, optimizer, step=1)
    bfp.load_checkpoint(tmp_path, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], other_optimizer.state[b]["exp_avg"])
        assert "master" not in other_optimizer.state[b]
    assert torch.equal(other[0].weight.codes, model[0].weight.codes)
    other_optimizer.make_state()
    master = other_optimizer.state[other[0].weight].get("master")
    assert master is None if ours is None else torch.equal(master, model[0].weight.dequantize())


def _onto_cut_columns(rank, folder):
    """FP8 moments have blocks of 128 columns, which this mesh cuts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer = bfp.Linear(128, 64, recipe="mxfp8")
    bfp.parallelize(layer, mesh["tp"], style="row")
    optimizer = bfp.AdamW(layer.parameters(), moments="bfloat16", lr=0.5)
    bfp.load_checkpoint(folder, layer, optimizer)
    assert (optimizer.param_groups[0]["moments"], optimizer.param_groups[0]["lr"]) == ("bfloat16", 0.25)
    assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.bfloat16


def test_the_optimizer_keeps_its_own_moments(tmp_path):
    layer = bfp.Linear(128, 64, recipe="mxfp8")
    bfp.save_checkpoint(tmp_path, layer, bfp.AdamW(layer.parameters(), moments="fp8", lr=0.25), step=1)
    threaded.run(2, _onto_cut_columns, tmp_path)


@pytest.mark.parametrize("ours", [True, False])
def test_switches_of_a_step_stay_those_of_the_optimizer(ours, tmp_path):
    """A run on a GPU, whose optimizer counts there, goes on with an optimizer on a CPU, which can't."""
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    optimizer = bfp.AdamW(models[0].parameters(), lr=0.25, capturable=True)
    models[0](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    bfp.save_checkpoint(tmp_path, models[0], optimizer, step=1)
    other = (bfp.AdamW if ours else torch.optim.AdamW)(models[1].parameters(), lr=0.5)
    bfp.load_checkpoint(tmp_path, models[1], other)
    assert other.param_groups[0]["lr"] == 0.25
    assert not other.param_groups[0]["capturable"]
    for model, its in zip(models, (optimizer, other), strict=True):
        its.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        its.step()
    assert other.state[models[1][0].weight]["step"] == 2
    for expected, param in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(param, expected, atol=1e-6)

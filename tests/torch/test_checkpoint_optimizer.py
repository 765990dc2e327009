"""An optimizer and checkpoints: what is refused leaves it as it was, what it has no state of, and what it keeps of its own."""

import pytest
import threaded
import torch
from resumed import model_of, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import blockfp.torch as bfp
from blockfp.manifest import BadCheckpoint

SHAPES = [(64, 128), (37, 40)]
FORMAT = "mxfp8_e4m3_32x32"


def layers(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(*(bfp.Linear(64, 64, recipe="mxfp8", **options) for _ in range(2)))


def test_a_refused_load_leaves_nothing_behind(tmp_path):
    """No masters of the weights as they were, which the next step would bring back."""
    bfp.save_checkpoint(tmp_path, layers(), step=1)
    model = layers(1)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-6)
    initial = model[0].weight.initial
    model[1].weight.grad = torch.ones(64, 64)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[model[1].weight].items()}
    with pytest.raises(BadCheckpoint, match="holds no optimizer"):
        bfp.load_checkpoint(tmp_path, model, optimizer)
    assert list(optimizer.state) == [model[1].weight]
    assert all(torch.equal(optimizer.state[model[1].weight][name], value) for name, value in before.items())
    assert torch.equal(model[0].weight.initial, initial)


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
        (lambda model: bfp.AdamW(_groups(model, 1)), r"group 0 has there, but not here, 0\.bias; here, but not there, nothing"),
        (
            lambda model: bfp.AdamW(model.parameters()),
            r"other groups: group 0 has there, but not here, nothing; here, .* 1\.bias",
        ),
        (
            lambda model: bfp.AdamW(_groups(model, 2), lr=torch.tensor(0.1)),
            r"groups\.0\.lr is no tensor in the checkpoint and a tensor here",
        ),
        (lambda model: bfp.AdamW(_groups(model, 2), master=None), r"beyond it state\.0\.weight\.master"),
    ],
    ids=["other groups", "one group", "a tensor", "no master"],
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

"""The optimizer's state: saved, loaded from elsewhere, what it takes."""

import copy
import gc
import pickle

import gloo
import numpy as np
import pytest
import torch
from adamw_parameters import assert_quantizes, give_gradients, mixed, values_of, weight
from arrays import values
from same_tensors import assert_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp import recipes


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
@pytest.mark.filterwarnings("ignore:two optimizers that round")
def test_state_goes_through_a_state_dict_unchanged(moments, tmp_path):
    params, others = mixed(), mixed()
    optimizer = bfp.AdamW(params, lr=1e-2, moments=moments, key=3)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        assert {x.dtype for x in state.values()} == {torch.float32}
    torch.save(saved, tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    # Weights come from the model's checkpoint.
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    other = bfp.AdamW(others, lr=1e-2, moments=moments, key=3)
    other.load_state_dict(loaded)
    for step in range(3, 6):
        for o, those in ((optimizer, params), (other, others)):
            give_gradients(those, step)
            o.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(values_of(optimizer, p), values_of(other, q))
        assert_equal(p, q)


def test_state_of_torchs_adamw_and_other_moments_can_be_loaded():
    p, plain = weight((40, 64), "mxfp8_e4m3_32x32"), nn.Parameter(values((40, 64), 0))
    reference = torch.optim.AdamW([plain], lr=1e-2)
    plain.grad = values((40, 64), 1)
    reference.step()
    for moments in ("float32", "fp8"):
        optimizer = bfp.AdamW([p], lr=1e-3, moments=moments)
        optimizer.load_state_dict(reference.state_dict())
        assert optimizer.state[p]["step"].item() == 1
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["moments"]) == (1e-2, moments)
        shown = optimizer.state_dict()["state"][0]
        torch.testing.assert_close(shown["exp_avg"], reference.state[plain]["exp_avg"], rtol=0.07, atol=1e-3)
        give_gradients([p], 2)
        optimizer.step()
        assert_quantizes(p, optimizer.state[p]["master"])


def test_what_is_loaded_is_kept_as_the_optimizer_says():
    p = weight((40, 64), "mxfp8_e4m3_32x32")
    saved = bfp.AdamW([p], lr=1e-2, moments="fp8", key=5)
    give_gradients([p], 0)
    saved.step()
    other = bfp.AdamW([p], moments="bfloat16", master=None)
    other.load_state_dict(saved.state_dict())
    assert {name: value.dtype for name, value in other.state[p].items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    group = other.param_groups[0]
    assert (group["lr"], group["key"], group["moments"], group["master"]) == (1e-2, (0, 5), "bfloat16", None)
    amsgrad = torch.optim.AdamW([nn.Parameter(torch.ones(2))], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True, which AdamW doesn't have"):
        other.load_state_dict(amsgrad.state_dict())


def test_original_values_become_the_master():
    original = values((64, 96), 0)
    q = bfp.quantize(original, "mxfp4_e2m1_32x32")
    q.initial = original.clone()
    p = nn.Parameter(q)
    codes = p.codes.clone()
    optimizer = bfp.AdamW([p], lr=0.0)
    give_gradients([p], 1)
    optimizer.step()
    assert p.initial is None
    assert torch.equal(optimizer.state[p]["master"], original)
    assert torch.equal(p.codes, codes)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert_quantizes(p, optimizer.state[p]["master"])


@pytest.mark.parametrize("keep_init", [True, False])
def test_values_loaded_later_are_what_the_next_step_goes_on_from(keep_init):
    p, given = weight((64, 96), "mxfp8_e4m3_32x32", dtype=torch.bfloat16), values((64, 96), 5)
    optimizer = bfp.AdamW([p], lr=0.0)
    give_gradients([p], 1)
    optimizer.step()
    master, saved = optimizer.state[p]["master"], optimizer.state_dict()
    bfp.load_high_precision_(p, given, keep_init=keep_init)
    loaded = given if keep_init else p.dequantize(torch.float32)
    optimizer.step()
    # The same memory: a CUDA graph may know it.
    assert optimizer.state[p]["master"] is master
    assert torch.equal(master, loaded)
    assert p.initial is None
    master.add_(1)
    optimizer.step()
    assert torch.equal(master, loaded + 1)
    # A state dict doesn't show what the next step would replace. Of values and masters those count that were loaded last.
    bfp.load_high_precision_(p, given, keep_init=keep_init)
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], loaded)
    bfp.load_high_precision_(p, given, keep_init=keep_init)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["master"], saved["state"][0]["master"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_a_copy_shows_and_takes_what_the_original_does(copied):
    p = weight((40, 64), "mxfp8_e4m3_32x32", dtype=torch.bfloat16)
    optimizer = bfp.AdamW([p], moments="fp8")
    give_gradients([p], 0)
    optimizer.step()
    given = values((40, 64), 5)
    bfp.load_high_precision_(p, given)
    q, other = copied((p, optimizer))
    saved = optimizer.state_dict()
    assert torch.equal(saved["state"][0]["master"], given)
    other.load_state_dict(other.state_dict())
    for name, value in other.state_dict()["state"][0].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, saved["state"][0][name])
    assert other.state[q]["exp_avg"].dtype == torch.uint8


def test_a_state_that_does_not_fit():
    p = weight((32, 32), "mxfp8_e4m3_32x32")
    optimizer = bfp.AdamW([p])
    give_gradients([p], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(31, 32)
    before = dict(optimizer.state[p])
    with pytest.raises(ValueError, match=r"exp_avg must be of the parameter's shape \(32, 32\)"):
        optimizer.load_state_dict(saved)
    # Nothing was changed, and it can go on.
    assert {name: id(value) for name, value in optimizer.state[p].items()} == {k: id(v) for k, v in before.items()}
    optimizer.step()
    del saved["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="lacks exp_avg"):
        bfp.AdamW([p]).load_state_dict(saved)


def test_many_steps_need_no_more_memory():
    params = mixed()
    optimizer = bfp.AdamW(params, lr=1e-3, moments="fp8")
    give_gradients(params, 0)

    def tensors():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    optimizer.step()
    before, storage = tensors(), [x.data_ptr() for p in params for x in optimizer.state[p].values()]
    for _ in range(200):
        optimizer.step()
    assert tensors() <= before
    assert [x.data_ptr() for p in params for x in optimizer.state[p].values()] == storage


def test_fp8_moments_take_a_quarter():
    p = weight((256, 1024), "mxfp8_e4m3_32x32")
    optimizer = bfp.AdamW([p], moments="fp8")
    give_gradients([p], 0)
    optimizer.step()
    state = optimizer.state[p]
    kept = sum(x.numel() * x.element_size() for name, x in state.items() if name.startswith("exp_"))
    assert kept / p.numel() == pytest.approx(2 * (1 + 4 / 128))
    assert np.isfinite(state["exp_avg_scales"].numpy()).all()


@pytest.mark.parametrize("kind", [bfp.AdamW, bfp.Adam])
def test_options_of_torchs_that_change_nothing_are_taken(kind):
    """Trainers pass them, and so do groups of torch's own optimizers."""
    results = []
    theirs = torch.optim.AdamW if kind is bfp.AdamW else torch.optim.Adam
    named = [
        *({}, {"foreach": True, "fused": None}, {"fused": True}, {"foreach": False, "fused": False}),
        {"amsgrad": False, "maximize": False, "differentiable": False},
        {} if kind is bfp.AdamW else {"decoupled_weight_decay": False},
    ]
    for options in (*named, None):
        layer = bfp.Linear(64, 32, recipe="mxfp8", dtype=torch.bfloat16)
        layer.load_state_dict({"weight": values((32, 64), 0, torch.bfloat16), "bias": torch.ones(32)}, strict=False)
        params = layer.parameters()
        if options is None:
            params, options = theirs(params, lr=0.1).param_groups, {}
        optimizer = kind(params, lr=0.1, **options)
        for p in layer.parameters():
            p.grad = values(tuple(p.shape), 1, torch.bfloat16)
        optimizer.step()
        results.append((layer.weight.codes, layer.weight.scales, layer.bias))
    # torch takes amsgrad by position too.
    with pytest.raises(ValueError, match="amsgrad=True: not supported"):
        kind([nn.Parameter(torch.ones(2))], 0.1, (0.9, 0.999), 1e-8, 0.01, True)
    kind([nn.Parameter(torch.ones(2))], 0.1, (0.9, 0.999), 1e-8, 0.01, False)
    # torch's groups come with weight decay of their own, which is as large.
    assert all(torch.equal(*pair) for found in results[1:] for pair in zip(found, results[0], strict=True))


@pytest.mark.parametrize("kind", [bfp.AdamW, bfp.Adam])
@pytest.mark.parametrize("name", ["amsgrad", "maximize", "differentiable", "decoupled_weight_decay"])
def test_options_of_torchs_that_would_change_it_are_refused(kind, name):
    weight = nn.Parameter(bfp.quantize(torch.ones(32, 64), "mxfp8_e4m3_32x32"))
    value = name != "decoupled_weight_decay" or kind is bfp.Adam
    message = f"{name}={value}: not supported by {kind.__name__}"
    if value:
        with pytest.raises(ValueError, match=message):
            kind([weight], **{name: True})
    with pytest.raises(ValueError, match=message):
        kind([{"params": [weight], name: value}])


def _model(recipe, seed):
    torch.manual_seed(seed)
    return bfp.Linear(96, 64, recipe=recipe, keep_init=seed == 0)


def _steps(layer, optimizer, count):
    for step in range(count):
        give_gradients([layer.weight, layer.bias], step)
        optimizer.step()


LOADS = {
    "load_state_dict": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "assign": lambda layer, other: layer.load_state_dict(copy.deepcopy(other.state_dict()), assign=True),
    "set_model_state_dict": lambda layer, other: set_model_state_dict(layer, get_model_state_dict(other)),
    "copy_": lambda layer, other: layer.weight.data.copy_(other.weight.data),
    "copy_ of it": lambda layer, other: torch.no_grad()(layer.weight.copy_)(other.weight),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])
def test_codes_loaded_later_are_what_the_next_step_goes_on_from(recipe, load):
    """A model that goes back to an earlier state, or to another one, by codes alone, under a living optimizer."""
    layer, other = _model(recipe, 0), _model(recipe, 1)
    optimizer = bfp.AdamW(layer.parameters(), lr=1e-2)
    _steps(layer, optimizer, 3)
    LOADS[load](layer, other)
    optimizer.param_groups[0]["lr"] = 0.0
    _steps(layer, optimizer, 2)
    assert torch.equal(optimizer.state[layer.weight]["master"], other.weight.dequantize(torch.float32))
    assert_equal(layer.weight, other.weight)
    # Shown by a state dict, too.
    other = _model(recipe, 2)
    LOADS[load](layer, other)
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], other.weight.dequantize(torch.float32))


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_model_may_be_loaded_behind_its_optimizer(recipe):
    """Its masters say more than its codes, and stay."""
    layer, other = _model(recipe, 0), _model(recipe, 1)
    optimizer, theirs = (bfp.AdamW(one.parameters(), lr=1e-2, key=i) for i, one in enumerate((layer, other)))
    _steps(layer, optimizer, 2)
    _steps(other, theirs, 3)
    optimizer.load_state_dict(theirs.state_dict())
    layer.load_state_dict(other.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    _steps(layer, optimizer, 1)
    assert torch.equal(optimizer.state[layer.weight]["master"], theirs.state[other.weight]["master"])


@pytest.mark.parametrize("weights", ["plain", "high_precision"])
def test_16_bit_values_written_later_are_what_the_next_step_goes_on_from(weights):
    torch.manual_seed(0)
    layer = nn.Linear(96, 64, dtype=torch.bfloat16)
    if weights == "high_precision":
        layer = bfp.Linear(96, 64, recipe="mxfp8", weights=weights, dtype=torch.bfloat16)
    optimizer = bfp.AdamW(layer.parameters(), lr=1e-2)
    _steps(layer, optimizer, 2)
    saved, masters = copy.deepcopy(layer.state_dict()), {k: v.clone() for k, v in optimizer.state_dict()["state"][0].items()}
    earlier = copy.deepcopy(optimizer.state_dict())
    _steps(layer, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.0
    layer.load_state_dict(saved)
    _steps(layer, optimizer, 1)
    local = layer.weight.values if weights == "high_precision" else layer.weight
    assert torch.equal(local, saved["weight"])
    # A number that has come back to the same 16 bits goes on from its master.
    assert torch.equal(optimizer.state[layer.weight]["master"].bfloat16(), saved["weight"])
    # Masters of these values stay, whichever is loaded first; of what somebody writes, the numbers that he wrote.
    optimizer.load_state_dict(earlier)
    layer.load_state_dict(saved)
    with torch.no_grad():
        layer.weight[:3] = 0.5
    optimizer.param_groups[0]["lr"] = 0.0
    _steps(layer, optimizer, 1)
    expected = masters["master"].clone()
    expected[:3] = 0.5
    assert torch.equal(optimizer.state[layer.weight]["master"], expected)


@gloo.on(2)
def test_shards_that_are_loaded_behind_their_optimizer(rank):
    mesh = init_device_mesh("cpu", (2,))
    for recipe in recipes.RECIPES:
        models = [nn.Sequential(_model(recipe, seed)) for seed in (0, 1)]
        for model in models:
            fully_shard(model, mesh=mesh)
        optimizers = [bfp.AdamW(model.parameters(), lr=1e-2, key=i) for i, model in enumerate(models)]
        for step in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(values((4, 96), step)).square().sum().backward()
                optimizer.step()
        (layer, optimizer), (other, theirs) = zip(models, optimizers, strict=True)
        layer.load_state_dict(other.state_dict())
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        loaded = other[0].weight.to_local().dequantize(torch.float32)
        assert torch.equal(optimizer.state[layer[0].weight]["master"], loaded), recipe
        optimizer.load_state_dict(theirs.state_dict())
        layer.load_state_dict(other.state_dict())
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert torch.equal(optimizer.state[layer[0].weight]["master"], theirs.state[other[0].weight]["master"]), recipe

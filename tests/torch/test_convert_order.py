"""`convert` after an optimizer holds the parameters trains on as before; after a wrapper that reduces gradients, it raises."""

import copy
import weakref

import pytest
import torch
import training
from arrays import values
from torch import nn

import blockfp.torch as bfp
from blockfp.experimental.torch import osci_reset

OPTIMIZERS = {
    "bfp.AdamW": lambda params: bfp.AdamW(params, lr=1e-2),
    "bfp.Adam": lambda params: bfp.Adam(params, lr=1e-2, moments="bfloat16"),
    "fp8 moments": lambda params: bfp.AdamW(params, lr=1e-2, moments="fp8"),
    "no masters": lambda params: bfp.AdamW(params, lr=1e-2, master=None),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 33, bias=False)).to(dtype)


def train(model, optimizer, steps=3):
    x = values((16, 48), 1).to(next(model.parameters()).dtype)
    return training.train(optimizer, lambda _: (model(x) - 1).float().square().mean(), range(steps))


def outcome(model, optimizer):
    """The losses of some steps, or the error of the first."""
    try:
        return train(model, optimizer)
    except NotImplementedError as error:
        return str(error)


def assert_same_values(model, other):
    ours, theirs = bfp.high_precision_state_dict(model), bfp.high_precision_state_dict(other)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_built_before_trains_as_one_built_after(name, weights):
    before, after = net(), net()
    early = OPTIMIZERS[name](before.parameters())
    for model in (before, after):
        bfp.convert(model, "mxfp8", weights=weights)
    first = {name: value.clone() for name, value in bfp.high_precision_state_dict(before).items()}
    losses = outcome(before, early)
    assert losses == outcome(after, OPTIMIZERS[name](after.parameters()))
    if weights == "quantized" and name in ("AdamW", "SGD"):
        assert "it writes values; use blockfp.torch.AdamW" in losses
        return
    assert losses[-1] < losses[0]
    trained = bfp.high_precision_state_dict(before)
    assert not any(torch.equal(trained[path], first[path]) for path in ("0.weight", "0.bias", "2.weight"))
    assert_same_values(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, "quantized") for name in OPTIMIZERS if name not in ("AdamW", "SGD")]
    + [(name, "high_precision") for name in OPTIMIZERS],
)
def test_an_optimizer_with_state_goes_on_as_one_that_loads_it(name, weights, dtype):
    before = net(dtype)
    early = OPTIMIZERS[name](before.parameters())
    train(before, early)
    after, state = copy.deepcopy(before), copy.deepcopy(early.state_dict())
    for model in (before, after):
        bfp.convert(model, "mxfp8", weights=weights)
    late = OPTIMIZERS[name](after.parameters())
    late.load_state_dict(state)
    assert train(before, early) == train(after, late)
    assert_same_values(before, after)
    for ours, theirs in zip(early.state_dict()["state"].values(), late.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(getattr(param, "initial", None) is None for param in before.parameters())


def test_schedules_clipping_and_lists_of_parameters_follow():
    model = net()
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    mine, weight = list(model.parameters()), model[0].weight
    weight.grad, weight.no_decay = torch.ones(64, 48), True
    bfp.convert(model, "mxfp8")
    assert [id(param) for param in model.parameters()] == [id(param) for param in mine]
    assert model[0].weight is weight
    assert isinstance(weight, bfp.QuantizedTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.no_decay
    assert torch.equal(weight.grad, torch.ones(64, 48))
    codes = weight.codes.clone()
    nn.utils.clip_grad_norm_(mine, 1.0)
    optimizer.step()
    assert not torch.equal(weight.codes, codes)


def test_weights_that_layers_share_stay_one_object():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = weight = model[0].weight
    bfp.convert(model, "mxfp8")
    assert model[0].weight is model[1].weight is weight
    assert isinstance(weight, bfp.QuantizedTensor)


def test_weights_on_meta_stay_the_objects_that_an_optimizer_holds():
    model = nn.Sequential(nn.Linear(32, 32, device="meta"))
    weight = model[0].weight
    optimizer = bfp.AdamW(model.parameters())
    bfp.convert(model, "mxfp8")
    assert model[0].weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.is_meta
    assert isinstance(weight, bfp.QuantizedTensor)


def test_osci_reset_without_codes_is_refused_at_the_first_step():
    model = nn.Sequential(bfp.Linear(32, 32, recipe="mxfp8"), nn.Linear(32, 32))
    optimizer = osci_reset(bfp.AdamW(model.parameters()))
    bfp.convert(model, "mxfp8", weights="high_precision")
    model(torch.ones(2, 32)).sum().backward()
    with pytest.raises(ValueError, match=r"has no codes between two steps.*OsciReset needs an optimizer without it"):
        optimizer.step()


class Reducer:
    """Waits for each gradient as Horovod, DeepSpeed and Megatron do: by a hook of the node that accumulates it."""

    def __init__(self, params):
        self.nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in params]
        for node in self.nodes:
            node.register_hook(lambda *_: None)


def results(model):
    return model(torch.ones(2, 48)).sum()


HOLDERS = {
    "hooks on the accumulation of its gradient": lambda model: Reducer(model.parameters()),
    "a result of the model that waits for its backward": results,
    "a weak reference": lambda model: [weakref.ref(param) for param in model.parameters()],
}


@pytest.mark.parametrize("what", HOLDERS)
def test_what_holds_a_weight_is_named_before_anything_is_changed(what):
    model = net()
    holder = HOLDERS[what](model)
    with pytest.raises(ValueError, match=rf"the weight of '.*'.*{what}"):
        bfp.convert(model, "mxfp8")
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert type(model[0]) is nn.Linear
    del holder
    bfp.convert(model, "mxfp8")
    assert isinstance(model[0].weight, bfp.QuantizedTensor)


def test_a_loss_that_was_differentiated_holds_nothing():
    model = net()
    loss = results(model)
    loss.backward()
    bfp.convert(model, "mxfp8")
    assert loss.requires_grad
    assert model[0].weight.grad is not None

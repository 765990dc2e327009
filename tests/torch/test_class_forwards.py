"""A class's forward that is replaced before or after `convert` is called, as in plain modules, or an error says why not."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockfp.torch as bfp

X = torch.ones(4, 64)


class MLP(nn.Module):
    """Written as transformers' LlamaMLP is."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Derived(MLP):
    pass


class Titan(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Scaled(nn.Linear):
    pass


ROWS = {
    MLP: bfp.MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn"),
    Titan: bfp.MLPParts(gate="w1", up="w3", down="w2", activation="silu"),
}


def converted(model):
    there = {cls: row for cls, row in ROWS.items() if any(isinstance(module, cls) for module in model.modules())}
    return bfp.convert(model, "mxfp8", fuse=there)


@pytest.mark.parametrize("cls", [MLP, Derived])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_mlps(cls, compiled, monkeypatch):
    model = converted(nn.Sequential(cls(), cls()))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    before = run(X)
    monkeypatch.setattr(MLP, "forward", lambda self, x, factor=2.0: factor * self.down_proj(self.up_proj(x)))
    h = X
    for mlp in model:
        h = 2 * mlp.down_proj(mlp.up_proj(h))
    assert torch.equal(run(X), h)
    if not compiled:
        assert torch.equal(model[0](X, factor=3.0), 3 * model[0].down_proj(model[0].up_proj(X)))
    monkeypatch.undo()
    assert torch.equal(run(X), before)


def test_an_mlp_takes_its_arguments_by_their_names():
    model = converted(MLP())
    assert torch.equal(model(x=X), model(X))
    with pytest.raises(TypeError, match="positional arguments"):
        model(X, X)


def test_a_linear_layers(monkeypatch):
    model = bfp.convert(nn.Sequential(Scaled(64, 64), nn.GELU(), Scaled(64, 64)), "mxfp8")
    copied = pickle.loads(pickle.dumps(model))
    before = model(X)
    monkeypatch.setattr(Scaled, "forward", lambda self, x: -x)
    # Its place behind the activation is no way around it.
    for one in (model, copied, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one[0](X), -X)
        assert torch.equal(one(X), -F.gelu(-X))
    monkeypatch.setattr(Scaled, "forward", lambda self, x: super(Scaled, self).forward(x) + 1)
    with pytest.raises(NotImplementedError, match="call the layer itself"):
        model(X)
    monkeypatch.undo()
    assert torch.equal(model(X), before)


@pytest.mark.parametrize(
    ("cls", "make"),
    [
        (nn.GELU, lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))),
        (nn.SiLU, MLP),
        (bfp.Linear, lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))),
    ],
)
def test_an_activations_and_a_quantized_layers(cls, make, monkeypatch):
    model = converted(make())
    forward = cls.forward
    called = []
    monkeypatch.setattr(cls, "forward", lambda self, x: (called.append(self), forward(self, x) + 1)[1])
    got = model(X)
    assert set(called) == {module for module in model.modules() if type(module) is cls}
    taken_apart = bfp.convert(make(), "mxfp8")
    taken_apart.load_state_dict(model.state_dict())
    for module in taken_apart.modules():
        # Whoever looks is shown each step.
        module.register_forward_hook(lambda *_: None)
    assert torch.equal(got, taken_apart(X))


@pytest.mark.parametrize(
    ("name", "make"), [("silu", Titan), ("silu", MLP), ("gelu", lambda: nn.Sequential(nn.GELU(), nn.Linear(64, 64)))]
)
def test_a_functions(name, make, monkeypatch):
    model = converted(make())
    before, function = model(X), getattr(F, name)
    monkeypatch.setattr(F, name, lambda x, *args, **options: function(x, *args, **options) * 0)
    assert not torch.equal(model(X), before)


def test_sequentials(monkeypatch):
    model = bfp.convert(nn.Sequential(nn.GELU(), nn.Linear(64, 64)), "mxfp8")
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: -x)
    assert torch.equal(model(X), -X)


def test_what_is_replaced_before_convert(monkeypatch):
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    expected = model(X)
    with pytest.raises(ValueError, match=r"holds no torch\.nn\.Linear to convert"):
        bfp.convert(model, "mxfp8")
    assert torch.equal(model(X), expected)

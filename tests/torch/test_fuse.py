"""`convert(.., fuse=)`: what is said of users' own classes, whether it is true of them, and bits that don't change."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from arrays import values
from blockfp.torch_backend.conversion.gated_mlp import FusedMLP
from blockfp.torch_backend.modules.layer_calls import SharesInput
from counted_casts import casts_of
from torch import nn

import blockfp.torch as bfp


def x_of():
    return values((16, 32), 0)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64)
        self.both, self.act, self.drop = nn.Linear(32, 128), nn.SiLU(), nn.Dropout(0.5)
        self.limit = 7.0


class Gated(Base):
    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        return self.w2(up * F.silu(gate))


class ByModule(Base):
    def forward(self, hidden, *, scale=None):
        """With names of its own, and an option that isn't used."""
        hidden = self.act(self.w1(hidden)) * self.w3(hidden)
        return self.w2(hidden)


class Halves(Base):
    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.w2(self.act(gate) * up)


class Plain(Base):
    def forward(self, x):
        return self.w2(nn.functional.gelu(self.w1(x), approximate="tanh"))


class SpeedRun(Base):
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)).square())


class Inherits(Gated):
    pass


class Attention(Base):
    def forward(self, x):
        return self.w2(self.w1(x) + self.w3(x))


GATED = bfp.MLPParts(gate="w1", up="w3", down="w2", activation="silu")
ROWS = {
    Gated: GATED,
    ByModule: bfp.MLPParts(gate="w1", up="w3", down="w2", activation="act"),
    Halves: bfp.MLPParts(gate="both", up="both", down="w2", activation="act"),
    Plain: bfp.MLPParts(up="w1", down="w2", activation="gelu_tanh"),
    SpeedRun: bfp.MLPParts(up="w1", down="w2", activation="relu2"),
    Attention: bfp.SharedInput("w1", "w3"),
}


def trained(model):
    """The result, the gradients, and how many casts of inputs they took."""
    x = x_of().requires_grad_()
    count, y = casts_of(model, x)
    y.square().sum().backward()
    return count, [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("cls", ROWS)
def test_a_row_changes_no_bit(cls, recipe):
    torch.manual_seed(0)
    plain = cls()
    fused = copy.deepcopy(plain)
    for model, fuse in ((plain, None), (fused, {cls: ROWS[cls]})):
        torch.manual_seed(1)
        bfp.convert(model, recipe, fuse=fuse)
    assert type(plain) is cls
    assert isinstance(fused, SharesInput if cls is Attention else FusedMLP)
    (alone, wanted), (once, found) = trained(plain), trained(fused)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    # Each layer of delayed scaling has a scale of its own.
    assert once < alone or recipe == "fp8_delayed"
    assert type(copy.deepcopy(fused)) is type(fused)


def test_classes_are_named_and_inherited():
    model = nn.Sequential(Gated(), Inherits(), Plain())
    bfp.convert(model, "mxfp8", fuse={f"{__name__}.Gated": GATED})
    assert [isinstance(module, FusedMLP) for module in model] == [True, True, False]
    assert isinstance(model[1], Inherits)


def test_layers_that_stay_have_nothing_to_fuse():
    model = bfp.convert(Gated(), "mxfp8", filter_fn=lambda path, layer: path != "w2", fuse={Gated: GATED})
    assert type(model) is Gated
    # The rest of it later; what is fused already stays so.
    for _ in range(2):
        bfp.convert(nn.ModuleDict({"mlp": model, "other": nn.Linear(32, 32)}), "mxfp8", fuse={Gated: GATED})
        assert isinstance(model, FusedMLP)


class Clamped(Base):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x).clamp(max=self.limit))


class Limited(Base):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x) * self.limit)


class Dropped(Base):
    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(self.drop(h) if self.training else h)


class Functional(Base):
    def forward(self, x):
        return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), training=self.training))


class InPlace(Base):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x), inplace=True) * self.w3(x))


class Swapped(Base):
    def forward(self, x):
        return self.w2(F.silu(self.w3(x)) * self.w1(x))


class SecondHalf(Base):
    def forward(self, x):
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.w2(self.act(gate) * up)


class Residual(Base):
    def forward(self, x):
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Weighs(Base):
    def forward(self, x):
        return F.linear(F.silu(self.w1(x)) * self.w3(x), self.w2.weight)


class Bent(Base):
    def forward(self, x):
        return self.w2(self.bend(self.w1(x)) * self.w3(x))

    def bend(self, x):
        return F.silu(x)


class Wrapped(Base):
    @torch.no_grad()
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Calls(Base):
    def forward(self, x):
        if x.shape[0] > 1:
            x = x + 1
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class NoLayer(Gated):
    def __init__(self):
        super().__init__()
        self.w3 = None


HALVES = ROWS[Halves]
UNTRUE = [
    (Clamped, GATED, r"asks for w3\(x\)\.clamp"),
    (Limited, GATED, r"asks for self\.limit"),
    (Dropped, GATED, r"asks for self\.drop"),
    (Functional, GATED, "calls dropout"),
    (InPlace, GATED, r"calls silu\(.*inplace=True\)"),
    (Swapped, GATED, r"returns w2\(F\.silu\(w3\(x\)\) \* w1\(x\)\), not w2\(F\.silu\(w1\(x\)\) \* w3\(x\)\)"),
    (SecondHalf, HALVES, r"not w2\(act\(both\(x\)\.chunk\(2, dim=-1\)\[0\]\)"),
    (Residual, GATED, "does more than call these"),
    (Weighs, GATED, "does more than call these"),
    (Bent, GATED, r"asks for self\.bend"),
    (Wrapped, GATED, "wrapped by another function"),
    (Calls, GATED, r"asks for x\.shape"),
    (NoLayer, GATED, "has no module 'w3'"),
    (Gated, bfp.MLPParts(gate="w1", up="w4", down="w2", activation="silu"), "has no module 'w4'"),
    (Gated, bfp.MLPParts(gate="w1", up="w3", down="w2", activation="relu"), "silu, gelu_tanh, gelu, relu2"),
    (ByModule, bfp.MLPParts(gate="w1", up="w3", down="w2", activation="drop"), "silu, gelu_tanh, gelu, relu2"),
    (Gated, bfp.MLPParts(up="w1", down="w2", activation="silu"), r"asks for self\.w3"),
    (Plain, bfp.MLPParts(up="w1", down="w2", activation="gelu"), r"returns w2\(F\.gelu_tanh"),
    (Attention, bfp.SharedInput("w1", "q"), "has no module 'q'"),
]


@pytest.mark.parametrize(("cls", "row", "reason"), UNTRUE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_true_of_a_class_is_refused_before_anything_changes(cls, row, reason):
    model = nn.Sequential(cls(), nn.Linear(32, 32))
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"fuse: '0', a {cls.__name__}, doesn't fit .*{reason}"):
        bfp.convert(model, "mxfp8", fuse={cls: row})
    assert [type(module) for module in model] == [cls, nn.Linear]
    assert all(type(p) is nn.Parameter and torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_forward_that_is_put_into_the_module_is_refused():
    model = Gated()
    model.forward = lambda x: x
    with pytest.raises(ValueError, match="its forward was replaced in the module"):
        bfp.convert(model, "mxfp8", fuse={Gated: GATED})


class Overrides(Gated):
    def forward(self, x):
        return -x


@pytest.mark.parametrize(
    ("fuse", "error", "text"),
    [
        ({Halves: HALVES}, ValueError, r"no module with the forward of .*test_fuse\.Halves"),
        ({"Gated": GATED}, ValueError, "forward of Gated: .*with its module"),
        ([Gated], TypeError, "fuse must be a mapping"),
        ({7: GATED}, TypeError, "a key of fuse must be a module class .*got 7"),
        ({int: GATED}, TypeError, "a key of fuse must be a module class"),
        ({Gated: ("w1", "w3")}, TypeError, r"must be a bfp\.MLPParts or a bfp\.SharedInput, got \('w1', 'w3'\)"),
        ({Gated: bfp.SharedInput("w1", 3)}, TypeError, r"must be strings, got SharedInput\('w1', 3\)"),
        ({Gated: bfp.MLPParts(up=["w1"], down="w2", activation="silu")}, TypeError, "must be strings, got MLPParts"),
        ({Gated: bfp.SharedInput("w1")}, ValueError, r"two layers or more, got SharedInput\('w1'\)"),
    ],
)
def test_a_mapping_that_says_nothing_is_refused(fuse, error, text):
    model = nn.Sequential(Gated(), nn.Linear(32, 32))
    with pytest.raises(error, match=text):
        bfp.convert(model, "mxfp8", fuse=fuse)
    assert type(model[1]) is nn.Linear


def test_another_forward_in_a_subclass_is_not_meant():
    with pytest.raises(ValueError, match="no module with the forward of"):
        bfp.convert(Overrides(), "mxfp8", fuse={Gated: GATED})
    assert sys.modules[__name__].Overrides.forward(None, 1) == -1


def test_rows_are_values():
    assert bfp.SharedInput("q", "k") == bfp.SharedInput("q", "k") != bfp.SharedInput("k", "q")
    assert len({GATED, bfp.MLPParts("w3", "w2", "silu", "w1")}) == 1
    assert repr(bfp.SharedInput("q", "k")) == "SharedInput('q', 'k')"

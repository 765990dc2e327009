"""`sensitivity`: against models in which one layer was converted, and nothing of the model changes."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from arrays import values
from same_tensors import assert_equal
from torch import nn

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

RECIPES = ("mxfp8", "nvfp4", "fp8_delayed")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm, self.drop, self.head = nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(self.drop(self.norm(x)))


def loss(model, batch):
    return (model(batch) - 1).square().mean()


def made():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.down.weight[0, 0] = 30.0  # what 16 x 16 and 32 x 32 blocks don't like
    return model


def batches():
    return [values((24, 64), i) for i in range(2)]


def paths(model):
    return [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def sqnr(x, format):
    """By the NumPy face."""
    x = x.detach().numpy()
    error = np.asarray(blockfp.quantize(x, format).dequantize(), np.float64) - x
    return 10 * math.log10(float(np.square(x, dtype=np.float64).sum() / np.square(error).sum()))


def is_it(wanted, path, layer):
    return path == wanted


def test_the_table():
    """Changes of the loss are those of models in which convert made one layer; SQNR is that of operands that hooks see."""
    model = made()
    table = bfp.sensitivity(model, batches(), RECIPES, loss=loss)
    plain = copy.deepcopy(model).eval()
    before = [loss(plain, batch).item() for batch in batches()]
    assert table.loss == pytest.approx(np.mean(before), rel=1e-6)
    assert [(one.path, one.recipe) for one in table.layers] == [(path, name) for path in paths(model) for name in RECIPES]
    seen = {path: [] for path in paths(model)}
    gradients = {path: [] for path in paths(model)}
    for path in seen:
        layer = plain.get_submodule(path)
        layer.register_forward_pre_hook(lambda _, args, path=path: seen[path].append(args[0].detach()))
        layer.register_full_backward_hook(lambda _, __, gradient, path=path: gradients[path].append(gradient[0]))
    for batch in batches():
        loss(plain, batch.clone().requires_grad_()).backward()
    for one in table.layers:
        recipe = recipes.parse(one.recipe)
        quantized = bfp.convert(copy.deepcopy(model).eval(), recipe.replace(delayed=None), partial(is_it, one.path))
        changes = [loss(quantized, batch).item() - base for batch, base in zip(batches(), before, strict=True)]
        assert one.loss_change == pytest.approx(np.mean(changes), abs=1e-6)
        weight = model.get_submodule(one.path).weight
        assert one.parameters == weight.numel()
        assert one.weight == pytest.approx(sqnr(weight, recipe.weight.format), abs=1e-3)
        if one.recipe == "mxfp8":
            # Blocks of rows: both batches may be laid below each other.
            assert one.input == pytest.approx(sqnr(torch.cat(seen[one.path]), recipe.input.format), abs=1e-2)
            assert one.gradient == pytest.approx(sqnr(torch.cat(gradients[one.path]), recipe.gradient.format), abs=1e-2)
    assert max(abs(one.loss_change) for one in table.layers if one.recipe == "nvfp4") > 1e-4


def state_of(model):
    return {
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "names": [sorted(vars(module)) for module in model.modules()],
        "hooks": [[len(module._forward_hooks), len(module._backward_hooks)] for module in model.modules()],
        "random": [torch.get_rng_state(), torch.tensor(torch.backends.mha.get_fastpath_enabled())],
    }


@pytest.mark.parametrize("recipe", [None, "nvfp4", "fp8_delayed"])
def test_the_model_is_left_as_it_was_and_results_repeat(recipe):
    model = made() if recipe is None else bfp.convert(made(), recipe)
    model.norm.eval()
    model.up.register_forward_hook(lambda *_: None)
    loss(model, batches()[0]).backward()
    before = state_of(model)
    table = bfp.sensitivity(model, batches(), ("nvfp4",), loss=loss)
    assert_equal(state_of(model), before)
    torch.manual_seed(77)
    assert table == bfp.sensitivity(model, batches(), ("nvfp4",), loss=loss)
    torch.set_rng_state(before["random"][0])
    calls = []

    def fails(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise ZeroDivisionError
        return loss(model, batch)

    with pytest.raises(ZeroDivisionError):
        bfp.sensitivity(model, batches(), ("nvfp4",), loss=fails)
    assert_equal(state_of(model), before)


def test_a_converted_model_is_measured_as_the_one_that_it_was():
    """Originals are kept; without them the weight is what its codes stand for, and its own format costs it nothing."""
    plain, model = made(), bfp.convert(made(), "nvfp4")
    for one, two in zip(
        bfp.sensitivity(plain, batches(), ("mxfp8", "nvfp4"), loss=loss).layers,
        bfp.sensitivity(model, batches(), ("mxfp8", "nvfp4"), loss=loss).layers,
        strict=True,
    ):
        assert (one.path, one.recipe, one.parameters) == (two.path, two.recipe, two.parameters)
        for name in ("input", "weight", "gradient", "loss_change"):
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-4, abs=1e-6)
    bare = bfp.convert(made(), "nvfp4", keep_init=False)
    assert {one.weight for one in bfp.sensitivity(bare, batches(), ("nvfp4",)).layers} == {math.inf}
    kept = bfp.convert(made(), "nvfp4", weights="high_precision")
    assert [one.weight for one in bfp.sensitivity(kept, batches(), ("nvfp4",)).layers] == [
        one.weight for one in bfp.sensitivity(plain, batches(), ("nvfp4",)).layers
    ]


def test_without_a_loss_and_frozen_and_compiled_models():
    model = made().requires_grad_(False)
    bare = bfp.sensitivity(model, [(batch,) for batch in batches()], ("mxfp4",))
    with_loss = bfp.sensitivity(model, batches(), ("mxfp4",), loss=loss)
    assert bare.loss is None
    for one, two in zip(bare.layers, with_loss.layers, strict=True):
        assert (one.input, one.weight, one.gradient, one.loss_change) == (two.input, two.weight, None, None)
        assert two.gradient > 5
    compiled = made().eval()
    compiled.compile(backend="aot_eager")
    compiled(batches()[0])
    assert bfp.sensitivity(compiled, [{"x": batch} for batch in batches()], ("mxfp4",)) == bare


def test_torchs_encoders_are_measured_in_evaluation_too():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    table = bfp.sensitivity(encoder, [torch.randn(2, 5, 32)], ("mxfp4",), loss=lambda model, x: (model(x) - x).square().mean())
    assert [one.path for one in table.layers] == ["linear1", "linear2"]
    assert all(one.input and one.loss_change for one in table.layers)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.up(x) + self.attention(x, x, x)[0])


@pytest.mark.filterwarnings("ignore:blockfp.torch.convert left:UserWarning")
def test_what_convert_leaves_is_not_measured():
    """A plan would spend its budget on it, or have patterns of layers that convert doesn't know."""
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(32).view(4, 8) % 16
    for options in ({}, {"filter_fn": lambda path, layer: path != "head"}):
        table = bfp.sensitivity(model, [tokens], ("nvfp4",), loss=lambda m, x: m(x).square().mean(), **options)
        assert [one.path for one in table.layers] == ["up"]
    bfp.convert(model, {"head": None, **table.plan("nvfp4", layers=0.0)})
    assert [path for path, layer in model.named_modules() if isinstance(layer, bfp.Linear)] == ["up"]


def test_plans():
    model = made()
    table = bfp.sensitivity(model, batches(), ("nvfp4", "mxfp4"), loss=loss)
    order = [one.path for one in table.of("nvfp4")]
    changes = {one.path: one.loss_change for one in table.layers if one.recipe == "nvfp4"}
    assert [changes[path] for path in order] == sorted(changes.values(), reverse=True)
    converted = bfp.convert(copy.deepcopy(model), table.plan("nvfp4", layers=0.5))
    assert [path for path in paths(model) if not isinstance(converted.get_submodule(path), bfp.Linear)] == [
        path for path in paths(model) if path in order[:2]
    ]
    mixed = bfp.convert(copy.deepcopy(model), table.plan("nvfp4", layers=0.25, keep="mxfp8"))
    assert {path: mixed.get_submodule(path).recipe.name for path in paths(model)} == {
        path: "mxfp8" if path == order[0] else "nvfp4" for path in paths(model)
    }
    total = sum(p.numel() for p in (model.up.weight, model.gate.weight, model.down.weight, model.head.weight))
    for share in (0.0, 0.05, 0.4, 1.0):
        kept = [pattern for pattern in table.plan("nvfp4", parameters=share) if pattern]
        held = sum(model.get_submodule(pattern[1:-1]).weight.numel() for pattern in kept)
        assert held <= share * total
        smallest = min((model.get_submodule(p).weight.numel() for p in order if f"^{p}$" not in kept), default=math.inf)
        assert held + smallest > share * total
    for bound in (0.0, 1e-6, max(changes.values()) * 0.99, 1.0):
        kept = [pattern[1:-1] for pattern in table.plan("nvfp4", loss_change=bound) if pattern]
        assert kept == order[: len(kept)]
        assert sum(max(changes[path], 0) for path in order[len(kept) :]) <= bound
        assert not kept or sum(max(changes[path], 0) for path in order[len(kept) - 1 :]) > bound
    assert "change of loss" in str(table)
    assert table.rows()[0]["path"] == "up"


def test_plans_leave_what_the_filter_left():
    model = made()
    table = bfp.sensitivity(model, batches(), ("nvfp4", "mxfp8"), filter_fn=lambda path, layer: path != "head")
    assert table.excluded == ("head",)
    converted = bfp.convert(copy.deepcopy(model), table.plan("nvfp4", layers=0.0))
    assert [path for path in paths(model) if not isinstance(converted.get_submodule(path), bfp.Linear)] == ["head"]

    # Of a model that is quantized, plans are for set_recipe: it leaves plain layers, and quantized ones by the plan.
    for filter_fn, left in ((lambda path, _: path != "head", ()), (lambda path, _: path not in ("head", "up"), ("up",))):
        table = bfp.sensitivity(converted, batches(), ("mxfp8",), filter_fn=filter_fn)
        assert table.excluded == left
        again = bfp.set_recipe(copy.deepcopy(converted), None, table.plan("mxfp8", layers=0.0))
        recipes = {path: layer.recipe.name for path, layer in again.named_modules() if isinstance(layer, bfp.Linear)}
        assert recipes == {path: "nvfp4" if path in left else "mxfp8" for path in paths(model) if path != "head"}


def test_wrong_calls():
    model = made()
    table = bfp.sensitivity(model, batches(), ("nvfp4",))
    for wrong, error, message in (
        (lambda: bfp.sensitivity(3, batches()), TypeError, "model must be a torch.nn.Module"),
        (lambda: bfp.sensitivity(model, []), ValueError, "batches is empty"),
        (lambda: bfp.sensitivity(model, batches(), ()), ValueError, "recipes must be one or more"),
        (lambda: bfp.sensitivity(model, batches(), "nvfp4"), TypeError, r"recipes must be a sequence, .* got str: 'nvfp4'"),
        (lambda: bfp.sensitivity(model, batches(), ("mxfp9",)), ValueError, "recipe 'mxfp9' is not known"),
        (lambda: bfp.sensitivity(nn.ReLU(), batches()), ValueError, "holds no linear layer"),
        (lambda: bfp.sensitivity(model, batches(), loss=lambda m, x: m(x)), TypeError, r"scalar tensor, got shape \(24, 8\)"),
        (lambda: table.plan("nvfp4"), TypeError, "one of layers, parameters and loss_change, got none"),
        (lambda: table.plan("nvfp4", layers=0.5, parameters=0.5), TypeError, "got layers, parameters"),
        (lambda: table.plan("nvfp4", layers=2), ValueError, "layers must be 0 or more and at most 1, got 2"),
        (lambda: table.plan("mxfp8", layers=0.5), ValueError, "recipe mxfp8 was not measured, only nvfp4"),
        (lambda: table.plan("nvfp4", loss_change=0.1), ValueError, "measured with a loss"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    vars(model.up)["forward"] = model.up.forward
    with pytest.raises(ValueError, match="'up' has a forward put into it"):
        bfp.sensitivity(model, batches())
    assert "forward" in vars(model.up)

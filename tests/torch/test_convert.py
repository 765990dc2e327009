"""`convert`: layers that change, patterns of their paths, what they keep, and what can't be converted."""

import pytest
import torch
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes


class Model(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64, device=device), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(64, 8, bias=False, device=device)


def test_linear_layers_become_quantized_ones():
    torch.manual_seed(0)
    model = Model()
    weights = {path: layer.weight.detach().clone() for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    bias = model.layers[0][0].bias
    assert bfp.convert(model, "mxfp8", filter_fn=lambda path, layer: path != "head") is model
    assert type(model.head) is nn.Linear
    for path in ("layers.0.0", "layers.1.0"):
        layer = model.get_submodule(path)
        assert isinstance(layer, bfp.Linear)
        q = bfp.quantize(weights[path], "mxfp8_e4m3_32x32")
        assert torch.equal(layer.weight.codes, q.codes)
        assert torch.equal(layer.weight.initial, weights[path])
    assert model.layers[0][0].bias is bias


def test_a_function_names_each_layers_recipe():
    model = Model()
    bfp.convert(model, {"layers.0.0": "fp8_block", "layers.1.0": "nvfp4"}.get)
    assert [str(model.layers[i][0].recipe) for i in range(2)] == ["fp8_block", "nvfp4"]
    assert type(model.head) is nn.Linear
    with pytest.raises(ValueError, match=r"recipe for 'layers\.0\.0': recipe 'mxfp9' is not known"):
        bfp.convert(Model(), lambda path: "mxfp9")


def test_on_meta():
    model = Model("meta")
    bfp.convert(model, "fp8_delayed", keep_init=False)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for layer in model.modules():
        if isinstance(layer, bfp.Linear):
            layer.reset_parameters()
    assert model.head(model.layers[0](torch.ones(3, 32))).isfinite().all()


def test_frozen_layers_stay_frozen_and_modes_stay():
    model = Model().eval()
    model.head.weight.requires_grad_(False)
    bfp.convert(model, "mxfp8")
    assert not model.head.weight.requires_grad
    assert model.layers[0][0].weight.requires_grad
    assert not model.head.training


def test_shared_layers_and_weights_stay_shared():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model.append(model[0])
    model[1].weight = model[0].weight
    bfp.convert(model, "mxfp8")
    assert model[2] is model[0]
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 3


def test_a_layer_alone_is_converted_where_it_stands():
    layer = nn.Linear(8, 4)
    assert bfp.convert(layer, "mxfp8") is layer
    assert type(layer) is bfp.Linear
    assert isinstance(layer, nn.Linear)


def tied():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize(
    ("model", "recipe", "error", "message"),
    [
        (nn.GELU(), "mxfp8", ValueError, "no torch.nn.Linear"),
        (
            nn.Sequential(bfp.Linear(32, 32, recipe="mxfp8")),
            "nvfp4",
            ValueError,
            r"; quantized already \(set_recipe changes recipes\): 0$",
        ),
        (Model(), "mxfp9", ValueError, "mxfp9"),
        (Model(), lambda path: None, ValueError, "exclude all"),
        (tied(), "mxfp8", ValueError, "to convert, .*: head shares its weight with embedding.weight"),
        ("model", "mxfp8", TypeError, "got str"),
        (Model().double(), "mxfp8", TypeError, r"the weight of 'layers\.0\.0', a Linear, must be .*, got torch\.float64: cast"),
    ],
)
def test_what_cannot_be_converted(model, recipe, error, message):
    with pytest.raises(error, match=message):
        bfp.convert(model, recipe)


def test_a_filter_may_be_torchaos():
    """torchao calls it with module and name; by (path, layer) it would compare the layer with a string, and leave nothing."""
    model = bfp.convert(Model(), "mxfp8", lambda mod, fqn: isinstance(mod, nn.Linear) and fqn != "head")
    assert type(model.head) is nn.Linear
    assert isinstance(model.layers[0][0], bfp.Linear)
    with pytest.raises(TypeError, match=r"name its parameters \(path, layer\), or \(module, fqn\)"):
        bfp.convert(Model(), "mxfp8", lambda a, b: b != "head")
    table = bfp.sensitivity(Model().layers[0], [torch.randn(4, 32)], ["mxfp8"], filter_fn=lambda mod, fqn: fqn == "0")
    assert [row.path for row in table.layers] == ["0"]


def test_a_filter_is_a_function():
    with pytest.raises(TypeError, match=r"convert\(\) takes filter_fn="):
        bfp.convert(Model(), "mxfp8", filter=lambda path, layer: True)
    with pytest.raises(TypeError, match="filter_fn must be a function of a layer's path and of the layer, got 'head'"):
        bfp.convert(Model(), "mxfp8", filter_fn="head")


def test_paths_have_no_names_of_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    seen = []
    bfp.convert(
        torch.compile(model, backend="eager"), {r"^layers\.0\.0$": "mxfp8", "": "nvfp4"}, lambda path, _: not seen.append(path)
    )
    assert seen == ["layers.0.0", "layers.1.0", "head"]
    assert [str(layer.recipe) for layer in model.modules() if isinstance(layer, bfp.Linear)] == ["mxfp8", "nvfp4", "nvfp4"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def kinds(model):
    linear = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {path: layer.recipe.name if isinstance(layer, bfp.Linear) else None for path, layer in linear.items()}


def test_the_first_pattern_that_is_found_counts():
    model = bfp.convert(Decoder(), {"^head$": None, r"layers\.[03]\.": "mxfp8", "down": recipes.nvfp4(), r"layers\.1": "mxfp6"})
    assert kinds(model) == {
        **{f"layers.{i}.{name}": "mxfp8" for i in (0, 3) for name in ("up", "down")},
        "layers.1.up": "mxfp6",
        "layers.1.down": "nvfp4",
        "layers.2.up": None,
        "layers.2.down": "nvfp4",
        "head": None,
    }
    model(torch.randn(3, 32)).sum().backward()


def test_first_and_last_blocks_stay_in_high_precision():
    model = bfp.convert(Decoder(), recipes.ends_in_high_precision("nvfp4", "layers", 4), lambda path, layer: path != "head")
    assert {path for path, recipe in kinds(model).items() if recipe} == {
        f"layers.{i}.{name}" for i in (1, 2) for name in ("up", "down")
    }


def test_a_pattern_that_no_layer_has_is_refused_before_anything_is_changed():
    model = Decoder()
    with pytest.raises(ValueError, match=r"pattern 'lm_head' matches no convertible layer; paths are 'layers\.0"):
        bfp.convert(model, {"lm_head": None, "": "mxfp8"})
    with pytest.raises(ValueError, match="filter_fn and recipe exclude all of them"):
        bfp.convert(model, {"": None})
    assert set(kinds(model).values()) == {None}

"""`convert` with a mapping of patterns of layers' paths."""

import pytest
import torch
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
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
    model = bfp.convert(Model(), {"^head$": None, r"layers\.[03]\.": "mxfp8", "down": recipes.nvfp4(), r"layers\.1": "mxfp6"})
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
    model = bfp.convert(Model(), recipes.ends_in_high_precision("nvfp4", "layers", 4), lambda path, layer: path != "head")
    assert {path for path, recipe in kinds(model).items() if recipe} == {
        f"layers.{i}.{name}" for i in (1, 2) for name in ("up", "down")
    }


def test_a_pattern_that_no_layer_has_is_refused_before_anything_is_changed():
    model = Model()
    with pytest.raises(ValueError, match=r"pattern 'lm_head' matches no convertible layer; paths are 'layers\.0"):
        bfp.convert(model, {"lm_head": None, "": "mxfp8"})
    with pytest.raises(ValueError, match="filter_fn and recipe exclude all of them"):
        bfp.convert(model, {"": None})
    assert set(kinds(model).values()) == {None}

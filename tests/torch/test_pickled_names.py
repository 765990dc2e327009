"""What pickles of models name: releases move other modules than the public ones."""

import pickle

import pytest
from torch import nn

import blockfp.torch as bfp


class LlamaMLP(nn.Module):
    """Gate, up and down, as transformers writes them."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def sequential():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


MLP = bfp.MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn")


@pytest.mark.parametrize(
    ("made", "fuse"),
    [(sequential, None), (LlamaMLP, {LlamaMLP: MLP}), (LlamaMLP, {LlamaMLP: bfp.SharedInput("gate_proj", "up_proj")})],
)
def test_pickles_of_a_converted_model_name_public_modules(made, fuse):
    model = bfp.convert(made(), "nvfp4", fuse=fuse)
    assert type(model) is not made or fuse is None
    data = pickle.dumps(model)
    assert b"blockfp.torch" in data
    assert b"torch_backend" not in data
    assert type(pickle.loads(data)) is type(model)

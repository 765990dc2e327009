"""Tools around a model: what a pickle names, and `torch.jit.trace`, which many of them call."""

import pickle

import pytest
import torch
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


@pytest.mark.parametrize("made", [sequential, LlamaMLP])
def test_pickles_of_a_converted_model_name_public_modules(made):
    model = bfp.convert(made(), "nvfp4")
    data = pickle.dumps(model)
    assert b"blockfp.torch" in data
    assert b"torch_backend" not in data
    assert type(pickle.loads(data)) is type(model)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("trained", [True, False])
def test_jit_trace_is_refused(weights, trained):
    # It ended the process when it saved, and recorded products of codes that nothing could run.
    x = torch.randn(4, 32)
    behind = nn.Sequential(nn.GELU(), nn.Linear(32, 32))
    for model in (bfp.convert(sequential(), "mxfp8", weights=weights), bfp.convert(behind, "mxfp8", weights=weights)):
        model.requires_grad_(trained)
        wanted = model(x)
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace .*high_precision_state_dict"):
            torch.jit.trace(model, x, check_trace=False)
        assert torch.equal(model(x), wanted)

"""lightning's model summary: parameters and FLOPs of a converted model are those of the plain one."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import nn

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.example_input_array = torch.randn(4, 32)

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_parameters_and_flops(recipe):
    plain = Module()
    quantized = bfp.convert(copy.deepcopy(plain), recipe)
    expected, summary = (ModelSummary(model, max_depth=2) for model in (plain, quantized))
    assert summary.total_flops == expected.total_flops == 2 * 4 * (32 * 64 + 64 * 16)
    assert summary.flop_counts.keys() == expected.flop_counts.keys()
    assert summary.total_parameters == expected.total_parameters
    assert summary.trainable_parameters == expected.trainable_parameters
    assert "24.6 K    Total Flops" in str(summary)

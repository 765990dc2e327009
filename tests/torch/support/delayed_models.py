"""Models with delayed scaling, and steps of theirs."""

import threaded
import torch
from arrays import values
from torch import nn

import blockfp.torch as bfp


def two_layers():
    with threaded.seeded(0):
        return nn.Sequential(bfp.Linear(32, 24, recipe="fp8_delayed"), bfp.Linear(24, 16, recipe="fp8_delayed"))


def trained_by_others(name="fp8_delayed"):
    """A model, torch's own optimizer of it, and what makes its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        bfp.Linear(32, 24, recipe=name, weights="high_precision"), bfp.Linear(24, 16, recipe=name, weights="high_precision")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, lambda: one_backward(model)


def one_backward(model, loss_scale=1.0):
    (model(values((4, 32), 3, scale=2.0)).square().mean() * loss_scale).backward()

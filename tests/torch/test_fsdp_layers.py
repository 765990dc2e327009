"""Layers of every recipe under FSDP2: the forward of a rank has the bits of the unsharded layer's, and gradients agree."""

import pytest
import threaded
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from small_model import device_mesh, inputs_for
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp.recipes import RECIPES, parse


def build(recipe, weights):
    return nn.Sequential(
        bfp.Linear(72, 50, recipe=recipe, weights=weights), nn.GELU(), bfp.Linear(50, 37, recipe=recipe, weights=weights)
    )


def step(model, rank):
    out = model(inputs_for(rank, 72, rows=40).view(4, 10, 72))
    out.square().mean().backward()
    return out.detach()


def sharded(rank, recipe, weights, values, expected):
    with torch.device("meta"):
        model = build(recipe, weights)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=device_mesh((4,)))
    fully_shard(model, mesh=device_mesh((4,)))
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(values), options=options)
    assert torch.equal(step(model, rank), expected[rank])
    for layer in (model[0], model[2]):
        assert type(local_of(layer.weight)) is not torch.Tensor
    return [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_as_without_sharding(recipe, weights):
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(p.shape, generator=generator) / 4 for name, p in build(recipe, weights).named_parameters()}
    expected, total = [], None
    for rank in range(4):
        whole = build(recipe, weights)
        whole.load_state_dict(values, strict=False)
        expected.append(step(whole, rank))
        gradients = [param.grad / 4 for param in whole.parameters()]
        total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
    ranks = threaded.run(4, sharded, recipe, weights, values, expected)
    if not parse(recipe).gradient.stochastic:
        # Others round gradients stochastically, each data-parallel rank with bits of its own.
        for got, want in zip(ranks[0], total, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())

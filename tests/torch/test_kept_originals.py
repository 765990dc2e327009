"""`keep_init` keeps originals for optimizers' masters, and nothing for weights of which nobody makes one."""

import pytest
import threaded
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_weights_that_are_frozen_when_they_are_converted():
    model = net()
    model[0].weight.requires_grad_(False)
    bfp.convert(model, "mxfp8")
    assert model[0].weight.initial is None
    assert model[1].weight.initial is not None
    model.load_state_dict(net().state_dict())
    assert model[0].weight.initial is None
    assert model[1].weight.initial is not None
    model[0].reset_parameters()
    assert model[0].weight.initial is None


def freeze(param):
    param.requires_grad = False


@pytest.mark.parametrize("way", [freeze, lambda param: param.requires_grad_(False)], ids=["attribute", "method"])
def test_weights_that_are_frozen_later(way):
    model = bfp.convert(net(), "nvfp4")
    codes = model[0].weight.codes.clone()
    way(model[0].weight)
    assert not model[0].weight.requires_grad
    assert model[0].weight.initial is None
    assert torch.equal(model[0].weight.codes, codes)
    model.requires_grad_(False)
    assert model[1].weight.initial is None
    model.requires_grad_(True)
    assert model[1].weight.requires_grad
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(32, 64)).sum().backward()
    assert model[1].weight.grad is not None


def _frozen_shards(rank):
    model = bfp.convert(net(), "mxfp8")
    model[0].weight.requires_grad_(False)
    fully_shard(model)
    assert local_of(model[0].weight).initial is None
    assert local_of(model[1].weight).initial is not None
    optimizer = bfp.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    assert local_of(model[1].weight).initial is None


def test_shards():
    threaded.run(2, _frozen_shards)

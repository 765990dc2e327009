"""Delayed scaling: histories, scales and their update, alone and over ranks."""

import threading
from inspect import signature as signature_of

import pytest
import threaded
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp
from blockfp import recipes, scaling
from blockfp.formats import Format


def values(seed, scale):
    return torch.randn((4, 32), generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
def test_scales_follow_the_definition(length, algorithm):
    layer = bfp.Linear(32, 16, recipe=recipes.fp8_delayed(history=length, margin=1, algorithm=algorithm))
    history, scale = torch.zeros(length), torch.ones(())
    for seed, factor in enumerate((1.0, 100.0, 3.0, 1e-3, 0.0)):
        for part in range(2):
            x = values(10 * seed + part, factor)
            layer(x).sum().backward()
            history = scaling.record(history, x.abs().max())
        assert torch.equal(layer.input_amax_history, history)
        bfp.update_scales(layer)
        element = Format.parse("fp8_e4m3").element
        history, scale = scaling.update(history, scale, element, margin=1, algorithm=algorithm)
        assert torch.equal(layer.input_amax_history, history)
        assert torch.equal(layer.input_scale, scale)
        # The gradient of a sum is one.
        assert layer.gradient_scale == 57344 / 2


def test_what_is_not_finite_counts_as_nothing():
    layer = bfp.Linear(32, 16, recipe="fp8_delayed")
    x = values(0, 1.0)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    layer(x)
    assert layer.input_amax_history[0] == 0
    bfp.update_scales(layer)
    assert layer.input_scale == 1


def test_models_without_delayed_scaling_are_left_alone():
    bfp.update_scales(nn.Sequential(bfp.Linear(32, 16, recipe="mxfp8"), nn.GELU()))


def sharded(rank, shape):
    """Every rank ends with the scales of the largest amax of all."""
    torch.manual_seed(0)
    names = ("replicas", "shards")[-len(shape) :]
    model = nn.Sequential(bfp.Linear(32, 24, recipe="fp8_delayed"), bfp.Linear(24, 16, recipe="fp8_delayed"))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    model(values(rank, 10.0**rank)).sum().backward()
    bfp.update_scales(model)
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_ranks_share_scales(shape):
    results = threaded.run(4, sharded, shape)
    largest = max(values(rank, 10.0**rank).abs().max() for rank in range(4))
    for buffers in results:
        for a, b in zip(buffers, results[0], strict=True):
            assert torch.equal(a, b)
        assert buffers[1] == torch.tensor(448.0) / largest
        assert buffers[0][-1] == largest


# Which model's forward runs is known to DDP once for the process: ranks that are threads take turns.
DDP_FORWARD = threading.Lock()


def replicated(rank):
    torch.manual_seed(0)
    layer = bfp.Linear(32, 24, recipe="fp8_delayed")
    with pytest.raises(ValueError, match="forward_sync_buffers=False"):
        bfp.update_scales(DistributedDataParallel(layer, init_sync=False))
    apart = next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in signature_of(DistributedDataParallel).parameters
    )
    model = DistributedDataParallel(bfp.Linear(32, 24, recipe="fp8_delayed"), init_sync=False, **{apart: False})
    with DDP_FORWARD:
        y = model(values(rank, 10.0**rank))
    y.sum().backward()
    bfp.update_scales(model)
    return model.module.input_scale.clone()


def test_ddp_shares_scales():
    results = threaded.run(2, replicated)
    largest = max(values(rank, 10.0**rank).abs().max() for rank in range(2))
    assert results[0] == results[1] == torch.tensor(448.0) / largest

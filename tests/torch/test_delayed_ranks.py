"""Delayed scaling over ranks: FSDP2's and DDP's have the scales of the largest amax of all."""

import threading
from inspect import signature as signature_of

import pytest
import threaded
import torch
from arrays import values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp


def two_layers():
    with threaded.seeded(0):
        return nn.Sequential(bfp.Linear(32, 24, recipe="fp8_delayed"), bfp.Linear(24, 16, recipe="fp8_delayed"))


def sharded(rank, shape):
    """Every rank ends with the scales of the largest amax of all."""
    names = ("replicas", "shards")[-len(shape) :]
    model = two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    model(values((4, 32), rank, scale=10.0**rank)).sum().backward()
    bfp.update_scales(model)
    return [buffer.clone() for buffer in model.buffers()]


def stepped(rank, shape):
    """The same, whole weights still in place when the optimizer steps."""
    model = two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]))
    model.set_reshard_after_backward(False)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
    model(values((4, 32), rank, scale=10.0**rank)).sum().backward()
    optimizer.step()
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("how", ["by hand", "by the optimizer"])
def test_ranks_share_scales(how, shape):
    results = threaded.run(4, sharded if how == "by hand" else stepped, shape)
    largest = max(values((4, 32), rank, scale=10.0**rank).abs().max() for rank in range(4))
    for buffers in results:
        for a, b in zip(buffers, results[0], strict=True):
            assert torch.equal(a, b)
        assert buffers[1] == torch.tensor(448.0) / largest
        assert buffers[0][-1] == largest


def by_hand(rank, shape):
    """Two steps that no optimizer takes, and the forward that sees the last of them."""
    with threaded.seeded(0):
        model = nn.Sequential(*(bfp.Linear(32, 32, recipe="fp8_delayed", weights="high_precision") for _ in range(2)))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]))
    for step in range(3):
        y = model(values((4, 32), 10 * step + rank, scale=10.0**rank))
        if step < 2:
            y.sum().backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-1e-3)
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_ranks_share_scales_after_steps_by_hand(shape):
    results = threaded.run(4, by_hand, shape)
    amaxes = [max(values((4, 32), 10 * step + rank, scale=10.0**rank).abs().max() for rank in range(4)) for step in range(2)]
    for buffers in results:
        for a, b in zip(buffers, results[0], strict=True):
            # Of the last forward each rank has its own amax still.
            assert torch.equal(a[1:], b[1:]) if a.ndim else torch.equal(a, b)
        assert buffers[1] == torch.tensor(448.0) / max(amaxes)
        assert buffers[0][-2:].tolist() == amaxes


# Which model's forward runs is known to DDP once for the process: ranks that are threads take turns.
DDP_FORWARD = threading.Lock()


def replicated(rank):
    with threaded.seeded(0):
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
        y = model(values((4, 32), rank, scale=10.0**rank))
    y.sum().backward()
    bfp.update_scales(model)
    return model.module.input_scale.clone()


def test_ddp_shares_scales():
    results = threaded.run(2, replicated)
    largest = max(values((4, 32), rank, scale=10.0**rank).abs().max() for rank in range(2))
    assert results[0] == results[1] == torch.tensor(448.0) / largest


def replicated_steps(rank, broadcasts):
    with threaded.seeded(0):
        layer = bfp.Linear(32, 24, recipe="fp8_delayed")
    optimizer = bfp.AdamW(layer.parameters(), lr=1e-3)
    apart = next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in signature_of(DistributedDataParallel).parameters
    )
    model = DistributedDataParallel(layer, init_sync=False, **{apart: broadcasts})
    with DDP_FORWARD:
        y = model(values((4, 32), rank, scale=10.0**rank))
    y.sum().backward()
    codes = layer.weight.codes.clone()
    if broadcasts:
        with pytest.raises(ValueError, match="forward_sync_buffers=False"):
            optimizer.step()
        assert torch.equal(layer.weight.codes, codes)
        return None
    optimizer.step()
    return layer.input_scale.clone()


def test_ddp_shares_scales_without_a_call():
    results = threaded.run(2, replicated_steps, False)
    largest = max(values((4, 32), rank, scale=10.0**rank).abs().max() for rank in range(2))
    assert results[0] == results[1] == torch.tensor(448.0) / largest
    assert threaded.run(1, replicated_steps, False)

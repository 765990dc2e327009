"""Codes and scales as DTensors: dequantized where they lie, or gathered first."""

import pytest
import threaded
import torch
from blockfp.torch_backend.custom_ops import ops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import blockfp.torch as bfp

SHAPE = (4, 64, 96)


def dequantized(rank, name, placement):
    mesh = init_device_mesh("cpu", (2,))
    q = bfp.quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), name)
    # Where square blocks are cut, their scales are too.
    parts = [distribute_tensor(part, mesh, [placement], src_data_rank=None) for part in (q.codes, q.scales)]
    tensor_scale = None
    if q.tensor_scale is not None:
        tensor_scale = distribute_tensor(q.tensor_scale, mesh, [Replicate()], src_data_rank=None)
    values = ops.dequantize(*parts, tensor_scale, name, torch.float32, SHAPE[-1], [0, 0])
    assert torch.equal(values.full_tensor(), q.dequantize())
    return values.placements[0]


@pytest.mark.parametrize(
    ("name", "placement", "result"),
    [
        ("mxfp8_e4m3", Shard(1), Shard(1)),
        ("nvfp4", Shard(1), Shard(1)),
        ("nvfp4", Replicate(), Replicate()),
        ("mxfp4_e2m1", Shard(0), Shard(0)),
        ("mxfp8_e4m3_32x32", Shard(0), Shard(0)),
        ("mxfp8_e4m3_32x32", Shard(1), Replicate()),
    ],
)
def test_dequantize(name, placement, result):
    assert threaded.run(2, dequantized, name, placement) == [result] * 2

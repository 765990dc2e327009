"""Codes and scales as DTensors: dequantized where they lie, or gathered first; and what takes no DTensors."""

import functools

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


def refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(64, 64)
    x = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
    weight = bfp.parallelize(bfp.Linear(64, 64, recipe="mxfp8"), mesh, "column").weight
    for function, arguments, name in (
        (bfp.quantize, (x, "mxfp8_e4m3"), "x"),
        (bfp.fake_quantize, (x, "mxfp8_e4m3"), "x"),
        (functools.partial(bfp.linear, recipe="mxfp8"), (x, whole), "x"),
        (functools.partial(bfp.linear, recipe="mxfp8"), (whole, weight), "weight"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} is a DTensor, .*{name}\.to_local\(\)"):
            function(*arguments)


def test_functions_take_one_ranks_tensors():
    threaded.run(2, refused)


def values_of_a_weight(rank):
    mesh = init_device_mesh("cpu", (2,))
    q = bfp.quantize(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), "mxfp8_e4m3_32x32")
    model = torch.nn.Sequential(bfp.Linear(96, 64, bias=False, recipe="mxfp8"))
    weight = bfp.parallelize(model[0], mesh, "column").weight
    weight.detach().to_local().copy_(q[32 * rank : 32 * (rank + 1)])
    for held in (weight, weight.detach()):
        with pytest.raises(NotImplementedError, match=r"to_local\(\)\.dequantize\(\) .*high_precision_state_dict\(model\)"):
            held.dequantize()
        with pytest.raises(NotImplementedError, match=r"a DTensor: call it on its to_local\(\)"):
            held + 1
    assert torch.equal(weight.to_local().dequantize(), q.dequantize().chunk(2)[rank])
    whole = bfp.high_precision_state_dict(model)["0.weight"]
    assert torch.equal(whole, q.dequantize())


def test_values_of_a_weight():
    threaded.run(2, values_of_a_weight)

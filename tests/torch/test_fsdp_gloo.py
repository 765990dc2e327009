"""Holds over real gloo what the threaded tests hold: one format of each kind, every kind of shard, 2 and 4 processes."""

import gloo
import pytest
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of, region_of
from blockfp.torch_backend.weights.loading import load_high_precision_
from small_model import Side, device_mesh, inputs_for, quantized, shapes_for, train, weights_for
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp
from blockfp.formats import Format

FAMILIES = ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4_16x16")


def check(rank, mesh, reshard):
    for name in FAMILIES:
        shapes = shapes_for(Format.parse(name), mesh[-1])
        train(rank, mesh, reshard, shapes, *(quantized(weights_for(shapes, step), name) for step in (0, 3)))


def two_ranks(rank):
    check(rank, (2,), True)
    check(rank, (2,), False)
    check(rank, (2, 1), True)
    data_parallel(rank)


def data_parallel(rank):
    """DistributedDataParallel averages the gradients of quantized weights."""
    weights = quantized(weights_for([(50, 64), (33, 40)]), "mxfp8_e4m3_32x32")
    whole = [Side([q.clone() for q in weights]) for _ in range(2)]
    for other, model in enumerate(whole):
        model(inputs_for(other, 64)).backward()
    model = DistributedDataParallel(Side(weights))
    model(inputs_for(rank, 64)).backward()
    for got, first, second in zip(model.parameters(), *(one.parameters() for one in whole), strict=True):
        torch.testing.assert_close(got.grad, (first.grad + second.grad) / 2)


def four_ranks(rank):
    check(rank, (4,), True)
    check(rank, (2, 2), False)
    weight = weights_for([(50, 64)], 1)[0]
    model = Side(quantized([weights_for([(50, 64)])[0]], "nvfp4_16x16"))
    fully_shard(model, mesh=device_mesh((2, 2)))
    param = model.layers[0].weight
    load_high_precision_(param, weight)
    whole, region = bfp.quantize(weight, "nvfp4_16x16"), region_of(param)
    assert local_of(param).tensor_scale == whole.tensor_scale
    assert (local_of(param).codes == whole.codes[region.slices[0]]).all()
    model = Side(quantized([weights_for([(50, 64)])[0]], "mxfp8_e4m3"))
    fully_shard(model, mesh=device_mesh((4,)), reshard_after_forward=2)
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        model(inputs_for(rank, 64))


@pytest.mark.parametrize(("ranks", "function"), [(2, "two_ranks"), (4, "four_ranks")])
def test_real_processes(ranks, function):
    gloo.run(ranks, __file__, function)

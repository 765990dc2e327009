"""Weights in high precision that FSDP2 gathers quantized: the same bits as the whole weight quantized, every optimizer step."""

import copy

import pytest
import threaded
import torch
from arrays import tensors_of, through_a_file
from blockfp.torch_backend.quantized_tensor.sharding import local_of, region_of
from same_tensors import assert_equal
from sharded import GEOMETRIES
from small_model import Side, device_mesh, inputs_for, shapes_for, shard, weights_for
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import blockfp.torch as bfp
from blockfp.formats import Format


def whole_of(param):
    """A sharded weight put together."""
    plain = DTensor.from_local(
        local_of(param).values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return plain.full_tensor()


def train(rank, shape, reshard, format, shapes):
    model = Side([bfp.CastWeight.from_values(weight, format) for weight in weights_for(shapes)])
    shard(model, device_mesh(shape), reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = inputs_for(rank, max(columns for _, columns in shapes))
    for _ in range(2):
        for layer in model.layers:
            layer.expected = bfp.quantize(whole_of(layer.weight), format)
        model(x).backward()
        for layer in model.layers:
            assert layer.seen_as == (layer.expected.format, tuple(layer.expected.shape), torch.float32, (0, 0))
            assert_equal(layer.seen, tensors_of(layer.expected))
        for layer in model.layers:
            assert layer.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        for module in (*model.layers, model):
            module.reshard()


@pytest.mark.parametrize("format", GEOMETRIES, ids=str)
def test_gathered_weights_are_the_quantized_whole(format):
    threaded.run(4, train, (4,), True, format, shapes_for(format, 4))


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=["2x2", "2x1"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4_16x16"])
def test_with_replicas(name, shape):
    format = Format.parse(name)
    threaded.run(torch.Size(shape).numel(), train, shape, False, format, shapes_for(format, shape[-1]))


def from_meta(rank, format, weight, offload):
    with torch.device("meta"):
        model = Side([bfp.CastWeight.from_values(torch.empty(50, 64), format)])
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, device_mesh((4,)), mp_policy=policy, **options)
    model.to_empty(device="cpu")
    param = model.layers[0].weight
    with torch.no_grad():
        local_of(param).copy_(weight[region_of(param).slices])
    model(inputs_for(rank, 64)).backward()
    assert model.layers[0].seen_as[2] is torch.bfloat16
    assert_equal(model.layers[0].seen, tensors_of(bfp.quantize(weight, format)))
    assert param.grad.dtype is torch.float32


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4_16x16"])
def test_from_the_meta_device(name, offload):
    threaded.run(4, from_meta, name, weights_for([(50, 64)])[0], offload)


def shards_by_hand(rank):
    mesh = device_mesh((4,))
    local = bfp.CastWeight.from_values(torch.ones(8, 64), "fp8_e4m3")
    assert DTensor.from_local(local, mesh, [Shard(0)], run_check=False).shape == (32, 64)
    local.fsdp_pre_all_gather(mesh)


def test_a_shard_that_fully_shard_did_not_make():
    for raised in threaded.errors(4, shards_by_hand):
        assert isinstance(raised, ValueError)
        assert "must hold 2 rows" in str(raised)


def test_alone_it_is_its_values():
    values = weights_for([(50, 64)])[0]
    weight = torch.nn.Parameter(bfp.CastWeight.from_values(values, "mxfp8_e4m3_32x32"))
    assert isinstance(weight, bfp.CastWeight)
    assert torch.equal(weight @ weight.mT, values @ values.mT)
    with pytest.raises(
        NotImplementedError, match=r"(?s)would multiply it in high precision: call the layer itself.*weight\.values"
    ):
        weight @ values.mT
    assert type(weight.detach() * 2) is torch.Tensor
    assert_equal(weight.quantized(), bfp.quantize(values, "mxfp8_e4m3_32x32"))
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full((50, 64), 3.0))
    with torch.no_grad():
        weight.add_(1)
        # FSDP2 and autocast do without casts of it; modules don't, and keep what these give.
        assert type(weight.bfloat16()) is bfp.CastWeight
        assert type(weight.int()) is type(torch.empty_like(weight, dtype=torch.bfloat16)) is torch.Tensor
    for other in (
        copy.deepcopy(weight),
        weight.clone(),
        weight.to("cpu", copy=True),
        through_a_file(weight, weights_only=True),
    ):
        assert isinstance(other, bfp.CastWeight)
        assert torch.equal(other.values, weight.values)
        assert other.values.data_ptr() != weight.values.data_ptr()
    with pytest.raises(TypeError, match="float64"):
        bfp.CastWeight.from_values(values.double(), "fp8_e4m3")

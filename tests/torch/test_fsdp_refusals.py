"""Refusals for sharded quantized weights: the same clear error on every rank, and none of them left waiting."""

import re

import pytest
import threaded
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from blockfp.torch_backend.weights.requantize import requantize_
from small_model import Side, inputs_for, quantized, weights_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import blockfp.torch as bfp

WEIGHT = weights_for([(50, 64)])[0]


def model_on(mesh, format="fp8_e4m3", **options):
    model = Side(quantized([WEIGHT], format))
    fully_shard(model, mesh=mesh, **options)
    return model


def smaller_mesh(rank, mesh):
    model = model_on(mesh, reshard_after_forward=2)
    model(inputs_for(rank, 64))


def columns(rank, mesh):
    model_on(mesh, shard_placement_fn=lambda param: Shard(1))


def bare_copy(rank, mesh, format="fp8_e4m3"):
    model = model_on(mesh, format)
    with torch.no_grad():
        model.layers[0].weight.copy_(distribute_tensor(WEIGHT, mesh, [Shard(0)]))
    # Only all shards together can be quantized, and nobody did.
    model(inputs_for(rank, 64))


def bare_copy_straddling(rank, mesh):
    bare_copy(rank, mesh, "mxfp8_e4m3_32x32")


def another_format(rank, mesh):
    param, other = model_on(mesh).layers[0].weight, model_on(mesh, "fp8_e5m2").layers[0].weight
    with torch.no_grad():
        param.copy_(other)


def wrong_dtype(rank, mesh):
    param = model_on(mesh).layers[0].weight
    requantize_([param], [torch.zeros(local_of(param).shape, dtype=torch.float64)])


def wrong_shape(rank, mesh):
    requantize_([model_on(mesh).layers[0].weight], [WEIGHT])


def not_quantized(rank, mesh):
    requantize_([distribute_tensor(WEIGHT, mesh, [Shard(0)])], [WEIGHT])


def otherwise_placed(rank, mesh):
    requantize_([model_on(mesh).layers[0].weight], [distribute_tensor(WEIGHT, mesh, [Replicate()])])


def gathered(rank, mesh):
    model = model_on(mesh)
    model.unshard()
    bfp.load_high_precision_(model.layers[0].weight, WEIGHT)


def load_integers(rank, mesh):
    bfp.load_high_precision_(model_on(mesh).layers[0].weight, torch.zeros(50, 64, dtype=torch.int32))


def load_a_shard(rank, mesh):
    param = model_on(mesh).layers[0].weight
    bfp.load_high_precision_(param, torch.zeros(local_of(param).shape))


def load_on_meta(rank, mesh):
    with torch.device("meta"):
        model = Side(quantized([torch.empty(50, 64)], "fp8_e4m3"))
    fully_shard(model, mesh=mesh)
    bfp.load_high_precision_(model.layers[0].weight, WEIGHT)


def shards_by_hand(rank, mesh):
    q = bfp.quantize(WEIGHT[:13], "fp8_e4m3")
    q.fsdp_pre_all_gather(mesh)


def wrong_origin(rank, mesh):
    q = bfp.quantize(WEIGHT[:13], "mxfp8_e4m3").narrow(0, 1, 12)
    param = DTensor.from_local(q, mesh, [Shard(0)], run_check=False, shape=(48, 64), stride=(64, 1))
    requantize_([param], [torch.zeros(12, 64)])


def values_wanted(rank, mesh):
    param = model_on(mesh).layers[0].weight
    with torch.no_grad():
        param.mul_(2)


def beside_the_forward(rank, mesh):
    model = fully_shard(bfp.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8"), mesh=mesh)
    model[0](WEIGHT)


CASES = [
    (beside_the_forward, ValueError, r"weight is a DTensor.*register_fsdp_forward_method"),
    (smaller_mesh, ValueError, r"reshard_after_forward=2: .*use reshard_after_forward=True or False"),
    (columns, NotImplementedError, r"aten.new_zeros.*shard_placement_fn of fully_shard must return Shard\(0\)"),
    (bare_copy, RuntimeError, r"its codes are still the old ones.*load_high_precision_\(parameter, values\)"),
    (bare_copy_straddling, RuntimeError, r"load_high_precision_"),
    (another_format, ValueError, r"format is fp8_e4m3, the source's is fp8_e5m2"),
    (wrong_dtype, TypeError, r"float64: cast it first"),
    (wrong_shape, ValueError, r"values must be of shape .* as this rank's part of the parameter, got \(50, 64\)"),
    (not_quantized, TypeError, r"params must hold quantized tensors, got Tensor of torch.float32"),
    (otherwise_placed, ValueError, r"values must be placed like their parameter, .*Shard\(0\).*got .*Replicate\(\)"),
    (gathered, ValueError, r"FSDP's gathered copy .* call reshard\(\)"),
    (load_integers, TypeError, r"tensor must hold values in one of .*got torch.int32"),
    (load_a_shard, ValueError, r"tensor must have the whole parameter's shape \(50, 64\)"),
    (load_on_meta, ValueError, r"call to_empty\(device=...\)"),
    (shards_by_hand, ValueError, r"doesn't know its position in the whole: use fully_shard"),
    (wrong_origin, ValueError, r"begins at \(\d+, 0\) on this rank, but its local tensor at \(1, 0\)"),
    (values_wanted, NotImplementedError, r"aten.mul_.* it writes values.*load_high_precision_\(parameter, values\)"),
]


@pytest.mark.parametrize(("case", "error", "message"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_rank_says_what_is_wrong(case, error, message):
    def rank_main(rank):
        case(rank, init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))

    raised = threaded.errors(4, rank_main)
    for one in raised:
        assert isinstance(one, error), one
        assert re.search(message, str(one), re.DOTALL), one

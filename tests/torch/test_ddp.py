"""DDP, FSDP1 and ZeroRedundancyOptimizer that others construct: rank 0's weights to the bit, and one step together."""

import warnings

import gloo
import pytest
import torch
import torch.distributed as dist
from arrays import values
from same_tensors import assert_equal
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp


def net(seed, recipe, weights, dtype):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 33)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bfp.convert(model, recipe, weights=weights)


def contents(param):
    if isinstance(param, bfp.QuantizedTensor):
        return [part for part in (param.codes, param.scales, param.tensor_scale, param.initial) if part is not None]
    return [param.values if isinstance(getattr(param, "values", None), torch.Tensor) else param.detach()]


def assert_alike_on_all_ranks(model):
    for param in model.parameters():
        for part in contents(param):
            own = part.detach().clone()
            dist.broadcast(own, 0)
            assert torch.equal(own, part)


def wrapped(model, way):
    if way == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(model)
    return DistributedDataParallel(model)


@gloo.on(2)
def test_rank_0s_weights_are_everybodys(rank):
    for recipe in ("mxfp8", "fp8_current", "nvfp4"):
        for weights, way in (("quantized", "ddp"), ("quantized", "replicate"), ("high_precision", "ddp")):
            for dtype in (torch.float32, torch.bfloat16):
                model, first = (net(seed, recipe, weights, dtype) for seed in (rank, 0))
                parallel = wrapped(model, way)
                if way == "replicate":
                    # Which waits for the first forward.
                    parallel(torch.ones(32, 64, dtype=dtype))
                for param, reference in zip(model.parameters(), first.parameters(), strict=True):
                    assert_equal(contents(param), contents(reference), (recipe, weights, way))
                optimizer = (bfp.AdamW if weights == "quantized" else torch.optim.AdamW)(model.parameters(), lr=1e-2)
                for step in range(2):
                    x = values((32, 64), 2 * step + rank).to(dtype)
                    parallel(x).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_alike_on_all_ranks(model)


@gloo.on(2)
def test_a_wrapper_that_holds_the_weights_is_refused(rank):
    from torch.distributed._composable.replicate import replicate

    def on_cpu(model, **options):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

    def replicated(model):
        replicate(model)(torch.ones(2, 64))
        return model

    ways = {
        "DistributedDataParallel": [
            DistributedDataParallel,
            lambda model: nn.Sequential(DistributedDataParallel(model)),
            replicated,
        ],
        "FullyShardedDataParallel": [on_cpu, lambda model: on_cpu(model, use_orig_params=True)],
    }
    for name, wrappers in ways.items():
        for wrap in wrappers:
            model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False))
            wrapped = wrap(model)
            for part in (wrapped, model, model[0]):
                for weights in ("quantized", "high_precision"):
                    with pytest.raises(ValueError, match=f"{name}.*convert the model first"):
                        bfp.convert(part, "mxfp8", weights=weights)
            assert type(model[0]) is nn.Linear
            wrapped(torch.ones(2, 64)).sum().backward()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    divided = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, parameters_as_bucket_view=True)
    with pytest.raises(
        ValueError, match=r"held by a ZeroRedundancyOptimizer with parameters_as_bucket_view=True.*convert the model"
    ):
        bfp.convert(model, "mxfp8")
    del divided
    layer = bfp.Linear(64, 64, recipe="mxfp8")
    wrapped = DistributedDataParallel(layer)
    with pytest.raises(ValueError, match=r"is held by a DistributedDataParallel.*call parallelize first"):
        bfp.parallelize(layer, init_device_mesh("cpu", (2,)), "column")
    # One that wraps another model, or none any more, is in nobody's way.
    other = DistributedDataParallel(nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    del wrapped
    wrapped = DistributedDataParallel(model)
    del wrapped
    bfp.convert(model, "mxfp8")
    assert type(other.module) is nn.Linear


# Models in which DDP lays a quantized weight out alone.
ALONE = {
    "no bias": lambda: nn.Sequential(nn.Linear(64, 64, bias=False)),
    "norms in float32": lambda: nn.Sequential(nn.LayerNorm(64, dtype=torch.float32), Cast(), nn.Linear(64, 64, bias=False)),
    # Above 250 MB, which torch sends together at the start; less is enough where nothing else is of that dtype.
    "a head above": lambda: nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4096, bias=False)),
}


class Cast(nn.Module):
    def forward(self, x):
        return x.to(torch.bfloat16)


@gloo.on(2)
def test_a_weight_that_is_sent_alone(rank):
    from torch.nn.parallel import distributed

    for name, made in ALONE.items():
        for recipe in ("mxfp8", "nvfp4", "fp8_current"):
            models = []
            for seed in (rank, 0):
                torch.manual_seed(seed)
                model = made()
                for linear in model.modules():
                    if isinstance(linear, nn.Linear):
                        linear.to(torch.bfloat16)
                models.append(bfp.convert(model, recipe))
            model, first = models
            torch.manual_seed(rank)
            sync = distributed._sync_module_states
            if name == "a head above":
                small = lambda *, broadcast_bucket_size, sync=sync, **options: sync(broadcast_bucket_size=4096, **options)  # noqa: E731
                distributed._sync_module_states = small
            try:
                parallel = DistributedDataParallel(model, bucket_cap_mb=0.001)
            finally:
                distributed._sync_module_states = sync
            for param, reference in zip(model.parameters(), first.parameters(), strict=True):
                assert_equal(contents(param), contents(reference), (name, recipe))
            optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                x = values((32, 64), 2 * step + rank)
                parallel(x if name == "norms in float32" else x.bfloat16()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_alike_on_all_ranks(model)


@gloo.on(2)
def test_ranks_with_other_formats_are_told(rank):
    # The first two have codes of as many bytes.
    for pair in (("mxfp8", "fp8_block"), ("fp8_current", "mxfp8"), ("mxfp4", "nvfp4"), ("mxfp8", "mxfp6")):
        for bias in (True, False):
            torch.manual_seed(rank)
            model = bfp.convert(nn.Sequential(nn.Linear(64, 64, bias=bias), nn.Linear(64, 128, bias=bias)), pair[rank])
            before = [part.clone() for param in model.parameters() for part in contents(param)]
            with pytest.raises(ValueError, match=r"weight 0 of .* is .* of shape \(64, 64\) and torch.float32 on rank 0 and "):
                DistributedDataParallel(model)
            after = [part for param in model.parameters() for part in contents(param)]
            assert all(torch.equal(*one) for one in zip(before, after, strict=True))


@gloo.on(2)
def test_older_ways_to_shard(rank):
    x = values((2, 32, 64), 0)

    def trained(model, optimizer, parts):
        for _ in range(3):
            for part in parts:
                (model(part).square().mean() / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def on_cpu(model, **options):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

    alone, sharded, divided = (net(0, "mxfp8", "high_precision", torch.float32) for _ in range(3))
    trained(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), x)
    expected = bfp.high_precision_state_dict(alone)
    sharded = on_cpu(sharded)
    trained(sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-2), x[rank : rank + 1])
    got = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    trained(
        DistributedDataParallel(divided),
        ZeroRedundancyOptimizer(divided.parameters(), torch.optim.AdamW, lr=1e-2),
        x[rank : rank + 1],
    )
    for state in (got, bfp.high_precision_state_dict(divided)):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    for weights, error in (("quantized", NotImplementedError), ("high_precision", TypeError)):
        with pytest.raises(error, match="use fully_shard"):
            on_cpu(net(0, "mxfp8", weights, torch.float32), use_orig_params=True)(x[0])


def test_all_weights_as_one_vector():
    """It can be laid out and taken apart again, and has no values to compute with."""
    model, other = (net(seed, "nvfp4", "quantized", torch.float32) for seed in (0, 1))
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.shape == (sum(param.numel() for param in model.parameters()),)
    for use in (lambda: vector + 1, vector.norm, vector.double, lambda: vector[3:7]):
        with pytest.raises(NotImplementedError, match=r"high_precision_state_dict\(model\)"):
            use()
    nn.utils.vector_to_parameters(vector, other.parameters())
    for param, reference in zip(other.parameters(), model.parameters(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(contents(param), contents(reference), strict=True))

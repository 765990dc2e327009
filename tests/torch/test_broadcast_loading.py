"""A model that rank 0 alone has read, values or codes, goes into sharded weights by torch's `broadcast_from_rank0`."""

import gloo
import pytest
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of, region_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp

RECIPES = ("mxfp8", "fp8_current", "fp8_delayed", "fp8_block", "nvfp4")


def net(seed, recipe=None, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 48))
    return model if recipe is None else bfp.convert(model, recipe, **options)


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def assert_is_part_of(model, whole):
    for layer, reference in zip(model, whole, strict=True):
        local, rows = local_of(layer.weight), region_of(layer.weight).slices
        if isinstance(local, bfp.QuantizedTensor):
            assert torch.equal(local.dequantize(), reference.weight.detach().dequantize()[rows])
        else:
            assert torch.equal(local.values, reference.weight.values[rows])
        assert torch.equal(layer.bias.full_tensor(), reference.bias)


def _broadcast(rank):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    for turn, recipe in enumerate(RECIPES):
        for weights in ("quantized", "high_precision"):
            for source in ("plain", "converted"):
                # What torch does with its options goes by no recipe: each meets both of them.
                options = ({"cpu_offload": True}, {"strict": False})
                for more in ({}, options[(turn + (weights == "quantized") + (source == "plain")) % 2]):
                    if (weights, source, more) == ("quantized", "converted", {"cpu_offload": True}):
                        continue  # A KeyError of torch's, which looks for each name of rank 0's among the parameters.
                    model = sharded(net(10 + rank, recipe, weights=weights))
                    state = (net(1) if source == "plain" else net(1, recipe, weights=weights)).state_dict() if rank == 0 else {}
                    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **more)
                    set_model_state_dict(model, state, options=given)
                    whole = net(1, recipe, weights=weights)
                    assert_is_part_of(model, whole)
                    initial = getattr(local_of(model[0].weight), "initial", None)
                    if weights == "quantized" and source == "plain":
                        assert torch.equal(initial, net(1)[0].weight.detach()[region_of(model[0].weight).slices])
                    else:
                        assert initial is None
                    model(x)


def test_values_and_codes():
    gloo.run(2, __file__, "_broadcast")


def _refused(rank):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded(net(0, "mxfp8"))
    before = [local_of(layer.weight).codes.clone() for layer in model]
    state = net(1, "nvfp4").state_dict() if rank == 0 else {}
    with pytest.raises(ValueError, match=r"0\.weight is mxfp8_e4m3_32x32 in the model and nvfp4_16x16 in the loaded state"):
        set_model_state_dict(model, state, options=options)
    assert all(torch.equal(local_of(layer.weight).codes, old) for layer, old in zip(model, before, strict=True))
    # A shard's values that nobody quantizes are not forgotten.
    model = sharded(net(0, "mxfp8"))
    with torch.no_grad():
        model[0].weight.to_local().copy_(torch.ones(local_of(model[0].weight).shape))
    for use in (lambda: model(torch.ones(32, 64)), model.state_dict, model[0].weight.to_local().dequantize):
        with pytest.raises(RuntimeError, match=r"codes are still the old ones.*load_high_precision_"):
            use()
    bfp.load_high_precision_(model[0].weight, torch.ones(50, 64))
    assert torch.equal(model[0].weight.to_local().dequantize(), torch.ones(25, 64))


def test_what_is_refused_is_refused_on_every_rank():
    gloo.run(2, __file__, "_refused")

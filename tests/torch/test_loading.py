"""High precision into quantized weights: whole, sharded or broadcast by rank 0; and originals that `keep_init` keeps."""

import gloo
import pytest
import threaded
import torch
from arrays import tensors_of
from blockfp.torch_backend.quantized_tensor.sharding import local_of, region_of
from blockfp.torch_backend.weights.module_state import keep_in_parts
from held_formats import FORMATS
from same_tensors import assert_equal
from small_model import Side, SmallLinear, device_mesh, inputs_for, quantized, shapes_for, shard, weights_for
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import blockfp.torch as bfp
from blockfp.formats import Format


def on_meta(shapes, format):
    with torch.device("meta"):
        model = Side(quantized([torch.empty(shape) for shape in shapes], format))
    for layer in model.layers:
        keep_in_parts(layer)
    return model


def as_state(weights):
    return {f"layers.{i}.weight": weight for i, weight in enumerate(weights)}


def load(rank, shape, way, shapes, weights, expected):
    format = expected[0].format
    model = on_meta(shapes, format)
    shard(model, device_mesh(shape))
    model.to_empty(device="cpu")
    if way == "function":
        for name, weight in as_state(weights).items():
            bfp.load_high_precision_(model.get_parameter(name), weight)
    elif way == "whole":
        assert not any(model.load_state_dict(as_state(weights)))
    elif way == "placed alike":
        placed = []
        for layer, weight in zip(model.layers, weights, strict=True):
            param = layer.weight
            mine = weight[region_of(param).slices]
            options = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
            placed.append(DTensor.from_local(mine, param.device_mesh, param.placements, **options))
        model.load_state_dict(as_state(placed))
    scales = []
    for layer, weight in zip(model.layers, weights, strict=True):
        local = local_of(layer.weight)
        assert torch.equal(local.initial, weight[region_of(layer.weight).slices])
        scales.append(local.scales)
    model(inputs_for(rank, 200)).backward()
    for layer, want in zip(model.layers, expected, strict=True):
        assert_equal(layer.seen, tensors_of(want))
    return scales


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_before_the_first_forward(format):
    check_load(format, "function", (4,))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["4", "2x2"])
@pytest.mark.parametrize("way", ["whole", "placed alike"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4_16x16"])
def test_through_a_state_dict(name, way, shape):
    check_load(Format.parse(name), way, shape)


def check_load(format, way, shape):
    shapes = shapes_for(format, shape[-1])
    weights = weights_for(shapes)
    scales = threaded.run(4, load, shape, way, shapes, weights, quantized(weights, format))
    if format.per_tensor:
        for of_one_weight in zip(*scales, strict=True):
            assert all(torch.equal(other, of_one_weight[0]) for other in of_one_weight)


def load_later(rank, weights, expected, kept):
    """The root still holds its gathered weight when new values are loaded."""
    zeros = torch.zeros(50, 64)
    model = SmallLinear(bfp.CastWeight.from_values(zeros, "fp8_e4m3") if kept else bfp.quantize(zeros, "fp8_e4m3"))
    keep_in_parts(model)
    model.keep_init = False
    fully_shard(model, mesh=device_mesh((4,)))
    optimizer = bfp.AdamW(model.parameters(), lr=0.0)
    optimizer.make_state()
    model(inputs_for(rank, 64))
    assert isinstance(model.weight, bfp.QuantizedTensor)
    model.load_state_dict({"weight": weights[0]})
    if kept:
        assert torch.equal(local_of(model.weight).values, weights[0][region_of(model.weight).slices])
    else:
        assert local_of(model.weight).initial is None
    model(inputs_for(rank, 64)).sum().backward()
    optimizer.step()
    if not kept:
        # The master, which was there before, is of what was loaded.
        assert torch.equal(optimizer.state[model.weight]["master"], local_of(model.weight).dequantize())
        assert optimizer.state[model.weight]["master"].any()
    assert_equal(model.seen, tensors_of(expected[0]))


@pytest.mark.parametrize("kept", [False, True], ids=["quantized", "high precision"])
def test_while_the_root_is_gathered(kept):
    weights = weights_for([(50, 64)])
    threaded.run(4, load_later, weights, quantized(weights, "fp8_e4m3"), kept)


def through_dcp(rank, weights, expected):
    model = on_meta([(50, 64)], "nvfp4_16x16")
    shard(model, device_mesh((4,)))
    model.to_empty(device="cpu")
    set_model_state_dict(model, as_state(weights), options=StateDictOptions(full_state_dict=True))
    model(inputs_for(rank, 64)).backward()
    assert_equal(model.layers[0].seen, tensors_of(expected[0]))


def test_a_full_state_dict_through_distributed_checkpoint():
    weights = weights_for([(50, 64)])
    threaded.run(4, through_dcp, weights, quantized(weights, "nvfp4_16x16"))


def test_without_sharding():
    weight = weights_for([(50, 64)])[0]
    module = nn.Linear(64, 50)
    module.weight = nn.Parameter(bfp.quantize(torch.zeros(50, 64), "nvfp4_16x16"))
    keep_in_parts(module)
    codes = module.weight.codes
    bias = torch.randn(50)
    assert not any(module.load_state_dict({"weight": weight, "bias": bias}))
    assert module.weight.codes is codes
    assert_equal(module.weight, bfp.quantize(weight, "nvfp4_16x16"))
    assert torch.equal(module.bias, bias)
    assert torch.equal(module.weight.initial, weight)
    quantized_state = {key: value.clone() for key, value in module.state_dict().items()}
    module.load_state_dict({"weight": torch.ones(50, 64), "bias": bias})
    module.load_state_dict(quantized_state)
    assert_equal(module.weight, bfp.quantize(weight, "nvfp4_16x16"))
    with pytest.raises(RuntimeError, match=r"size mismatch.*\[50, 64\]"):
        module.load_state_dict({"weight": weight[:49], "bias": bias})
    with pytest.raises(TypeError, match=r"weight must hold values in one of torch.float32, .*, got torch.float64"):
        module.load_state_dict({"weight": weight.double(), "bias": bias})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        module.load_state_dict({"bias": bias})


def test_from_the_meta_device():
    weight = weights_for([(50, 64)])[0]
    with torch.device("meta"):
        model = SmallLinear(bfp.quantize(torch.empty(50, 64), "nvfp4_16x16"))
    assert model.weight.initial is None
    with pytest.raises(ValueError, match=r"call to_empty\(device=...\)"):
        bfp.load_high_precision_(model.weight, weight)
    model.to_empty(device="cpu")
    bfp.load_high_precision_(model.weight, weight, keep_init=False)
    assert_equal(model.weight, bfp.quantize(weight, "nvfp4_16x16"))
    assert model.weight.initial is None
    assert model.bfloat16().weight.dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match=r"_to_copy.*can't be torch.float64"):
        model.double()


@pytest.mark.parametrize("kept", [False, True], ids=["quantized", "high precision"])
def test_assigned_to_the_meta_device(kept):
    weight = weights_for([(50, 64)])[0]
    with torch.device("meta"):
        values = torch.empty(50, 64)
        model = SmallLinear(bfp.CastWeight.from_values(values, "nvfp4_16x16") if kept else bfp.quantize(values, "nvfp4_16x16"))
    model.other, model.bias = nn.Linear(64, 50, device="meta"), nn.Parameter(torch.empty(50, device="meta"))
    model.other.weight = model.weight
    values = weight.bfloat16()
    for one in (model, model.other):
        keep_in_parts(one)
    state = {"weight": values, "bias": values[:, 0], "other.weight": values, "other.bias": values[:, 0]}
    parameter = model.weight
    # The second time it has memory, and is written to as without `assign`.
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weight is on the meta device in the loaded state"):
            model.load_state_dict(state | {"weight": values.to("meta")}, assign=True)
        assert not any(model.load_state_dict(state, assign=True))
        assert isinstance(model.weight, nn.Parameter)
        assert model.other.weight is model.weight is parameter
        assert model.weight.dtype == model.bias.dtype == torch.bfloat16
        assert_equal(model.weight.quantized() if kept else model.weight, bfp.quantize(values, "nvfp4_16x16"))


@pytest.mark.parametrize("view", [lambda w: w[1], lambda w: w.detach()[1:], lambda w: w[1].detach(), lambda w: w[1:, :32].data])
def test_a_view_of_a_weight_is_refused(view):
    weight = nn.Parameter(bfp.quantize(torch.zeros(2, 64, 32), "mxfp8_e4m3"))
    part = view(weight)
    with pytest.raises(ValueError, match=r"of shape .*32\), is a view of a larger tensor, .* load the whole parameter"):
        bfp.load_high_precision_(part, torch.ones(part.shape))
    assert not weight.codes.any()
    for whole in (weight.detach(), part.clone(), nn.Parameter(part)):
        bfp.load_high_precision_(whole, torch.ones(whole.shape))
        assert whole.initial is not None
    assert weight.geometry.loaded


def strided(rank, weight):
    """torch would give the ranks of a strided DTensor other rows than FSDP2 does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    tp = mesh["tp"].get_local_rank()
    part = bfp.quantize(weight, "fp8_e4m3").narrow(0, 25 * tp, 25).clone()
    module = nn.Module()
    module.weight = nn.Parameter(
        DTensor.from_local(part, mesh["tp"], [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
    )
    fully_shard(module, mesh=mesh["fsdp"])
    param, region = module.weight, region_of(module.weight)
    placed = DTensor.from_local(
        weight[region.slices], param.device_mesh, param.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    with pytest.raises(ValueError, match=r"may hold other rows.*full_tensor"):
        bfp.load_high_precision_(param, placed)
    bfp.load_high_precision_(param, 2 * weight)
    assert_equal(local_of(param), bfp.quantize(2 * weight, "fp8_e4m3").narrow(0, region.start[0], region.shape[0]))
    whole = distribute_tensor(weight, param.device_mesh, [Replicate(), Replicate()], src_data_rank=None)
    bfp.load_high_precision_(param, whole)
    assert_equal(local_of(param), bfp.quantize(weight, "fp8_e4m3").narrow(0, region.start[0], region.shape[0]))
    optimizer = bfp.AdamW([param])
    state = {"step": torch.ones(())} | dict.fromkeys(("exp_avg", "exp_avg_sq", "master"), whole)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: state}})
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert torch.equal(local_of(optimizer.state[param][name]), weight[region.slices])


def test_over_tensor_parallelism():
    threaded.run(4, strided, weights_for([(50, 64)])[0])


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


@threaded.on(2)
def test_shards(rank):
    model = bfp.convert(net(), "mxfp8")
    model[0].weight.requires_grad_(False)
    fully_shard(model)
    assert local_of(model[0].weight).initial is None
    assert local_of(model[1].weight).initial is not None
    optimizer = bfp.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    assert local_of(model[1].weight).initial is None


RECIPES = ("mxfp8", "fp8_current", "fp8_delayed", "fp8_block", "nvfp4")


def converted(seed, recipe=None, **options):
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


@gloo.on(2)
def test_values_and_codes(rank):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    for turn, recipe in enumerate(RECIPES):
        for weights in ("quantized", "high_precision"):
            for source in ("plain", "converted"):
                # What torch does with its options goes by no recipe: each meets both of them.
                options = ({"cpu_offload": True}, {"strict": False})
                for more in ({}, options[(turn + (weights == "quantized") + (source == "plain")) % 2]):
                    if (weights, source, more) == ("quantized", "converted", {"cpu_offload": True}):
                        continue  # A KeyError of torch's, which looks for each name of rank 0's among the parameters.
                    model = sharded(converted(10 + rank, recipe, weights=weights))
                    state = (
                        (converted(1) if source == "plain" else converted(1, recipe, weights=weights)).state_dict()
                        if rank == 0
                        else {}
                    )
                    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **more)
                    set_model_state_dict(model, state, options=given)
                    whole = converted(1, recipe, weights=weights)
                    assert_is_part_of(model, whole)
                    initial = getattr(local_of(model[0].weight), "initial", None)
                    if weights == "quantized" and source == "plain":
                        assert torch.equal(initial, converted(1)[0].weight.detach()[region_of(model[0].weight).slices])
                    else:
                        assert initial is None
                    model(x)


@gloo.on(2)
def test_what_is_refused_is_refused_on_every_rank(rank):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded(converted(0, "mxfp8"))
    before = [local_of(layer.weight).codes.clone() for layer in model]
    state = converted(1, "nvfp4").state_dict() if rank == 0 else {}
    with pytest.raises(ValueError, match=r"0\.weight is mxfp8_e4m3_32x32 in the model and nvfp4_16x16 in the loaded state"):
        set_model_state_dict(model, state, options=options)
    assert all(torch.equal(local_of(layer.weight).codes, old) for layer, old in zip(model, before, strict=True))
    # A shard's values that nobody quantizes are not forgotten.
    model = sharded(converted(0, "mxfp8"))
    with torch.no_grad():
        model[0].weight.to_local().copy_(torch.ones(local_of(model[0].weight).shape))
    for use in (lambda: model(torch.ones(32, 64)), model.state_dict, model[0].weight.to_local().dequantize):
        with pytest.raises(RuntimeError, match=r"codes are still the old ones.*load_high_precision_"):
            use()
    bfp.load_high_precision_(model[0].weight, torch.ones(50, 64))
    assert torch.equal(model[0].weight.to_local().dequantize(), torch.ones(25, 64))

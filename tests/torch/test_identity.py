"""Identity of a quantized weight to tools: addresses, storages, hooks, copies, `.data`, pickled names."""

import copy
import pickle
import warnings

import pytest
import safetensors.torch
import threaded
import torch
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from decoder_layer import MLP
from torch import nn
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp

WEIGHTS = pytest.mark.parametrize("weights", ["quantized", "high_precision"])
RECIPES = pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])


def layers(recipe, weights, count=3, dtype=torch.bfloat16):
    with threaded.seeded(0):
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=dtype) for _ in range(count)))
    return bfp.convert(model, recipe, weights=weights)


@RECIPES
@WEIGHTS
def test_addresses_tell_weights_apart(recipe, weights):
    model = layers(recipe, weights)
    model[2].weight = model[0].weight
    tied, other = model[0].weight, model[1].weight
    for address in (lambda p: p.data_ptr(), lambda p: p.untyped_storage().data_ptr(), safetensors.torch.storage_ptr):
        assert address(tied) == address(model[2].weight) == address(tied.detach()) == address(tied.data) != address(other)
        assert address(copy.deepcopy(tied)) != address(tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of typed storages
        assert tied.storage().data_ptr() == tied.data_ptr()
    rows = tied[32:]
    assert rows.data_ptr() - tied.data_ptr() == (tied[33:].data_ptr() - tied[32:].data_ptr()) * 32 > 0
    assert rows.untyped_storage().data_ptr() == tied.untyped_storage().data_ptr()
    assert tied.to("meta").data_ptr() == 0
    assert len({p.data_ptr() for p in layers(recipe, weights).parameters()}) == 6


@RECIPES
def test_state_dicts_have_no_two_tensors_in_one_storage(recipe):
    """Savers leave out what they take for tied, tensors of no bytes too."""
    state = layers(recipe, "quantized").state_dict()
    places = {(value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()) for value in state.values()}
    assert len(places) == len(state)
    assert all(value.untyped_storage().nbytes() == 0 for value in state.values() if not value.numel())


@RECIPES
@WEIGHTS
def test_sizes(recipe, weights):
    weight = layers(recipe, weights)[0].weight
    assert weight.is_contiguous()
    assert weight.element_size() == weight.dtype.itemsize == 2
    if weights == "high_precision":
        assert weight.nbytes == 64 * 64 * 2
    else:
        parts = (weight.codes, weight.scales, weight.tensor_scale)
        assert weight.nbytes == sum(part.nbytes for part in parts if part is not None) < 64 * 64 * 2


@WEIGHTS
def test_hooks_on_gradients(weights):
    layer = layers("mxfp8", weights)[0]
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight))
    layer(torch.ones(32, 64, dtype=torch.bfloat16)).sum().backward()
    assert seen[0] == (64, 64)
    assert seen[1] is layer.weight


@WEIGHTS
def test_deep_copies(weights):
    layer = layers("nvfp4", weights)[0]
    layer(torch.ones(32, 64, dtype=torch.bfloat16)).sum().backward()
    layer.weight.group = ["decay"]
    other = copy.deepcopy(layer)
    assert type(other.weight) is type(layer.weight)
    assert isinstance(other.weight, nn.Parameter)
    assert other.weight.requires_grad
    assert torch.equal(other.weight.grad, layer.weight.grad)
    assert other.weight.grad is not layer.weight.grad
    assert other.weight.group == ["decay"]
    assert other.weight.group is not layer.weight.group
    tied = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert tied[0].weight is tied[1].weight
    frozen = copy.deepcopy(layer.weight.detach())
    assert (frozen.requires_grad, isinstance(frozen, nn.Parameter)) == (False, False)


def test_a_cast_of_data_changes_the_nominal_dtype():
    """Accelerate does so to parameters for mixed precision, and peft before it trains on few bits."""
    model = layers("mxfp8", "quantized")
    weight, codes, before = model[0].weight, model[0].weight.codes.clone(), model[0].weight.dequantize(torch.float32)
    weight.data = weight.data.to(torch.float32)
    assert weight is model[0].weight
    assert (weight.dtype, weight.requires_grad, isinstance(weight, nn.Parameter)) == (torch.float32, True, True)
    assert torch.equal(weight.codes, codes)
    assert torch.equal(weight.dequantize(), before)
    assert torch.equal(weight.initial, model[0].weight.initial)
    with pytest.raises(NotImplementedError, match=r"nominal dtype can't be torch\.float64.*cast to one of torch\.float32"):
        weight.double()
    cast = layers("mxfp8", "high_precision")[0].weight
    values = cast.values
    cast.data = cast.data.to(torch.float32)
    assert cast.dtype == cast.values.dtype == torch.float32
    assert torch.equal(cast.values, values.float())


@WEIGHTS
def test_data_is_what_it_is_set_to(weights):
    one, other = (layer.weight for layer in layers("nvfp4", weights, 2))
    expected = bfp.quantize(torch.zeros(64, 64), "nvfp4_16x16") if weights == "quantized" else None
    one.data = other.data
    assert one.data_ptr() == other.data_ptr()
    if expected is not None:
        one.data = expected
        assert (one.codes.data_ptr(), one.dtype) == (expected.codes.data_ptr(), torch.float32)
    with pytest.raises(TypeError, match=r"\.data of a \w+ must be a \w+, got a Tensor of torch\.float32.*load_high_precision_"):
        one.data = torch.zeros(64, 64)


def test_readers_of_raw_memory_find_no_codes(tmp_path):
    """Under the shape and the dtype of the values they would read past the codes."""
    quantized, cast = (layers("mxfp8", weights)[0].weight.detach() for weights in ("quantized", "high_precision"))
    with pytest.raises(ValueError, match="NULL pointer"):
        safetensors.torch.save_file({"weight": quantized}, tmp_path / "codes.safetensors")
    safetensors.torch.save_file({"weight": cast}, tmp_path / "values.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "values.safetensors")["weight"], cast.values)


@WEIGHTS
@threaded.on(2)
def test_shards(rank, weights):
    model = layers("mxfp8", weights, dtype=torch.float32)
    before = {p.data_ptr() for p in model.parameters()}
    fully_shard(model)
    for address in (lambda p: local_of(p).data_ptr(), lambda p: local_of(p).untyped_storage().data_ptr()):
        after = {address(p) for p in model.parameters()}
        assert len(after) == 6
        assert before.isdisjoint(after)
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(seen.append)
    model(torch.ones(32, 64)).sum().backward()
    assert seen[0] is model[0].weight


PARTS = bfp.MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn")


@pytest.mark.parametrize(
    ("model", "fuse"),
    [
        (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), None),
        (MLP(32, 64), {MLP: PARTS}),
        (MLP(32, 64), {MLP: bfp.SharedInput("gate_proj", "up_proj")}),
    ],
    ids=["sequential", "parts", "shared input"],
)
def test_pickles_of_a_converted_model_name_public_modules(model, fuse):
    model = bfp.convert(copy.deepcopy(model), "nvfp4", fuse=fuse)
    assert type(model) is not MLP
    data = pickle.dumps(model)
    assert b"blockfp.torch" in data
    assert b"torch_backend" not in data
    assert type(pickle.loads(data)) is type(model)

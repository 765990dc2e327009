"""blockfp's own layers in checkpoints: real steps under FSDP2, everything a recipe keeps, weights in high precision."""

import math

import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from resumed import MESHES
from same_tensors import assert_equal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint


def model_of(recipe, seed, device=None, **options):
    options |= {"recipe": recipe, "device": device}
    with threaded.seeded(seed):
        return nn.Sequential(bfp.Linear(48, 160, **options), nn.GELU(), bfp.LayerNormLinear(160, 33, **options))


def shard(model, mesh):
    shape, names = MESHES[mesh]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, optimizer, rank, first, last):
    for step in range(first, last):
        x = values((16, 48), 100 * step + rank)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        bfp.update_scales(model)


def everything(model, optimizer):
    """Copies of all that a rank holds, by name."""
    held = {name: value.clone() for name, value in model.named_buffers()}
    for name, param in model.named_parameters():
        local = local_of(param)
        parts = (local.codes, local.scales, local.tensor_scale) if isinstance(local, bfp.QuantizedTensor) else (local,)
        held |= {f"{name}.{i}": part.detach().clone() for i, part in enumerate(parts) if part is not None}
        held |= {f"{name}.{entry}": value.clone() for entry, value in optimizer.state[param].items()}
    return held


def _uninterrupted_or_not(rank, folder, recipe, options):
    model = shard(model_of(recipe, 0, **options), "fsdp2")
    optimizer = bfp.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 0, 3)
    # After a forward, the root's parameters are still gathered: the state dict is of the shards.
    model(torch.ones(2, 48))
    bfp.save_checkpoint(folder, model, optimizer, step=3)
    saved = everything(model, optimizer)
    train(model, optimizer, rank, 3, 6)

    other = shard(model_of(recipe, 1, device="meta", **options), "fsdp2")
    other.to_empty(device="cpu")
    other_optimizer = bfp.AdamW(other.parameters(), lr=0.5, key=9)
    bfp.load_checkpoint(folder, other, other_optimizer)
    assert_equal(everything(other, other_optimizer), saved)
    train(other, other_optimizer, rank, 3, 6)
    assert_equal(everything(other, other_optimizer), everything(model, optimizer))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block", "nvfp4"])
def test_a_run_goes_on_as_if_never_interrupted(recipe, tmp_path):
    """From the meta device, with real gradients: histories, scales, random keys and steps among what comes back."""
    threaded.run(2, _uninterrupted_or_not, tmp_path, recipe, {})


def test_weights_in_high_precision(tmp_path):
    threaded.run(2, _uninterrupted_or_not, tmp_path, "mxfp8", {"weights": "high_precision"})


@threaded.on(2)
def test_high_precision_weights_are_plain_and_can_be_requantized(rank, tmp_path):
    model = shard(model_of("mxfp8", 0, weights="high_precision"), "fsdp2")
    state = get_model_state_dict(model)
    local = local_of(state["0.weight"])
    assert type(local) is torch.Tensor
    assert local.data_ptr() == local_of(model[0].weight).values.data_ptr()
    bfp.save_checkpoint(tmp_path, model, step=1)
    quantized = shard(model_of("mxfp8", 1), "fsdp2")
    with pytest.raises(BadCheckpoint, match=r"0\.weight is mxfp8_e4m3_32x32 in the model and torch\.float32 in the checkpoint"):
        bfp.load_checkpoint(tmp_path, quantized)
    bfp.load_checkpoint(tmp_path, quantized, requantize=True)
    expected = bfp.quantize(state["0.weight"].full_tensor(), "mxfp8_e4m3_32x32")
    start = rank * math.ceil(160 / 2)
    assert torch.equal(local_of(quantized[0].weight).codes, expected.codes[start : start + 80])
    assert torch.equal(local_of(quantized[0].weight).initial, local)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "mxfp6"])
@threaded.on(3)
def test_experts(rank, tmp_path, recipe):
    """One 3-D weight, cut between the experts, of which some ranks have fewer."""
    with threaded.seeded(0):
        layer, other = (bfp.GroupedLinear(5, 32, 24, recipe=recipe) for _ in range(2))
    whole = {name: value.clone() for name, value in layer.state_dict().items()}
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    fully_shard(layer, mesh=mesh)
    bfp.save_checkpoint(tmp_path, layer, step=0)
    bfp.load_checkpoint(tmp_path, other)
    for name, value in other.state_dict().items():
        assert torch.equal(value, whole[name]), name


def transformer(seed, recipe):
    with threaded.seeded(seed):
        return bfp.TransformerLayer(64, 96, 4, recipe=recipe)


def _tensor_parallel(rank, folder, recipe, sequence_parallel):
    layer = transformer(0, recipe)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    bfp.parallelize(layer, mesh["tp"], sequence_parallel=sequence_parallel)
    fully_shard(layer, mesh=mesh["fsdp"])
    optimizer = bfp.AdamW(layer.parameters(), lr=0.01)
    for step in range(2):
        x = values((2, 64, 64), 10 * step + mesh["fsdp"].get_local_rank())
        if sequence_parallel:
            x = x.chunk(2, dim=1)[mesh["tp"].get_local_rank()]
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bfp.save_checkpoint(folder, layer, optimizer, step=2)
    return everything(layer, optimizer)


def _back_to_tensor_parallel(rank, folder, recipe, expected):
    layer = transformer(1, recipe)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    bfp.parallelize(layer, mesh["tp"])
    fully_shard(layer, mesh=mesh["fsdp"])
    optimizer = bfp.AdamW(layer.parameters(), lr=0.01)
    bfp.load_checkpoint(folder, layer, optimizer)
    assert_equal(everything(layer, optimizer), expected[rank])


def _through_fsdp(rank, folder, recipe):
    layer = transformer(2, recipe)
    fully_shard(layer, mesh=init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",)))
    optimizer = bfp.AdamW(layer.parameters(), lr=0.01)
    bfp.load_checkpoint(folder, layer, optimizer)
    bfp.save_checkpoint(folder / "again", layer, optimizer, step=2)


@pytest.mark.parametrize(("recipe", "sequence_parallel"), [("mxfp8", True), ("nvfp4", False), ("fp8_current", True)])
def test_tensor_parallelism_to_fsdp_and_back(recipe, sequence_parallel, tmp_path):
    """FSDP over TP, columns and rows cut, to three ranks of FSDP that cut blocks apart, and from there back."""
    expected = threaded.run(4, _tensor_parallel, tmp_path, recipe, sequence_parallel)
    threaded.run(3, _through_fsdp, tmp_path, recipe)
    threaded.run(4, _back_to_tensor_parallel, tmp_path / "again", recipe, expected)


def test_what_compile_puts_around_a_model_stays_out_of_the_names(tmp_path):
    model = model_of("fp8_delayed", 0)
    wrapped = torch.compile(model, backend="eager")
    optimizer = bfp.AdamW(wrapped.parameters(), lr=0.01)
    train(wrapped, optimizer, 0, 0, 1)
    bfp.save_checkpoint(tmp_path, wrapped, optimizer, step=1)
    other = model_of("fp8_delayed", 1)
    other_optimizer = bfp.AdamW(other.parameters(), lr=0.01)
    bfp.load_checkpoint(tmp_path, other, other_optimizer)
    assert_equal(everything(other, other_optimizer), everything(model, optimizer))


def _compiled(layer):
    return torch.compile(layer, backend="eager")


@pytest.mark.parametrize("wrap", [_compiled, checkpoint_wrapper, lambda layer: _compiled(checkpoint_wrapper(layer))])
def test_what_is_put_around_layers_stays_out_of_the_names_too(wrap, tmp_path):
    model, plain, other, nvfp4 = (model_of(recipe, seed) for seed, recipe in enumerate(["mxfp8"] * 3 + ["nvfp4"]))
    for wrapped in (model, other, nvfp4):
        wrapped[0] = wrap(wrapped[0])
    optimizers = [bfp.AdamW(each.parameters(), lr=0.01) for each in (model, plain, other)]
    train(model, optimizers[0], 0, 0, 1)
    bfp.save_checkpoint(tmp_path, model, optimizers[0], step=1)
    bfp.load_checkpoint(tmp_path, plain, optimizers[1])
    bfp.load_checkpoint(tmp_path, other, optimizers[2])
    assert_equal(everything(other, optimizers[2]), everything(model, optimizers[0]))
    assert_equal(
        dict(enumerate(everything(plain, optimizers[1]).values())), dict(enumerate(everything(model, optimizers[0]).values()))
    )
    with pytest.raises(BadCheckpoint, match=r"^0\.weight is nvfp4_16x16 in the model and mxfp8_e4m3_32x32 in the checkpoint"):
        bfp.load_checkpoint(tmp_path, nvfp4)
    bfp.load_checkpoint(tmp_path, nvfp4, requantize=True)


@threaded.on(1)
def test_what_ddp_puts_around_layers_stays_out_of_the_names_too(rank, tmp_path):
    """And only that: a layer may be called "module" itself."""
    models = [nn.ModuleDict({"module": model_of("mxfp8", seed)}) for seed in range(3)]
    for model in models[:2]:
        model["module"] = DistributedDataParallel(model["module"], init_sync=False)
    optimizers = [bfp.AdamW(model.parameters(), lr=0.01) for model in models]
    optimizers[0].make_state()
    bfp.save_checkpoint(tmp_path, models[0], optimizers[0], step=1)
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        bfp.load_checkpoint(tmp_path, model, optimizer)
        held = everything(model, optimizer).values()
        assert_equal(dict(enumerate(held)), dict(enumerate(everything(models[0], optimizers[0]).values())))


RECIPES = [None, "fp8_delayed", "fp8_current", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("theirs", RECIPES, ids=str)
def test_requantizing_between_recipes(theirs, tmp_path):
    """Buffers that only one of two recipes has stay as they are; a weight in fp32 is its own master."""

    def layer_of(recipe):
        torch.manual_seed(0)
        return nn.Linear(64, 64) if recipe is None else bfp.Linear(64, 64, recipe=recipe)

    layer = layer_of(theirs)
    optimizer = bfp.AdamW(layer.parameters(), lr=0.1)
    layer(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    bfp.save_checkpoint(tmp_path, layer, optimizer, step=1)
    master = optimizer.state[layer.weight].get("master", layer.weight.detach())
    for ours in RECIPES:
        other = layer_of(ours)
        other_optimizer = bfp.AdamW(other.parameters(), lr=0.1)
        bfp.load_checkpoint(tmp_path, other, other_optimizer, requantize=True)
        got = other_optimizer.state[other.weight].get("master", other.weight.detach())
        assert torch.equal(got, master)
        if ours is not None:
            codes = layer.weight.codes if ours == theirs else bfp.quantize(master, other.weight.format).codes
            assert torch.equal(other.weight.codes, codes)
        alone = layer_of(ours)
        bfp.load_checkpoint(tmp_path, alone, requantize=True)
        assert torch.equal(alone.bias, layer.bias)


def test_another_nominal_dtype_is_a_conversion_that_keeps_the_codes(tmp_path):
    layer, other = (bfp.Linear(64, 64, recipe="mxfp8", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    layer.bias = other.bias = None
    bfp.save_checkpoint(tmp_path, layer, step=1)
    both = (
        r"weight is mxfp8_e4m3_32x32 of torch\.float32 in the model and mxfp8_e4m3_32x32 of torch\.bfloat16 in the checkpoint"
    )
    with pytest.raises(BadCheckpoint, match=both):
        bfp.load_checkpoint(tmp_path, other)
    bfp.load_checkpoint(tmp_path, other, requantize=True)
    assert torch.equal(other.weight.codes, layer.weight.codes)
    assert other.weight.dtype == torch.float32


def test_state_dicts_without_the_codes_of_frozen_weights():
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    model, other, reference = (model_of("mxfp8", seed) for seed in (0, 1, 1))
    for each in (model, other):
        each[0].weight.requires_grad_(False)
    state = get_model_state_dict(model, options=options)
    assert "0.weight" not in state
    assert set_model_state_dict(other, dict(state), options=options).missing_keys == ["0.weight"]
    assert torch.equal(other[0].weight.codes, reference[0].weight.codes)
    assert torch.equal(other[2].linear.weight.codes, model[2].linear.weight.codes)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
        other.load_state_dict(state)


def test_saving_does_not_recompile():
    torch._dynamo.reset()
    layer = bfp.Linear(32, 32, recipe="mxfp8")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.ones(4, 32)
    compiled(x)
    layer.load_state_dict(layer.state_dict())
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)

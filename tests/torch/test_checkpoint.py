"""Checkpoints: saved on one mesh, loaded on another, with equal bits after more steps; saves that run as a program ends."""

import copy
import functools
import math
import subprocess
import sys

import pytest
import threaded
import torch
import torch.distributed.checkpoint as dcp
from blockfp.torch_backend.distributed_internals import dtensor_like
from blockfp.torch_backend.quantized_tensor.sharding import local_of, placed
from blockfp.torch_backend.weights.state_dict import stored
from held_formats import FORMATS
from processes import LIMIT, environment
from resumed import MESHES, assert_is_part_of, model_of, own, shard, train
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint
from blockfp.files import manifest

SHAPES = [(64, 128), (37, 40), (3, 64), (70, 128)]
"""Two that are cut along the blocks on some mesh, two that no mesh cuts evenly, and one of fewer rows than ranks."""

PAIRS = [(a, b) for a in MESHES for b in MESHES if "row" not in a + b]


def world(mesh):
    return 1 if MESHES[mesh] is None else math.prod(MESHES[mesh][0])


def optimizer_of(model, make=bfp.AdamW, **options):
    return make(model.parameters(), lr=0.1, key=7, **options)


@functools.lru_cache(maxsize=8)
def unsharded(format, steps, shapes, **options):
    model = model_of(format, shapes)
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, 0, steps)
    return model, optimizer


def save(rank, mesh, folder, format, shapes=SHAPES, **options):
    model = shard(model_of(format, shapes), mesh)
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, 0, 3)
    bfp.save_checkpoint(folder, model, optimizer, step=3, extra={"cursor": torch.arange(3), "epoch": 2, "name": "run"})


def load_and_go_on(rank, mesh, folder, format, shapes, options, references):
    model = shard(model_of(format, shapes, seed=50), mesh)
    optimizer = optimizer_of(model, **options)
    loaded = bfp.load_checkpoint(folder, model, optimizer)
    assert (loaded.step, loaded.extra["epoch"], loaded.extra["name"]) == (3, 2, "run")
    assert torch.equal(loaded.extra["cursor"], torch.arange(3))
    assert_is_part_of(model, optimizer, *references[0])
    train(model, optimizer, 3, 6)
    assert_is_part_of(model, optimizer, *references[1])


def check(folder, format, source, target, shapes=SHAPES, **options):
    references = [unsharded(format, steps, tuple(shapes), **options) for steps in (3, 6)]
    threaded.run(world(source), functools.partial(save, **options), source, folder, format, shapes)
    threaded.run(world(target), load_and_go_on, target, folder, format, shapes, options, references)


@pytest.mark.parametrize(("i", "format"), list(enumerate(FORMATS)), ids=str)
def test_every_format_goes_on_on_another_mesh(i, format, tmp_path):
    """Formats take turns at pairs of meshes: FSDP, HSDP, FSDP over TP; uneven, empty and straddling shards."""
    assert len(FORMATS) >= len(PAIRS)
    source, target = PAIRS[(7 * i + 3) % len(PAIRS)]
    check(tmp_path, format.name, source, target, SHAPES[1:])


@pytest.mark.parametrize(("source", "target"), [("fsdp4", "strided"), ("strided", "hsdp_tp"), ("hsdp", "one")])
def test_weights_that_are_cut_along_the_blocks_and_across(source, target, tmp_path):
    check(tmp_path, "nvfp4_16x16", source, target)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e4m3_128x128", "mxfp6_e3m2_32x32", "nvfp4"])
def test_cut_columns(format, tmp_path):
    """Tensor parallelism over columns, FSDP over rows."""
    shapes = [(64, 256), (3, 512)]
    check(tmp_path / "a", format, "row_parallel", "fsdp2", shapes)
    check(tmp_path / "b", format, "one", "row_parallel", shapes)


@pytest.mark.parametrize("options", [{"moments": "bfloat16"}, {"moments": "fp8"}, {"master": None}], ids=str)
def test_what_the_optimizer_keeps(options, tmp_path):
    check(tmp_path, "mxfp8_e4m3_32x32", "fsdp4", "hsdp", **options)


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ("fsdp4", "hsdp_tp", {}),
        ("strided", "row_parallel", {"adjust_lr_fn": "match_rms_adamw"}),
        ("one", "fsdp4", {"moments": "fp8"}),
        ("hsdp", "one", {"moments": "bfloat16", "master": None}),
    ],
    ids=str,
)
def test_muon_goes_on_on_another_mesh(source, target, options, tmp_path):
    check(tmp_path, "mxfp8_e4m3_32x32", source, target, [(64, 256), (37, 128), (3, 256)], make=bfp.Muon, **options)


def test_without_sharding_no_process_group_is_needed(tmp_path):
    save(0, "one", tmp_path, "mxfp8_e4m3")
    references = [unsharded("mxfp8_e4m3", steps, tuple(SHAPES)) for steps in (3, 6)]
    load_and_go_on(0, "one", tmp_path, "mxfp8_e4m3", SHAPES, {}, references)


@pytest.mark.parametrize("kind", ["AdamW", "torch's AdamW"])
def test_before_the_first_step(kind, tmp_path):
    """Saving leaves weights, gradients and originals as they are; it changes no later step, of this run or of a resumed one."""
    format = "nvfp4_16x16" if kind == "AdamW" else None
    models = [model_of(format, SHAPES, seed) for seed in (0, 0, 50)]
    make = optimizer_of if kind == "AdamW" else lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizers = [make(model) for model in models]
    for model in models:
        model[0].weight.initial = torch.ones(model[0].weight.shape) if format else None
        for param in model.parameters():
            param.grad = torch.ones(param.shape)
    bfp.save_checkpoint(tmp_path, models[1], optimizers[1], step=0)
    bfp.load_checkpoint(tmp_path, models[2], optimizers[2])
    assert not optimizers[1].state
    assert all(torch.equal(param.grad, torch.ones(param.shape)) for model in models for param in model.parameters())
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 0, 3)
    for i in (1, 2):
        for param, reference in zip(models[i].parameters(), models[0].parameters(), strict=True):
            entries = optimizers[0].state[reference]
            assert entries["step"] == 3
            assert all(torch.equal(optimizers[i].state[param][name], value) for name, value in entries.items())
        assert_is_part_of(models[i], None, models[0], None)


def test_a_state_dict_is_plain_tensors_and_shares_memory(tmp_path):
    model = model_of("nvfp4_16x16", SHAPES)
    state = model.state_dict()
    weight = model[1].weight
    assert {name for name in state if name.startswith("1.")} == {
        *("1.weight", "1.weight_codes", "1.weight_scale", "1.weight_tensor_scale", "1.weight_format_nvfp4_16x16"),
        *("1.bias", "1.input_amax_history", "1.input_scale", "1.rng_key", "1.step"),
    }
    assert state["1.weight_codes"].data_ptr() == weight.codes.data_ptr()
    assert state["1.weight_scale"].data_ptr() == weight.scales.data_ptr()
    assert state["1.weight"].shape == state["1.weight_format_nvfp4_16x16"].shape == (0, 37, 40)
    # Nobody computes with what stands under a weight's own name; otherwise it is a tensor, and a plain one in files.
    others = {name for name, value in state.items() if type(value) is not torch.Tensor}
    assert others == {name.removesuffix("_codes") for name in state if name.endswith("_codes")}
    assert state["1.weight"].numpy().shape == (0, 37, 40)
    assert state["1.weight"].tolist() == []
    torch.save(state, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    for one in (copy.deepcopy(state), saved):
        other = model_of("nvfp4_16x16", SHAPES, seed=50)
        assert other.load_state_dict(one) == ([], [])
        assert_is_part_of(other, None, model, None)


def test_assigning_takes_memory_and_keeps_parameters():
    model, other = model_of("mxfp4_e2m1", SHAPES), model_of("mxfp4_e2m1", SHAPES, seed=50)
    state, weight = model.state_dict(), other[0].weight
    held = weight.view_as(weight)
    with pytest.raises(ValueError, match=r"0\.weight is held by a result .*assign=False"):
        other.load_state_dict(state, assign=True)
    del held
    other.load_state_dict(state, assign=True)
    assert other[0].weight is weight
    assert weight.codes.data_ptr() == state["0.weight_codes"].data_ptr()
    assert_is_part_of(other, None, model, None)


@threaded.on(4)
def test_torchs_own_functions(rank, tmp_path):
    model = shard(model_of("fp8_e4m3_128x128", SHAPES), "strided")
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    other = shard(model_of("fp8_e4m3_128x128", SHAPES, seed=50), "fsdp4")
    state = get_model_state_dict(other)
    assert local_of(state["0.weight_codes"]).data_ptr() == local_of(other[0].weight).codes.data_ptr()
    # Blocks of 128 rows straddle all shards: one whole grid.
    assert tuple(local_of(state["0.weight_scale"]).shape) == (1, 1)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state)
    # A state dict of this mesh goes straight onto another.
    for name, value in get_model_state_dict(model).items():
        if "weight" in name:
            assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, _full(state[name])), name


def _full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@threaded.on(4)
def test_what_stays_on_the_cpu_is_placed_as_the_parameter_is(rank):
    param = shard(model_of("nvfp4", SHAPES), "strided")[0].weight
    scales = local_of(param).scales
    whole = torch.empty((64, 8), dtype=torch.uint8, device="meta")
    expected, got = placed(param, scales, (64, 8)), dtensor_like(param, scales, whole)
    assert got._spec == expected._spec
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert local_of(got).data_ptr() == scales.data_ptr()
    # torch saves a DTensor of shape () behind the training's back without copying it first.
    assert local_of(stored(param)["_tensor_scale"]).data_ptr() != local_of(param).tensor_scale.data_ptr()


def _wrong_format(rank, folder):
    model = shard(model_of("mxfp8_e5m2_32x32", SHAPES), "fsdp2")
    before = [local_of(layer.weight).codes.clone() for layer in model]
    state = get_model_state_dict(model)
    with pytest.raises(CheckpointException, match=r"weight_format_mxfp8_e5m2_32x32"):
        dcp.load({"model": state}, checkpoint_id=folder / "step-00000003")
    both = r"0\.weight is mxfp8_e5m2_32x32 in the model and mxfp8_e4m3_32x32 in the checkpoint"
    with pytest.raises(BadCheckpoint, match=both):
        bfp.load_checkpoint(folder, model)
    assert all(torch.equal(local_of(layer.weight).codes, old) for layer, old in zip(model, before, strict=True))


def test_another_format_is_refused_before_anything_is_changed(tmp_path):
    threaded.run(2, save, "fsdp2", tmp_path, "mxfp8_e4m3_32x32")
    threaded.run(2, _wrong_format, tmp_path)
    state = model_of("mxfp8_e4m3_32x32", SHAPES).state_dict()
    with pytest.raises(ValueError, match=r"0\.weight is mxfp8_e5m2 in the model and mxfp8_e4m3_32x32 in the loaded state"):
        model_of("mxfp8_e5m2", SHAPES).load_state_dict(state)
    with pytest.raises(ValueError, match=r"0\.weight is torch\.float32 in the model and mxfp8_e4m3_32x32 in the loaded state"):
        model_of(None, SHAPES).load_state_dict(state)
    del state["0.weight_scale"]
    with pytest.raises(ValueError, match=r"needs 0\.weight_scale, which"):
        model_of("mxfp8_e4m3_32x32", SHAPES).load_state_dict(state)


def _requantize(rank, mesh, folder, ours, with_optimizer, expected, values):
    model = shard(model_of(ours, SHAPES, seed=50), mesh)
    optimizer = optimizer_of(model) if with_optimizer else None
    bfp.load_checkpoint(folder, model, optimizer, requantize=True)
    assert_is_part_of(model, None, expected, None)
    if optimizer is not None:
        for layer, value in zip(model, values, strict=True):
            # A weight in fp32 is its own master.
            master = optimizer.state[layer.weight].get("master")
            assert master is None if ours is None else torch.equal(master, own(layer.weight, value))
    elif ours is not None:
        return local_of(model[0].weight).initial is not None


@pytest.mark.parametrize(
    ("theirs", "ours", "with_optimizer"),
    [
        ("mxfp8_e4m3_32x32", "nvfp4_16x16", True),
        ("fp8_e4m3_128x128", "fp8_e5m2", False),
        (None, "mxfp4_e2m1", False),
        ("nvfp4", None, False),
        (None, "mxfp8_e4m3_32x32", True),
        ("nvfp4", None, True),
    ],
)
def test_requantizing(theirs, ours, with_optimizer, tmp_path):
    """Equal to quantizing the whole of the masters, or of the values that the checkpoint has."""
    threaded.run(4, save, "strided", tmp_path, theirs)
    saved, optimizer = unsharded(theirs, 3, tuple(SHAPES))
    expected = model_of(ours, SHAPES)
    expected.load_state_dict({name: value for name, value in saved.state_dict().items() if "weight" not in name}, strict=False)
    masters = []
    for layer, there in zip(expected, saved, strict=True):
        values = optimizer.state[there.weight].get("master", there.weight.detach()) if with_optimizer else there.weight.detach()
        values = values.dequantize(torch.float32) if isinstance(values, bfp.QuantizedTensor) else values
        layer.weight = torch.nn.Parameter(values.clone() if ours is None else bfp.quantize(values, ours))
        masters.append(values)
    kept = threaded.run(4, _requantize, "fsdp4", tmp_path, ours, with_optimizer, expected, masters)
    if not with_optimizer and ours is not None:
        assert set(kept) == {theirs is None}


def test_what_does_not_fit_is_named(tmp_path):
    save(0, "one", tmp_path, "mxfp8_e4m3")
    model = model_of("mxfp8_e4m3", SHAPES[:3])
    with pytest.raises(BadCheckpoint, match=r"has beyond it 3\.bias, 3\.input_amax_history"):
        bfp.load_checkpoint(tmp_path, model)
    with pytest.raises(BadCheckpoint, match=r"lacks 4\.bias"):
        bfp.load_checkpoint(tmp_path, model_of("mxfp8_e4m3", [*SHAPES, (4, 4)]))
    with pytest.raises(BadCheckpoint, match=r"model\.0\.weight has shape \(64, 128\) in the checkpoint and \(65, 128\) here"):
        bfp.load_checkpoint(tmp_path, model_of("mxfp8_e4m3", [(65, 128), *SHAPES[1:]]))
    bfp.save_checkpoint(tmp_path / "alone", model, step=1)
    with pytest.raises(BadCheckpoint, match=r"holds no optimizer"):
        bfp.load_checkpoint(tmp_path / "alone", model, optimizer_of(model))
    empty = model_of("mxfp8_e4m3", SHAPES).to("meta")
    with pytest.raises(BadCheckpoint, match=r"is on the meta device"):
        bfp.load_checkpoint(tmp_path, empty)


FULL = """
import atexit, resource, signal, sys
from torch import nn
import blockfp.torch as bfp

atexit.register(print, "others' exit handlers have run")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
saving = bfp.save_checkpoint(sys.argv[1], nn.Linear(64, 128), step=3, wait=False)
print("the training ends")
if len(sys.argv) > 2:
    try:
        saving.wait()
    except OSError:
        print("told")
"""

DESTROYED = """
import sys, time
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import blockfp.torch as bfp
from blockfp.torch_backend.checkpoint import checkpoint_files

def late(*args):
    time.sleep(0.5)
    return original(*args)

original, checkpoint_files.write = checkpoint_files.write, late
run, store, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
model = fully_shard(bfp.convert(nn.Linear(64, 64), "mxfp8"))
bfp.save_checkpoint(run, model, step=2, wait=False)
dist.destroy_process_group()
"""


def started(program, *arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=environment(), **pipes)


def test_a_save_that_fails_at_the_end(tmp_path):
    """On stderr at once and once more, and in the exit status, which leaves out nobody's exit handlers."""
    unheard, heard = started(FULL, tmp_path / "run"), started(FULL, tmp_path / "other", "waits")
    out, err = unheard.communicate(timeout=LIMIT)
    assert unheard.returncode == 120, err
    assert out.splitlines() == ["the training ends", "others' exit handlers have run"]
    at_once, at_the_end = (line for line in err.splitlines() if line.startswith("blockfp: "))
    assert "run/step-00000003 was not saved: rank 0: OSError: [Errno 27] writing: File too large" in at_once
    assert "run/step-00000003 was not saved when the program ended, and nobody has called wait()" in at_the_end
    assert not list((tmp_path / "run").iterdir())
    out, err = heard.communicate(timeout=LIMIT)
    assert (heard.returncode, out.splitlines()[1]) == (0, "told"), err


def test_ranks_that_leave_their_process_group(tmp_path):
    """As every script for torchrun ends; the save goes on without the group."""
    ranks = [started(DESTROYED, tmp_path / "run", tmp_path / "store", rank) for rank in range(2)]
    for rank in ranks:
        _, err = rank.communicate(timeout=LIMIT)
        assert rank.returncode == 0, err
    assert manifest.steps(tmp_path / "run") == [2]
    model = bfp.convert(torch.nn.Linear(64, 64), "mxfp8")
    assert bfp.load_checkpoint(tmp_path / "run", model).step == 2

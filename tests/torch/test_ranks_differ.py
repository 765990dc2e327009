"""Ranks that were called with different things, or hold different weights: the same error on all of them, and nothing lost."""

import math
import os
import re
import shutil
import warnings
from pathlib import Path
from unittest import mock

import gloo
import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.optimizer import clipping
from blockfp.torch_backend.quantized_tensor import agreement
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from resumed import model_of, shard
from small_model import Side, device_mesh, inputs_for, quantized, weights_for
from torch import nn
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp.errors import BadCheckpoint
from blockfp.files import manifest, publishing

SHAPES = [(64, 128), (37, 40)]
FORMAT = "mxfp8_e4m3_32x32"


def raised(action, error, match):
    """Asserts that this rank raises what the others do."""
    with pytest.raises(error, match=match) as caught:
        action()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, str(caught.value))
    assert len(set(everyones)) == 1, everyones
    return caught.value


def side(format, shapes=((50, 64),)):
    return Side(quantized(weights_for(list(shapes)), format))


def saves(rank):
    run, elsewhere = Path(os.environ["RUN"]) / "run", Path(os.environ["RUN"]) / "elsewhere"
    model, other = model_of(FORMAT, SHAPES), model_of("mxfp8_e5m2_32x32", SHAPES)
    bfp.save_checkpoint(run, model, step=1)
    mine = rank == 1
    for arguments, match in (
        ({"folder": elsewhere if mine else run}, r"the checkpoint is \S*/run/step-00000002 on rank 0 and \S*/elsewhere/step-"),
        ({"step": 3 if mine else 2}, r"step-00000002 on rank 0 and \S*step-00000003 on rank 1"),
        ({"keep": 2 if mine else 1}, "keep is 1 on rank 0 and 2 on rank 1"),
        ({"wait": mine}, "wait is False on rank 0 and True on rank 1"),
        ({"model": other if mine else model}, r"0\.weight is mxfp8_e4m3_32x32 of shape .* and mxfp8_e5m2_32x32 of"),
        ({"model": model_of(FORMAT, [(64, 128), (38, 40)]) if mine else model}, r"\(37, 40\) .* on rank 0 and .*\(38, 40\)"),
        (
            {"model": nn.ModuleDict({"layer": bfp.Linear(32, 32, recipe="fp8_current" if mine else "fp8_delayed")})},
            "recipe of layer is fp8_delayed",
        ),
    ):
        given = {"folder": run, "model": model, "step": 2, "keep": 1} | arguments
        raised(lambda given=given: bfp.save_checkpoint(**given), ValueError, match)
        assert [path.name for path in run.iterdir()] == ["step-00000001"]
    # What is saved once, though each rank has its own.
    for one, other, match in (
        (3, 4, r"extra\['own'\] is 3 on rank 0 and 4 on rank 1"),
        ("a" * 500, "a" * 499 + "b", r"a \.\. with SHA-256 .* on rank 0 and .*a \.\. with SHA-256"),
        (torch.zeros(3), torch.ones(3), r"torch\.float32 of shape \(3,\) with SHA-256 .* on rank 0 and torch\.float32"),
        (torch.zeros(3), torch.zeros(4), r"torch\.float32 of shape \(3,\) .* and torch\.float32 of shape \(4,\)"),
        (torch.zeros(3), 0, r"torch\.float32 of shape \(3,\) .* and 0 on rank 1"),
    ):
        own = {"own": other if mine else one, "alike": torch.full((2,), torch.nan)}
        raised(lambda own=own: bfp.save_checkpoint(run, model, step=2, extra=own), ValueError, match)
    for settings, match in (
        ({"lr": 0.2}, r"optimizer\.param_groups\[0\]\['lr'\] is 0\.1 on rank 0 and 0\.2 on rank 1"),
        ({"lr": torch.tensor(0.25)}, r"\['lr'\] is 0\.1 on rank 0 and 0\.25 on rank 1"),
        ({"key": 7}, r"\['key'\] is \(0, 0\) on rank 0 and .* on rank 1"),
        ({"moments": "bfloat16"}, r"\['moments'\] is 'float32' on rank 0 and 'bfloat16' on rank 1"),
        ({"master": None}, r"\['master'\] is 'float32' on rank 0 and None on rank 1"),
    ):
        optimizer = bfp.AdamW(model.parameters(), **({"lr": 0.1} | (settings if mine else {})))
        raised(lambda optimizer=optimizer: bfp.save_checkpoint(run, model, optimizer, step=2), ValueError, match)
        raised(lambda optimizer=optimizer: bfp.load_checkpoint(run, model, optimizer), ValueError, match)
    weights = bfp.Linear(32, 32, recipe="mxfp8", weights="high_precision" if mine else "quantized")
    match = r"weight is mxfp8_e4m3_32x32 of .* on rank 0 and in high precision, cast to mxfp8_e4m3_32x32, of"
    raised(lambda: bfp.save_checkpoint(run, weights, step=2), ValueError, match)
    match = "the function that was called is save_checkpoint on rank 0 and load_checkpoint on rank 1"
    raised(lambda: bfp.load_checkpoint(run, model) if mine else bfp.save_checkpoint(run, model, step=2), ValueError, match)
    # Each rank's own has a name of its own.
    bfp.save_checkpoint(run, model, step=2, extra={f"cursor.{rank}": rank, "alike": float("nan")})
    loaded = bfp.load_checkpoint(run, model).extra
    assert (loaded["cursor.0"], loaded["cursor.1"]) == (0, 1)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(run / "step-00000002")
    dist.barrier()
    # What only one of them raises.
    extra = {"cursor": {}} if mine else {}
    raised(lambda: bfp.save_checkpoint(run, model, step=2, extra=extra), TypeError, r"extra\['cursor'\] must be a tensor")
    optimizer = bfp.AdamW((model_of(FORMAT, SHAPES) if mine else model).parameters(), lr=0.1)
    raised(
        lambda: bfp.save_checkpoint(run, model, optimizer, step=2),
        ValueError,
        r"optimizer's parameter 0, .* isn't one of the model's",
    )
    assert [path.name for path in run.iterdir()] == ["step-00000001"]
    assert not elsewhere.exists()
    own_disks(rank, run, elsewhere, model)


def keys_differ(rank):
    """Ranks that were not seeded alike drew different keys; a checkpoint has one."""
    torch.manual_seed(rank)
    layers = nn.ModuleDict({"first": bfp.Linear(32, 32, recipe="mxfp8"), "second": bfp.Linear(32, 32, recipe="nvfp4")})
    options = {"folder": Path(os.environ["RUN"]) / "run", "model": layers}
    with pytest.warns(UserWarning, match=rf"key of second\.rng_key is .* on rank {rank} and .* on rank {1 - rank}, and a"):
        bfp.save_checkpoint(**options, step=1)
    layers["second"].rng_key.copy_(torch.tensor([1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bfp.save_checkpoint(**options, step=2)


def own_disks(rank, run, elsewhere, model):
    """A rank whose folder of the same name is on another disk: the checkpoint lacks its file, and step 1 stays."""

    sharded, original = shard(model_of(FORMAT, SHAPES), "fsdp2"), publishing.Draft

    def draft(checkpoint, folder):
        return original(checkpoint, (elsewhere if rank == 1 else run) / folder.name)

    with mock.patch.object(publishing, "Draft", draft):
        for wait in (True, False):
            raised(
                lambda wait=wait: bfp.save_checkpoint(run, sharded, step=2, keep=1, wait=wait).wait(),
                OSError,
                r"step-00000002 was not saved: .*__1_0\.distcp: No such file.* a shared file system",
            )
            dist.barrier()
            assert [path.name for path in run.iterdir()] == ["step-00000001"]
            assert not list(elsewhere.iterdir())
    assert bfp.load_checkpoint(run, model).step == 1
    assert bfp.save_checkpoint(run, model, step=2, keep=1).wait().name == "step-00000002"


def loads(rank):
    run = Path(os.environ["RUN"]) / "run"
    model, other = model_of(FORMAT, SHAPES), model_of("mxfp8_e5m2_32x32", SHAPES)
    optimizer = bfp.AdamW(model.parameters(), lr=0.1)
    for step in (1, 2):
        bfp.save_checkpoint(run, model, optimizer, step=step)
    mine = rank == 1
    for arguments, match in (
        ({"folder": run / "step-00000002" if mine else run}, r"the run's folder is \S*/run on rank 0 and \S*/step-00000002"),
        ({"step": 2 if mine else 1}, "step is 1 on rank 0 and 2 on rank 1"),
        ({"requantize": mine}, "requantize is False on rank 0 and True on rank 1"),
        ({"optimizer": optimizer if mine else None}, "optimizer is NoneType on rank 0 and AdamW on rank 1"),
        ({"model": other if mine else model}, r"0\.weight is mxfp8_e4m3_32x32 of shape .* and mxfp8_e5m2_32x32 of"),
    ):
        given = {"folder": run, "model": model} | arguments
        raised(lambda given=given: bfp.load_checkpoint(**given), ValueError, match)
    # Found out by one rank alone, whose optimizer has other groups.
    first, *rest = model.parameters()
    optimizer = bfp.AdamW([{"params": [first]}, {"params": rest}] if mine else model.parameters(), lr=0.1)
    raised(lambda: bfp.load_checkpoint(run, model, optimizer), BadCheckpoint, "has the optimizer's parameters in other groups")
    assert bfp.load_checkpoint(run, model).step == 2


@pytest.mark.parametrize("function", ["saves", "loads", "keys_differ"])
def test_ranks_of_a_checkpoint(function, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN", str(tmp_path))
    gloo.run(2, __file__, function)


PAIRS = (
    ("fp8_e4m3", "fp8_e5m2"),
    ("mxfp8_e4m3_32x32", "mxfp8_e4m3_32x32_floor"),
    ("mxfp8_e4m3", "mxfp4_e2m1"),
    ("nvfp4_16x16", "mxfp8_e4m3_32x32"),
)


@gloo.on(2)
def test_ranks_of_a_first_gather(rank):
    for formats in PAIRS:
        model = side(formats[rank])
        fully_shard(model, mesh=device_mesh((2,)))
        match = rf"layers\.0\.weight is {formats[0]} of shape \(50, 64\) .* on rank 0 and {formats[1]} of shape"
        raised(lambda model=model: model(inputs_for(0, 64)), ValueError, match)
    for recipes in (("fp8_current", "fp8_delayed"), ("mxfp8", "nvfp4")):
        for weights in ("quantized", "high_precision"):
            layer = bfp.Linear(64, 64, recipe=recipes[rank], weights=weights)
            fully_shard(layer, mesh=device_mesh((2,)))
            match = rf"recipe {recipes[0]} .*on rank 0 and .*recipe {recipes[1]} "
            raised(lambda layer=layer: layer(torch.ones(2, 64)), ValueError, match)
    # One of them has its weights in high precision.
    layers = nn.Sequential(
        bfp.Linear(64, 64, recipe="mxfp8"), nn.Linear(64, 64) if rank else bfp.Linear(64, 64, recipe="mxfp8")
    )
    fully_shard(layers, mesh=device_mesh((2,)))
    raised(lambda: layers(torch.ones(2, 64)), ValueError, r"1\.weight is mxfp8_e4m3_32x32 .* and in high precision of")


@pytest.mark.parametrize(("shape", "odd"), [((2, 2), 2), ((2, 2), 3), ((4,), 3)])
def test_also_replicas_and_empty_ranks(shape, odd):
    """HSDP's replicas hold the same weights, and a rank without a row of a weight knows its format all the same."""

    def rank_main(rank):
        model = side("fp8_e5m2" if rank == odd else "fp8_e4m3", [(2, 64), (1, 32)])
        fully_shard(model, mesh=device_mesh(shape))
        model(inputs_for(0, 64))

    for error in threaded.errors(4, rank_main):
        assert isinstance(error, ValueError), error
        assert "layers.0.weight is fp8_e4m3 of shape (2, 64) and torch.float32 on rank 0 and fp8_e5m2 of" in str(error)
        assert f"on rank {odd}:" in str(error)


def test_one_reduction_for_a_group_of_parameters_and_none_after_the_first_step():
    """With rows that end unevenly FSDP2 replaces the local tensor at the first gather; what it knows a parameter by stays."""
    counted = []
    original = agreement.agree

    def agree(groups, kinds, *more):
        counted.append((dist.get_rank(), *kinds))
        return original(groups, kinds, *more)

    def rank_main(rank):
        model = side("mxfp8_e4m3_32x32", [(50, 64), (33, 64), (1, 64)])
        fully_shard(model.layers[2], mesh=device_mesh((4,)))
        fully_shard(model, mesh=device_mesh((4,)))
        for _ in range(3):
            model(inputs_for(rank, 64)).backward()

    with mock.patch.object(agreement, "agree", agree):
        threaded.run(4, rank_main)
    groups = (("layers.0.weight", "layers.1.weight"), ("layers.2.weight",))
    assert sorted(counted) == sorted((rank, *group) for rank in range(4) for group in groups)


def trained(rank, shape=(2,), recipe="mxfp8"):
    """A layer under FSDP2 or HSDP, after a backward."""
    with threaded.seeded(0):
        layer = bfp.Linear(64, 64, recipe=recipe)
    fully_shard(layer, mesh=device_mesh(shape))
    layer(inputs_for(rank, 64)).sum().backward()
    return layer


def all_raise(world, match, action):
    """Asserts that all ranks raise the same ValueError."""
    found = threaded.errors(world, action)
    assert len({str(error) for error in found}) == 1, found
    assert all(isinstance(error, ValueError) for error in found), found
    assert re.search(match, str(found[0])), found[0]


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize(
    ("setting", "one", "other"),
    [
        ("lr", 0.1, 0.2),
        ("key", 0, 5),
        ("moments", "float32", "fp8"),
        ("betas", (0.9, 0.99), (0.9, 0.9)),
        ("master", "float32", None),
    ],
)
def test_settings_of_an_optimizer(shape, setting, one, other):
    """Replicas, and shards, would part: with the first step all ranks are told, and no parameter is changed."""
    last = math.prod(shape) - 1

    def rank_main(rank):
        layer = trained(rank, shape)
        optimizer = bfp.AdamW(layer.parameters(), **{setting: other if rank == last else one})
        before = {name: local_of(param).detach().clone() for name, param in layer.named_parameters()}
        try:
            optimizer.step()
        finally:
            assert all(torch.equal(local_of(param), before[name]) for name, param in layer.named_parameters() if name == "bias")
            assert not optimizer.state

    all_raise(
        last + 1, rf"param_groups\[0\]\['{setting}'\] is .* on rank 0 and .* on rank {last}: it must be the same", rank_main
    )


def test_one_reduction_of_settings_in_the_first_step():
    counted = []
    original = agreement.agree

    def agree(*arguments):
        counted.append(dist.get_rank())
        return original(*arguments)

    def rank_main(rank):
        layer = trained(rank)
        optimizer = bfp.AdamW(layer.parameters(), lr=0.1)
        counted.clear()
        dist.barrier()
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()

    with mock.patch.object(agreement, "agree", agree):
        threaded.run(2, rank_main)
    assert sorted(counted) == [0, 1]


@pytest.mark.parametrize("later", [False, True])
def test_what_gradients_are_clipped_to(later):
    def rank_main(rank):
        layer = trained(rank)
        if later:
            assert bfp.clip_grad_norm_(layer.parameters(), 1.0).isfinite()
        bfp.clip_grad_norm_(layer.parameters(), 1.0 + rank)

    all_raise(2, "max_norm is 1.0 on rank 0 and 2.0 on rank 1: it must be the same on all", rank_main)


def test_on_a_gpu_that_is_not_asked_a_norm_of_different_limits_is_nan(monkeypatch):
    """As where a rank's limit is the one that it was, and another rank's isn't."""
    monkeypatch.setattr(clipping, "_asks", lambda *_: False)

    def rank_main(rank):
        layer = trained(rank)
        norm = bfp.clip_grad_norm_(layer.parameters(), 1.0)
        assert norm.isfinite()
        assert bfp.clip_grad_norm_(layer.parameters(), 1.0 + rank).isnan()
        assert all(local_of(param.grad).isnan().all() for param in layer.parameters())

    threaded.run(2, rank_main)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_recipes_that_are_set_later(weights):
    """Of activations alone, and of weights."""
    for before, after in (("fp8_current", ("fp8_current", "fp8_delayed")), ("mxfp8", ("fp8_block", "mxfp4"))):

        def rank_main(rank, before=before, after=after):
            layer = bfp.Linear(64, 64, recipe=before, weights=weights)
            fully_shard(layer, mesh=device_mesh((2,)))
            try:
                bfp.set_recipe(layer, None, after[rank])
            finally:
                assert str(layer.recipe) == before

        match = rf"the new recipe of the model is {after[0]} .* on rank 0 and {after[1]} .* on rank 1: call set_recipe with"
        all_raise(2, match, rank_main)


def a_protected_surplus(rank):
    """Removing fails, which is said with the path, and saving goes on."""
    run = Path(os.environ["RUN"]) / "run"
    model = model_of(FORMAT, SHAPES)
    for step in (1, 2, 3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with mock.patch.object(publishing, "_delete", mock.Mock(side_effect=OSError(39, "Directory not empty"))):
                bfp.save_checkpoint(run, model, step=step, keep=1)
        there = [str(one.message) for one in said if "can't be removed" in str(one.message)]
        if rank == 0 and step > 1:
            assert any(f"step-0000000{step - 1} is surplus and can't be removed: [Errno 39]" in text for text in there), there
        if rank == 0 and step > 2:
            left = r"\.step-00000001\.\w+\.old is left over from an earlier save and can't be removed"
            assert any(re.search(left, text) for text in there), there
    assert manifest.steps(run) == [3]


def test_a_surplus_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN", str(tmp_path))
    gloo.run(2, __file__, "a_protected_surplus")

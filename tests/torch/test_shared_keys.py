"""Ranks of FSDP2 that drew different random keys: all take the first rank's before a bit of it is drawn, and save it."""

import itertools
import math
from unittest import mock

import pytest
import threaded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blockfp.torch_backend.modules import stateful_layer
from blockfp.torch_backend.quantized_tensor import agreement
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import Cast

# Axes of a mesh, their sizes (of one, all ranks), and the axes that `fully_shard` gets.
MESHES = {
    "fsdp": (("shards",), None, ("shards",)),
    "hsdp": (("replicas", "shards"), (2, 2), ("replicas", "shards")),
    "replicas": (("replicas", "shards"), (2, 1), ("replicas", "shards")),
    "tp": (("dp", "tp"), (2, 2), ("dp",)),
    "tp before": (("tp", "dp"), (2, 2), ("dp",)),
}


def drawn(seed):
    """The keys that a process of this seed would draw for two layers."""
    with threaded.seeded(seed):
        return [bfp.random_key().tolist() for _ in range(2)]


def model_of(rank, weights="quantized", recipe="nvfp4"):
    """A model whose values are alike on all ranks, and whose keys are the rank's own."""
    with threaded.seeded(0):
        model = nn.Sequential(*(bfp.Linear(64, 64, recipe=recipe, weights=weights) for _ in range(2)))
    for layer, key in zip(model, drawn(rank), strict=True):
        if layer.rng_key is not None:
            layer.rng_key.copy_(torch.tensor(key))
    return model


def shard(model, kind="fsdp"):
    axes, sizes, given = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=axes)
    if "tp" in axes:
        bfp.parallelize(model, mesh["tp"], {"0": "column", "1": "row"})
    for layer in model:
        fully_shard(layer, mesh=mesh[given])
    return fully_shard(model, mesh=mesh[given])


def keys_of(model):
    return [buffer.tolist() for name, buffer in model.named_buffers() if name.endswith("rng_key")]


def inputs(rank, step=0):
    return torch.randn((8, 64), generator=torch.Generator().manual_seed(100 * step + rank))


def step(model, rank, number=0):
    model.zero_grad()
    model(inputs(rank, number)).square().sum().backward()


def gradients(model):
    return [param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad for param in model.parameters()]


def after_a_forward(rank, kind, weights):
    model = shard(model_of(rank, weights), kind)
    with torch.no_grad():
        model(inputs(0))
    assert [layer.step.item() for layer in model] == [0, 0]
    return keys_of(model)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("kind", MESHES)
def test_the_first_gather_gives_all_ranks_the_first_ones_keys(kind, weights):
    world = math.prod(MESHES[kind][1] or (2,))
    assert threaded.run(world, after_a_forward, kind, weights) == [drawn(0)] * world


def test_gradients_are_rounded_by_the_first_ranks_keys(monkeypatch):
    """One process with these keys, which folds each rank in turn, gives the same bits; two terms have one sum."""

    def rank_main(rank):
        model = shard(model_of(rank))
        for number in range(2):
            step(model, rank, number)
        return gradients(model)

    total = None
    for rank in range(2):
        model = model_of(0)
        monkeypatch.setattr(stateful_layer, "data_rank", lambda _, rank=rank: rank)
        for number in range(2):
            step(model, rank, number)
        found = gradients(model)
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    monkeypatch.undo()
    for found in threaded.run(2, rank_main):
        assert all(torch.equal(got, want / 2) for got, want in zip(found, total, strict=True))


class Tied(nn.Module):
    """A layer after another with the same weight and a key of its own, grouped experts, and what has layers inside."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (bfp.Linear(64, 64, recipe="nvfp4") for _ in range(2))
        self.second.weight = self.first.weight
        self.groups = bfp.GroupedLinear(2, 64, 64, recipe="nvfp4")
        self.mlp = bfp.LayerNormMLP(64, 64, recipe="nvfp4")
        self.attention = bfp.MultiheadAttention(64, 2, recipe="nvfp4")

    def forward(self, x):
        x = self.groups(self.second(self.first(x)), torch.tensor([3, 5], dtype=torch.int32))
        return self.attention(self.mlp(x)[None])


def test_keys_of_all_kinds_of_layers():
    def rank_main(rank):
        with threaded.seeded(rank):
            model = Tied()
        own = keys_of(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            model(inputs(rank))
        return own, keys_of(model)

    (first, one), (second, other) = threaded.run(2, rank_main)
    assert one == other == first
    assert not [key for key in second if key in first]
    assert len(first) > 6


def test_models_from_the_meta_device_and_layers_that_are_reset_later(monkeypatch):
    """What a layer draws anew is shared anew, by the next gather of its weight alone."""
    # Resetting NVFP4's weights takes a reduction, under which threads can't hold the generator.
    count = itertools.count()
    monkeypatch.setattr(stateful_layer, "random_key", lambda: torch.tensor([next(count), dist.get_rank()]))

    def rank_main(rank):
        with torch.device("meta"):
            model = shard(nn.Sequential(*(bfp.Linear(64, 64, recipe="nvfp4") for _ in range(2))))
        model.to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()
        own = [keys_of(model)]
        step(model, rank)
        found = [keys_of(model)]
        model[1].reset_parameters()
        own.append(keys_of(model))
        step(model, rank)
        return own, [*found, keys_of(model)]

    (first, one), (second, other) = threaded.run(2, rank_main)
    assert one == other == first
    assert first[0] != second[0]
    assert first[0][0] == first[1][0]
    assert first[0][1] != first[1][1] != second[1][1]


def test_reductions_in_the_first_step_alone_and_none_without_random_bits():
    """Two groups of parameters, each with one comparison and, if the recipe draws random bits, its keys."""
    counted = []
    original = agreement.max_reduce

    def max_reduce(tensor, groups):
        counted.append((dist.get_rank(), tuple(tensor.shape)))
        return original(tensor, groups)

    def rank_main(rank, recipe, expected):
        model = shard(model_of(rank, recipe=recipe))
        for number in range(3):
            step(model, rank, number)
            assert [shape for one, shape in counted if one == rank] == expected

    with mock.patch.object(agreement, "max_reduce", max_reduce):
        for recipe, expected in (("mxfp8", [(2,), (2,)]), ("nvfp4", [(2,), (1, 2), (2,), (1, 2)])):
            counted.clear()
            threaded.run(2, rank_main, recipe, expected)


def test_a_key_that_one_rank_lacks_is_told():
    def rank_main(rank):
        compute = "high_precision" if rank else "quantized"
        with threaded.seeded(0):
            model = bfp.Linear(64, 64, recipe="nvfp4", compute=compute)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model(inputs(rank))

    for error in threaded.errors(2, rank_main):
        assert isinstance(error, ValueError), error
        assert "random keys: 1 on rank 0 and nvfp4_16x16 of shape (64, 64)" in str(error)


def stepped(model, number):
    """Gradients of a batch of four units on any number of ranks."""
    model.zero_grad()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    bfp.Reproducible(model, 4, mesh).backward(lambda unit: model(inputs(unit, number)).square().sum())
    return gradients(model)


def run_and_save(rank, folder):
    """Two steps, of which torch's own function saves the first."""
    model = shard(model_of(rank))
    stepped(model, 0)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    return stepped(model, 1)


def resume(rank, folder, gathered):
    """The second step of ranks that began with other keys, where they have already shared one and where they haven't."""
    model = shard(model_of(7 + rank))
    if gathered:
        stepped(model, 0)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    assert keys_of(model) == drawn(0)
    found = stepped(model, 1)
    assert keys_of(model) == drawn(0)
    return found


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_runs_go_on_from_torchs_checkpoints_on_any_number_of_ranks(ranks, gathered, tmp_path):
    first = threaded.run(2, run_and_save, tmp_path)
    for found in threaded.run(ranks, resume, tmp_path, gathered):
        assert all(torch.equal(got, want) for got, want in zip(found, first[0], strict=True))


@pytest.mark.parametrize("recipe", ["nvfp4", recipes.nvfp4().replace(weight=Cast(None))])
def test_a_checkpoint_before_the_first_step_has_the_first_ranks_keys(recipe, tmp_path):
    """Of weights that FSDP2 gathers in high precision, which no gather tells, too."""

    def rank_main(rank):
        model = shard(model_of(rank, recipe=recipe))
        bfp.save_checkpoint(tmp_path, model, step=0)
        saved = keys_of(model)
        step(model, rank)
        return saved, keys_of(model)

    assert threaded.run(2, rank_main) == [(drawn(0), drawn(0))] * 2
    alone = model_of(5, recipe=recipe)
    bfp.load_checkpoint(tmp_path, alone)
    assert keys_of(alone) == drawn(0)


def test_a_checkpoint_of_some_ranks_does_not_wait_for_others(tmp_path):
    """One replica saves before the first step, and warns, as the other one isn't there to share a key."""

    def rank_main(rank):
        model = shard(model_of(rank), "hsdp")
        if rank < 2:
            bfp.save_checkpoint(tmp_path, model, step=0, process_group=model[0].weight.device_mesh.get_group("shards"))

    *savers, third, fourth = threaded.errors(4, rank_main)
    assert all("0.rng_key is" in str(error) and "a checkpoint keeps one" in str(error) for error in savers), savers
    assert third is fourth is None

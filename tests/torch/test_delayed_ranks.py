"""Delayed scaling over ranks, and its step by one kernel for all operands, which the definition carries out."""

import contextlib
import threading
from inspect import signature as signature_of
from unittest import mock

import emulated_cuda
import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.linear import delayed
from blockfp.torch_backend.ops.optimizer import cuda_steps
from blockfp.torch_backend.torch_internals import version_of
from delayed_models import two_layers
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import bits, scaling
from blockfp.formats import E4M3, E5M2
from blockfp.kernels import cuda_library
from blockfp.recipes import Cast


def sharded(rank, shape):
    """Every rank ends with the scales of the largest amax of all."""
    names = ("replicas", "shards")[-len(shape) :]
    model = two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    model(values((4, 32), rank, scale=10.0**rank)).sum().backward()
    bfp.update_scales(model)
    return [buffer.clone() for buffer in model.buffers()]


def stepped(rank, shape):
    """The same, whole weights still in place when the optimizer steps."""
    model = two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]))
    model.set_reshard_after_backward(False)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
    model(values((4, 32), rank, scale=10.0**rank)).sum().backward()
    optimizer.step()
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("how", ["by hand", "by the optimizer"])
def test_ranks_share_scales(how, shape):
    results = threaded.run(4, sharded if how == "by hand" else stepped, shape)
    largest = max(values((4, 32), rank, scale=10.0**rank).abs().max() for rank in range(4))
    for buffers in results:
        assert_equal(buffers, results[0])
        assert buffers[1] == torch.tensor(448.0) / largest
        assert buffers[0][-1] == largest


def by_hand(rank, shape):
    """Two steps that no optimizer takes, and the forward that sees the last of them."""
    with threaded.seeded(0):
        model = nn.Sequential(*(bfp.Linear(32, 32, recipe="fp8_delayed", weights="high_precision") for _ in range(2)))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]))
    for step in range(3):
        y = model(values((4, 32), 10 * step + rank, scale=10.0**rank))
        if step < 2:
            y.sum().backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-1e-3)
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_ranks_share_scales_after_steps_by_hand(shape):
    results = threaded.run(4, by_hand, shape)
    amaxes = [max(values((4, 32), 10 * step + rank, scale=10.0**rank).abs().max() for rank in range(4)) for step in range(2)]
    for buffers in results:
        for a, b in zip(buffers, results[0], strict=True):
            # Of the last forward each rank has its own amax still.
            assert torch.equal(a[1:], b[1:]) if a.ndim else torch.equal(a, b)
        assert buffers[1] == torch.tensor(448.0) / max(amaxes)
        assert buffers[0][-2:].tolist() == amaxes


# Which model's forward runs is known to DDP once for the process: ranks that are threads take turns.
DDP_FORWARD = threading.Lock()


def replicated(rank):
    with threaded.seeded(0):
        layer = bfp.Linear(32, 24, recipe="fp8_delayed")
    with pytest.raises(ValueError, match="forward_sync_buffers=False"):
        bfp.update_scales(DistributedDataParallel(layer, init_sync=False))
    apart = next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in signature_of(DistributedDataParallel).parameters
    )
    model = DistributedDataParallel(bfp.Linear(32, 24, recipe="fp8_delayed"), init_sync=False, **{apart: False})
    with DDP_FORWARD:
        y = model(values((4, 32), rank, scale=10.0**rank))
    y.sum().backward()
    bfp.update_scales(model)
    return model.module.input_scale.clone()


def test_ddp_shares_scales():
    results = threaded.run(2, replicated)
    largest = max(values((4, 32), rank, scale=10.0**rank).abs().max() for rank in range(2))
    assert results[0] == results[1] == torch.tensor(448.0) / largest


def replicated_steps(rank, broadcasts):
    with threaded.seeded(0):
        layer = bfp.Linear(32, 24, recipe="fp8_delayed")
    optimizer = bfp.AdamW(layer.parameters(), lr=1e-3)
    apart = next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in signature_of(DistributedDataParallel).parameters
    )
    model = DistributedDataParallel(layer, init_sync=False, **{apart: broadcasts})
    with DDP_FORWARD:
        y = model(values((4, 32), rank, scale=10.0**rank))
    y.sum().backward()
    codes = layer.weight.codes.clone()
    if broadcasts:
        with pytest.raises(ValueError, match="forward_sync_buffers=False"):
            optimizer.step()
        assert torch.equal(layer.weight.codes, codes)
        return None
    optimizer.step()
    return layer.input_scale.clone()


def test_ddp_shares_scales_without_a_call():
    results = threaded.run(2, replicated_steps, False)
    largest = max(values((4, 32), rank, scale=10.0**rank).abs().max() for rank in range(2))
    assert results[0] == results[1] == torch.tensor(448.0) / largest
    assert threaded.run(1, replicated_steps, False)


RECIPES = (
    recipes.fp8_delayed(),
    recipes.fp8_delayed(history=1),
    recipes.fp8_delayed(history=3, margin=2),
    recipes.fp8_delayed(history=2, algorithm="most_recent", margin=-1),
    recipes.fp8_delayed(history=3, margin=2).replace(gradient=Cast("fp8_e4m3")),
)


def model_of():
    """Layers of several recipes, whose histories hold what some steps have left, and something new."""
    torch.manual_seed(0)
    model = nn.Sequential(*(bfp.Linear(16, 16, recipe=recipe) for recipe in RECIPES for _ in range(2)))
    for seed, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith("history"):
            buffer.copy_(values(buffer.shape, seed, scale=10.0**seed % 1e30).abs())
            buffer[0] *= seed % 5 != 0
        else:
            buffer.fill_(1.5 + seed)
    return model


def updated(change=lambda model: None):
    model = model_of()
    change(model)
    bfp.update_scales(model)
    return list(model.buffers())


def calls_of(change=lambda model: None, within=None):
    """The buffers after an update on the CUDA path, and what its calls answered."""
    answers = []

    def noted(function):
        def call(*arguments):
            answers.append((function.__name__, function(*arguments)))
            return answers[-1][1]

        return call

    with emulated_cuda.launches(), within or contextlib.nullcontext():
        library = cuda_library.library()
        watched = {name: noted(getattr(library, name)) for name in ("update_scales", "newest_amaxes")}
        with mock.patch.multiple(library, **watched):
            return updated(change), answers


def test_one_call_updates_all_layers():
    found, answers = calls_of()
    assert answers == [("update_scales", -1)]
    assert_equal(found, updated())
    assert sum(int((history[0] != 0).sum()) for history in found if history.ndim) == 0


def strided(model):
    layer = model[4]
    layer.gradient_amax_history = torch.stack([layer.gradient_amax_history, layer.input_amax_history], dim=1)[:, 0]


def shared(model):
    """As an average has it that takes a model's own buffers: they move on once."""
    model[1].input_amax_history.data = model[0].input_amax_history.data
    model[1].input_scale.data = model[0].input_scale.data


@pytest.mark.parametrize(("change", "answer"), [(strided, 18), (shared, 4)])
def test_state_that_lies_otherwise_is_updated_by_the_definition(change, answer):
    found, answers = calls_of(change)
    assert answers == [("update_scales", answer)]
    assert_equal(found, updated(change))


@pytest.mark.parametrize("change", [lambda model: None, strided], ids=["by the kernel", "by the definition"])
def test_ranks_share_amaxes_without_writing_them_back(change, monkeypatch):
    """A rank's part of it: the reduction of some groups is that with other newest amaxes."""
    elsewhere = values((4 * len(RECIPES),), 3, scale=100.0).abs().view(torch.int32)
    reduced = []

    def reduce(newest, groups):
        assert (groups, newest.dtype) == (("shards",), torch.int32)
        reduced.append(newest.clone())
        return torch.maximum(newest, elsewhere)

    def raised(model):
        change(model)
        histories = [buffer for name, buffer in model.named_buffers() if name.endswith("history")]
        for history, other in zip(histories, elsewhere.view(torch.float32), strict=True):
            history[0] = max(history[0], other)

    wanted = updated(raised)
    monkeypatch.setattr(delayed, "_groups_of", lambda layers, replicas: [("shards",)] * len(layers))
    monkeypatch.setattr(delayed, "max_reduce", reduce)
    found, answers = calls_of(change)
    assert [name for name, _ in answers] == ["newest_amaxes", "update_scales"]
    assert_equal(found, wanted)
    on_a_cpu = updated(change)
    assert_equal(on_a_cpu, wanted)
    assert torch.equal(*reduced)


def test_a_mode_that_watches_operations_sees_those_of_the_definition():
    found, answers = calls_of(within=FlopCounterMode(display=False))
    assert answers == []
    assert_equal(found, updated())


@pytest.mark.parametrize("margin", [-100, 0, 3, 100])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_the_kernel_is_told_what_the_definition_takes(element, margin):
    target, alone = cuda_steps.numbers(element, recipes.Delayed(margin=margin, algorithm="most_recent"))
    assert alone
    assert target == bits.constant_bits(element.max / 2.0**margin) == torch.tensor(element.max * 2.0**-margin).view(torch.int32)
    # A history of one has the scale of its own amax.
    _, scale = scaling.update(torch.ones(1), torch.ones(()), element, margin=margin)
    assert scale.view(torch.int32) == target


def test_an_optimizer_makes_one_call_of_which_autograd_hears(monkeypatch):
    model = nn.Sequential(*(bfp.Linear(32, 32, recipe="fp8_delayed") for _ in range(3)))
    optimizer, calls = bfp.AdamW(model.parameters()), []
    monkeypatch.setattr(cuda_steps, "update_scales", lambda *arguments: calls.append(arguments) or True)
    with emulated_cuda.launches():
        for _ in range(2):
            model(values((4, 32), 0)).sum().backward()
            before = [version_of(buffer) for buffer in model.buffers()]
            optimizer.step()
            assert [version_of(buffer) - 1 for buffer in model.buffers()] == before
    assert [(len(numbers), newest, len(state)) for numbers, newest, state in calls] == [(6, None, 12)] * 2

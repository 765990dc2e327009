"""Runs whose gradients are reduce-scattered as codes: resumed, offloaded, beside other parallelism, and what is refused."""

import copy

import gloo
import pytest
import threaded
import torch
import torch.distributed as dist
from arrays import values
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from reduced_gradients import SHAPES, Model, Terms, assert_same_gradients, expected, gradients_of, reduced, sharded, two_steps
from small_model import device_mesh
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import blockfp.torch as bfp
from blockfp.experimental.torch import quantize_reduce_scatter
from blockfp.kernels import switch
from blockfp.sharding.reducing import sent_layout


def resumed(rank, stop):
    mesh = device_mesh((2,))
    model, reduce_scatter = sharded(mesh, "mxfp8_e5m2", 6)
    for step in range(3):
        if step == stop:
            state = reduce_scatter.state_dict()
            model, reduce_scatter = sharded(mesh, "mxfp8_e5m2", 6)
            reduce_scatter.load_state_dict(state)
        model.zero_grad()
        model(gradients_of(rank, step)).backward()
    return reduced(model)


def test_a_run_goes_on_with_its_random_bits():
    whole, stopped = threaded.run(2, resumed, None)[0], threaded.run(2, resumed, 2)[0]
    assert_same_gradients(stopped, whole)
    assert_same_gradients(whole, expected(2, "mxfp8_e5m2", 6, reduction=2, step=2))


def offloaded(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e5m2", 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model(gradients_of(rank)).backward()
    return reduced(model)


def test_offloaded_parameters():
    for got in threaded.run(2, offloaded):
        assert_same_gradients(got, expected(2, "mxfp8_e5m2", 2))


def one_backward(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e5m2")
    model(gradients_of(rank)).backward()


def test_as_many_bytes_travel_as_the_layout_says(monkeypatch):
    sent, real = [], dist.all_to_all_single

    def counting(output, input, **options):
        sent.append(input.nbytes)
        return real(output, input, **options)

    monkeypatch.setattr(dist, "all_to_all_single", counting)
    threaded.run(2, one_backward)
    groups = (tuple(SHAPES.values()), ((12, 96),))
    assert sorted(sent) == sorted(2 * [2 * sent_layout("mxfp8_e5m2", shapes, 2, 4).size for shapes in groups])


def refused(rank):
    mesh = device_mesh((2,))
    found = []

    def attempt(make, **options):
        with pytest.raises((ValueError, RuntimeError)) as error:
            quantize_reduce_scatter(make(), **options)
        found.append(str(error.value))

    attempt(Model)
    attempt(lambda: fully_shard(Model(), mesh=mesh), format="nvfp4")
    attempt(lambda: fully_shard(Model(), mesh=mesh), format="fp8_e5m2")
    attempt(lambda: fully_shard(Model(), mesh=mesh), key=-1)
    columns = {"matrix": Shard(1)}
    make = lambda: fully_shard(Terms({"matrix": (8, 64)}), mesh=mesh, shard_placement_fn=lambda p: columns["matrix"])  # noqa: E731
    attempt(make)
    _, reduce_scatter = sharded(mesh, "mxfp8_e5m2")
    with pytest.raises(ValueError, match="counts the reductions of 3 parameters, and the model has 7"):
        reduce_scatter.load_state_dict({"reductions": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="only FSDP2 may call"):
        reduce_scatter(torch.zeros(4), torch.zeros(8), dist.group.WORLD, dist.ReduceOp.SUM)
    return found


def test_what_cannot_be_done_is_refused_by_name():
    for messages in threaded.run(2, refused):
        words = (
            "holds no module of FSDP2",
            "format nvfp4: rows",
            "format fp8_e5m2: rows",
            "key must be",
            "'matrix' is sharded along axis 1",
        )
        for message, part in zip(messages, words, strict=True):
            assert part in message


def tensor_parallel(rank):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with threaded.seeded(0):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.GELU())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    plain = [None, None]
    for i, quantized in enumerate((False, True)):
        if quantized:
            quantize_reduce_scatter(model, "mxfp8_e4m3")
        model.zero_grad()
        x = values((16, 64), rank // 2)
        model(x).square().mean().backward()
        plain[i] = [local_of(p.grad).clone() for p in model.parameters()]
    return plain


def test_beside_tensor_parallelism():
    for exact, rounded in threaded.run(4, tensor_parallel):
        for one, other in zip(exact, rounded, strict=True):
            assert (one - other).norm() < 0.04 * one.norm()
            assert one.ndim == 1 or not torch.equal(one, other)


def mlp(hidden, seed):
    """An MLP with weights of its own generator: ranks are threads, which share torch's."""
    model = nn.Sequential(nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32), nn.Identity())
    for number, p in enumerate(model.parameters()):
        nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(10 * seed + number))
    return model


MLPS = mlp(64, 0), mlp(128, 1)


def losses(rank, format, recipe, key=0):
    """The loss of the whole batch over 40 steps of an MLP that learns what another makes of noise."""
    teacher, model = (copy.deepcopy(first) for first in MLPS)
    if recipe is not None:
        bfp.convert(model, recipe)
    mesh = device_mesh((2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if format is not None:
        quantize_reduce_scatter(model, format, key=key)
    optimizer = bfp.AdamW(model.parameters(), lr=5e-3)
    found = []
    for step in range(40):
        x = values((64, 32), 2 * step + rank)
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    total = torch.stack(found)
    dist.all_reduce(total)
    return total / 2


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_training_follows_the_same_curve(recipe):
    exact = threaded.run(2, losses, None, recipe)[0]
    assert exact[-1] < 0.3 * exact[0]
    for format in ("mxfp8_e5m2", "mxfp8_e4m3"):
        rounded = threaded.run(2, losses, format, recipe)[0]
        assert not torch.equal(rounded, exact)
        assert ((rounded - exact).abs() / exact).max() < 0.03
    torch.testing.assert_close(threaded.run(2, losses, format, recipe)[0], rounded, rtol=0, atol=0)


def test_the_definition_gives_the_same_bits():
    with switch.definition_only():
        results = threaded.run(2, two_steps, (2,), "mxfp8_e5m2", 5)
    for step in range(2):
        assert_same_gradients(results[0][step], expected(2, "mxfp8_e5m2", 5, reduction=step, step=step))


@gloo.on(2)
def test_over_real_gloo(rank):
    made = two_steps(rank, (2,), "fp8_e5m2_1x128", 8)
    for step in range(2):
        assert_same_gradients(made[step], expected(2, "fp8_e5m2_1x128", 8, reduction=step, step=step))


def from_meta(rank, shape):
    with torch.device("meta"):
        model = Model()
    mesh = device_mesh(shape)
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    quantize_reduce_scatter(model, key=3)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model(gradients_of(rank)).backward()
    return reduced(model)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_models_from_the_meta_device(shape):
    """Replicas alone: FSDP2 reduce-scatters nothing."""
    want = expected(2, "mxfp8_e5m2", 3)
    if shape == (2, 1):
        terms = [gradients_of(rank) for rank in range(2)]
        want = {name: (value + terms[1][name]) / 2 for name, value in terms[0].items()}
    for got in threaded.run(2, from_meta, shape):
        assert_same_gradients(got, want)

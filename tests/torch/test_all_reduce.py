"""Sums as codes outside of FSDP2: `all_reduce`, DDP's gradients, and DiLoCo's outer step, against NumPy's codes in float64."""

import copy
from functools import partial

import gloo
import numpy as np
import pytest
import threaded
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp
import blockfp.torch as bfp
from blockfp.definition.rounding import fold_in
from blockfp.experimental.torch import OuterStep, quantize_all_reduce


def cast(x, format, key=None):
    return np.asarray(blockfp.quantize(x, format, key=key).dequantize(np.float32))


def summed(xs, format, key=None, factor=1.0):
    """The sum by its definition: terms in rank order in fp32, each rank's rows rounded again."""
    ranks, rows = len(xs), len(xs[0])
    chunk = -(-rows // ranks)
    padded = [np.pad(x, ((0, ranks * chunk - rows), (0, 0))) for x in xs]
    terms = [cast(x, format, None if key is None else fold_in(key, rank)) for rank, x in enumerate(padded)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    total = total * np.float32(factor)
    own = None if key is None else fold_in(key, ranks)
    parts = np.split(total, ranks)
    keys = [None if own is None else fold_in(own, rank) for rank in range(ranks)]
    return np.concatenate([cast(part, format, one) for part, one in zip(parts, keys, strict=True)])[:rows]


def tensors(ranks, shape):
    rng = np.random.default_rng(0)
    return [(rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))).astype(np.float32) for _ in range(ranks)]


@pytest.mark.parametrize("shape", [(12, 64), (7, 80), (1, 32), (0, 32)])
@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128", "mxfp4_e2m1"])
@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce(ranks, shape, format, key):
    xs = tensors(ranks, shape)
    wanted = summed(xs, format, key) if shape[0] else xs[0]
    for found in threaded.run(ranks, lambda rank: bfp.all_reduce(torch.from_numpy(xs[rank]), format, key=key)):
        np.testing.assert_array_equal(found.numpy(), wanted)
    assert all(x.flags.writeable for x in xs)


def test_jaxs_bits():
    jax = pytest.importorskip("jax")
    import blockfp.jax

    xs = tensors(1, (5, 64))
    mesh = jax.make_mesh((1,), ("a",))
    spec = jax.sharding.PartitionSpec()
    for key in (None, 3):
        body = partial(blockfp.jax.all_reduce, axis="a", format="mxfp8_e4m3", key=key)
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        (found,) = threaded.run(1, lambda rank, key=key: bfp.all_reduce(torch.from_numpy(xs[0]), "mxfp8_e4m3", key=key))
        np.testing.assert_array_equal(np.asarray(run(xs[0])), found.numpy())


def test_an_inf_is_nan_and_bfloat16_stays():
    x = torch.randn(4, 64).bfloat16()
    x[1, 2] = torch.inf

    def rank(rank):
        return bfp.all_reduce(x if rank else torch.ones_like(x), "mxfp8_e4m3")

    for found in threaded.run(2, rank):
        assert found.dtype is torch.bfloat16
        assert found[1, 2].isnan()
        assert found[2:].isfinite().all()
    assert x[1, 2] == torch.inf


@pytest.mark.parametrize(
    ("x", "format", "match"),
    [
        (torch.ones(4, 64), "mxfp8_e4m3_32x32", "rows that go to different ranks must not share a scale"),
        (torch.ones(64), "mxfp8_e4m3", r"x must be a plain tensor \[rows, columns\], got Tensor of shape \(64,\)"),
        (torch.ones(4, 64, dtype=torch.int32), "mxfp8_e4m3", "x must be a tensor of float32"),
        (torch.ones(4, 64, requires_grad=True), "mxfp8_e4m3", "x requires a gradient"),
    ],
)
def test_what_is_refused(x, format, match):
    with pytest.raises((TypeError, ValueError), match=match):
        bfp.all_reduce(x, format)


# ---- DDP


def net():
    with threaded.seeded(0):
        return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 7))


def gradients(model, rank):
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def _ddp(rank):
    ranks = dist.get_world_size()
    own = [gradients(net(), each) for each in range(ranks)]
    means = []
    for megabytes in (25, 0.001):
        model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=megabytes)
        state = quantize_all_reduce(model, "mxfp8_e5m2", key=None)
        found = gradients(model, rank)
        means.append(found)
        assert state.state_dict()["reductions"].tolist() == [1] * 4
        for name, mean in found.items():
            xs = [one[name].numpy() for one in own]
            wanted = (
                summed(xs, "mxfp8_e5m2", factor=1 / ranks) if xs[0].ndim > 1 else sum(xs[1:], xs[0]) * np.float32(1 / ranks)
            )
            np.testing.assert_array_equal(mean.numpy(), wanted, err_msg=name)
    # Stochastic: equal on all ranks and for all buckets, again after a resume, and another step draws other bits.
    drawn = []
    for megabytes, start in ((25, None), (0.001, None), (25, 1)):
        model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=megabytes)
        state = quantize_all_reduce(model, "mxfp4_e2m1", key=7)
        if start is not None:
            state.load_state_dict({"reductions": torch.full((4,), start)})
        steps = []
        for _ in range(1 if start else 2):
            model.zero_grad()
            steps.append(gradients(model, rank)["0.weight"])
        drawn.append(steps)
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert torch.equal(drawn[2][0], drawn[0][1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    both = drawn[0][0].clone()
    dist.broadcast(both, 0)
    assert torch.equal(both, drawn[0][0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp(ranks):
    gloo.run(ranks, __file__, "_ddp")


def test_only_a_ddp_model_is_taken():
    with pytest.raises(TypeError, match="model must be a DistributedDataParallel, got Linear"):
        quantize_all_reduce(nn.Linear(2, 2))


# ---- the outer step


def outer_of(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, nesterov=True)


def _outer(rank, moves):
    """Moves parameters by this rank's entries; returns the common weights after each outer step."""
    params = [nn.Parameter(torch.from_numpy(move).clone()) for move in moves[0][0]]
    outer, found = OuterStep(params, lambda common: torch.optim.SGD(common, lr=1.0), "mxfp4_e2m1"), []
    for step in moves:
        with torch.no_grad():
            for param, move in zip(params, step[rank], strict=True):
                param.sub_(torch.from_numpy(move))
        outer.step()
        found.append([common.numpy().copy() for common in outer.common])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_outer_steps_are_those_of_numpy(ranks):
    """Of a matrix whose rows don't divide, and of a vector, which is sent as values."""
    rng, rows = np.random.default_rng(2), 7
    moves = [[[rng.standard_normal(s).astype(np.float32) for s in ((rows, 80), (5,))] for _ in range(ranks)] for _ in range(3)]
    chunk = -(-rows // ranks)
    common, vector = moves[0][0]
    errors = [np.zeros((ranks * chunk, 80), np.float32) for _ in range(ranks + 1)]
    expected = []
    for step in moves:
        totals = []
        for rank, (move, _) in enumerate(step):
            wanted = np.pad(common - (common - move), ((0, ranks * chunk - rows), (0, 0))) + errors[rank]
            totals.append(cast(wanted, "mxfp4_e2m1"))
            errors[rank] = wanted - totals[-1]
        wanted = sum(totals[1:], totals[0]) * np.float32(1 / ranks) + errors[ranks]
        mean = cast(wanted, "mxfp4_e2m1")
        errors[ranks] = wanted - mean
        updates = [vector - (vector - move) for _, move in step]
        common, vector = common - mean[:rows], vector - sum(updates[1:], updates[0]) * np.float32(1 / ranks)
        expected.append([common, vector])
    for found in threaded.run(ranks, _outer, moves):
        for one, wanted in zip(found, expected, strict=True):
            for got, want in zip(one, wanted, strict=True):
                np.testing.assert_array_equal(got, want)


def _alone(rank, steps):
    """Inner steps by hand, different on each rank; the outer ones by codes, and without."""
    model = net()
    outer = OuterStep(model.parameters(), outer_of, "mxfp4_e2m1")
    exact = [p.detach().clone() for p in model.parameters()]
    plain = outer_of(exact)
    generator = torch.Generator().manual_seed(rank)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        moves = [torch.randn(p.shape, generator=generator) * 0.01 + 0.02 for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        outer.step()
        for p, move in zip(exact, moves, strict=True):
            p.grad = move.clone()
            dist.all_reduce(p.grad)
            p.grad /= 2
        plain.step()
    for p, common in zip(model.parameters(), outer.common, strict=True):
        assert torch.equal(p.detach(), common)
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p.detach())
    moved = [(a - b).norm() for a, b in zip(exact, start, strict=True)]
    return [((p.detach() - e).norm() / m).item() for p, e, m in zip(model.parameters(), exact, moved, strict=True)]


def test_errors_are_made_up_for():
    """Of FP4, whose single roundings lose tenths: after many steps the way is that of exact sums."""
    once = max(max(each) for each in threaded.run(2, _alone, 1))
    often = max(max(each) for each in threaded.run(2, _alone, 30))
    assert once > 0.02
    assert often < 0.25 * once


@threaded.on(2)
def test_resumes_to_the_bit(rank):
    def run(outer, model, steps):
        for step in steps:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + rank)))
            outer.step()

    model = net()
    outer = OuterStep(model.parameters(), outer_of, "mxfp4_e2m1")
    run(outer, model, (0, 1))
    saved = copy.deepcopy(outer.state_dict())
    other = copy.deepcopy(model)
    run(outer, model, (2, 3))
    again = OuterStep(other.parameters(), outer_of, "mxfp4_e2m1")
    again.load_state_dict(saved)
    run(again, other, (2, 3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@threaded.on(4)
def test_between_shards(rank):
    """Two groups of two ranks: FSDP2 within, outer steps between."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "fsdp"))
    with threaded.seeded(0):
        model = bfp.convert(nn.Sequential(nn.Linear(32, 48)), "mxfp8", weights="high_precision")
    fully_shard(model, mesh=mesh["fsdp"])
    outer = OuterStep(model.parameters(), outer_of, "mxfp8_e4m3", group=mesh.get_group("outer"))
    before = [common.clone() for common in outer.common]
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().sub_(0.25 * (1 + mesh.get_local_rank("outer")))
    outer.step()
    for p, common, was in zip(model.parameters(), outer.common, before, strict=True):
        local = p.to_local()
        assert torch.equal(getattr(local, "values", local) if isinstance(local, bfp.CastWeight) else local, common)
        # The mean of 0.25 and 0.5, which E4M3 has; Nesterov's first step is (1 + 0.9) of it.
        torch.testing.assert_close(was - common, torch.full_like(was, 0.5 * 1.9 * 0.375), rtol=0.02, atol=1e-6)


@threaded.on(1)
def test_quantized_weights_are_refused(rank):
    with pytest.raises(TypeError, match=r"params holds a quantized weight.*weights='high_precision'"):
        OuterStep(bfp.convert(nn.Linear(64, 64), "mxfp8").parameters(), outer_of)
    with pytest.raises(ValueError, match="params holds no parameter"):
        OuterStep([], outer_of)

"""FSDP2's reduce-scatter as codes: the gradients that `simulate` gives, bit for bit, on any mesh."""

import copy

import gloo
import numpy as np
import pytest
import threaded
import torch
import torch.distributed as dist
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from small_model import device_mesh
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import blockfp.torch as bfp
from blockfp.definition.rounding import fold_in
from blockfp.kernels import switch
from blockfp.sharding import simulate
from blockfp.sharding.reducing import sent_layout

FORMATS = (
    "mxfp8_e5m2",
    "mxfp8_e4m3_floor",
    "fp8_e4m3_1x128",
    "fp8_e5m2_1x128_fp32",
    "fp8_e4m3_row",
    "mxfp6_e3m2",
    "mxfp4_e2m1",
)
SHAPES = {"matrix": (8, 64), "odd": (7, 40), "bias": (6,), "experts": (5, 3, 33), "few": (1, 24), "kernel": (4, 2, 3, 3)}


class Terms(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self._parameters.items() if name in gradients)


class Model(nn.Module):
    """Two groups of FSDP2: `inner`, and the rest."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.outer = nn.Parameter(torch.zeros(12, 96, dtype=dtype))
        self.inner = Terms(dtype=dtype)

    def forward(self, gradients):
        total = self.inner(gradients)
        return total + (self.outer * gradients["outer"]).sum() if "outer" in gradients else total


def gradients_of(rank, step=0, dtype=torch.float32):
    """One rank's gradients, of all magnitudes."""
    made = {}
    for i, (name, shape) in enumerate({"outer": (12, 96), **SHAPES}.items()):
        generator = torch.Generator().manual_seed(1000 * rank + 100 * step + i)
        scale = torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
        made[name] = (torch.randn(shape, generator=generator) * scale).to(dtype)
    return made


def expected(ranks, format, key, reduction=0, factor=None, terms=None, **options):
    """The whole of each gradient, as `simulate` reduces it: float32 by name."""
    terms = terms or [gradients_of(rank, **options) for rank in range(ranks)]
    made = {}
    for number, name in enumerate(terms[0]):
        own = None if key is None else fold_in(fold_in(key, number), reduction)
        values = [term[name].numpy() if term[name].dtype != torch.bfloat16 else bf16(term[name]) for term in terms]
        parts = simulate.reduce_scatter(values, format, key=own, factor=factor or ranks)
        made[name] = torch.from_numpy(np.concatenate(parts))
    return made


def bf16(tensor):
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def sharded(mesh, format, key=0, dtype=torch.float32, **options):
    model = Model(dtype)
    fully_shard(model.inner, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, bfp.quantize_reduce_scatter(model, format, key=key)


def reduced(model):
    """The whole gradients by the last part of their names."""
    return {name.rpartition(".")[2]: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def two_steps(rank, shape, format, key):
    model, _ = sharded(device_mesh(shape), format, key)
    made = []
    for step in range(2):
        model.zero_grad()
        model(gradients_of(rank, step)).backward()
        made.append(reduced(model))
    return made


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_those_of_simulate(format, ranks):
    key = None if ranks == 3 else 5
    results = threaded.run(ranks, two_steps, (ranks,), format, key)
    for step in range(2):
        want = expected(ranks, format, key, reduction=step, step=step)
        for result in results:
            assert_same(result[step], want)


def test_one_rank_sends_and_rounds_nothing():
    (result,) = threaded.run(1, two_steps, (1,), "mxfp8_e5m2", 0)
    for step in range(2):
        assert_same(result[step], gradients_of(0, step))


def test_hybrid_sharding():
    # Replicas' sums are added by FSDP2: of two, the order makes no difference.
    results = threaded.run(4, two_steps, (2, 2), "mxfp8_e5m2", 9)
    for step in range(2):
        terms = [gradients_of(rank, step) for rank in range(4)]
        total = {}
        for number, name in enumerate(terms[0]):
            own = fold_in(fold_in(9, number), step)
            each = [
                simulate.reduce_scatter([terms[r][name].numpy() for r in pair], "mxfp8_e5m2", key=own, ranks=pair, factor=2)
                for pair in ((0, 1), (2, 3))
            ]
            total[name] = torch.from_numpy(sum(map(np.concatenate, each)) * np.float32(0.5))
        for result in results:
            assert_same(result[step], total)


def accumulated(rank):
    model, reduce_scatter = sharded(device_mesh((2,)), "mxfp8_e5m2", 3)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(gradients_of(rank, step)).backward()
    return reduced(model), reduce_scatter.reductions


def test_accumulated_gradients_are_rounded_once():
    terms = []
    for rank in range(2):
        steps = [gradients_of(rank, step) for step in range(3)]
        terms.append({name: steps[0][name] + steps[1][name] + steps[2][name] for name in steps[0]})
    for got, reductions in threaded.run(2, accumulated):
        assert_same(got, expected(2, "mxfp8_e5m2", 3, terms=terms))
        assert reductions == [1] * 7


def mixed(rank, reduce_dtype):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, _ = sharded(device_mesh((2,)), "mxfp8_e5m2", 1, mp_policy=policy)
    model(gradients_of(rank, dtype=torch.bfloat16)).backward()
    return reduced(model)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision(reduce_dtype):
    want = expected(2, "mxfp8_e5m2", 1, dtype=torch.bfloat16)
    want = {name: value.to(reduce_dtype).float() for name, value in want.items()}
    for got in threaded.run(2, mixed, reduce_dtype):
        assert_same(got, want)


def half(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e4m3", None, torch.float16)
    model(gradients_of(rank, dtype=torch.float16)).backward()
    return reduced(model)


def test_half_precision_is_divided_before_and_after_as_fsdp_does():
    terms = [gradients_of(rank, dtype=torch.float16) for rank in range(2)]
    terms = [{name: value / 2 for name, value in term.items()} for term in terms]
    want = expected(2, "mxfp8_e4m3", None, factor=1, terms=terms)
    for got in threaded.run(2, half):
        assert_same(got, {name: value.half() for name, value in want.items()})


def some(rank):
    model, reduce_scatter = sharded(device_mesh((2,)), "mxfp8_e5m2", 4)
    made = []
    for names in (("odd", "bias"), ("matrix", "odd", "bias", "experts", "few", "kernel", "outer")):
        model.zero_grad()
        model({name: value for name, value in gradients_of(rank).items() if name in names}).backward()
        made.append(reduced(model))
    return made, reduce_scatter.reductions


def test_parameters_without_a_gradient_have_no_place_in_the_buffer():
    first, second = expected(2, "mxfp8_e5m2", 4), expected(2, "mxfp8_e5m2", 4, reduction=1)
    for (one, other), reductions in threaded.run(2, some):
        assert_same(one, {name: first[name] for name in ("odd", "bias")})
        assert_same(other, {name: (second if name in ("odd", "bias") else first)[name] for name in first})
        assert reductions == [1, 1, 2, 2, 1, 1, 1]


def divided(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e5m2", 2)
    for module in (model, model.inner):
        module.set_gradient_divide_factor(3.0)
    model(gradients_of(rank)).backward()
    return reduced(model)


def test_another_divisor():
    for got in threaded.run(2, divided):
        assert_same(got, expected(2, "mxfp8_e5m2", 2, factor=3))


def often(rank):
    model = fully_shard(Terms({"few": (2, 32)}), mesh=device_mesh((2,)))
    bfp.quantize_reduce_scatter(model, key=1)
    gradients = {"few": gradients_of(rank)["matrix"][:2, :32]}
    made = []
    for _ in range(67):
        model.zero_grad()
        model(gradients).backward()
        made.append(reduced(model)["few"])
    return made


def test_each_reduction_has_random_bits_of_its_own():
    terms = [{"few": gradients_of(rank)["matrix"][:2, :32]} for rank in range(2)]
    (made, _) = threaded.run(2, often)
    assert len({got.numpy().tobytes() for got in made}) == len(made)
    for step in (0, 63, 64, 66):
        assert_same({"few": made[step]}, expected(2, "mxfp8_e5m2", 1, reduction=step, terms=terms))


def infinite(rank):
    model, _ = sharded(device_mesh((2,)), "fp8_e4m3_1x128", 0)
    gradients = gradients_of(rank)
    if rank:
        gradients["matrix"][0, 5], gradients["matrix"][7, 6], gradients["bias"][2] = torch.inf, torch.nan, -torch.inf
    model(gradients).backward()
    return reduced(model)


def test_what_is_not_finite_arrives():
    for got in threaded.run(2, infinite):
        assert got["matrix"].isnan().nonzero().tolist() == [[0, 5], [7, 6]]
        assert got["bias"].isinf().nonzero().tolist() == [[2]]
        assert got["odd"].isfinite().all()


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
    assert_same(stopped, whole)
    assert_same(whole, expected(2, "mxfp8_e5m2", 6, reduction=2, step=2))


def offloaded(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e5m2", 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model(gradients_of(rank)).backward()
    return reduced(model)


def test_offloaded_parameters():
    for got in threaded.run(2, offloaded):
        assert_same(got, expected(2, "mxfp8_e5m2", 2))


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
            bfp.quantize_reduce_scatter(make(), **options)
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
    with pytest.raises(RuntimeError, match="called by FSDP2 alone"):
        reduce_scatter(torch.zeros(4), torch.zeros(8), dist.group.WORLD, dist.ReduceOp.SUM)
    return found


def test_what_cannot_be_done_is_refused_by_name():
    for messages in threaded.run(2, refused):
        words = (
            "holds no module of FSDP2",
            "format nvfp4: rows",
            "format fp8_e5m2: rows",
            "key must be",
            "'matrix' is cut along axis 1",
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
            bfp.quantize_reduce_scatter(model, "mxfp8_e4m3")
        model.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank // 2))
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
        bfp.quantize_reduce_scatter(model, format, key=key)
    optimizer = bfp.AdamW(model.parameters(), lr=5e-3)
    found = []
    for step in range(40):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2 * step + rank))
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
        assert_same(results[0][step], expected(2, "mxfp8_e5m2", 5, reduction=step, step=step))


def over_gloo(rank):
    made = two_steps(rank, (2,), "fp8_e5m2_1x128", 8)
    for step in range(2):
        assert_same(made[step], expected(2, "fp8_e5m2_1x128", 8, reduction=step, step=step))


def test_over_real_gloo():
    gloo.run(2, __file__, "over_gloo")


def from_meta(rank, shape):
    with torch.device("meta"):
        model = Model()
    mesh = device_mesh(shape)
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    bfp.quantize_reduce_scatter(model, key=3)
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
        assert_same(got, want)

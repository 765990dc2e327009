"""FSDP2's reduce-scatter as codes: the gradients that `simulate` gives, bit for bit, on any mesh."""

import numpy as np
import pytest
import threaded
import torch
from reduced_gradients import Terms, assert_same_gradients, expected, gradients_of, reduced, sharded, two_steps
from small_model import device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from blockfp.definition.rounding import fold_in
from blockfp.experimental.torch import quantize_reduce_scatter
from blockfp.sharding import simulate

FORMATS = (
    "mxfp8_e5m2",
    "mxfp8_e4m3_floor",
    "fp8_e4m3_1x128",
    "fp8_e5m2_1x128_fp32",
    "fp8_e4m3_row",
    "mxfp6_e3m2",
    "mxfp4_e2m1",
)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_those_of_simulate(format, ranks):
    key = None if ranks == 3 else 5
    results = threaded.run(ranks, two_steps, (ranks,), format, key)
    for step in range(2):
        want = expected(ranks, format, key, reduction=step, step=step)
        for result in results:
            assert_same_gradients(result[step], want)


def test_one_rank_sends_and_rounds_nothing():
    (result,) = threaded.run(1, two_steps, (1,), "mxfp8_e5m2", 0)
    for step in range(2):
        assert_same_gradients(result[step], gradients_of(0, step))


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
            assert_same_gradients(result[step], total)


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
        assert_same_gradients(got, expected(2, "mxfp8_e5m2", 3, terms=terms))
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
        assert_same_gradients(got, want)


def half(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e4m3", None, torch.float16)
    model(gradients_of(rank, dtype=torch.float16)).backward()
    return reduced(model)


def test_half_precision_is_divided_before_and_after_as_fsdp_does():
    terms = [gradients_of(rank, dtype=torch.float16) for rank in range(2)]
    terms = [{name: value / 2 for name, value in term.items()} for term in terms]
    want = expected(2, "mxfp8_e4m3", None, factor=1, terms=terms)
    for got in threaded.run(2, half):
        assert_same_gradients(got, {name: value.half() for name, value in want.items()})


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
        assert_same_gradients(one, {name: first[name] for name in ("odd", "bias")})
        assert_same_gradients(other, {name: (second if name in ("odd", "bias") else first)[name] for name in first})
        assert reductions == [1, 1, 2, 2, 1, 1, 1]


def divided(rank):
    model, _ = sharded(device_mesh((2,)), "mxfp8_e5m2", 2)
    for module in (model, model.inner):
        module.set_gradient_divide_factor(3.0)
    model(gradients_of(rank)).backward()
    return reduced(model)


def test_another_divisor():
    for got in threaded.run(2, divided):
        assert_same_gradients(got, expected(2, "mxfp8_e5m2", 2, factor=3))


def often(rank):
    model = fully_shard(Terms({"few": (2, 32)}), mesh=device_mesh((2,)))
    quantize_reduce_scatter(model, key=1)
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
        assert_same_gradients({"few": made[step]}, expected(2, "mxfp8_e5m2", 1, reduction=step, terms=terms))


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

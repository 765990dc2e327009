"""JAX's executor of the core's plans: every kind of step, and what `simulate` gives."""

from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from blockfp.jax_backend.arrays import sharded
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits
from samples import sample

from blockfp.definition import numerics
from blockfp.definition.numerics import Quantized
from blockfp.sharding import plans, simulate
from blockfp.sharding.placement import Mesh, Shard, Sharding
from blockfp.sharding.steps import Step

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
ROWS = Sharding((64, 64), Mesh((2,), ("tp",)), (Shard(0),))
PLANS = {
    "shards": plans.quantize_shards("mxfp8_e4m3", ROWS),
    "turned": plans.gather_activation("fp8_e4m3", ROWS, ("tp",), columnwise=True),
    "rotated": plans.gather_activation("nvfp4", ROWS, ("tp",), columnwise=True, rotate=True),
    "another format": plans.gather_activation("mxfp8_e4m3", ROWS, ("tp",), quantized="mxfp8_e5m2"),
    "another direction": plans.gather_activation("mxfp8_e4m3", ROWS, ("tp",), columnwise=True, quantized="mxfp8_e5m2"),
}


@pytest.mark.parametrize("name", PLANS)
def test_as_simulated(name):
    plan, x = PLANS[name], simulate.shards(sample("bf16_valued", (64, 64)), ROWS)
    if name.startswith("another"):
        x = [numerics.quantize(shard, "mxfp8_e5m2") for shard in x]
    check(plan, x, name)


@pytest.mark.parametrize(("format", "dim"), [("nvfp4_4over6", 1), ("nvfp4_4over6_16x16", 0), ("nvfp4_4over6_448_mse_16x16", 1)])
def test_cut_blocks_that_choose_between_scales(format, dim):
    sharding = Sharding((72, 72), Mesh((2,), ("tp",)), (Shard(dim),))
    plan = plans.quantize_shards(format, sharding)
    assert plan.steps[-1].straddles
    check(plan, simulate.shards(sample("bf16_valued", (72, 72)), sharding), format)


def check(plan, x, name):
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def body(x):
        x = jax.tree.map(lambda part: part[0], x)
        local = sharded.Local(None, *x) if isinstance(x, Quantized) else sharded.Local(x)
        held = sharded.run(plan, local, sharded.Options(nominal="float32"))
        return jax.tree.map(lambda part: part[None], Quantized(held.codes, held.scales, held.tensor_scale))

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False))
    found = run(jax.tree.map(lambda *parts: jnp.stack(parts), *x))
    for rank, want in enumerate(simulate.run(plan, x, nominal="float32")):
        got = jax.tree.map(lambda part, rank=rank: part[rank], found)
        # A rank stores as many scales as that with the most of them.
        rows, columns = want.scales.shape
        got = got._replace(scales=got.scales[:rows, :columns])
        assert_same_bits(tuple(got), (want.codes, want.scales, want.tensor_scale), f"{name}, rank {rank}")


def test_every_step_has_an_executor():
    """`test_as_simulated` runs each kind of step."""
    assert {type(step) for plan in PLANS.values() for step in plan.steps} == set(get_args(Step))

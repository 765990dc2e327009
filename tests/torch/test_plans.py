"""The core's plans carried out by PyTorch's executor, on ranks that are threads: what `simulate` gives, on any mesh."""

from typing import get_args

import numpy as np
import pytest
import threaded
from arrays import to_numpy, to_torch
from blockfp.torch_backend.sharded.quantize import WeightShard, quantize_weights
from blockfp.torch_backend.sharded.rank_plan import rank_plan, weight_quantization
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from samples import KINDS, sample
from sharded import GEOMETRIES, assert_holds, parts, whole_and_shards
from shardings import shardings
from torch.distributed.device_mesh import init_device_mesh

from blockfp.definition import numerics
from blockfp.definition.numerics import Quantized
from blockfp.formats import FORMATS
from blockfp.sharding import plans
from blockfp.sharding.placement import Mesh, Replicate, Shard, Sharding
from blockfp.sharding.steps import Dequantize, Gather, Quantize, Rotate, Step, Transpose


def on_rank(rank, sharding, shards, formats, key):
    """This rank's codes and scales of arrays that lie alike, a format each, all amaxes reduced together."""
    mesh = init_device_mesh("cpu", sharding.mesh.shape, mesh_dim_names=sharding.mesh.names)
    groups = {name: mesh[name].get_group().group_name for name in sharding.mesh.names}
    weights = []
    for format, x in zip(formats, shards, strict=True):
        step, values = weight_quantization(format, sharding, rank, key is not None), to_torch(x[rank])
        # Of random rounding scales go on from those that a weight has.
        out = None if key is None else quantize_weights([WeightShard(values / 3, step, groups, "float32")])[0]
        weights.append(WeightShard(values, step, groups, "float32", key, out))
    return [Quantized(*map(to_numpy, q)) for q in quantize_weights(weights)]


def _whole_and_shards(format, sharding, kind, seed, key):
    shards, whole = whole_and_shards(format, sharding.shape, sharding, kind, seed)
    if key is not None:
        x = sample(kind, sharding.shape, "float32", seed)
        with np.errstate(all="ignore"):
            first = numerics.quantize(x / np.float32(3), format)
        whole = numerics.requantize(x, format, first.scales, first.tensor_scale, key=key)
    return shards, whole


@examples(25)
@given(st.data())
def test_shards_of_any_format_on_any_mesh(data):
    sharding, key = data.draw(shardings()), data.draw(st.sampled_from([None, 7]))
    formats = data.draw(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3))
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 99))
    made = [_whole_and_shards(format, sharding, kind, seed + i, key) for i, format in enumerate(formats)]
    found = threaded.run(sharding.mesh.size, on_rank, sharding, [x for x, _ in made], formats, key)
    for held, format, (_, whole) in zip(zip(*found, strict=True), formats, made, strict=True):
        assert_holds(held, parts(whole, format, sharding))


def each_plan(format):
    """Plans of weights and of activations, aligned and cutting blocks apart, of which every kind of step is a part."""
    for rows in (256, 50):
        for placements in ((Shard(0),), (Shard(1),), (Replicate(),)):
            sharding = Sharding((rows, 256), Mesh((2,), ("tp",)), placements)
            yield plans.quantize_shards(format, sharding)
            if not isinstance(placements[0], Replicate):
                yield plans.gather_weight(format, sharding, ("tp",), columnwise=format.square)
                for columnwise in (False, True):
                    yield plans.gather_activation(
                        format, sharding, ("tp",), columnwise=columnwise, rotate=format.scale.two_level
                    )


def test_every_step_has_an_executor():
    """In PyTorch; an activation that comes quantized is JAX's alone, and is refused by name."""
    run = set()
    for plan in (plan for format in GEOMETRIES for plan in each_plan(format)):
        for rank in range(2):
            rank_plan(plan, rank)
        run |= {type(step) for step in plan.steps}
    assert run == {Transpose, Rotate, Quantize, Gather} == set(get_args(Step)) - {Dequantize}
    came = plans.gather_activation(
        "mxfp8_e4m3", Sharding((64, 64), Mesh((2,)), (Shard(0),)), ("dim_0",), quantized="mxfp8_e5m2"
    )
    assert any(isinstance(step, Dequantize) for step in came.steps)
    with pytest.raises(NotImplementedError, match="no tensor comes quantized in another format"):
        rank_plan(came, 0)

"""Every format on every mesh of eight devices: gather(quantize(shard)) == quantize(whole), bit for bit, and its gradient.

All formats are in one program for each mesh, so that a mesh is compiled for once. Of tensor parallelism's two ways to cut a
weight every other format takes the one, and with cuts inside blocks the other. Without it formats that lie alike take turns:
those with aligned cuts under FSDP have cuts inside blocks under HSDP.
"""

from collections import defaultdict

import jax
import numpy as np
import pytest
from blockfp.jax_backend.arrays import sharded
from blockfp.jax_backend.params import placing
from held_formats import FORMATS
from jax.sharding import PartitionSpec as P
from meshes import CASES
from samples import bits_of, sample
from sharded import ALIKE, parts

import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe
from blockfp.sharding import plans

# Bits are held in programs that XLA optimizes as it does for users.
pytestmark = pytest.mark.optimized

MESHES = {
    "FSDP 8": ("FSDP 8",),
    "HSDP 2x4": ("HSDP 2x4",),
    "FSDP 4 x TP 2": ("FSDP 4 x TP 2, column", "FSDP 4 x TP 2, row"),
}

WEIGHTS_ALONE = Recipe("weights alone", *(HIGH_PRECISION,) * 6)


def shape_for(format, straddling):
    """[out, in] of a weight that all meshes cut between blocks; or inside of blocks, and of bytes."""
    rows, columns = (1, 128) if format.per_row else format.block or (4, 32)
    return (152, 84) if straddling else (8 * max(rows, 4), 2 * columns)


def formats_on(mesh, straddling):
    """Of formats that lie alike, every other one; all where there are no two, and on meshes with tensor parallelism."""
    turn = straddling + mesh.startswith("HSDP")
    taken = {f for alike in ALIKE for i, f in enumerate(alike) if len(alike) == 1 or (i + turn) % 2 == 0}
    return [f for f in FORMATS if "TP" in mesh or f in taken]


def assert_ranks_hold(found, expected, format):
    """Every rank has its part of the expected codes and scales; scales behind those fill up, and nobody reads them."""
    for rank, part in enumerate(expected):
        for name, want in zip(part._fields, part, strict=True):
            if want is not None:
                got = getattr(found, name)[rank][tuple(slice(n) for n in want.shape)]
                np.testing.assert_array_equal(bits_of(got), bits_of(want), f"{format}, rank {rank}, {name}", strict=True)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("straddling", [False, True], ids=["aligned", "straddling"])
def test_gathered_weights_and_their_gradients(mesh, straddling):
    formats, mesh, cases = formats_on(mesh, straddling), CASES[MESHES[mesh][0]].mesh, MESHES[mesh]
    groups = defaultdict(list)
    for i, format in enumerate(formats):
        groups[shape_for(format, straddling), cases[(i + straddling) % len(cases)]].append(format)
    groups = [(shape, CASES[case], formats) for (shape, case), formats in groups.items()]
    lies = [placing.sharding_of(shape, placing.core_mesh(mesh), case.weight) for shape, case, _ in groups]
    arrays = [
        (sample("bf16_valued", shape), *(sample("gaussian", (2 * case.data_ranks, n), seed=n) for n in shape[::-1]))
        for shape, case, _ in groups
    ]

    def of_group(formats, case, lies, w, x, g):
        """Gathered weights of each format, and their gradients in a layer with this input and cotangent."""
        options = sharded.Options(nominal="float32")
        shards = [sharded.quantize(w, plans.quantize_shards(f, lies), options) for f in formats]

        def loss(shards):
            recipes = [WEIGHTS_ALONE.replace(weight=Cast(f)) for f in formats]
            y = [bfp.linear(x, q, recipe=r, data_axes=case.data) for q, r in zip(shards, recipes, strict=True)]
            return (sum(y) * g).sum()

        gathered = [bfp.all_gather(q, "fsdp") for q in shards]
        return [numerics.Quantized(q.codes, q.scales, q.tensor_scale) for q in gathered], bfp.grad(loss)(shards)

    def body(arrays):
        found = [of_group(formats, case, s, *a) for (_, case, formats), s, a in zip(groups, lies, arrays, strict=True)]
        return jax.tree.map(lambda x: x[None], found)

    specs = ([(case.weight, case.x, case.y) for _, case, _ in groups],)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names)))
    found = jax.device_get(run(arrays))
    for (_, _, formats), before, (w, x, g), (gathered, gradients) in zip(groups, lies, arrays, found, strict=True):
        dw = g.astype(np.float64).T @ x
        for format, q, gradient in zip(formats, gathered, gradients, strict=True):
            assert_ranks_hold(q, parts(numerics.quantize(w, format), format, before.gathered(("fsdp",))), format)
            for rank, region in enumerate(before.regions):
                np.testing.assert_allclose(gradient[rank], dw[region.slices], rtol=0, atol=1e-6 * np.abs(dw).max())

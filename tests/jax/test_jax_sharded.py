"""Sharded weights of every format on eight devices: gather(quantize(shard)) == quantize(whole), bit for bit."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.arrays import sharded
from blockfp.jax_backend.params import placing
from held_formats import FORMATS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import CASES
from same_trees import assert_same_tree
from samples import bits_of, sample
from sharded import ALIKE, parts

import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.formats import Format
from blockfp.recipes import HIGH_PRECISION, Cast, Recipe
from blockfp.sharding import plans

# Bits are held in programs that XLA optimizes as it does for users.
pytestmark = pytest.mark.optimized

# Cuts inside blocks and bytes; rows that don't divide evenly.
SHAPES = {"straddling": (160, 84), "uneven": (83, 84)}


def quantized(x, format):
    """The definition's codes and scales as a JAX array."""
    q = numerics.quantize(x, format)
    parts = (None if part is None else jnp.asarray(part) for part in q)
    return bfp.QuantizedArray.from_parts(*parts, format=format, columns=x.shape[-1], dtype="float32")


def sharded_map(case, body, in_specs, out_specs, **options):
    return jax.jit(jax.shard_map(body, mesh=case.mesh, in_specs=in_specs, out_specs=out_specs, **options))


@pytest.mark.parametrize(("case", "shape"), [("FSDP 4 x TP 2, column", "uneven"), ("FSDP 4 x TP 2, row", "straddling")])
def test_placed_weights_are_the_whole_ones(case, shape):
    """From the placed shards to what each rank of the gather has, and back."""
    case, shape, turn = CASES[case], SHAPES[shape], shape == "uneven"
    # One case takes one of each kind, the other another.
    formats = [alike[turn % len(alike)] for alike in ALIKE]
    tree = {str(f): quantized(sample("bf16_valued", shape, seed=i), f) for i, f in enumerate(formats)}
    placed = bfp.shard_params(tree, case.mesh, case.weight)
    assert_same_tree(bfp.unshard_params(placed), tree)

    def body(tree):
        return {name: bfp.all_gather(q, "fsdp") for name, q in tree.items()}

    out = bfp.partition_specs(bfp.shard_params(tree, case.mesh, case.gathered))
    gathered = sharded_map(case, body, (bfp.partition_specs(placed),), out, check_vma=False)(placed)
    assert_same_tree(bfp.unshard_params(gathered), tree)


def test_values_of_gathered_weights():
    case, shape = CASES["FSDP 4 x TP 2, row"], SHAPES["straddling"]
    tree = {f: quantized(sample("exponents", shape), f) for f in ("mxfp6_e2m3", "fp8_e4m3_128x128", "nvfp4_16x16")}
    placed = bfp.shard_params(tree, case.mesh, case.weight)

    def body(tree):
        return {name: bfp.all_gather(q, "fsdp").dequantize() for name, q in tree.items()}

    values = sharded_map(case, body, (bfp.partition_specs(placed),), case.gathered, check_vma=False)(placed)
    assert_same_tree(values, {name: q.dequantize() for name, q in tree.items()})


def test_an_axis_of_one_rank():
    """JAX, which keeps account of what ranks have alike, must know it of a scale that nothing was reduced for."""
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    x = sample("bf16_valued", SHAPES["straddling"])
    tree = {f: quantized(x, f) for f in ("fp8_e4m3", "nvfp4_16x16", "mxfp8_e4m3_32x32")}
    placed = bfp.shard_params(tree, mesh, P("fsdp"))

    def body(x):
        made = {f: plans.quantize_shards(f, q.sharding) for f, q in placed.items()}
        return {f: sharded.quantize(x, plan, sharded.Options()) for f, plan in made.items()}

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("fsdp"),), out_specs=bfp.partition_specs(placed)))
    assert_same_tree(bfp.unshard_params(run(x)), tree)


def test_nan_and_inf_in_blocks_that_straddle_shards():
    case, x = CASES["FSDP 4 x TP 2, row"], sample("special", SHAPES["uneven"])
    formats = [Format.parse(n) for n in ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp6_e3m2_32x32", "nvfp4_16x16")]
    tree = {str(f): quantized(x, f) for f in formats}
    placed = bfp.shard_params(tree, case.mesh, case.weight)
    # What fills the last rank's rows up must not be looked at.
    filled = np.pad(x, ((0, placed["fp8_e4m3"].shape[0] - len(x)), (0, 0)), constant_values=np.nan)

    def body(x, tree):
        options = sharded.Options(nominal="float32")
        return {n: sharded.quantize(x, plans.quantize_shards(q.format, q.sharding), options) for n, q in tree.items()}

    specs = bfp.partition_specs(placed)
    again = sharded_map(case, body, (case.weight, specs), specs)(filled, placed)
    assert_same_tree(bfp.unshard_params(again), tree)


def test_columnwise_weights_are_derived_behind_the_gather():
    case = CASES["FSDP 4 x TP 2, column"]
    x = sample("gaussian", SHAPES["straddling"])
    tree = {name: quantized(x, name) for name in ("mxfp4_e2m1_32x32", "fp8_e4m3")}
    placed = bfp.shard_params(tree, case.mesh, case.weight)

    def body(tree):
        return {name: bfp.all_gather(q, "fsdp", columnwise=True).dequantize() for name, q in tree.items()}

    values = sharded_map(case, body, (bfp.partition_specs(placed),), P(None, "tp"), check_vma=False)(placed)
    for name, q in tree.items():
        np.testing.assert_array_equal(values[name], q.mT.dequantize())


def test_stacks_are_cut_matrix_by_matrix():
    case = CASES["FSDP 8"]
    whole = bfp.quantize_params(jnp.asarray(sample("gaussian", (3, 48, 40))), "fp8_current")
    placed = bfp.shard_params(whole, case.mesh, P(None, "fsdp"))

    def body(q):
        return jax.lax.scan(lambda c, q: (c, bfp.all_gather(q, "fsdp").dequantize()), None, q)[1]

    values = sharded_map(case, body, (bfp.partition_specs(placed),), P(), check_vma=False)(placed)
    np.testing.assert_array_equal(values, bfp.dequantize_params(whole))


def test_plain_leaves_and_states_lie_beside_quantized_ones():
    case = CASES["FSDP 4 x TP 2, row"]
    w = jnp.asarray(sample("gaussian", SHAPES["uneven"]))
    params = {"w": w, "gain": jnp.ones(84), "half": jnp.ones((8, 4), "bfloat16")}
    q = bfp.quantize_params(params, "mxfp8", filter_fn=lambda path, leaf: path == "w")
    placed = bfp.shard_params(q, case.mesh, {"w": case.weight, "gain": P("tp"), "half": P("fsdp")})
    assert bfp.partition_specs(placed)["gain"] == P("tp")
    for whole in (bfp.adamw(1e-3).init(q, params), bfp.with_masters(bfp.adamw(1e-3)).init(q, params)):
        state = bfp.shard_state(whole, placed)
        assert state.masters["w"].shape == (84, 84)
        assert state.masters["w"].sharding == NamedSharding(case.mesh, P("fsdp", "tp"))
        assert_same_tree(bfp.unshard_state(state, placed), whole)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"layers": [P("model")]}, r"layers\.0: mesh has no axis 'model'; its axes are 'fsdp', 'tp'"),
        ({"layers": [P("fsdp", "fsdp")]}, r"layers\.0: spec .* names mesh axis 'fsdp' twice"),
        ({"layers": [P(None, None, "fsdp")]}, r"layers\.0: .*3 entries for an array of 2 axes"),
    ],
)
def test_bad_specs_name_the_leaf(specs, message):
    mesh = CASES["FSDP 4 x TP 2, row"].mesh
    with pytest.raises(ValueError, match=message):
        bfp.shard_params({"layers": [quantized(sample("gaussian", (8, 32)), "mxint8")]}, mesh, specs)


def test_bad_leaves():
    mesh = CASES["FSDP 8"].mesh
    q = quantized(sample("gaussian", (8, 32)), "mxint8")
    with pytest.raises(ValueError, match=r"a: an axis of 6 of a plain array can't be divided evenly over 'fsdp' \(8 ranks\)"):
        bfp.shard_params({"a": jnp.zeros(6)}, mesh, P("fsdp"))
    with pytest.raises(ValueError, match=r"a: spec .* has 2 entries for an array of shape \(8,\)"):
        bfp.shard_params({"a": jnp.zeros(8)}, mesh, P("fsdp", None))
    with pytest.raises(ValueError, match=r"a: is already sharded .*: use unshard_params first"):
        bfp.shard_params({"a": bfp.shard_params(q, mesh, P("fsdp"))}, mesh, P())
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got int"):
        bfp.shard_params({}, 3, {})
    with pytest.raises(TypeError, match=r"a: specs must hold PartitionSpecs, got str"):
        bfp.shard_params({"a": q}, mesh, {"a": "fsdp"})
    with pytest.raises(ValueError, match="an axis of 6 of a stack of quantized matrices can't be divided evenly over 'fsdp'"):
        bfp.shard_params(bfp.quantize(jnp.ones((6, 4, 32)), "mxint8"), mesh, P("fsdp"))
    with pytest.raises(ValueError, match=r"a: spec .* names mesh axis 'fsdp' twice"):
        bfp.shard_params({"a": jnp.zeros((8, 8))}, mesh, P("fsdp", "fsdp"))
    with pytest.raises(ValueError, match=r"mesh axis 'fsdp' is unknown here: call this inside jax\.shard_map"):
        bfp.all_gather(bfp.shard_params(quantized(sample("gaussian", (8, 32)), "mxint8"), mesh, P("fsdp")), "fsdp")


# Bits are held in programs that XLA optimizes as it does for users.

MESHES = {"FSDP 8": ("FSDP 8",), "HSDP 2x4": ("HSDP 2x4",), "FSDP 4 x TP 2": ("FSDP 4 x TP 2, column", "FSDP 4 x TP 2, row")}

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

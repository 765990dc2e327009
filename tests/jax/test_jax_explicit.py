"""Meshes as `jax.make_mesh` makes them, with Explicit axes: every cast, cut anywhere, and `linear` with its gradients."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits, parts_of
from same_trees import assert_same_tree
from samples import sample

import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.formats import Format

pytestmark = [pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")]
# Cut along blocks and inside them, evenly for some of codes, scales and values and not for others.
CUTS = [((128, 256), P("d")), ((128, 256), P(None, "d")), ((128, 256), P("d", "e")), ((72, 40), P(None, ("d", "e")))]
ONE_OF_EACH = ("fp8_e4m3", "fp8_e5m2_128x128", "mxfp6_e3m2_32x32", "mxint8", "nvfp4")
# The last two cut along both axes and inside blocks. Cuts along one axis: for the largest block and for two levels of scales.
CASTS = [(cut, format) for cut in range(len(CUTS)) for format in (ONE_OF_EACH[1::3] if cut < 2 else ONE_OF_EACH)]


@pytest.fixture(scope="module")
def mesh():
    mesh = jax.make_mesh((4, 2), ("d", "e"))
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,) * 2
    return mesh


@pytest.mark.parametrize(("cut", "format"), CASTS)
def test_every_cast_of_every_cut(format, cut, mesh):
    (shape, spec), format = CUTS[cut], Format.parse(format)
    x = sample("bf16_valued", shape)
    placed = jax.device_put(x, NamedSharding(mesh, spec))

    @jax.jit
    def run(x):
        q = bfp.quantize(x, format)
        transposed = q.mT if format.square or format.per_tensor else None
        return q, q.dequantize("bfloat16"), bfp.quantize_columnwise(x, format), bfp.quantize_both(x, format), transposed

    q, values, column, both, transposed = run(placed)
    expected, turned = numerics.quantize(x, format), numerics.quantize(x.T, format)
    assert_same_bits(parts_of(q), expected)
    assert_same_bits(values, numerics.dequantize(*expected, format, "bfloat16", columns=shape[1]))
    for got, want in ((column, turned), (both[0], expected), (both[1], turned), (transposed, turned)):
        if got is not None:
            assert_same_bits(parts_of(got), want)
    # Types say where results lie, and a gradient lies as what it is of.
    if cut < 3:
        assert jax.typeof(q.codes).sharding.spec == P(*spec, *(None,) * (2 - len(spec)))
    gradient = jax.jit(jax.grad(lambda x: (bfp.quantize(x, format).dequantize() * x).sum()))(placed)
    assert jax.typeof(gradient) == jax.typeof(placed)
    np.testing.assert_allclose(gradient, x + numerics.dequantize(*expected, format, "float32", columns=shape[1]), rtol=1e-6)


def test_eager_calls_keys_and_leading_axes(mesh):
    x = sample("gaussian", (4, 32, 64))
    placed = jax.device_put(x, NamedSharding(mesh, P("e", None, "d")))
    for format in ("mxfp4_e2m1", "nvfp4"):
        q, expected = bfp.quantize(placed, format, key=5), numerics.quantize(x, format, key=5)
        assert_same_bits(parts_of(q), expected)
        assert_same_bits(q.dequantize(), numerics.dequantize(*expected, format, "float32", columns=64))
        with jax.set_mesh(mesh):
            assert_same_bits(parts_of(bfp.quantize(placed, format)), numerics.quantize(x, format))


# x, w, y; and whether the weight has to travel.
LAYERS = {
    "data": (P("d"), P(), P("d", None, None), False),
    "fsdp": (P("d"), P("d"), P("d", None, None), True),
    "fsdp along in": (P("d"), P(None, "d"), P("d", None, None), True),
    "data and columns": (P("d"), P("e"), P("d", None, "e"), False),
    "data and rows": (P("d", None, "e"), P(None, "e"), P("d", None, None), False),
    "fsdp and columns": (P("d"), P(("e", "d")), P("d", None, "e"), True),
    "columns": (P(), P("d"), P(None, None, "d"), False),
}
CUT_IN = {P(): (1, 1), P("d"): (4, 1), P(None, "d"): (1, 4), P("e"): (2, 1), P(None, "e"): (1, 2), P(("e", "d")): (8, 1)}


@pytest.mark.parametrize(
    ("layer", "recipe"),
    [
        *((layer, "mxfp8") for layer in LAYERS),
        *((layer, recipe) for layer in ("fsdp", "data and rows") for recipe in ("fp8_current", "fp8_block")),
        ("fsdp", "nvfp4"),
    ],
)
def test_linear_and_its_gradients(layer, recipe, mesh):
    lie_x, lie_w, lies_y, travels = LAYERS[layer]
    x, w = (jnp.asarray(sample("gaussian", shape)) for shape in ((4, 32, 256), (128, 256)))
    key = 3 if recipe == "nvfp4" else None

    def loss(w, x):
        y = bfp.linear(x, w, recipe=recipe, key=key)
        return (y**2).sum(), y

    step = jax.jit(bfp.value_and_grad(loss, (0, 1), has_aux=True))
    whole = bfp.quantize_params(w, recipe)
    expected = step(whole, x)

    def place(leaf):
        lies = NamedSharding(mesh, lie_w)
        even = leaf.ndim == 2 and all(n % size == 0 for n, size in zip(leaf.shape, CUT_IN[lie_w], strict=True))
        return jax.device_put(leaf, lies if even else NamedSharding(mesh, P()))

    placed = jax.tree.map(place, whole), jax.device_put(x, NamedSharding(mesh, lie_x))
    program = step.lower(*placed).compile()
    got = program(*placed)
    assert got[0][1].sharding.spec == lies_y
    chex.assert_trees_all_close(*(jax.tree.map(np.asarray, tree) for tree in (got, expected)), rtol=2e-5, atol=2e-2)
    gathered = set(re.findall(r"= (\w+)\[[\d,]*\][^=\n]* all-gather\(", program.as_text()))
    # fp32 scales of FP8 blocks are the only floats.
    assert gathered <= ({"u8", "f32"} if recipe == "fp8_block" else {"u8"})
    assert ("u8" in gathered) == travels


@pytest.mark.parametrize("lies", [P(), P("e"), P(None, "e")], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
def test_inside_a_shard_map_over_some_of_the_axes(recipe, lies, mesh):
    """Data parallel by hand, and the weight cut by JAX's types: gradients of what stands around the layer are right too."""
    x, w, b, s = (
        jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((32, 96), (64, 96), (1, 64), (1, 64)))
    )
    whole = bfp.quantize_params({"w": w}, recipe)["w"]

    def gradients(q, b, s, x, **options):
        def loss(q, b, s, x):
            return ((bfp.linear(x, q, b, recipe=recipe, **options) * s) ** 2).sum()

        return bfp.grad(loss, (0, 1, 2, 3))(q, b[0], s, x)

    # Each rank's rows are a tensor of their own.
    each = [gradients(whole, b, s, rows) for rows in jnp.split(x, 4)]
    wanted = [sum(parts) for parts in list(zip(*each, strict=True))[:3]] + [jnp.concatenate([one[3] for one in each])]
    body = jax.shard_map(
        lambda q, b, s, x: gradients(q, b, s, x, data_axes=("d",)),
        mesh=mesh, in_specs=(P(), P(), P(), P("d")), out_specs=(P(), P(), P(), P("d")), axis_names={"d"},
    )  # fmt: skip
    placed = jax.device_put(whole, bfp.named_shardings(whole, mesh, lies))
    got = jax.jit(body)(placed, b, s, jax.device_put(x, NamedSharding(mesh, P("d"))))
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("lies", [P("d"), P(None, "d"), P("d", "e"), P(None, None, "e"), P()], ids=str)
def test_dot_general_keeps_the_axes_that_are_cut(lies, mesh):
    x, w = (jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((8, 32, 64), (48, 64))))
    dimensions = (((2,), (1,)), ((), ()))

    def run(x, w):
        y, back = jax.vjp(lambda x, w: bfp.dot_general(x, w, dimensions, recipe="mxfp8"), x, w)
        return y, *back(y)

    placed = jax.device_put(x, NamedSharding(mesh, lies))
    got = jax.jit(run)(placed, jax.device_put(w, NamedSharding(mesh, P())))
    entries = (*lies, *(None,) * (3 - len(lies)))
    assert got[0].sharding.spec == P(*entries[:2], None)
    assert jax.typeof(got[1]).sharding == jax.typeof(placed).sharding
    for ours, theirs in zip(got, jax.jit(run)(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_dot_general_lies_as_out_sharding_says(mesh):
    """As in einsums of training loops for Explicit meshes."""
    x, w = (jnp.asarray(sample("gaussian", shape, seed=i)) for i, shape in enumerate(((8, 32, 64), (48, 64))))
    placed = jax.device_put(x, NamedSharding(mesh, P("d"))), jax.device_put(w, NamedSharding(mesh, P("e")))
    multiply = lambda x, w, out: jnp.einsum(  # noqa: E731
        "btk,nk->btn", x, w, out_sharding=out, _dot_general=partial(bfp.dot_general, recipe="mxfp8")
    )
    wanted = multiply(x, w, None)
    with jax.set_mesh(mesh):
        for out in (P("d", None, "e"), P(("d", "e")), P(), NamedSharding(mesh, P(None, "d"))):
            y = jax.jit(multiply, static_argnums=2)(*placed, out)
            assert jax.typeof(y).sharding.spec == P(*(*getattr(out, "spec", out), *(None,) * 3)[:3])
            np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    with pytest.raises(
        ValueError, match=r"out_sharding = .* must be a PartitionSpec or NamedSharding of lhs's mesh with Explicit"
    ):
        bfp.dot_general(x, w, (((2,), (1,)), ((), ())), out_sharding=P("d"), recipe="mxfp8")


def test_axes_that_dot_general_would_merge(mesh):
    x = jax.device_put(jnp.ones((4, 8, 64)), NamedSharding(mesh, P(None, "d")))
    w = jnp.ones((4, 8, 48))
    with pytest.raises(ValueError, match=r"axes \(1, 2\) of lhs become one, and axis 2 is cut over 'd'"):
        jax.jit(lambda x, w: bfp.dot_general(x, w, (((0, 1), (0, 1)), ((), ())), recipe="mxfp8"))(x, w)


def test_what_jax_can_not_add_is_its_own_error(mesh):
    x = jax.device_put(jnp.ones((8, 32)), NamedSharding(mesh, P("d")))
    w = jax.device_put(jnp.ones((16, 32)), NamedSharding(jax.make_mesh((8,), ("other",)), P("other")))
    with pytest.raises(ValueError, match="mesh"):
        jax.jit(lambda x, w: bfp.linear(x, w, recipe="mxfp8"))(x, w)


def test_groups_are_cut_inside_shard_map_alone(mesh):
    x, w = jnp.asarray(sample("gaussian", (32, 64))), jnp.asarray(sample("gaussian", (4, 32, 64)))
    sizes, experts = jnp.full(4, 8), jnp.arange(32)[:, None] % 4
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    cut = jax.device_put(x, rows)
    layer = jax.jit(lambda x, w: bfp.grouped_linear(x, w, sizes, recipe="mxfp8"))
    send = jax.jit(lambda x: bfp.dispatch(x, experts, 4, recipe="mxfp8").tokens)
    weight = bfp.quantize_params({"w": w}, "mxfp8")["w"]
    for call, message in (
        (lambda: layer(cut, weight), "x is cut over 'd', a mesh axis of type Explicit, where grouped_linear runs inside"),
        (lambda: layer(x, jax.device_put(weight, bfp.named_shardings(weight, mesh, P("e")))), "weight is cut over 'e'"),
        (lambda: send(cut), r"x is cut over 'd', .* where dispatch runs inside jax\.shard_map alone: call it there, or .*Auto"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    expected = layer(x, weight), send(x)
    with jax.set_mesh(mesh):
        assert_same_tree((layer(jax.device_put(x, whole), weight), send(jax.device_put(x, whole))), expected)


@pytest.mark.parametrize("spec", [P("d", None), P("d"), P(None, "d"), P("d", "e"), P()])
@pytest.mark.parametrize("axis_type", jax.sharding.AxisType.__members__.values(), ids=str)
def test_named_shardings_are_what_jax_takes(spec, axis_type):
    if axis_type == jax.sharding.AxisType.Manual:
        pytest.skip("only inside shard_map")
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(axis_type,) * 2)
    x = sample("gaussian", (64, 96))
    tree = {name: bfp.quantize(x, name) for name in ("mxfp8_e4m3", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128")} | {"plain": x}
    lie = bfp.named_shardings(tree, mesh, spec)
    placed = jax.device_put(tree, lie)
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    assert placed["plain"].sharding == NamedSharding(mesh, spec)
    if spec != P():
        assert not placed["mxfp8_e4m3"].codes.sharding.is_fully_replicated
    assert placed["nvfp4"].tensor_scale.sharding.is_fully_replicated
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, each) for each in (placed, tree)))
    values = jax.jit(lambda q: q.dequantize())(placed["nvfp4"])
    np.testing.assert_array_equal(values, tree["nvfp4"].dequantize())

    def build(part, lies):
        host = np.asarray(part)
        return jax.make_array_from_callback(host.shape, lies, lambda index: host[index])

    chex.assert_trees_all_equal(jax.tree.map(build, tree, lie), placed)


def test_named_shardings_of_what_does_not_fit(mesh):
    q = bfp.quantize(jnp.ones((64, 96)), "nvfp4")
    with pytest.raises(ValueError, match=r"names 'x', and the mesh has 'd', 'e'"):
        bfp.named_shardings({"w": q}, mesh, P("x"))
    with pytest.raises(ValueError, match="has 3 entries for an array of shape"):
        bfp.named_shardings({"w": q}, mesh, P(None, None, "d"))


# Blocks that straddle devices along rows and columns, packed columns that are cut, and rows that don't divide evenly.
@pytest.mark.parametrize(("shape", "spec"), [((96, 128), P("d")), ((128, 96), P("e", "d")), ((83, 84), P(("e", "d")))])
def test_parameters_of_shard_params_are_put_together_again(shape, spec, mesh):
    weights = {recipe: jnp.asarray(sample("gaussian", shape)) for recipe in ("mxfp4", "nvfp4", "fp8_current")}
    whole = bfp.quantize_params(weights, lambda path: path)
    state = bfp.adamw(0.1).init(whole, weights)
    placed = bfp.shard_params(whole, mesh, spec)
    again = bfp.unshard_params(placed)
    assert_same_tree(again, whole)
    assert_same_tree(bfp.unshard_state(bfp.shard_state(state, placed), placed), state)
    # What lies on the mesh is cut another way.
    other = bfp.shard_params(again, mesh, P(None, "d"))
    assert_same_tree(bfp.unshard_params(other), whole)
    even = jax.tree.map(lambda part: NamedSharding(mesh, P("e") if part.ndim and part.shape[0] % 2 == 0 else P()), state)
    moved = bfp.shard_state(jax.device_put(state, even), other)
    assert_same_tree(bfp.unshard_state(moved, other), state)
    # Along every axis that the mesh divides, it stays cut.
    if shape == (128, 96):
        assert again["mxfp4"].codes.sharding.spec == spec

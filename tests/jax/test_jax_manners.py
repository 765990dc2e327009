"""Requests of other code to an array: a quantized array answers, or refuses and says what to write."""

import os
import socket
import subprocess
import sys

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.array_serialization import pytree_serialization
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import LIMIT
from safetensors.flax import save as save_flax
from same_trees import assert_same_tree
from samples import sample

import blockfp
import blockfp.jax as bfp

X = jnp.asarray(sample("bf16_valued", (40, 64), "bfloat16"))
FACES = pytest.mark.parametrize("make", [bfp.quantize, lambda x, f: blockfp.quantize(np.asarray(x), f)], ids=["jax", "numpy"])


@FACES
@pytest.mark.parametrize(
    "take",
    [
        np.asarray,
        lambda q: np.array([q, q]),
        jnp.asarray,
        lambda q: np.ones((4, 40), np.float32) @ q,
        lambda q: X.T @ q,
        lambda q: 2.0 * q,
        lambda q: q - X,
        lambda q: -q,
        lambda q: q // 2,
        lambda q: 2.0 % q,
        lambda q: round(q),
        lambda q: q[0],
        list,
        lambda q: 3.0 in q,
        bool,
        lambda q: q or None,
        lambda q: np.multiply(np.ones((40, 64)), q),
        lambda q: np.sum(q),
        lambda q: np.savez("/dev/null", w=q),
        lambda q: q == X,
        lambda q: X == q,  # noqa: SIM300
        lambda q: q > 0,
        lambda q: save_flax({"w": q}),
    ],
)
def test_codes_are_not_taken_for_values(make, take):
    with pytest.raises(TypeError, match=r"dequantize\(\)|does not support ufuncs"):
        take(make(X, "mxfp8_e4m3"))


TREE = {"mx": bfp.quantize(X, "mxfp8_e4m3"), "nv": bfp.quantize(X, "nvfp4"), "fp8": bfp.quantize(X, "fp8_e4m3_1x128")}


def is_whole(leaf):
    return isinstance(leaf, bfp.QuantizedArray)


@pytest.mark.parametrize(
    ("map_over", "message"),
    [
        (lambda x: 0.9 * x, "codes of a QuantizedArray, uint8, became float32"),
        (lambda x: x.astype(jnp.bfloat16), "codes of a QuantizedArray, uint8, became bfloat16"),
        (lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, "scales of a QuantizedArray, float32, became bf"),
    ],
)
def test_what_is_mapped_over_codes(map_over, message):
    """A running mean of parameters, and the casts of mixed precision."""
    for run in (jax.tree.map, jax.jit(jax.tree.map, static_argnums=0)):
        with pytest.raises(TypeError, match=rf"{message}.*dequantize_params\(tree\) has values.*is_leaf"):
            run(map_over, TREE)
    with pytest.raises(TypeError, match="tensor_scale of a QuantizedArray, float32, became float16"):
        jax.tree.map(lambda x: x.astype("float16") if x.dtype == "float32" else x, TREE["nv"])
    whole = jax.tree.map(lambda x: x if is_whole(x) else map_over(x), TREE | {"plain": X}, is_leaf=is_whole)
    assert_same_tree({name: whole[name] for name in TREE}, TREE)


def test_what_may_be_mapped_over_codes():
    for leaf in (
        lambda x: x.shape,
        lambda x: x.dtype,
        jnp.isfinite,
        jnp.mean,
        np.asarray,
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    ):
        jax.tree.map(leaf, TREE)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), TREE, jax.tree.map(jnp.copy, TREE)))


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.pmax, lax.pmin, lambda q, axis: lax.psum_scatter(q, axis)])
def test_sums_over_devices_are_not_sums_of_codes(reduce):
    mesh = jax.make_mesh((2,), ("d",))
    with pytest.raises(TypeError, match=r"jax would calculate with the codes of a QuantizedArray.*dequantize_params"):
        jax.shard_map(lambda q: reduce(q, "d"), mesh=mesh, in_specs=P(), out_specs=P())(TREE["mx"])
    with pytest.raises(TypeError, match="calculate with the codes"):
        jax.vmap(lambda q: reduce(q, "i"), axis_name="i")(jax.tree.map(lambda part: jnp.stack([part] * 2), TREE["mx"]))
    gathered = jax.vmap(lambda q: lax.all_gather(q, "i"), axis_name="i")(jax.tree.map(lambda part: part[None], TREE["mx"]))
    assert_same_tree(jax.tree.map(lambda part: part[0, 0], gathered), TREE["mx"])


def test_one_vector_of_a_tree_is_not_one_of_codes():
    with pytest.raises(TypeError, match="calculate with the codes"):
        ravel_pytree(TREE)
    assert ravel_pytree(bfp.dequantize_params(TREE))[0].shape == (3 * X.size,)


def test_codes_of_no_number_are_not_taken_for_finite():
    tree = {"q": bfp.quantize(jnp.full((4, 64), jnp.nan), "mxfp8_e4m3")}
    with pytest.raises(TypeError, match=r"chex would calculate with the codes.*dequantize_params"):
        chex.assert_tree_all_finite(tree)
    with pytest.raises(AssertionError, match="non-finite"):
        chex.assert_tree_all_finite(bfp.dequantize_params(tree))


@pytest.mark.parametrize("square", [jnp.square, lambda x: x**2, lambda x: jnp.vdot(x, x)])
def test_decay_in_a_loss_names_what_has_values(square):
    """The tutorials' own: a sum over the leaves of parameters. Beside codes there is the carrier of their gradient."""
    params = {"w": bfp.quantize(X.astype("float32"), "mxfp8_e4m3"), "b": jnp.ones(3)}

    def decay(params):
        return sum(jnp.sum(square(leaf)) for leaf in jax.tree.leaves(params))

    for run in (bfp.grad(decay), jax.jit(bfp.grad(decay))):
        with pytest.raises((TypeError, ValueError), match=r"carrier<float32> \(beside the codes.*dequantize_params\(tree\)"):
            run(params)
    gradients = bfp.grad(lambda params: decay(bfp.dequantize_params(params)))(params)
    np.testing.assert_array_equal(gradients["w"], 2 * params["w"].dequantize())


@FACES
def test_equality_is_not_guessed(make):
    q, same = make(X, "mxfp8_e4m3"), make(X, "mxfp8_e4m3")
    with pytest.raises(TypeError, match="== is not defined for a QuantizedArray: compare format, codes, scales"):
        q == same  # noqa: B015
    with pytest.raises(TypeError, match="== is not defined"):
        q != same  # noqa: B015
    assert q == q
    assert q != "mxfp8"
    # NumPy takes what raises for an array that is unequal, so that an array would differ from itself.
    for compare in (np.array_equal, np.array_equiv):
        for pair in ((q, same), (q.dequantize(), q)):
            with pytest.raises(
                TypeError, match=f"numpy.{compare.__name__} is not defined for a QuantizedArray: compare format"
            ):
                compare(*pair)
    assert (np.shape(q), np.ndim(q), np.size(q)) == ((40, 64), 2, 40 * 64)
    assert q in [None, q]
    assert len({q, same}) == 2


@FACES
@pytest.mark.parametrize("write", [np.save, np.savez, np.savez_compressed, np.savetxt])
def test_numpy_leaves_a_file_as_it_is(make, write, tmp_path):
    file = tmp_path / "weights.npz"
    file.write_bytes(b"kept")
    with pytest.raises(TypeError, match=rf"numpy\.{write.__name__} takes no QuantizedArray: save it by blockfp's save"):
        write(file, make(X, "mxfp8_e4m3"))
    assert [path.name for path in tmp_path.iterdir()] == ["weights.npz"]
    assert file.read_bytes() == b"kept"


@FACES
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4_16x16", "mxfp6_e3m2_32x32"])
def test_sizes_and_transpose(make, format):
    q = make(X, format)
    assert q.size == 40 * 64
    parts = (q.codes, q.scales, q.tensor_scale)
    assert q.nbytes == sum(np.asarray(part).nbytes for part in parts if part is not None)
    np.testing.assert_array_equal(q.T.dequantize(), np.asarray(q.dequantize()).T)
    with pytest.raises(ValueError, match=r"\.T is for two axes, got shape \(2, 40, 64\): \.mT swaps the last two"):
        make(jnp.stack([X, X]), format).T  # noqa: B018


def test_sizes_under_jit():
    sizes = []
    jax.jit(lambda q: sizes.append((q.size, q.nbytes)))(bfp.quantize(X, "mxfp4_e2m1"))
    assert sizes == [(40 * 64, 40 * 32 + 40 * 2)]


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_axes_that_vmap_put_behind(format):
    behind = jax.vmap(lambda x: bfp.quantize(x, format), in_axes=-1, out_axes=-1)(jnp.stack([X, X, X], -1))
    for use in (lambda q: q.dequantize(), lambda q: q.shape, lambda q: q.mT, lambda q: q.view_scales()):
        with pytest.raises(ValueError, match=r"columns don't fit; vmap takes and gives axes in front"):
            use(behind)
    assert format in repr(behind)
    # Back through the same axis it is what it was.
    values = jax.vmap(lambda q: q.dequantize(), in_axes=-1)(behind)
    np.testing.assert_array_equal(values[1], bfp.quantize(X, format).dequantize())


def test_axes_that_vmap_put_between():
    between = jax.vmap(lambda x: bfp.quantize(x, "mxfp8_e4m3_32x32"), out_axes=1)(jnp.stack([X, X]))
    with pytest.raises(ValueError, match=r"scales of \(40, 2, 64\) have shape \(40, 1, 2\)"):
        between.dequantize()


def test_keys_of_a_step():
    for make in (lambda: jnp.int32(3), lambda: jnp.uint32(3)):
        with pytest.raises(ValueError, match=r"jax\.random\.fold_in\(jax\.random\.key\(seed\), step\) makes a key of a step"):
            bfp.quantize(X, "nvfp4", key=make())
    with pytest.raises(ValueError, match=r"jax\.random\.fold_in"):
        jax.jit(lambda step: bfp.quantize(X, "nvfp4", key=step))(3)
    jax.eval_shape(lambda step: bfp.quantize(X, "nvfp4", key=jax.random.fold_in(jax.random.key(0), step)), 3)


def test_nothing_to_contract():
    x, w = jnp.ones((3, 2, 0)), jnp.ones((5, 0))
    layer = lambda x, w: bfp.linear(x, w, recipe="mxfp8")  # noqa: E731
    np.testing.assert_array_equal(layer(x, w), np.zeros((3, 2, 5)))
    gradients = jax.grad(lambda *a: layer(*a).sum(), (0, 1))(x, w)
    assert [g.shape for g in gradients] == [(3, 2, 0), (5, 0)]


@pytest.mark.parametrize("precision", ["default", jax.lax.Precision.DEFAULT, ("default", None), ["default"] * 2])
def test_default_precisions(precision):
    product = lambda precision: bfp.dot_general(X, X, (((1,), (1,)), ((), ())), precision, recipe="mxfp8")  # noqa: E731
    assert jax.eval_shape(lambda: product(precision)).shape == (40, 40)
    with pytest.raises(ValueError, match="must be None; the recipe's fast_accum"):
        product(("default", "highest"))


def tree(format):
    return {"w": bfp.quantize(X, format), "stack": [bfp.quantize_params({"w": jnp.ones((2, 32, 32))}, "nvfp4")]}


def test_export_of_functions_of_quantized_arrays():
    def f(tree, x):
        return tree | {"y": x @ tree["w"].dequantize("float32").T}

    exported = jax.export.export(jax.jit(f))(tree("mxfp8_e4m3"), jnp.ones((3, 64)))
    again = jax.export.deserialize(exported.serialize())
    assert_same_tree(again.call(tree("mxfp8_e4m3"), jnp.ones((3, 64))), f(tree("mxfp8_e4m3"), jnp.ones((3, 64))))
    with pytest.raises(ValueError, match="mxfp8_e5m2"):
        again.call(tree("mxfp8_e5m2"), jnp.ones((3, 64)))


def test_export_of_a_step_on_a_mesh():
    """Placements of parameters and the optimizer's state are in the file too."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    optimizer = bfp.adamw(0.1)
    whole = bfp.quantize_params({"w": X, "plain": jnp.ones(3)}, "mxfp8", filter_fn=lambda path, _: path == "w")
    params = bfp.shard_params(whole, mesh, {"w": P("d"), "plain": P()})
    state = bfp.shard_state(optimizer.init(whole), params)
    exported = jax.export.export(jax.jit(lambda params, state: (params, state)))(params, state)
    again = jax.export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree
    assert_same_tree(again.call(params, state), (params, state))


def test_trees_in_files_of_jax(tmp_path):
    """JAX's own files of trees, which have what `jax.export` has."""
    pytree_serialization.save(tree("mxfp8_e4m3"), tmp_path / "tree")
    made = pytree_serialization.load_pytreedef(tmp_path / "tree")
    assert jax.tree.structure(made) == jax.tree.structure(tree("mxfp8_e4m3"))
    here = SingleDeviceSharding(jax.devices()[0])
    assert_same_tree(pytree_serialization.load(tmp_path / "tree", here), tree("mxfp8_e4m3"))


PROCESS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
import jax.numpy as jnp, numpy as np
import blockfp.jax as bfp
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
cut = jax.tree.map(
    lambda part: jax.make_array_from_callback(part.shape, rows, lambda at: np.asarray(part)[at]),
    bfp.quantize(jnp.ones((4, 32)), "mxfp8_e4m3"),
)
try:
    bfp.save(sys.argv[3], {"w": cut})
except ValueError as error:
    print(error)

from jax.experimental.multihost_utils import process_allgather

rng = np.random.default_rng(0)
x = rng.standard_normal((6, 64)).astype("float32")
whole = {"shards": bfp.quantize_params(x, "mxfp8"), "rows": bfp.quantize(x, "nvfp4")}
mine = x[3 * int(sys.argv[1]) :][:3]
explicit = jax.make_mesh((2,), ("d",))
cut = {
    "shards": bfp.unshard_params(bfp.shard_params(whole["shards"], explicit, jax.P("d"))),
    "rows": jax.jit(lambda x: bfp.quantize(x, "nvfp4"))(jax.make_array_from_process_local_data(rows, mine)),
}
gathered = process_allgather(cut, tiled=True)
assert jax.tree.structure(gathered) == jax.tree.structure(whole)
jax.tree.map(np.testing.assert_array_equal, gathered, whole)
print("the same bits")
"""


def test_several_processes(tmp_path):
    """What they hold together has the bits of the whole, and what `save` can't write it says to save with Orbax."""
    command = [sys.executable, "-c", PROCESS]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with socket.socket() as held:
        # JAX may bind the port too, and nobody else is given it meanwhile.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("localhost", 0))
        arguments = (str(held.getsockname()[1]), str(tmp_path / "w.safetensors"))
        running = [subprocess.Popen([*command, str(rank), *arguments], env=environment, **pipes) for rank in range(2)]
        ended = [process.communicate(timeout=LIMIT) for process in running]
    for process, (out, err) in zip(running, ended, strict=True):
        assert process.returncode == 0, err
        assert "w.codes_mxfp8_e4m3_float32_32 is on devices of several processes" in out
        assert "save it by Orbax" in out
        assert "the same bits" in out
    assert not any(tmp_path.iterdir())


def test_what_is_refused_is_said_in_150_characters_and_the_rest_in_notes():
    q, x = bfp.quantize(jnp.ones((64, 64)), "mxfp8_e4m3_32x32"), jnp.ones((4, 64))
    for act in (
        lambda: q + 1,
        lambda: 1 - q,
        lambda: q @ x.T,
        lambda: x @ q,
        lambda: q[0],
        lambda: bool(q),
        lambda: np.asarray(q),
    ):
        with pytest.raises(TypeError, match=r"q\.dequantize\(\) gives values") as raised:
            act()
        assert len(str(raised.value)) <= 150
        assert "blockfp.jax.linear multiplies by a quantized weight" in raised.value.__notes__

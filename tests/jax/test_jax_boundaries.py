"""Straight-through gradients across every boundary that JAX has: right, or an error that says what to write; never zeros."""

from functools import partial

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from samples import sample

import blockfp.jax as bfp

FORMAT = "mxfp8_e4m3_32x32"
LOST = "quantized inside a function which JAX traces by itself"


@pytest.fixture(scope="module")
def arrays():
    return tuple(jnp.asarray(a) for a in sample("gaussian", (2, 4, 32, 64)))


def quantize(x):
    return bfp.quantize(x, FORMAT)


def carrying(x):
    return quantize(x).with_carrier()


def dequantize(q):
    return q.dequantize()


def mapped(function):
    return lambda q: jax.tree.map(function, q)


def over_devices(function):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    return jax.shard_map(lambda x: jax.vmap(function)(x), mesh=mesh, in_specs=P("d"), out_specs=P("d"))


# From x [4, 32, 64], whose matrices are quantized, to its values; the first function may lose what the second needs.
IN_ONE_TRACE = {
    "nothing": lambda x: dequantize(quantize(x)),
    "fake_quantize": lambda x: bfp.fake_quantize(x, FORMAT),
    "vmap": lambda x: jax.vmap(dequantize)(jax.vmap(quantize)(x)),
    "vmap of another axis": lambda x: jax.vmap(dequantize, 1, 1)(jax.vmap(quantize, 1, 1)(x)),
    "scan over": lambda x: lax.scan(lambda _, q: (None, q.dequantize()), None, quantize(x))[1],
    "scan inside": lambda x: lax.scan(lambda _, x: (None, dequantize(quantize(x))), None, x)[1],
    "carried around": lambda x: dequantize(lax.scan(lambda q, _: (q, None), quantize(x), None, length=2)[0]),
    "cond": lambda x: lax.cond(x[0, 0, 0] > -99, dequantize, lambda q: q.dequantize() * 2, quantize(x)),
    "checkpoint after": lambda x: jax.checkpoint(dequantize)(quantize(x)),
    "checkpoint around": jax.checkpoint(lambda x: dequantize(quantize(x))),
    "jit after": lambda x: jax.jit(dequantize)(quantize(x)),
    "jit around": jax.jit(lambda x: dequantize(quantize(x))),
    "tree.map": lambda x: dequantize(mapped(lambda leaf: leaf)(quantize(x))),
    "replace": lambda x: dequantize(quantize(x).replace(origin=(0, 0))),
    "optimization_barrier": lambda x: dequantize(lax.optimization_barrier(quantize(x))),
    "checkpoint_name": lambda x: dequantize(mapped(lambda leaf: checkpoint_name(leaf, "q"))(quantize(x))),
    "indexed": lambda x: jnp.stack([dequantize(mapped(lambda leaf, i=i: leaf[i])(quantize(x))) for i in range(4)]),
    "mT": lambda x: dequantize(quantize(x).mT).mT,
    "quantize_params": lambda x: bfp.dequantize_params(bfp.quantize_params({"w": x}, "mxfp8"))["w"],
    "quantize_params of stacks": lambda x: bfp.dequantize_params(bfp.quantize_params({"w": x}, "nvfp4"))["w"],
    "shard_map": lambda x: over_devices(dequantize)(over_devices(quantize)(x)),
    "columnwise": lambda x: bfp.quantize_columnwise(x, "mxfp4_e2m1").dequantize().mT,
    "taken by index": lambda x: jnp.stack(
        [dequantize(mapped(lambda leaf, i=i: jnp.take(leaf, i, 0))(quantize(x))) for i in range(4)]
    ),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1]), (0, quantize(x)))[1].dequantize(),
}
FORWARD_ONLY = {"while"}

# Of these JAX traces the first half by itself.
APART = {
    "jit": lambda x, q: jax.jit(dequantize)(jax.jit(q)(x)),
    "donated": lambda x, q: jax.jit(lambda q: (q.dequantize(), q), donate_argnums=0)(jax.jit(q)(x))[0],
    "checkpoint": lambda x, q: jax.checkpoint(dequantize)(jax.checkpoint(q)(x)),
    "scan": lambda x, q: jax.vmap(dequantize)(lax.scan(lambda _, x: (None, q(x)), None, x)[1]),
    "cond": lambda x, q: dequantize(lax.cond(x[0, 0, 0] > -99, q, q, x)),
    "shard_map": jax.jit(lambda x, q: over_devices(dequantize)(over_devices(q)(x)), static_argnums=1),
    "vmap under jit": jax.jit(lambda x, q: jax.vmap(dequantize)(jax.vmap(q)(x)), static_argnums=1),
    "tree.map under jit": jax.jit(lambda x, q: dequantize(mapped(lambda leaf: leaf)(q(x))), static_argnums=1),
    "barrier under checkpoint": lambda x, q: jax.checkpoint(lambda x: dequantize(lax.optimization_barrier(q(x))))(x),
}


class InTheTraceThatIsDifferentiated(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters((name, name) for name in IN_ONE_TRACE)
    def test(self, name):
        x, w = (jnp.asarray(a) for a in sample("gaussian", (2, 4, 32, 64)))

        def loss(x):
            return (IN_ONE_TRACE[name](x) * w).sum()

        np.testing.assert_allclose(self.variant(lambda x: jax.jvp(loss, (x,), (w,))[1])(x), (w * w).sum(), rtol=1e-5)
        if name not in FORWARD_ONLY:
            chex.assert_trees_all_equal(self.variant(jax.grad(loss))(x), w)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", APART)
def test_codes_that_leave_a_trace(arrays, name):
    x, w = arrays

    def loss(quantize):
        return lambda x: (APART[name](x, quantize) * w).sum()

    # Undifferentiated, there is nothing to complain of.
    assert np.isfinite(loss(quantize)(x))
    with pytest.raises(TypeError, match=LOST):
        jax.grad(loss(quantize))(x)
    with pytest.raises(TypeError, match=LOST):
        jax.jvp(loss(quantize), (x,), (w,))
    with_carrier = lambda x: quantize(x).with_carrier()  # noqa: E731
    chex.assert_trees_all_equal(jax.grad(loss(with_carrier))(x), w)
    stopped = lambda x: quantize(lax.stop_gradient(x))  # noqa: E731
    assert not jnp.any(jax.grad(loss(stopped))(x))


def test_a_custom_vjp_takes_a_quantized_argument(arrays):
    @jax.custom_vjp
    def twice(q):
        return q.dequantize() * 2

    twice.defvjp(lambda q: (twice(q), None), lambda _, g: (None,))
    inside = jax.custom_vjp(lambda x: dequantize(quantize(x)))
    inside.defvjp(lambda x: (inside(x), None), lambda _, g: (3 * g,))
    x, w = arrays
    assert not jnp.any(jax.grad(lambda x: (twice(quantize(x)) * w).sum())(x)), "the rule says None"
    chex.assert_trees_all_equal(jax.grad(lambda x: (inside(x) * w).sum())(x), 3 * w)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_rule_of_ones_own_differentiates_again(transform, arrays):
    """A backward that makes the forward again, from the array that was quantized."""

    def plain(q, x):
        return jnp.tanh(q.dequantize() * x)

    again = jax.custom_vjp(plain)
    again.defvjp(lambda *args: (plain(*args), args), lambda args, g: jax.vjp(plain, *args)[1](g))
    forward = jax.custom_jvp(plain)
    forward.defjvp(partial(jax.jvp, plain))
    filtered = eqx.filter_custom_vjp(lambda args: plain(*args))
    filtered.def_fwd(lambda _, args: (plain(*args), None))
    filtered.def_bwd(lambda _, g, __, args: eqx.filter_vjp(lambda args: plain(*args), args)[1](g)[0])
    x, w = arrays
    q = quantize(w)
    for rule in (again, forward, lambda *args: filtered(args)):
        of_both = [transform(bfp.grad(lambda *args, f=f: f(*args).sum(), (0, 1)))(q, x) for f in (rule, plain)]
        chex.assert_trees_all_close(*of_both, rtol=1e-5, atol=1e-6)
        assert jnp.any(of_both[0][0])
        of_x = [transform(jax.grad(lambda x, f=f: f(q, x).sum()))(x) for f in (rule, plain)]
        chex.assert_trees_all_close(*of_x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("boundary", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap, lambda f: lambda q: lax.map(f, q)])
@pytest.mark.parametrize("stop", [lax.stop_gradient, mapped(lax.stop_gradient)], ids=["the tree", "each leaf"])
def test_stop_gradient_of_quantized_arrays(stop, boundary, arrays):
    """Of target networks and teachers: a product of q with itself stopped, whose derivatives count one factor."""
    x, w = arrays
    q = quantize(x)

    def product(q):
        return q.dequantize() * stop(q).dequantize()

    def loss(q):
        return (boundary(product)(q) * w).sum()

    expected = q.dequantize() * w
    for transform in (lambda f: f, jax.jit):
        chex.assert_trees_all_close(transform(bfp.grad(loss))(q), expected)
        chex.assert_trees_all_close(transform(jax.grad(lambda x: loss(carrying(x))))(x), expected)
    tangents = jax.jvp(lambda x: product(carrying(x)), (x,), (w,))[1]
    chex.assert_trees_all_close(tangents, expected)
    # What was stopped is a constant to every derivative.
    assert not jnp.any(bfp.grad(lambda q: (bfp.grad(loss)(q) * w).sum())(q))
    assert jax.tree.structure(jax.eval_shape(stop, q)) == jax.tree.structure(q)


def test_what_is_stopped_may_leave_a_trace(arrays):
    x, w = arrays
    teacher = jax.jit(lambda x: lax.stop_gradient(quantize(x)).dequantize())
    gradient = jax.grad(lambda x: (teacher(x) * x * w).sum())(x)
    chex.assert_trees_all_close(gradient, quantize(x).dequantize() * w)


@pytest.mark.parametrize("outer", [jax.grad, bfp.grad])
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint])
def test_quantize_params_in_a_loss(outer, inner):
    x, w, g = (jnp.asarray(sample("gaussian", shape)) for shape in ((8, 64), (32, 64), (8, 32)))

    def loss(w):
        return (bfp.linear(x, bfp.quantize_params({"w": w}, "mxfp8")["w"], recipe="mxfp8") * g).sum()

    expected = bfp.grad(lambda q: (bfp.linear(x, q, recipe="mxfp8") * g).sum())(bfp.quantize_params(w, "mxfp8"))
    assert jnp.any(expected)
    chex.assert_trees_all_close(outer(inner(loss))(w), expected, rtol=1e-6)


@pytest.mark.parametrize("boundary", [jax.jit, jax.checkpoint, jax.vmap, lambda f: lambda q: lax.map(f, q)])
def test_gradients_with_respect_to_quantized_arrays(boundary, arrays):
    x, w = arrays
    q = quantize(x)
    gradient = bfp.grad(lambda q: (boundary(lambda q: mapped(lambda leaf: leaf)(q).dequantize())(q) * w).sum())
    chex.assert_trees_all_equal(gradient(q), w)
    chex.assert_trees_all_equal(jax.jit(gradient)(q), w)


def test_what_comes_back_is_made_as_what_went_in(arrays):
    """Codes and scales, whatever they went through: what checkpoints, loops and out_shardings go by."""
    x, w = arrays
    q = quantize(x)
    structure = jax.tree.structure(q)
    _, aux = jax.value_and_grad(lambda x: ((quantize(x).dequantize() * w).sum(), quantize(x)), has_aux=True)(x)[0]
    _, of_params = bfp.value_and_grad(lambda q: ((q.dequantize() * w).sum(), q), has_aux=True)(q)[0]
    traced = jax.jit(lambda x: quantize(x).with_carrier())(x)
    shapes = jax.eval_shape(carrying, x)
    assert {jax.tree.structure(tree) for tree in (aux, of_params, traced, shapes, jax.jit(quantize)(x))} == {structure}

    def step(q, _):
        (_, same), gradient = bfp.value_and_grad(lambda q: ((q.dequantize() * w).sum(), q), has_aux=True)(q)
        return jax.tree.map(lambda leaf: leaf, same), gradient

    _, gradients = jax.jit(lambda q: lax.scan(step, q, None, length=2))(q)
    chex.assert_trees_all_equal(gradients, jnp.stack([w, w]))


POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "all but": jax.checkpoint_policies.save_anything_except_these_names("other"),
    "named": jax.checkpoint_policies.save_only_these_names("codes"),
    "offloaded": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["codes"], offload_src="device", offload_dst="pinned_host"
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_saves_codes(policy, arrays):
    """Of layers, and of an activation that is kept as codes; a carrier beside them is nothing that could be rounded."""
    x, w = arrays[0][0], bfp.quantize_params(arrays[1][0], "mxfp8")

    def loss(w, x):
        hidden = jnp.tanh(bfp.linear(x, w, recipe="mxfp8"))
        kept = mapped(lambda part: checkpoint_name(part, "codes"))(bfp.quantize(hidden, "mxfp8_e4m3").with_carrier())
        return (jnp.sin(kept.dequantize()) * bfp.linear(x, w, recipe="mxfp8")).sum()

    saving = jax.checkpoint(loss, policy=POLICIES[policy])
    expected = jax.jit(bfp.value_and_grad(loss, (0, 1)))(w, x)
    assert jnp.any(expected[1][0])
    scanned = lambda w, x: lax.scan(lambda total, x: (total + saving(w, x), None), 0.0, x[None])[0]  # noqa: E731
    for each in (saving, scanned):
        chex.assert_trees_all_close(jax.jit(bfp.value_and_grad(each, (0, 1)))(w, x), expected, rtol=1e-4, atol=1e-5)
    if policy in ("named", "offloaded"):
        kept = {part.dtype.name for part in jax.tree.leaves(jax.vjp(partial(saving, w), x)[1]) if part.shape == (32, 32)}
        assert "uint8" in kept
        assert "float32" not in kept


@pytest.mark.optimized
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_no_program_keeps_anything_for_it(format, arrays):
    x = arrays[0][0]
    bytes_of_codes = sum(leaf.nbytes for leaf in jax.tree.leaves(bfp.quantize(x, format)))
    plain = jax.jit(lambda x: bfp.quantize(x, format)).lower(x).compile()
    # Buffers of nothing count a word each in the tuple of results.
    assert plain.memory_analysis().output_size_in_bytes <= bytes_of_codes + 32
    carried = jax.jit(lambda x: bfp.quantize(x, format).with_carrier()).lower(x).compile()
    assert carried.memory_analysis().output_size_in_bytes <= bytes_of_codes + 40
    params = jax.jit(lambda p: bfp.quantize_params(p, "mxfp8")).lower({"w": x}).compile()
    assert params.memory_analysis().output_size_in_bytes < x.size * 1.2
    # A loss whose gradient is taken holds codes, and no array of the original's size and dtype.
    pullback = jax.vjp(lambda x: bfp.fake_quantize(x, format), x)[1]
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pullback)) < x.size


def test_scales_from_parts_have_no_gradient(arrays):
    x = arrays[0][0]
    q = bfp.quantize(x, "fp8_e4m3")

    def loss(scales):
        parts = bfp.QuantizedArray.from_parts(q.codes, scales, format=q.format, columns=q.columns, dtype=x.dtype)
        return parts.dequantize().sum()

    assert np.isfinite(jax.jit(loss)(q.scales))
    with pytest.raises(TypeError, match="scales given to from_parts have no gradient"):
        jax.grad(loss)(q.scales)


def test_the_gradient_goes_through_an_update(arrays):
    """Of meta-learning: the inner step's parameters are codes, whose gradient is that of the masters."""
    x, w = (a[0] for a in arrays)
    q, optimizer = bfp.quantize_params(x, "mxfp8"), bfp.with_masters(optax.sgd(0.1))
    state = optimizer.init(q)

    def update(gradient):
        return bfp.apply_updates(q, optimizer.update(gradient, state, q)[0])

    def after(gradient):
        return update(gradient).dequantize()

    for transform in (lambda f: f, jax.jit):
        chex.assert_trees_all_close(transform(jax.grad(lambda g: (after(g) * w).sum()))(x), -0.1 * w)
    assert jax.tree.structure(jax.jit(update)(x)) == jax.tree.structure(update(x)) == jax.tree.structure(q)


def test_loops_take_what_carries(arrays):
    x, w = arrays

    def loss(x):
        step = lambda _, q: quantize(q.dequantize() * 2).with_carrier()  # noqa: E731
        return (lax.fori_loop(0, 2, step, carrying(x)).dequantize() * w).sum()

    chex.assert_trees_all_close(jax.grad(loss)(x), 4 * w)


def test_nothing_is_traced_again(arrays):
    x, w = arrays

    @jax.jit
    @partial(chex.assert_max_traces, n=1)
    def gradient(x):
        return jax.grad(lambda x: (dequantize(quantize(x)) * w).sum())(x)

    for factor in (1, 2, 3):
        gradient(x * factor)

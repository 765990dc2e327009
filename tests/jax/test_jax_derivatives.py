"""Forward mode and second derivatives: those of the straight-through function, emulated with what plain JAX differentiates."""

import dataclasses
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.linear import linear
from jax import lax

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition.rotation import rotate
from blockfp.definition.rounding import COLUMNWISE, ROWWISE, gradient_key
from blockfp.recipes import Cast

TOKENS, IN, OUT, KEY = 24, 32, 16, (0, 7)
ROTATION = rotate(np.eye(16, dtype=np.float32))


class Arrays(NamedTuple):
    x: jax.Array
    w: jax.Array
    g: jax.Array
    along_x: jax.Array
    along_w: jax.Array


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(3)
    shapes = ((TOKENS, IN), (OUT, IN), (TOKENS, OUT), (TOKENS, IN), (OUT, IN))
    return Arrays(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))


def dot(a, b):
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def cast_as(recipe, operand, direction=ROWWISE):
    """A cast whose derivative is the identity's; of [rows, columns], whichever way it casts."""
    cast = recipe.cast(operand, "columnwise" if direction == COLUMNWISE and operand != "weight" else "rowwise")
    key = gradient_key(np.asarray(KEY, np.uint32), direction, None) if cast.stochastic else None

    def run(x):
        if cast.format is None:
            return x
        y = lax.stop_gradient(x)
        if direction == COLUMNWISE and operand != "weight":
            y = bfp.quantize_columnwise(y, cast.format, key=key, rotate=cast.rotate).dequantize()
            if cast.rotate:
                length = y.shape[1] // 16 * 16
                turned = dot(y[:, :length].reshape(y.shape[0], -1, 16), ROTATION.T).reshape(y.shape[0], length)
                y = jnp.concatenate([turned, y[:, length:]], axis=1)
            y = y.T
        else:
            y = bfp.quantize(y, cast.format, key=key).dequantize()
        return x + lax.stop_gradient(y - x)

    return run


def emulated(recipe):
    """The layer, its forward-mode form (casts with the identity's derivative) and its reverse-mode form."""
    recipe = recipes.parse(recipe)
    of = partial(cast_as, recipe)

    def forward(x, w):
        return dot(of("input")(x), of("weight")(w).T)

    def backward(x, w, g):
        dx = dot(of("gradient")(g), of("weight")(w))
        return dx, dot(of("gradient", COLUMNWISE)(g).T, of("input", COLUMNWISE)(x))

    reverse = jax.custom_vjp(forward)
    # As itself, which JAX differentiates again.
    reverse.defvjp(lambda x, w: (reverse(x, w), (x, w)), lambda kept, g: backward(*kept, g))
    return forward, reverse, backward


ALL = ("jvp", "linearize", "forward over reverse", "reverse over reverse", "reverse over forward")
RECIPES = {
    "mxfp8": ("mxfp8", ALL),
    "fp8_current": ("fp8_current", ("jvp", "reverse over reverse")),
    "nvfp4": ("nvfp4", ("jvp", "reverse over reverse")),
    "high precision backward": (
        recipes.mxfp8().replace(gradient=Cast(None), input_columnwise=Cast(None)),
        ("reverse over reverse",),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_linear(arrays, name):
    recipe, orders = RECIPES[name]
    layer = partial(bfp.linear, recipe=recipe, key=jnp.asarray(KEY, jnp.uint32) if name == "nvfp4" else None)
    forward, reverse, backward = emulated(recipe)
    primals, along = (arrays.x, arrays.w), (arrays.along_x, arrays.along_w)

    def gradient(f):
        return jax.grad(lambda x, w: (jnp.tanh(f(x, w)) * arrays.g).sum(), argnums=(0, 1))

    def emulated_gradient(x, w):
        return backward(x, w, jax.grad(lambda y: (jnp.tanh(y) * arrays.g).sum())(forward(x, w)))

    def penalty(gradients):
        return lambda *p: sum((jnp.sin(g) * v).sum() for g, v in zip(gradients(*p), along, strict=True))

    def derivatives(f, gradients, differentiable):
        of = {
            "jvp": lambda p: jax.jvp(f, p, along)[1],
            "linearize": lambda p: jax.linearize(f, *p)[1](*along),
            "forward over reverse": lambda p: jax.jvp(gradients, p, along)[1],
            "reverse over reverse": lambda p: jax.grad(penalty(gradient(differentiable)), argnums=(0, 1))(*p),
            "reverse over forward": lambda p: jax.grad(lambda *p: jnp.sin(jax.jvp(f, p, along)[1]).sum(), argnums=(0, 1))(*p),
        }
        return jax.jit(lambda p: {order: of[order](p) for order in orders})(primals)

    got, want = derivatives(layer, gradient(layer), layer), derivatives(forward, emulated_gradient, reverse)
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(want))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-3)


def through(x):
    return bfp.fake_quantize(x, "mxfp8_e4m3")


PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda _, row: (None, f(row[None])[0]), None, x)[1],
    "scan of checkpoint": lambda f: lambda x: lax.scan(jax.checkpoint(lambda _, row: (None, f(row[None])[0])), None, x)[1],
    "vmap": lambda f: lambda x: jax.vmap(lambda row: f(row[None])[0])(x),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > -99, f, lambda x: x, x),
}


@pytest.mark.parametrize("place", PLACES)
def test_fake_quantize(place):
    """sum(q^3) has the Hessian 6 q on its diagonal, in every order."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32)), jnp.float32)
    v = jnp.cos(jnp.arange(64.0)).reshape(2, 32)

    def loss(x):
        return (PLACES[place](through)(x) ** 3).sum()

    @jax.jit
    def products(x):
        return {
            "forward over reverse": jax.jvp(jax.grad(loss), (x,), (v,))[1],
            "reverse over reverse": jax.grad(lambda x: (jax.grad(loss)(x) * v).sum())(x),
            "reverse over forward": jax.grad(lambda x: jax.jvp(loss, (x,), (v,))[1])(x),
            "third": jax.grad(lambda x: (jax.grad(lambda x: (jax.grad(loss)(x) * v).sum())(x)).sum())(x) * through(x),
        }

    got = products(x)
    chex.assert_trees_all_close(got, dict.fromkeys(got, 6 * through(x) * v), rtol=1e-5)
    if place == "plain":
        hessian = jax.hessian(loss)(x).reshape(64, 64)
        chex.assert_trees_all_close(hessian, jnp.diag(6 * through(x).reshape(-1)), rtol=1e-5)
        assert jnp.array_equal(jax.jacfwd(through)(x), jax.jacrev(through)(x))


@pytest.mark.parametrize("around", ["scan", "checkpoint", "vmap", "jit"])
def test_a_gradient_penalty_through_layers(arrays, around):
    """Layers one after another; those that the inner gradient only passes are differentiated by the outer one too."""
    w = jnp.stack([arrays.w[:, :OUT], arrays.along_w[:, :OUT]])
    x = arrays.x[:, :OUT]

    def network(layer, around):
        def run(x, w):
            if around == "scan":
                return lax.scan(lambda x, w: (jnp.tanh(layer(x, w)), None), x, w)[0]
            if around == "vmap":
                return jax.vmap(layer, in_axes=(None, 0))(x, w).sum(0)
            step = {"checkpoint": jax.checkpoint, "jit": jax.jit, "nothing": lambda f: f}[around](
                lambda x, w: jnp.tanh(layer(x, w))
            )
            return step(step(x, w[0]), w[1])

        return run

    def penalty(layer, around):
        def of(w):
            return (jax.grad(lambda x: (network(layer, around)(x, w) * arrays.g).sum())(x) ** 2).sum()

        return jax.jit(jax.grad(of))

    got = penalty(partial(bfp.linear, recipe="mxfp8"), around)(w)
    # JAX differentiates a custom_vjp no further inside scan. (A checkpoint stays: it computes y twice, and of two cotangents
    # each is quantized by itself.)
    want = penalty(emulated("mxfp8")[1], "nothing" if around == "scan" else around)(w)
    assert jnp.any(want)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-4 * jnp.abs(want).max())


def test_with_respect_to_quantized_weights(arrays):
    q = bfp.quantize_params(arrays.w, "mxfp8")

    def penalty(layer, gradient):
        def of(w):
            return (jax.grad(lambda x: (jnp.tanh(layer(x, w)) * arrays.g).sum())(arrays.x) ** 2).sum()

        return jax.jit(gradient(of))

    got = penalty(partial(bfp.linear, recipe="mxfp8"), bfp.grad)(q)
    want = penalty(emulated("mxfp8")[1], jax.grad)(q.dequantize())
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_of_gradients_of_quantized_weights(arrays):
    """Hessian-vector products and third derivatives, with `bfp.grad` inside of itself and of `jax.grad`, jit, vmap and scan."""
    q, v = bfp.quantize_params(arrays.w, "mxfp8"), arrays.along_w
    values = q.dequantize()

    def along(gradient, f):
        return lambda w: jnp.vdot(gradient(f)(w), v)

    cube = lambda w: ((w.dequantize() if isinstance(w, bfp.QuantizedArray) else w) ** 3).sum()  # noqa: E731
    layer = lambda w: (jnp.tanh(bfp.linear(arrays.x, w, recipe="mxfp8")) * arrays.g).sum()  # noqa: E731
    for f in (cube, layer):
        product = bfp.grad(along(bfp.grad, f))
        want = jax.grad(along(jax.grad, f))(values)
        for got in (product(q), jax.jit(product)(q)):
            chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(bfp.grad(along(bfp.grad, along(bfp.grad, cube)))(q), 6 * v * v, rtol=1e-6)
    stack = jax.tree.map(lambda part: jnp.stack([part, part]), q)
    mapped = jax.vmap(bfp.grad(along(bfp.grad, cube)))(stack)
    np.testing.assert_allclose(mapped, jnp.stack([6 * values * v] * 2), rtol=1e-6)
    quantized = lambda w: along(bfp.grad, cube)(bfp.quantize_params(w, "mxfp8"))  # noqa: E731
    looped = lambda w: jax.lax.scan(lambda sum, _: (sum + along(bfp.grad, cube)(w), None), 0.0, None, length=2)[0]  # noqa: E731
    np.testing.assert_allclose(jax.grad(quantized)(arrays.w), 6 * values * v, rtol=1e-6)
    np.testing.assert_allclose(bfp.grad(looped)(q), 12 * values * v, rtol=1e-6)


def test_grouped_linear(arrays):
    """Group by group `linear`'s, of groups of unequal sizes, one without rows, and rows beyond all."""
    sizes = (5, 0, 17)
    w = jnp.stack([arrays.w, -arrays.w, arrays.along_w])
    b = jnp.asarray(np.random.default_rng(1).standard_normal((3, OUT)), jnp.float32)

    def grouped(x, w, b):
        return bfp.grouped_linear(x, w, jnp.asarray(sizes), b, recipe="mxfp8")

    def one_by_one(x, w, b):
        ends = np.cumsum(sizes)
        each = [
            bfp.linear(x[end - size : end], w[i], b[i], recipe="mxfp8")
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        return jnp.concatenate([*each, jnp.zeros((TOKENS - ends[-1], OUT))])

    primals = (arrays.x, w, b)
    along = jax.tree.map(jnp.cos, primals)

    @partial(jax.jit, static_argnums=0)
    def products(layer, primals):
        gradient = jax.grad(lambda *p: (jnp.tanh(layer(*p)) * arrays.g).sum(), argnums=(0, 1, 2))
        return (
            jax.jvp(layer, primals, along)[1],
            jax.jvp(gradient, primals, along)[1],
            jax.grad(lambda *p: sum(jnp.sin(g).sum() for g in gradient(*p)), argnums=(0, 1, 2))(*primals),
        )

    chex.assert_trees_all_close(products(grouped, primals), products(one_by_one, primals), rtol=1e-3, atol=2e-4)


def test_dot_general_and_delayed_scaling(arrays):
    x, w = arrays.x.reshape(2, 12, IN), jnp.stack([arrays.w, arrays.along_w])
    dimensions = (((2,), (2,)), ((0,), (0,)))
    product = partial(bfp.dot_general, dimension_numbers=dimensions, recipe="mxfp8")
    each = lambda x, w: jax.vmap(partial(bfp.linear, recipe="mxfp8"))(x, w)  # noqa: E731

    def penalty(f):
        return jax.jit(jax.grad(lambda w: (jax.grad(lambda x: (jnp.tanh(f(x, w)) ** 2).sum())(x) ** 2).sum()))(w)

    chex.assert_trees_all_close(penalty(product), penalty(each), rtol=1e-5)

    state = bfp.delayed_state("fp8_delayed")
    state = dataclasses.replace(state, input_scale=jnp.float32(1), gradient_scale=jnp.float32(1))
    layer = lambda x, w: bfp.linear(x, w, recipe="fp8_delayed", state=state)[0]  # noqa: E731
    tangent = jax.jit(lambda x, w: jax.jvp(layer, (x, w), (arrays.along_x, arrays.along_w))[1])(arrays.x, arrays.w)
    multiplied = bfp.fake_quantize(arrays.w, "fp8_e4m3")
    # Scales of 1: what E4M3 itself rounds to.
    rounded = arrays.x.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    want = dot(arrays.along_x, multiplied.T) + dot(rounded, arrays.along_w.T)
    chex.assert_trees_all_close(tangent, want, rtol=1e-4, atol=1e-4)


def test_a_jacobian(arrays):
    layer = lambda x: bfp.linear(x, arrays.w, recipe="mxfp8")  # noqa: E731
    jacobian = jax.jit(jax.jacfwd(layer))(arrays.x[0])
    chex.assert_trees_all_close(jacobian, bfp.quantize_params(arrays.w, "mxfp8").dequantize(), rtol=1e-5)


def test_what_a_sharded_weight_has_no_derivatives_of(arrays):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec
    params = bfp.shard_params(bfp.quantize_params(arrays.w, "mxfp8"), mesh, spec("d"))

    def layer(x, w):
        return bfp.linear(x, w, recipe="mxfp8", data_axes=("d",))

    def over_ranks(f, out):
        specs = (spec("d"), bfp.partition_specs(params))
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))(arrays.x, params)

    with pytest.raises(NotImplementedError, match="only has gradients in reverse mode"):
        over_ranks(lambda x, w: jax.jvp(lambda x: layer(x, w), (x,), (x,))[1], spec("d"))

    def penalty(x, w):
        dx = lambda w: jax.grad(lambda x: (layer(x, w) ** 2).sum())(x)  # noqa: E731
        return bfp.grad(lambda w: (dx(w) ** 2).sum())(w)

    with pytest.raises(NotImplementedError, match="only has gradients in reverse mode"):
        over_ranks(penalty, spec("d"))


@pytest.mark.optimized
def test_what_is_kept_for_the_backward(arrays):
    """Codes of x and of the weight, and nothing of their original size and dtype."""
    x, w = (jnp.tile(a, (4, 4)) for a in (arrays.x, arrays.w))
    pullback = jax.vjp(lambda x, w: bfp.linear(x, w, recipe="mxfp8"), x, w)[1]
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))
    assert kept < 2.2 * x.size + 1.2 * w.size

    def loss(x, ws):
        return (lax.scan(lambda x, w: (jnp.tanh(bfp.linear(x, w, recipe="mxfp8")), None), x, ws)[0] ** 2).sum()

    square = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64, 64)), jnp.float32)
    many = jnp.ones((512, 64))
    compiled = jax.jit(jax.grad(loss, argnums=1)).lower(many, square).compile()
    text = compiled.as_text()
    # Of each of the eight layers' x the forward stores one array of codes, and no values but what tanh wants.
    assert "u8[8,64,512]" in text
    assert "u8[8,512,64]" not in text, "rowwise codes are for forward mode"


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_derivatives_outside_of_jit_trace_a_layer_once(monkeypatch, stored, biased):
    """Equal calls run one program; another shape is traced once more."""
    traced = []
    operands = linear.input_operands
    monkeypatch.setattr(linear, "input_operands", lambda *args, **options: traced.append(1) or operands(*args, **options))
    features = 224 + 64 * biased if stored else 160 + 32 * biased  # which no other test has: its program would be known
    w, bias = jnp.ones((32, features)), jnp.ones(32) if biased else None
    weight = bfp.quantize(w, "mxfp8_e4m3_32x32") if stored else w
    for times, rows in ((3, 16), (2, 48)):
        for _ in range(times):
            jax.value_and_grad(lambda x: bfp.linear(x, weight, bias, recipe="mxfp8").sum())(jnp.ones((rows, features)))
    assert len(traced) == 2


# As docs/jax.md says: how far the orders of differentiation are from each other, and from the product without quantization.
PRODUCTS = {
    "fp8_current": ((0.015, 0.06), (0.08, 0.10)),
    "mxfp8": ((0.015, 0.06), (0.08, 0.10)),
    "mxfp6": ((0.015, 0.06), (0.155, 0.175)),
    "mxfp4": ((0.015, 0.06), (0.325, 0.425)),
    "nvfp4": ((0.125, 0.235), (0.325, 0.425)),
    "mxfp4_rotated": ((0.125, 0.235), (0.325, 0.425)),
}


def network(x, weights, recipe):
    y = x
    for i, weight in enumerate(weights):
        y = jnp.tanh(y @ weight.T if recipe is None else bfp.linear(y, weight, recipe=recipe, key=5 + i))
    return (y**2).sum()


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_hessian_vector_products_depend_on_the_order(recipe):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((64, 64)), jnp.float32)
    shapes = ((128, 64), (32, 128))
    weights = tuple(jnp.asarray(draw.standard_normal(shape) * shape[1] ** -0.5, jnp.float32) for shape in shapes)
    along = tuple(jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes)

    def of(recipe):
        loss = lambda weights: network(x, weights, recipe)  # noqa: E731
        yield jax.jvp(jax.grad(loss), (weights,), (along,))[1]
        yield jax.grad(lambda w: sum(map(jnp.vdot, jax.grad(loss)(w), along)))(weights)
        yield jax.grad(lambda w: jax.jvp(loss, (w,), (along,))[1])(weights)

    flat = lambda tree: np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in tree])  # noqa: E731
    apart = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)  # noqa: E731
    exact, *others = map(flat, of(None))
    assert all(apart(other, exact) < 1e-5 for other in others)
    found = list(map(flat, of(recipes.parse(recipe))))
    (least, most), (closest, farthest) = PRODUCTS[recipe]
    for i, j in ((0, 1), (2, 1), (0, 2)):
        assert least <= apart(found[i], found[j]) <= most, (i, j)
    assert all(closest <= apart(one, exact) <= farthest for one in found)

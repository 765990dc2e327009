"""JAX and PyTorch on the same numbers: a linear layer and a transformer block, every recipe, every quantized operand."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.linear.layer_placement import LayerPlacement
from blockfp.jax_backend.linear.operands import Delayed, gradient_operands, input_operands
from casting import CASTING
from samples import bits_of, sample

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.kernels.operand_cast import operand_cast
from blockfp.recipes import Cast

torch = pytest.importorskip("torch")
bfp_torch = pytest.importorskip("blockfp.torch")
gradient_keys = pytest.importorskip("blockfp.torch_backend.ops.quantize.key_ops").gradient_keys
quantize_operand = pytest.importorskip("blockfp.torch_backend.ops.quantize.operand_ops").quantize_operand
apply = pytest.importorskip("blockfp.torch_backend.linear.linear").apply

BY_RECIPE = pytest.mark.parametrize("recipe", CASTING)
HERE = LayerPlacement(None, (), False)
KEY = (11 << 32) + 5
MULTIPLIER = np.float32(3.7)


def assert_same_parts(array, parts, what):
    ours = [part for part in (array.codes, array.scales, array.tensor_scale) if part is not None]
    assert len(ours) == len(parts), what
    for got, want in zip(ours, parts, strict=True):
        np.testing.assert_array_equal(bits_of(np.asarray(got)), bits_of(want.numpy()), err_msg=what)


@cache
def operands_of(recipe, operand):
    """The compiled JAX function that makes both operands of an input or a gradient."""
    delayed = None if recipe.delayed is None else Delayed(jnp.asarray(MULTIPLIER), lambda: jnp.asarray(MULTIPLIER))
    key = jnp.asarray([KEY >> 32, KEY & 0xFFFFFFFF], jnp.uint32)
    if operand == "input":
        return jax.jit(lambda x: input_operands(x, recipe, HERE, delayed)[:2])
    return jax.jit(lambda x: gradient_operands(x, recipe, HERE, delayed, key)[:2])


def assert_same_operands(x, recipe, operand):
    """Rowwise and columnwise codes and scales of one input or gradient [tokens, size]."""
    multiplier = None if recipe.delayed is None else MULTIPLIER
    keys = gradient_keys(torch.tensor([KEY >> 32, KEY & 0xFFFFFFFF]))[0]
    row, column = recipe.cast(operand), recipe.cast(operand, "columnwise")
    x = np.array(x)
    cast = operand_cast(row, column, recipe.eps, keyed=True)
    scale = None if multiplier is None else torch.tensor(multiplier)
    found = quantize_operand(torch.from_numpy(x), cast, multiplier=scale, keys=keys)
    ours = operands_of(recipe, operand)(x)
    for array, parts, way in zip(ours, (found.row, found.column), ("rowwise", "columnwise"), strict=True):
        if recipe.cast(operand, way).format is None:
            assert parts == []
        else:
            assert_same_parts(array, parts, f"{recipe} {operand} {way}")


def assert_same_weight(w, recipe):
    q = bfp.quantize_params(jnp.asarray(w), recipe)
    other = bfp_torch.quantize(torch.from_numpy(np.asarray(w)), recipe.weight.format)
    parts = [part for part in (other.codes, other.scales, other.tensor_scale) if part is not None]
    assert_same_parts(q, parts, f"{recipe} weight")
    if recipe.weight_columnwise.format is not None:
        turned = other.mT
        assert_same_parts(
            q.mT,
            [p for p in (turned.codes, turned.scales, turned.tensor_scale) if p is not None],
            f"{recipe} weight columnwise",
        )


# Lifts the amaxes of inputs; gradients are in a format that has no eps, and a weight's amax is its own.
WITH_EPS = recipes.fp8_block(eps=64.0).replace(name="with_eps", gradient=Cast("mxfp8_e4m3"))


@pytest.mark.parametrize("recipe", [*CASTING, WITH_EPS], ids=str)
def test_linear(recipe):
    recipe = recipes.parse(recipe)
    x, w, g = (
        sample(kind, shape) for kind, shape in (("integers", (40, 72)), ("bf16_valued", (56, 72)), ("gaussian", (40, 56)))
    )
    assert_same_operands(x, recipe, "input")
    assert_same_operands(g, recipe, "gradient")
    assert_same_weight(w, recipe)
    state = None if recipe.delayed is None else bfp.delayed_state(recipe)

    def loss(x, w):
        y = bfp.linear(x, w, recipe=recipe, key=KEY, state=state)
        y = y if state is None else y[0]
        return (y * g).sum(), y

    q = bfp.quantize_params(jnp.asarray(w), recipe)
    (_, y), gradients = jax.jit(bfp.value_and_grad(loss, (0, 1), has_aux=True))(jnp.asarray(x), q)

    tx = torch.from_numpy(x).requires_grad_()
    tw = bfp_torch.quantize(torch.from_numpy(w), recipe.weight.format).requires_grad_()
    options = {"key": KEY}
    if recipe.delayed is not None:
        none, history = torch.zeros(()), torch.zeros(4)
        options = {"state": bfp_torch.LinearState(history, none, history.clone(), none.clone())}
    ty = bfp_torch.linear(tx, tw, recipe=recipe, **options)
    ty.backward(torch.from_numpy(g))
    for got, want in zip((y, *gradients), (ty.detach(), tx.grad, tw.grad), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=2e-6 * float(want.abs().max()))


# The layers share shapes, so that fewer functions are compiled.
WIDTH, HEADS, HIDDEN, LENGTH = 64, 4, 192, 24
SHAPES = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}


def block(x, weights, linear, lib):
    """A causal transformer block of one sequence [length, width] in either library, given its linear layers."""
    if lib is torch:
        softmax, gelu = torch.softmax, lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    else:
        softmax, gelu = jax.nn.softmax, jax.nn.gelu
    norm = lambda x: x / lib.sqrt((x * x).mean(-1)[..., None] + 1e-6)  # noqa: E731
    qkv = linear(norm(x), "qkv").reshape(LENGTH, 3, HEADS, -1)
    q, k, v = (qkv[:, i] for i in range(3))
    scores = lib.einsum("qhd,khd->hqk", q, k) / (WIDTH // HEADS) ** 0.5
    mask = lib.tril(lib.ones((LENGTH, LENGTH))) > 0
    attended = lib.einsum("hqk,khd->qhd", softmax(lib.where(mask, scores, lib.full_like(scores, -1e9)), -1), v)
    x = x + linear(attended.reshape(LENGTH, WIDTH), "out")
    return x + linear(gelu(linear(norm(x), "up")), "down")


def state_of(recipe, history):
    """The same state of delayed scaling in both frameworks, given its newest history; (None, None) for other recipes."""
    if recipe.delayed is None:
        return None, None
    history = [np.asarray(h, np.float32) for h in history]
    ours = bfp.DelayedState(jnp.asarray(history[0]), jnp.float32(MULTIPLIER), jnp.asarray(history[1]), jnp.float32(MULTIPLIER))
    parts = [torch.from_numpy(np.array(part)) for part in jax.tree.leaves(ours)]
    return ours, bfp_torch.LinearState(*parts)


@BY_RECIPE
def test_transformer_block(recipe):
    recipe = recipes.parse(recipe)
    rng = np.random.default_rng(3)
    x, g = (rng.standard_normal((LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
    weights = {name: (rng.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for name, s in SHAPES.items()}
    q = bfp.quantize_params({name: jnp.asarray(w) for name, w in weights.items()}, recipe)

    states = {name: state_of(recipe, np.zeros((2, 4))) for name in SHAPES}

    def loss(params, x, probes, states):
        seen, new = {}, {}

        def linear(x, name):
            seen[name] = x
            y = bfp.linear(x, params[name], recipe=recipe, key=KEY, state=states[name])
            y, new[name] = (y, None) if states[name] is None else y
            # The probe's cotangent is the gradient that this layer's backward gets.
            return y + probes[name]

        y = block(x, params, linear, jnp)
        return (y * g).sum(), (y, seen, new)

    probes = {name: jnp.zeros((LENGTH, s[0])) for name, s in SHAPES.items()}
    run = jax.jit(bfp.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    (_, (y, seen, new)), (dw, dx, incoming, amaxes) = run(q, jnp.asarray(x), probes, {n: s for n, (s, _) in states.items()})

    for name in SHAPES:
        assert_same_operands(seen[name], recipe, "input")
        assert_same_operands(incoming[name], recipe, "gradient")
        assert_same_weight(weights[name], recipe)

    tw = {n: bfp_torch.quantize(torch.from_numpy(w), recipe.weight.format).requires_grad_() for n, w in weights.items()}
    tx = torch.from_numpy(x).requires_grad_()

    def torch_linear(x, name):
        state = states[name][1]
        return bfp_torch.linear(x, tw[name], recipe=recipe, **({"key": KEY} if state is None else {"state": state}))

    ty = block(tx, tw, torch_linear, torch)
    ty.backward(torch.from_numpy(g))
    # A sum that differs in its last bit may be rounded to another code further on.
    for got, want in [(y, ty.detach()), (dx, tx.grad), *((dw[n], tw[n].grad) for n in SHAPES)]:
        difference = np.linalg.norm(np.asarray(got) - want.numpy()) / float(want.norm())
        assert difference < 2e-2, difference
    if recipe.delayed is not None:
        for name, (_, state) in states.items():
            for got, want in (
                (new[name].input_amax_history, state.input_amax_history),
                (amaxes[name].gradient_amax_history, state.gradient_amax_history),
            ):
                np.testing.assert_allclose(got, want.numpy(), rtol=2e-2)


STOCHASTIC = recipes.fp8_current().replace(gradient=Cast("fp8_e5m2", stochastic=True))


@pytest.mark.parametrize("recipe", [recipes.fp8_delayed(history=4), STOCHASTIC], ids=["delayed", "stochastic"])
def test_groups_share_a_state_and_have_keys_of_their_own(recipe):
    counts = (5, 0, 11)
    x, w, g = (sample(kind, s) for kind, s in (("integers", (16, 40)), ("gaussian", (3, 24, 40)), ("gaussian", (16, 24))))
    ours, theirs = state_of(recipe, np.zeros((2, 4)))
    if ours is not None:
        # A group whose amax isn't finite hides no other's.
        g[2, 0] = np.inf

    def loss(x, q, state):
        y = bfp.grouped_linear(x, q, jnp.asarray(counts), recipe=recipe, key=KEY, state=state)
        y, state = (y, None) if state is None else y
        return (y * g).sum(), (y, state)

    q = bfp.quantize(jnp.asarray(w), recipe.weight.format)
    (_, (y, new)), (dx, dw, seen) = jax.jit(bfp.value_and_grad(loss, (0, 1, 2), has_aux=True))(jnp.asarray(x), q, ours)

    tx = torch.from_numpy(x).requires_grad_()
    tw = bfp_torch.quantize(torch.from_numpy(w), recipe.weight.format).requires_grad_()
    ty = apply(tx, tw, None, recipe, state=theirs, key=KEY, counts=counts)
    ty.backward(torch.from_numpy(g))
    for got, want in zip((y, dx, dw), (ty.detach(), tx.grad, tw.grad), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=2e-6 * np.nanmax(np.abs(want.numpy())))
    if ours is not None:
        np.testing.assert_array_equal(new.input_amax_history, theirs.input_amax_history)
        np.testing.assert_array_equal(seen.gradient_amax_history, theirs.gradient_amax_history)
        assert theirs.gradient_amax_history[0] == np.abs(g[5:]).max()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_moves_on_alike(algorithm):
    recipe = recipes.fp8_delayed(history=5, margin=1, algorithm=algorithm)
    histories = np.abs(sample("exponents", (2, 5)))
    ours, theirs = state_of(recipe, histories)
    layer = bfp_torch.Linear(8, 8, recipe=recipe)
    for name, part in zip(theirs._fields, theirs[:4], strict=False):
        getattr(layer, name).copy_(part)
    bfp_torch.update_scales(layer)
    moved = bfp.update_scales(ours, jax.tree.map(jnp.zeros_like, ours), recipe)
    for name in ("input_amax_history", "input_scale", "gradient_amax_history", "gradient_scale"):
        np.testing.assert_array_equal(bits_of(np.asarray(getattr(moved, name))), bits_of(getattr(layer, name).numpy()))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp4_rotated"])
def test_hessian_vector_products(recipe):
    """Those of a gradient's gradient, the order that PyTorch has."""
    draw = np.random.default_rng(0)
    x, weight, along = (draw.standard_normal(shape).astype(np.float32) for shape in ((64, 64), (32, 64), (32, 64)))
    loss = lambda w: (jnp.tanh(bfp.linear(x, w, recipe=recipe, key=5)) ** 2).sum()  # noqa: E731
    wanted = jax.grad(lambda w: jnp.vdot(jax.grad(loss)(w), along))(jnp.asarray(weight))
    leaf = torch.tensor(weight, requires_grad=True)
    value = (torch.tanh(bfp_torch.linear(torch.tensor(x), leaf, recipe=recipe, key=5)) ** 2).sum()
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    (found,) = torch.autograd.grad(gradient.mul(torch.tensor(along)).sum(), leaf)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())

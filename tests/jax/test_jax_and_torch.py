"""JAX and PyTorch on the same numbers: a linear layer and a transformer block, every recipe, every quantized operand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from blockfp.jax_backend.lies import Lies
from blockfp.jax_backend.operands import gradient_operands, input_operands
from blockfp.torch_backend.custom_ops.operand_ops import quantize_operand
from blockfp.torch_backend.quantized_tensor.keys import gradient_keys
from samples import bits_of, sample

import blockfp.jax as bfp
import blockfp.torch as bfp_torch
from blockfp import recipes
from blockfp.recipes import RECIPES

BY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
HERE = Lies(None, (), False)
KEY = (11 << 32) + 5
MULTIPLIER = np.float32(3.7)


def assert_same_parts(array, parts, what):
    ours = [part for part in (array.codes, array.scales, array.tensor_scale) if part is not None]
    assert len(ours) == len(parts), what
    for got, want in zip(ours, parts, strict=True):
        np.testing.assert_array_equal(bits_of(np.asarray(got)), bits_of(want.numpy()), err_msg=what)


def assert_same_operands(x, recipe, operand):
    """Rowwise and columnwise codes and scales of one input or gradient [tokens, size]."""
    multiplier = None if recipe.delayed is None else MULTIPLIER
    ours_multiplier = None if multiplier is None else jnp.asarray(multiplier)
    keys = gradient_keys(torch.tensor([KEY >> 32, KEY & 0xFFFFFFFF]))[0]
    row, column = recipe.cast(operand), recipe.cast(operand, "columnwise")
    found = quantize_operand(
        torch.from_numpy(np.array(x)),
        row.format,
        column.format,
        multiplier=None if multiplier is None else torch.tensor(multiplier),
        row_key=keys[0] if row.stochastic else None,
        column_key=keys[1] if column.stochastic else None,
        rotate=column.rotate,
        eps=recipe.eps,
    )
    if operand == "input":
        ours = jax.jit(lambda x: input_operands(x, recipe, HERE, ours_multiplier))(x)
    else:
        key = jnp.asarray([KEY >> 32, KEY & 0xFFFFFFFF], jnp.uint32)
        ours = jax.jit(lambda x: gradient_operands(x, recipe, HERE, ours_multiplier, key))(x)
    for array, parts, way in zip(ours, (found.row, found.column), ("rowwise", "columnwise"), strict=True):
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


@BY_RECIPE
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
        one, history = torch.ones(()), torch.zeros(4)
        options = {"state": bfp_torch.LinearState(history, one, history.clone(), one.clone())}
    ty = bfp_torch.linear(tx, tw, recipe=recipe, **options)
    ty.backward(torch.from_numpy(g))
    for got, want in zip((y, *gradients), (ty.detach(), tx.grad, tw.grad), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=2e-6 * float(want.abs().max()))


WIDTH, HEADS, HIDDEN, LENGTH = 64, 4, 128, 24
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


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "fp8_delayed"])
def test_transformer_block(recipe):
    recipe = recipes.parse(recipe)
    rng = np.random.default_rng(3)
    x, g = (rng.standard_normal((LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
    weights = {name: (rng.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for name, s in SHAPES.items()}
    q = bfp.quantize_params({name: jnp.asarray(w) for name, w in weights.items()}, recipe)

    def loss(params, x, probes):
        seen = {}

        def linear(x, name):
            seen[name] = x
            # The probe's cotangent is the gradient that this layer's backward gets.
            return bfp.linear(x, params[name], recipe=recipe, key=KEY) + probes[name]

        y = block(x, params, linear, jnp)
        return (y * g).sum(), (y, seen)

    probes = {name: jnp.zeros((LENGTH, s[0])) for name, s in SHAPES.items()}
    (_, (y, seen)), (dw, dx, incoming) = jax.jit(bfp.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, jnp.asarray(x), probes)

    for name in SHAPES if recipe.name == "mxfp8" else ("up", "down"):
        assert_same_operands(seen[name], recipe, "input")
        assert_same_operands(incoming[name], recipe, "gradient")
        assert_same_weight(weights[name], recipe)

    tw = {n: bfp_torch.quantize(torch.from_numpy(w), recipe.weight.format).requires_grad_() for n, w in weights.items()}
    tx = torch.from_numpy(x).requires_grad_()
    ty = block(tx, tw, lambda x, name: bfp_torch.linear(x, tw[name], recipe=recipe, key=KEY), torch)
    ty.backward(torch.from_numpy(g))
    # A sum that differs in its last bit may be rounded to another code further on.
    for got, want in [(y, ty.detach()), (dx, tx.grad), *((dw[n], tw[n].grad) for n in SHAPES)]:
        difference = np.linalg.norm(np.asarray(got) - want.numpy()) / float(want.norm())
        assert difference < 2e-2, difference

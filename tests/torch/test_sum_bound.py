"""The bound of docs/numerics.md on sums: (K + 4) 2^-24 sum |a b| and one rounding, of the decoded operands."""

import pytest
import torch
from linear_reference import SCALES, expected, state_of

import blockfp.torch as bfp
from blockfp import recipes


def operands(kind, tokens, n, k, dtype):
    generator = torch.Generator().manual_seed(tokens + 7 * k)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    x, weight, gradient = random(tokens, k), random(n, k) * 0.1, random(tokens, n)
    if kind == "cancelling":
        # Each half takes back what the other adds, but for some units of the last place; also along the tokens.
        half = k // 2
        x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
        half = tokens // 2
        x[half : 2 * half], gradient[half : 2 * half] = x[:half], -gradient[:half]
        x, gradient = x + random(tokens, k) * 1e-4, gradient + random(tokens, n) * 1e-4
    if kind == "binades":
        spread = 1 if dtype is torch.float16 else 4  # nothing may overflow
        x, gradient = x * torch.exp2(spread * random(1, k)), gradient * torch.exp2(spread * random(tokens, 1))
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def assert_bound(actual, result, terms, bias=None, slack=1.0):
    added = 0.0 if bias is None else bias.double()
    value, magnitude = result.value + added, result.magnitude + abs(added)
    lost = slack * (terms + 4) * 2.0**-24 * magnitude
    bound = lost + torch.finfo(actual.dtype).eps / 2 * (value.abs() + lost) + torch.finfo(actual.dtype).tiny
    error = (actual.detach().double() - value).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max():.3} times the bound"


def hold(recipe, kind, dtype, shape, device="cpu", slack=1.0):
    tokens, n, k = shape
    recipe = recipes.parse(recipe)
    x, weight, gradient = operands(kind, tokens, n, k, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
    scales = SCALES if recipe.delayed else {}
    wanted = expected(x, weight, gradient, recipe, key=7, **scales)
    stored = weight if recipe.weight.format is None else bfp.quantize(weight, recipe.weight.format)
    x, stored = x.requires_grad_(), stored.requires_grad_()
    y = bfp.linear(x, stored, bias, recipe=recipe, state=state_of(recipe), key=7)
    y.backward(gradient)
    assert_bound(y, wanted.y, k + 1, bias, slack)
    assert_bound(x.grad, wanted.d_x, n, slack=slack)
    assert_bound(stored.grad, wanted.d_weight, tokens, slack=slack)


KINDS = ("gaussian", "cancelling", "binades")


@pytest.mark.parametrize("recipe", recipes.RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_recipe_and_dtype(recipe, dtype):
    for kind in KINDS:
        for shape in ((33, 40, 513), (513, 7, 64)):
            hold(recipe, kind, dtype, shape)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(2, 3, 16384), (16384, 3, 16), (2, 4096, 16)], ids=["forward", "weight", "input"])
def test_long_sums(recipe, shape):
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            hold(recipe, kind, dtype, shape)


def test_the_bound_tells_a_worse_sum_from_a_good_one():
    """bfloat16 sums, or operands that are rounded once more, are beyond it."""
    x, weight, _ = operands("gaussian", 8, 16, 512, torch.float32)
    recipe = recipes.mxfp8()
    wanted = expected(x, weight, torch.zeros(8, 16), recipe, key=7).y
    a, b = (bfp.quantize(v, "mxfp8_e4m3").dequantize() for v in (x, weight))
    for worse in ((a.bfloat16() @ b.bfloat16().mT).float(), x @ weight.mT):
        with pytest.raises(AssertionError, match="times the bound"):
            assert_bound(worse, wanted, 512)

"""A linear layer's reference: products in float64 of the operands that the recipe names, each quantized on its own."""

import contextlib
from typing import NamedTuple

import torch
from arrays import values

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics, rotation, rounding
from blockfp.recipes import Cast

SCALES = {"input_scale": torch.tensor(60.0), "gradient_scale": torch.tensor(900.0)}

MIXED = {
    "high-precision backward": {"gradient": Cast(None), "input_columnwise": Cast(None), "weight_columnwise": Cast(None)},
    "high-precision weight": {"weight": Cast(None)},
    "weight quantized in dgrad only": {"weight": Cast(None), "weight_columnwise": Cast("mxfp8_e4m3")},
    "one-dimensional weight": {"weight": Cast("mxfp8_e4m3")},
    "formats by direction": {"input": Cast("mxfp8_e4m3"), "input_columnwise": Cast("nvfp4")},
    "stochastic one way": {"gradient": Cast("mxfp8_e4m3", stochastic=True), "gradient_columnwise": Cast("mxfp8_e4m3")},
    "rotated per tensor": {
        "input_columnwise": Cast("fp8_e4m3", rotate=True),
        "gradient_columnwise": Cast("fp8_e5m2", rotate=True),
        "input": Cast("fp8_e4m3"),
        "gradient": Cast("fp8_e5m2"),
    },
    "integers": {"input": Cast("mxint8"), "gradient": Cast("fp8_e5m2_1x128_fp32")},
}


def state_of(recipe, device="cpu"):
    if recipe.delayed is None:
        return None
    scales = (scale.to(device, copy=True) for scale in SCALES.values())
    return bfp.LinearState(*(part for scale in scales for part in (torch.zeros(4, device=device), scale)))


class Result(NamedTuple):
    """A product in float64, and the sum of the magnitudes of its terms, which its rounding error is measured by."""

    value: torch.Tensor
    magnitude: torch.Tensor


class Expected(NamedTuple):
    y: Result
    d_x: Result
    d_weight: Result


def quantized(x, cast, *, key=None, multiplier=None):
    """Values of x as the cast leaves them, float64."""
    if cast.format is None:
        return x.double()
    if cast.rotate:
        x = rotation.rotate(x)
    if multiplier is not None:
        parts = numerics.quantize(x, cast.format, multiplier=multiplier)
        return numerics.dequantize(*parts, cast.format, "float32", columns=x.shape[-1]).double()
    return bfp.quantize(x, cast.format, key=key if cast.stochastic else None).dequantize(torch.float32).double()


def product(a, b):
    return Result(a @ b.mT, a.abs() @ b.abs().mT)


def expected(x, weight, gradient, recipe, *, key=None, input_scale=None, gradient_scale=None):
    """The three products of x [tokens, in], weight [out, in] values and gradient [tokens, out]."""
    recipe = recipes.parse(recipe)
    row_key, column_key = (None, None) if key is None else (rounding.fold_in(key, t) for t in (0, 1))
    w = quantized(weight, recipe.weight)
    across = w.mT if recipe.weight_columnwise.format is None else quantized(weight.mT.contiguous(), recipe.weight_columnwise)
    g = quantized(gradient, recipe.gradient, key=row_key, multiplier=gradient_scale)
    turned = gradient.mT.contiguous(), x.mT.contiguous()
    return Expected(
        product(quantized(x, recipe.input, multiplier=input_scale), w),
        product(g, across),
        product(
            quantized(turned[0], recipe.gradient_columnwise, key=column_key, multiplier=gradient_scale),
            quantized(turned[1], recipe.input_columnwise, multiplier=input_scale),
        ),
    )


def assert_close(actual, result, *, sums, bias=0.0):
    """Asserts a product within `sums` of its terms' magnitude (2^-20 in fp32, 2^-12 on fast tensor cores), and half a ulp."""
    unit = torch.finfo(actual.dtype).eps / 2
    value = result.value + bias
    bound = sums * result.magnitude + unit * value.abs() * 1.01 + torch.finfo(actual.dtype).tiny
    error = (actual.detach().double() - value).abs()
    assert actual.shape == value.shape
    assert bool((error <= bound).all()), f"{(error / bound).max():.3} times the bound"


def hold_linear(recipe, sums, shape=(37, 24, 80), dtype=torch.float32, device="cpu", launches=contextlib.nullcontext):
    """Holds a forward and backward with tokens, out, in against the operands' products, within `sums` (one, or one each)."""
    recipe, (tokens, n, k) = recipes.parse(recipe), shape
    made = (values((tokens, k), 0, dtype), values((n, k), 1, dtype, 0.1), values((tokens, n), 2, dtype))
    x, weight, gradient = (each.to(device) for each in made)
    state = state_of(recipe, device)
    stored = weight if recipe.weight.format is None else bfp.quantize(weight, recipe.weight.format)
    leaf, stored = x.clone().requires_grad_(), stored.requires_grad_()
    with launches():
        y = bfp.linear(leaf, stored, recipe=recipe, state=state, key=7)
        y.backward(gradient)
    scales = {} if state is None else {name: scale.to(device) for name, scale in SCALES.items()}
    wanted = expected(x, weight, gradient, recipe, key=7, **scales)
    bounds = sums if isinstance(sums, tuple) else (sums,) * 3
    for actual, result, bound in zip((y, leaf.grad, stored.grad), wanted, bounds, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, result, sums=bound)
    if state is not None and tokens:
        assert state.input_amax_history[0] == x.abs().max()
        assert state.gradient_amax_history[0] == gradient.abs().max()

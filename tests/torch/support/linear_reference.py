"""A linear layer's reference: products in float64 of the operands that the recipe names, each quantized on its own."""

from typing import NamedTuple

import torch
from blockfp.torch_backend.linear.linear import LinearState

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


def state_of(recipe):
    if recipe.delayed is None:
        return None
    return LinearState(torch.zeros(4), SCALES["input_scale"].clone(), torch.zeros(4), SCALES["gradient_scale"].clone())


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

"""`grouped_mm`: torch's seam for experts, on quantized operands."""

import pytest
import torch

import blockfp.torch as bfp
from blockfp import recipes

RECIPES = ["fp8_current", "fp8_block", "mxfp8", "mxfp4", "nvfp4"]
OFFS = (20, 20, 53)


def operands(tokens=60, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(tokens, 64, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(len(OFFS), 96, 64, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(len(OFFS), 96, generator=generator).to(dtype).requires_grad_()
    return a, w, bias, torch.tensor(OFFS, dtype=torch.int32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_gives_the_bits_of_a_linear_for_each_group(recipe):
    a, w, bias, offs = operands()
    # Without random bits: a group's key is folded with its number.
    recipe = recipes.parse(recipe)
    recipe = recipe.replace(gradient=recipes.Cast(recipe.gradient.format), input_columnwise=recipes.Cast(recipe.input.format))
    y = bfp.grouped_mm(a, w.mT, offs=offs, bias=bias, recipe=recipe)
    gradient = torch.randn(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, (a, w, bias), gradient)
    assert not y[53:].any()
    assert not found[0][53:].any()
    begin = 0
    for group, end in enumerate(OFFS):
        own = [tensor.detach().clone().requires_grad_() for tensor in (a[begin:end], w[group], bias[group])]
        # Groups share what scale the weight has of the whole tensor.
        if not recipe.weight.format.has_tensor_scale:
            each = bfp.linear(*own, recipe=recipe)
            wanted = torch.autograd.grad(each, own, gradient[begin:end])
            assert torch.equal(y[begin:end], each)
            assert torch.equal(found[0][begin:end], wanted[0])
            assert torch.equal(found[1][group], wanted[1])
        assert torch.equal(found[2][group], gradient[begin:end].sum(0))
        begin = end


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_what_grouped_linear_computes(recipe):
    a, w, bias, offs = operands(OFFS[-1])
    layer = bfp.GroupedLinear(3, 64, 96, recipe=recipe, dtype=torch.bfloat16)
    weight = bfp.quantize(w, recipes.parse(recipe).weight.format)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    y = bfp.grouped_mm(a, weight.mT, offs=offs, bias=bias, recipe=recipe, state=layer.state())
    assert torch.equal(y, layer(a, [20, 0, 33]))


def test_a_quantized_matrix_gives_the_bits_of_its_values():
    a, w, _, offs = operands()
    weight = bfp.quantize(w.detach(), "mxfp8_e4m3_32x32").requires_grad_()
    y = bfp.grouped_mm(a, weight.mT, offs=offs, recipe="mxfp8")
    assert torch.equal(y, bfp.grouped_mm(a, w.mT, offs=offs, recipe="mxfp8"))
    y.sum().backward()
    assert weight.grad.shape == w.shape


def test_what_it_refuses():
    a, w, bias, offs = operands()
    with pytest.raises(TypeError, match=r"offs must be an int32 tensor, got torch\.int64"):
        bfp.grouped_mm(a, w.mT, offs=offs.long(), recipe="mxfp8")
    with pytest.raises(TypeError, match=r"out_dtype must be None or a.s dtype, torch\.bfloat16; got torch\.float32"):
        bfp.grouped_mm(a, w.mT, offs=offs, recipe="mxfp8", out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"offs must be \[3\], an end for each group, on cpu; got \(2,\) on cpu"):
        bfp.grouped_mm(a, w.mT, offs=offs[:2], recipe="mxfp8")
    with pytest.raises(ValueError, match=r"a must be \[tokens, in\] and b_t \[groups, in, out\]"):
        bfp.grouped_mm(a, w[0].mT, offs=offs, recipe="mxfp8")
    with pytest.raises(ValueError, match=r"bias must have shape \(3, 96\)"):
        bfp.grouped_mm(a, w.mT, offs=offs, bias=bias[:2], recipe="mxfp8")
    for ends in ([20, 10, 53], [20, 20, 61]):
        with pytest.raises(ValueError, match="offs must ascend to at most the 60 rows of x"):
            bfp.grouped_mm(a, w.mT, offs=torch.tensor(ends, dtype=torch.int32), recipe="mxfp8")

"""Layers with `exact_order` have the CPU's bits on a Hopper GPU: forward, dgrad and wgrad, in PyTorch."""

import pytest
import torch
from hopper_products import same_bits

import blockfp.torch as bfp
from blockfp import recipes

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the order is the Hopper kernel's", allow_module_level=True)

NAMES = ("fp8_current", "fp8_block", "fp8_row", "mxfp8", "mxfp6", "mxfp4", "mxfp4_rotated", "nvfp4", "nvfp4_4over6")
SHAPES = ((128, 256, 384), (200, 1000, 136), (5, 33, 7), (1, 2064, 16), (512, 1024, 1024))


def step(recipe, shape, dtype, device, function=bfp.linear):
    tokens, inside, outside = shape
    generator = torch.Generator().manual_seed(sum(shape))
    shapes = ((tokens, inside), (outside, inside), (outside,), (tokens, outside))
    x, w, bias, gradient = (torch.randn(each, generator=generator).to(device, dtype) for each in shapes)
    x.requires_grad_(), w.requires_grad_()
    y = function(x, w, bias, recipe=recipe, key=3)
    y.backward(gradient)
    return {"forward": y.detach().cpu(), "dgrad": x.grad.cpu(), "wgrad": w.grad.cpu()}


def assert_same(found, wanted, what):
    for product, one in found.items():
        same_bits(one, wanted[product], f"{what}, {product}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_cpus_bits(name, dtype):
    if name == "fp8_row" and dtype is torch.float32:
        pytest.skip("its dgrad multiplies float32")
    recipe = recipes.parse(name).replace(exact_order=True)
    for shape in SHAPES:
        assert_same(step(recipe, shape, dtype, "cuda"), step(recipe, shape, dtype, "cpu"), f"{name} {shape}")


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "fp8_row"])
def test_compiled_and_with_exact_products(name):
    recipe = recipes.parse(name).replace(exact_order=True)
    compiled = torch.compile(bfp.linear, fullgraph=True)
    assert_same(step(recipe, SHAPES[0], torch.bfloat16, "cuda", compiled), step(recipe, SHAPES[0], torch.bfloat16, "cpu"), name)
    if name == "mxfp8":
        recipe = recipe.replace(exact_products=True)
        shape, dtype = SHAPES[1], torch.bfloat16
        assert_same(step(recipe, shape, dtype, "cuda"), step(recipe, shape, dtype, "cpu"), "exact products")


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp6", "mxfp4", "fp8_row"])
def test_a_row_alone_and_in_batches_of_any_tile(name):
    layer = bfp.Linear(1024, 520, recipe=recipes.parse(name).replace(exact_order=True), dtype=torch.bfloat16, device="cuda")
    x = torch.randn(700, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = layer(x)
        for first, last in ((0, 1), (130, 131), (0, 64), (5, 512), (699, 700)):
            same_bits(layer(x[first:last]), whole[first:last], f"rows {first} to {last}")

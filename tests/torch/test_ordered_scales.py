"""Scales of 1x128 and of rows that casts lay out as products read them, with the library carried out by the definition."""

import emulated_cuda
import emulated_groups
import pytest
import torch
from arrays import values
from blockfp.torch_backend.linear import linear
from blockfp.torch_backend.modules.layer_calls import fused_product
from blockfp.torch_backend.ops.layer import linear_ops
from blockfp.torch_backend.ops.layer.activations import Gating
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.product.matrix import Matrix
from blockfp.torch_backend.ops.quantize import quantize_plans
from same_tensors import assert_equal
from torch.utils.flop_counter import FlopCounterMode

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.calls import SIGNATURES
from blockfp.kernels.operand_cast import OperandCast
from blockfp.recipes import Cast

BLOCK = recipes.fp8_block()
RECIPES = {
    "fp8_block": BLOCK,
    "fp8_row": recipes.fp8_row(),
    "in order": BLOCK.replace(exact_order=True),
    "stochastic": BLOCK.replace(
        gradient=Cast("fp8_e5m2_1x128", stochastic=True), gradient_columnwise=Cast("fp8_e5m2_1x128", stochastic=True)
    ),
    "rotated": BLOCK.replace(
        input_columnwise=Cast("fp8_e4m3_1x128", rotate=True), gradient_columnwise=Cast("fp8_e4m3_1x128", rotate=True)
    ),
    "formats by direction": BLOCK.replace(gradient=Cast("fp8_e5m2_1x128"), gradient_columnwise=Cast("fp8_e4m3_1x128_fp32")),
    "an input of one scale": BLOCK.replace(input=Cast("fp8_e4m3"), input_columnwise=Cast("fp8_e4m3_1x128")),
}
SHAPES = [(48, 256, 128), (37, 300, 130), (2, 16, 7)]


def plain(layer, x):
    return layer(x)


def of_values(layer, x):
    """Of a result that autograd keeps: the backward casts it again."""
    return layer(torch.relu(x))


def through_ops(layer, x):
    with FlopCounterMode(display=False):
        return layer(x)


def gated(layer, x):
    """Of an activation's output, which no operation keeps."""
    return fused_product(layer, x, x * 2, Gating("silu", "apart"))


def compiled(layer, x):
    return torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@pytest.fixture
def orders(monkeypatch):
    """(a_ordered, b_ordered) of each product."""
    found, numbers = [], SIGNATURES["product"][1]

    def product(*arguments):
        told = dict(zip(numbers, arguments[-len(numbers) :], strict=True))
        found.append((told["a_ordered"], told["b_ordered"]))
        emulated_groups.product(*arguments)

    with emulated_cuda.launches(product=product):
        yield found


def as_stored(monkeypatch):
    """Lets products lay scales out, as they do for operands that anybody else reads."""
    for module in (linear_ops, linear):
        monkeypatch.setattr(module, "comes_laid", lambda *_, **__: False)
    with switch.definition_only():
        pass


def step(recipe, shape, run):
    tokens, inside, outside = shape
    torch.manual_seed(0)
    layer = bfp.Linear(inside, outside, recipe=recipe, dtype=torch.bfloat16)
    x = values((tokens, inside), 1, torch.bfloat16).requires_grad_()
    y = run(layer, x)
    y.backward(values((tokens, outside), 2, torch.bfloat16))
    return [y.detach(), x.grad, torch.as_tensor(layer.weight.grad)]


def products_of(name):
    """Which sides of the forward's product, wgrad's and dgrad's, which multiplies values in `fp8_row`, come in order."""
    three = [(name != "an input of one scale", False), (True, True), (True, False)]
    return three[:2] if name == "fp8_row" else three


@pytest.mark.parametrize("run", [plain, of_values, through_ops, gated])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RECIPES)
def test_products_find_scales_in_order(name, shape, run, orders, monkeypatch):
    """Those of inputs and gradients, in all products; the results have the bits of scales as stored."""
    found, wanted = step(RECIPES[name], shape, run), products_of(name)
    assert orders == wanted
    orders.clear()
    as_stored(monkeypatch)
    assert_equal(found, step(RECIPES[name], shape, run))
    assert orders == [(False, False)] * len(wanted)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_row"])
def test_of_compiled_layers_too(name, orders):
    assert_equal(step(name, SHAPES[1], compiled), step(name, SHAPES[1], plain))
    assert orders == products_of(name) * 2


@pytest.mark.parametrize("name", ["fp8_block", "fp8_row"])
def test_gradients_of_gradients_read_them_as_stored(name, orders, monkeypatch):
    def twice():
        x, w = (values(shape, i).requires_grad_() for i, shape in enumerate(((37, 300), (130, 300))))
        y = bfp.linear(x, w, recipe=name)
        d_x, d_w = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        return [d_x.detach(), d_w.detach(), *torch.autograd.grad(d_x.square().sum() + d_w.square().sum(), (x, w))]

    found = twice()
    assert orders[0] == (True, False)
    as_stored(monkeypatch)
    assert_equal(found, twice())


def test_what_others_read_stays_as_stored(orders):
    """Operands that `observe` measures, and an input in high precision columnwise."""
    mixed = BLOCK.replace(gradient_columnwise=Cast(None), input_columnwise=Cast(None))
    step(mixed, SHAPES[0], plain)
    assert orders == [(True, False), (True, False)]
    orders.clear()
    layer, x = bfp.Linear(256, 128, recipe="fp8_block"), values((48, 256), 1).requires_grad_()
    with bfp.observe(layer), FlopCounterMode(display=False):
        layer(x).sum().backward()
    assert orders[0] == (False, False)


def test_an_inf_spoils_every_scale(orders):
    x = values((37, 300), 0, torch.bfloat16)
    x[3, 5] = float("inf")
    format = Format.parse("fp8_e4m3_1x128")
    _, scales, _, scales_t = quantize_plans.quantize_matrix(x, OperandCast(format, format, laid=(True, True)))
    assert bool(scales[:, :37].isnan().all())
    assert bool(scales_t[:, :300].isnan().all())


def test_where_the_definition_casts():
    """Of a direction that no kernel has."""
    row, column = Format.parse("fp8_e4m3_1x128"), Format.parse("nvfp4_4over6")
    x = values((37, 300), 0)
    with emulated_cuda.launches():
        codes, scales, *_ = quantize_plans.quantize_matrix(x, OperandCast(row, column, laid=(True, False)))
    wanted = numerics.quantize(x, row)
    assert scales.shape == (3, 40)
    assert_equal([codes, scales[:, :37].mT], wanted[:2])


def test_operands_in_order_are_refused_where_nothing_reads_them():
    format = Format.parse("fp8_e4m3_1x128")
    a = Matrix([torch.zeros(8, 128, dtype=torch.uint8), torch.ones(1, 8)], format, laid=True)
    b = Matrix([torch.zeros(16, 128, dtype=torch.uint8), torch.ones(16, 1)], format)
    for exact in ("", "order"):
        with pytest.raises(ValueError, match="comes laid out for the CUDA library's product"):
            products.multiply_parts(a, b, 16, 128, None, torch.float32, False, None, exact)

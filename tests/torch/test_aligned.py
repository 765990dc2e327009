"""MX products on FP8 matrix units, with the library's functions carried out by the definition: what is asked of them."""

import emulated_cuda
import pytest
import torch
from blockfp.torch_backend.linear import linear
from blockfp.torch_backend.modules.layer_calls import sharing
from blockfp.torch_backend.ops.layer import linear_ops
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.quantize import cuda_layouts
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.routes import route


@pytest.fixture
def library(monkeypatch):
    """Routes and plans of a Hopper GPU on this CPU."""
    stand_in = emulated_cuda.Library()

    def hopper(device, a, b, m, n, k, in_order=True, exact=False):
        chosen = route(a, b, platform="cuda", capability=(9, 0), m=m, n=n, k=k, in_order=in_order, exact=exact)
        return chosen if chosen.mode == "aligned" else route(a, b, platform="cpu", in_order=in_order)

    monkeypatch.setattr(products, "route_on", hopper)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(emulated_cuda.FUNCTIONS, "cublas_version", lambda: 0)
    monkeypatch.setattr(products.cuda_library, "library", lambda: stand_in)
    monkeypatch.setattr(cuda_layouts, "library", lambda: stand_in)
    forget_plans()
    yield stand_in
    forget_plans()


def forget_plans():
    with switch.definition_only():
        pass


def values(shape, seed, spread=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp(spread * torch.randn(shape[-1], generator=generator))


def step(recipe, shape=(40, 72, 24), spread=0.0):
    tokens, inside, outside = shape
    x, w = values((tokens, inside), 0, spread).requires_grad_(), values((outside, inside), 1).requires_grad_()
    bias = values((outside,), 2).requires_grad_()
    y = bfp.linear(x, w, bias, recipe=recipe)
    y.backward(values(tuple(y.shape), 3))
    return y.detach(), x.grad, w.grad, bias.grad


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
@pytest.mark.parametrize("shape", [(40, 72, 24), (64, 256, 96), (5, 33, 7), (1, 300, 130)])
def test_all_three_products_of_a_layer(library, name, shape):
    """Within 2^-17 of what the exact ones give: of the bound of each side and the sums of float32."""
    got, wanted = step(name, shape), step(recipes.RECIPES[name](exact_products=True), shape)
    assert library.calls.count("product") == 3
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2.0**-17 * max(shape) * 30)


def test_a_recipe_asks_for_exact_products(library):
    exact = recipes.mxfp8(exact_products=True)
    assert exact != recipes.mxfp8()
    assert recipes.mxfp8().replace(exact_products=True) == exact
    with_route = step(exact, spread=3.0)
    assert library.calls.count("product") == 0
    shifted = step("mxfp8", spread=3.0)
    assert library.calls.count("product") == 3
    # Columns that differ this much are changed by shifting.
    assert not torch.equal(shifted[0], with_route[0])


@pytest.mark.parametrize("format", ["mxfp8_e4m3_32x32", "mxfp4_e2m1_32x32"])
def test_quantized_weights_and_modules(library, format):
    recipe = format.partition("_")[0]
    layer = bfp.Linear(64, 40, recipe=recipe)
    assert layer.weight.format is Format.parse(format)
    x = values((3, 64), 5).requires_grad_()
    layer(x).sum().backward()
    assert library.calls.count("product") == 3
    assert bool(x.grad.isfinite().all())


def test_compiled_layers_take_the_same_route(library):
    layer, x = bfp.Linear(64, 32, recipe="mxfp8"), values((8, 64), 5)
    eager = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert library.calls.count("product") == 2
    assert torch.equal(eager, compiled)


def test_weights_in_rows_of_blocks_have_no_columnwise_codes(library):
    """Their dgrad multiplies values: in the forward codes are shifted, in the backward only wgrad's."""
    recipe = recipes.mxfp8().replace(weight=recipes.Cast("mxfp8_e4m3"))
    step(recipe)
    assert library.calls.count("product") == 2


def test_an_infinity_in_an_operand_reaches_its_row(library):
    x = values((4, 64), 0)
    x[1, 3] = float("inf")
    y = bfp.linear(x, values((32, 64), 1), recipe="mxfp4")
    assert bool(y.isnan().all())


@pytest.fixture
def passes(monkeypatch, library):
    """How many operands come aligned from their casts, and how many products align."""
    counts = {"cast": 0, "product": 0}
    in_product, in_cast = cuda_layouts.aligner, cuda_layouts.lay_parts

    def aligner(*arguments):
        align = in_product(*arguments)

        def counted(*parts):
            counts["product"] += 1
            return align(*parts)

        return counted

    def lay_parts(parts, plans):
        counts["cast"] += len(plans)
        in_cast(parts, plans)

    monkeypatch.setattr(cuda_layouts, "aligner", aligner)
    monkeypatch.setattr(cuda_layouts, "lay_parts", lay_parts)
    return counts


def test_what_is_multiplied_alone_comes_aligned(passes):
    """Input and gradient; the product aligns the weight, twice, and the codes that the forward has kept."""
    step("mxfp8")
    assert passes == {"cast": 3, "product": 3}


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "mxfp4_rotated"])
def test_where_codes_are_aligned_changes_no_bit(name, passes, monkeypatch):
    recipe = recipes.RECIPES[name]()

    def both():
        torch.manual_seed(0)
        layer = bfp.Linear(72, 24, recipe=recipe)
        x = values((40, 72), 0, 2.0).requires_grad_()
        y = layer(torch.relu(x))
        y.backward(values((40, 24), 3))
        return y.detach(), x.grad, torch.as_tensor(layer.weight.grad)

    direct = both()
    # The columns of a ReLU's result, which autograd keeps, are made again in the backward.
    assert passes == {"cast": 4, "product": 2}
    for module in (linear_ops, linear):
        monkeypatch.setattr(module, "comes_laid", lambda *_, **__: False)
    forget_plans()
    assert_equal(direct, both())
    assert passes == {"cast": 4, "product": 8}


def test_directions_have_formats_of_their_own(passes, monkeypatch):
    """Of a gradient that is NVFP4 rowwise, in three parts, the columns alone are aligned."""
    recipe = recipes.mxfp8().replace(gradient=recipes.Cast("nvfp4"), gradient_columnwise=recipes.Cast("mxfp8_e4m3"))
    direct = step(recipe)
    assert passes == {"cast": 2, "product": 2}
    monkeypatch.setattr(linear_ops, "comes_laid", lambda *_, **__: False)
    forget_plans()
    assert_equal(direct, step(recipe))
    assert passes == {"cast": 2, "product": 6}


def test_layers_of_one_input_align_it_once(passes):
    layers, x = [bfp.Linear(64, 32, recipe="mxfp8") for _ in range(3)], values((8, 64), 5).requires_grad_()
    shared = x * 2
    with sharing(layers):
        for layer in layers:
            layer(shared)
    assert passes == {"cast": 1, "product": 3}


def test_of_exact_products_nothing_comes_aligned(passes):
    step(recipes.mxfp8(exact_products=True))
    assert passes == {"cast": 0, "product": 0}


def test_of_compiled_layers_columns_of_8_bits_come_aligned(passes):
    for name, expected in (("mxfp8", {"cast": 4, "product": 2}), ("mxfp4", {"cast": 3, "product": 3})):
        passes.update(cast=0, product=0)
        layer, x = bfp.Linear(64, 32, recipe=name), values((8, 64), 5).requires_grad_()
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
        assert passes == expected


def test_a_weight_that_begins_inside_a_block(passes):
    """Its product takes values."""
    whole = bfp.quantize(values((64, 64), 1), "mxfp8_e4m3_32x32")
    x = values((8, 64), 0)
    part = whole.split(40)[1]
    assert part.origin == (40, 0)
    assert torch.equal(
        bfp.linear(x, part, recipe="mxfp8"), bfp.linear(x, whole, recipe=recipes.mxfp8(exact_products=True))[:, 40:]
    )
    assert passes == {"cast": 0, "product": 0}


def test_a_cpu_multiplies_exactly():
    for name in ("mxfp8", "mxfp6", "mxfp4"):
        assert_equal(step(name), step(recipes.RECIPES[name](exact_products=True)))

"""`linear`: every product against that of its quantized operands; biases, shapes, gradients left out, bad use."""

import copy
import functools

import emulated_cuda
import pytest
import threaded
import torch
import torch.nn.functional as F
from arrays import values
from blockfp.torch_backend.ops.layer import linear_ops
from blockfp.torch_backend.ops.product import gpu_products, products
from blockfp.torch_backend.ops.product.gpu_products import BLACKWELL
from blockfp.torch_backend.ops.product.matrix import Matrix
from linear_reference import MIXED, Result, assert_close, expected, hold_linear, product, quantized
from torch.distributed.device_mesh import init_device_mesh

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics, rotation
from blockfp.formats import Format
from blockfp.recipes import Cast

# Products on a CPU are sums in fp32.
SUMS = 2.0**-20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_products(name, dtype):
    hold_linear(name, SUMS, dtype=dtype)


@pytest.mark.parametrize("case", MIXED)
def test_mixed_recipes(case):
    for base in (recipes.mxfp8(), recipes.fp8_current()):
        hold_linear(base.replace(**MIXED[case]), SUMS)


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("shape", [(0, 16, 32), (1, 16, 32), (130, 7, 33), (5, 1, 1)])
def test_ragged_shapes(name, shape):
    hold_linear(name, SUMS, shape)


def test_leading_axes_are_tokens():
    x, weight = values((2, 5, 3, 32), 0).requires_grad_(), bfp.quantize(values((8, 32), 1), "mxfp8_e4m3_32x32").requires_grad_()
    y = bfp.linear(x, weight, torch.ones(8), recipe="mxfp8")
    flat = bfp.linear(x.reshape(-1, 32), weight, torch.ones(8), recipe="mxfp8")
    assert torch.equal(y.reshape(-1, 8), flat)
    assert bfp.linear(x[0, 0, 0], weight, recipe="mxfp8").shape == (8,)
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_products_nobody_wants_are_not_run(monkeypatch):
    ran = []

    def counted(*arguments):
        product = products.product_of(*arguments)
        return lambda *operands: ran.append(operands) or product(*operands)

    monkeypatch.setattr(linear_ops, "product_of", counted)
    for plans in ("_forwards", "_backwards"):
        monkeypatch.setattr(linear_ops, plans, {})
    weight = bfp.quantize(values((8, 32), 1), "mxfp8_e4m3_32x32")
    for x_wants, weight_wants, count in ((True, True, 3), (False, True, 2), (True, False, 2), (False, False, 1)):
        ran.clear()
        y = bfp.linear(values((4, 32), 0).requires_grad_(x_wants), weight.detach().requires_grad_(weight_wants), recipe="mxfp8")
        if y.requires_grad:
            y.sum().backward()
        assert len(ran) == count


def test_microbatches_may_overtake_each_other():
    """State that a backward writes is no saved tensor: two forwards before two backwards; one graph twice counts once."""
    for name in ("fp8_delayed", "nvfp4"):
        layer = bfp.Linear(32, 16, recipe=name)
        first, second = (layer(values((4, 32), seed)) for seed in (0, 1))
        first.sum().backward(retain_graph=True)
        second.sum().backward()
        first.sum().backward()
    assert layer.step == 2


def test_high_precision_compute_multiplies_the_dequantized_weight():
    x, gradient = values((6, 32), 0).requires_grad_(), values((6, 8), 2)
    weight = bfp.quantize(values((8, 32), 1), "mxfp4_e2m1_32x32").requires_grad_()
    bfp.linear(x, weight, recipe="mxfp4", compute="high_precision").backward(gradient)
    torch.testing.assert_close(x.grad, gradient @ weight.detach().dequantize())
    torch.testing.assert_close(weight.grad, gradient.mT @ x.detach())


def test_values_as_weight_are_quantized_at_use():
    x, weight, gradient = values((6, 32), 0).requires_grad_(), values((8, 32), 1).requires_grad_(), values((6, 8), 2)
    bfp.linear(x, weight, recipe="mxfp8").backward(gradient)
    other, stored = x.detach().requires_grad_(), bfp.quantize(weight.detach(), "mxfp8_e4m3_32x32").requires_grad_()
    bfp.linear(other, stored, recipe="mxfp8").backward(gradient)
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(weight.grad, stored.grad)


def test_autocast():
    x, bias = values((6, 32), 0).requires_grad_(), torch.ones(8, requires_grad=True)
    weight = bfp.quantize(values((8, 32), 1), "mxfp8_e4m3_32x32").requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = bfp.linear(x, weight, bias, recipe="mxfp8")
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (torch.float32,) * 3
    result = expected(x.detach().bfloat16(), weight.dequantize().detach(), torch.ones(6, 8), recipes.mxfp8()).y
    assert_close(y, result, sums=SUMS, bias=1.0)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflow_reaches_the_loss_scaler(name, value):
    """A float16 gradient that isn't finite leaves no finite gradient behind, though FP8 would saturate it."""
    layer = bfp.Linear(32, 16, bias=False, recipe=name, dtype=torch.float16)
    x = values((4, 32), 0, torch.float16).requires_grad_()
    gradient = torch.ones(4, 16, dtype=torch.float16)
    gradient[1, 3] = value
    layer(x).backward(gradient)
    assert not layer.weight.grad.isfinite().all()
    assert not x.grad.isfinite().all()


def test_stochastic_gradients_follow_the_key():
    x, gradient = values((8, 32), 0), values((8, 16), 2)
    weight = bfp.quantize(values((16, 32), 1), "nvfp4_16x16")

    def grads(key):
        parameter = weight.detach().requires_grad_()
        bfp.linear(x, parameter, recipe="nvfp4", key=key).backward(gradient)
        return parameter.grad

    assert torch.equal(grads(5), grads(torch.tensor([0, 5])))
    assert not torch.equal(grads(5), grads(6))


WEIGHT = bfp.quantize(torch.ones(8, 32), "mxfp8_e4m3_32x32")

X = torch.ones(4, 32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, WEIGHT), {"recipe": "mxfp9"}, ValueError, "mxfp9"),
        ((X, WEIGHT), {"recipe": "fp8_block"}, ValueError, "quantize it in that format"),
        ((X[:, :16], WEIGHT), {"recipe": "mxfp8"}, ValueError, "share in"),
        ((X, WEIGHT, torch.ones(3)), {"recipe": "mxfp8"}, ValueError, "bias must have shape"),
        ((X.bfloat16(), WEIGHT), {"recipe": "mxfp8"}, TypeError, "autocast"),
        ((X.double(), WEIGHT), {"recipe": "mxfp8"}, TypeError, "float64"),
        ((WEIGHT, WEIGHT), {"recipe": "mxfp8"}, TypeError, "quantized already"),
        ((X, WEIGHT), {"recipe": "mxfp8", "compute": "fast"}, ValueError, "compute must be"),
        ((X, torch.ones(8, 32)), {"recipe": "fp8_delayed"}, ValueError, "state="),
        ((X.clone().requires_grad_(), torch.ones(8, 32)), {"recipe": "nvfp4"}, ValueError, "key="),
        ((X, WEIGHT.to("meta")), {"recipe": "mxfp8"}, ValueError, r"x on cpu, weight on meta: .*to_empty\(device=\.\.\)"),
        ((X, WEIGHT, torch.ones(8, device="meta")), {"recipe": "mxfp8"}, ValueError, "weight on cpu, bias on meta"),
    ],
)
def test_bad_use(arguments, options, error, message):
    with pytest.raises(error, match=message):
        bfp.linear(*arguments, **options)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_shapes_of_everything_on_meta(name):
    layer, x = bfp.Linear(32, 8, recipe=name, device="meta"), torch.ones(2, 3, 32, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert [(t.shape, t.is_meta) for t in (y, x.grad, layer.weight.grad)] == [
        ((2, 3, 8), True), ((2, 3, 32), True), ((8, 32), True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": Cast("nvfp4", stochastic=True)}, "only gradients"),
        ({"input": Cast("nvfp4", rotate=True), "weight": Cast("nvfp4_16x16", rotate=True)}, "rotate"),
        ({"delayed": recipes.Delayed()}, "one scale"),
    ],
)
def test_recipes_that_no_layer_runs(changes, message):
    with pytest.raises(ValueError, match=message):
        bfp.linear(X, WEIGHT, recipe=recipes.mxfp8().replace(**changes))


def test_matrix_units_get_what_they_read(monkeypatch):
    """Blackwell's modes on a stand-in that takes codes and interleaved scales apart again."""
    from blockfp.definition import layout

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, output_dtype):
        def back(codes, scales, format):
            rows, columns = codes.shape[0], codes.shape[1] * (2 if format.element.packed else 1)
            scales, tensor_scale = scales if isinstance(scales, list) else (scales, None)
            grid = (rows, -(-columns // format.block[1]))
            numbers = layout.interleave_scales(torch.arange(1, 1 + grid[0] * grid[1]).reshape(grid))
            compact = torch.zeros(1 + grid[0] * grid[1], dtype=torch.uint8)
            compact[numbers] = scales.view(torch.uint8)
            compact = compact[1:].reshape(grid)
            parts = (codes.view(torch.uint8), compact, tensor_scale)
            return numerics.dequantize(*parts, format, "float32", columns=columns)

        return (back(a, scale_a, formats[0]) @ back(b.t(), scale_b, formats[1]).mT).to(output_dtype)

    monkeypatch.setattr(gpu_products.F, "scaled_mm", scaled_mm)
    x, weight = values((130, 64), 0), values((48, 64), 1)
    for names, mode in ((("mxfp8_e4m3", "mxfp8_e5m2_32x32"), "mx"), (("nvfp4", "nvfp4_16x16"), "nvfp4")):
        # Rows of a square block are rows of a 1-D one once their scales are repeated.
        formats = [Format.parse(name.removesuffix("_32x32").removesuffix("_16x16")) for name in names]
        operands = [
            products.Matrix(q.parts, q.format)
            for q in (bfp.quantize(values, name) for values, name in zip((x, weight), names, strict=True))
        ]
        y = gpu_products.BLACKWELL[mode](*operands, torch.ones(48), torch.float32)
        wanted = quantized(x, Cast(names[0])) @ quantized(weight, Cast(names[1])).mT + 1
        torch.testing.assert_close(y, wanted.float())


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_more_axes_change_no_bit_and_add_no_node(name):
    """Of results, of gradients and of gradients of gradients; a gradient may be an expanded number."""
    layer = bfp.Linear(32, 16, recipe=name)
    flat, vectors = values((12, 32), 0), values((12, 32), 1)
    found = []
    for shape in ((12, 32), (3, 4, 32), (2, 3, 2, 32)):
        for _ in range(2):  # the first call of its kind has its checks before it
            copied = copy.deepcopy(layer)
            x = flat.clone().reshape(shape).detach().requires_grad_()
            y = copied(x)
            y += 1
            assert not y._is_view()
            assert y.shape == (*shape[:-1], 16)
        assert y.grad_fn.next_functions[0][0].next_functions[0][0].variable is x
        first = torch.autograd.grad(y.sum(), (x, copied.weight), retain_graph=True)
        copied = copy.deepcopy(layer)
        d_x, d_weight = torch.autograd.grad(copied(x).square().sum(), (x, copied.weight), create_graph=True)
        second = torch.autograd.grad((d_x * vectors.reshape(shape)).sum() + d_weight.square().sum(), (x, copied.weight))
        assert d_x.shape == second[0].shape == first[0].shape == shape
        found.append([y.detach(), *first, d_x, d_weight, *second])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a.reshape(b.shape), b)


def test_guarded_gradients_are_unbiased_in_a_layer():
    """dW along what it would be without the gradient's cast: of plain nvfp4 it is some tenths of a percent short."""
    generator = torch.Generator().manual_seed(8)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((256, 64), (48, 64), (256, 48)))
    short = {}
    for guarded in (False, True):
        recipe, means = recipes.nvfp4(guarded=guarded), []
        for key in range(60):
            leaf = w.clone().requires_grad_()
            bfp.linear(x, leaf, recipe=recipe, key=key).backward(g)
            means.append(leaf.grad.double())
        # What the input's nearest rounding makes of dW is the same for all keys.
        turned = numerics.quantize(rotation.rotate(x.mT.contiguous()), "nvfp4")
        inputs = numerics.dequantize(*turned, "nvfp4", "float32", columns=256).double()
        exact = rotation.rotate(g.mT.contiguous()).double() @ inputs.mT
        each = torch.stack([(m * exact).sum() / exact.square().sum() for m in means])
        short[guarded] = (1 - each.mean()).item(), (each.std() / len(means) ** 0.5).item()
    assert short[False][0] > max(0.0025, 5 * short[False][1])
    assert abs(short[True][0]) < 4 * short[True][1]


BIASED_SUMS = (256 + 4) * 2.0**-24
WEIGHT_ONLY = recipes.mxfp8().replace(input=Cast(None), input_columnwise=Cast(None), gradient=Cast(None))


def arrays(dtype, groups=()):
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for shape in ((48, 256), (*groups, 80, 256), (*groups, 80)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4", WEIGHT_ONLY], ids=str)
def test_linear(recipe, dtype):
    x, w, bias = arrays(dtype)
    q = bfp.quantize(w, recipes.parse(recipe).weight.format)
    wanted = expected(x, w, torch.zeros(48, 80, dtype=dtype), recipe, key=(0, 1)).y
    layer = functools.partial(bfp.linear, recipe=recipe, key=1)
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        assert_close(run(x, q, bias), wanted, sums=BIASED_SUMS, bias=bias.double())


def grouped(recipe):
    x, w, bias = arrays(torch.bfloat16, (2,))
    layer = bfp.GroupedLinear(2, 256, 80, bias=True, dtype=torch.bfloat16, recipe=recipe)
    bfp.load_high_precision_(layer.weight, w)
    with torch.no_grad():
        layer.bias.copy_(bias)
    return layer, x, layer.weight.dequantize(torch.float32).double(), bias.double()


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_groups(recipe):
    layer, x, w, bias = grouped(recipe)
    y = layer(x, [20, 28])
    for rows, group in ((slice(0, 20), 0), (slice(20, 48), 1)):
        own = quantized(x[rows], layer.recipe.input)
        assert_close(y[rows], product(own, w[group]), sums=BIASED_SUMS, bias=bias[group])


def row_parallel(rank, options):
    """256 and 1, each a rank's term, and a bias of -256: 257 is no bfloat16."""
    layer = bfp.Linear(64, 32, dtype=torch.bfloat16, recipe="mxfp8")
    bfp.load_high_precision_(layer.weight, torch.ones(32, 64, dtype=torch.bfloat16))
    with torch.no_grad():
        layer.bias.fill_(-256)
    layer = bfp.parallelize(layer, init_device_mesh("cpu", (2,)), "row", **options)
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    x[:, 0] = (256, 1)[rank]
    with torch.no_grad():
        return layer(x)


@pytest.mark.parametrize("options", [{"splits": 2}, {"sequence_parallel": True, "reduce_format": "mxfp8_e5m2"}], ids=str)
def test_terms_that_ranks_sum_in_fp32(options):
    for y in threaded.run(2, row_parallel, options):
        assert bool((y == 1).all()), y


@pytest.mark.parametrize("mode", BLACKWELL)
def test_blackwells_products(mode, monkeypatch):
    """What torch is asked for is not rounded before the bias."""
    monkeypatch.setattr(F, "scaled_mm", lambda a, b, *_, output_dtype: torch.full((4, 32), 257.0).to(output_dtype))
    name = {"mx": "mxfp8_e4m3", "nvfp4": "nvfp4"}[mode]
    a, b = (bfp.quantize(torch.ones(rows, 64), name) for rows in (4, 32))
    parts = [[each for each in (q.codes, q.scales, q.tensor_scale) if each is not None] for q in (a, b)]
    left, right = (Matrix(part, q.format) for part, q in zip(parts, (a, b), strict=True))
    multiply = lambda bias: BLACKWELL[mode](left, right, bias, torch.bfloat16)  # noqa: E731
    assert bool((multiply(torch.full((32,), -256, dtype=torch.bfloat16)) == 1).all())
    assert multiply(None).dtype == torch.bfloat16


def test_groups_that_torch_multiplies_in_bfloat16():
    """torch's product of groups comes in bfloat16: the scale of the tensors and the bias follow in fp32, and one rounding."""
    layer, x, w, bias = grouped("nvfp4")
    with emulated_cuda.launches(), torch.no_grad():
        y = layer(x, torch.tensor([20, 48], dtype=torch.int32))
    for rows, group in ((slice(0, 20), 0), (slice(20, 48), 1)):
        sums = product(quantized(x[rows], layer.recipe.input), w[group])
        rounded = Result(sums.value, sums.magnitude + sums.value.abs() * 2.0**-8 / BIASED_SUMS)
        assert_close(y[rows], rounded, sums=BIASED_SUMS, bias=bias[group])

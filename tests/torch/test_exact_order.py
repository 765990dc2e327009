"""Layers with `exact_order`: the definition's bits on a CPU, the same on the CUDA path, rows that depend on nothing else."""

import emulated_cuda
import emulated_order
import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.linear.linear import apply
from same_tensors import assert_equal
from torch.distributed.device_mesh import init_device_mesh

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import alignment, numerics, products
from blockfp.definition.products import Operand
from blockfp.formats import Format
from blockfp.kernels import exact_order, switch
from blockfp.kernels.products import plan

BY_ROW = ("fp8_block", "mxfp8", "mxfp6", "mxfp4", "fp8_row")
OTHERS = ("fp8_current", "nvfp4", "mxfp4_rotated")
SHAPE = (40, 144, 72)


def exact(name, **changes):
    return recipes.parse(name).replace(exact_order=True, **changes)


def step(recipe, shape=SHAPE, dtype=torch.bfloat16, function=bfp.linear):
    """y, and the gradients of x, weight and bias."""
    tokens, inside, outside = shape
    x, w = values((tokens, inside), 0, dtype).requires_grad_(), values((outside, inside), 1, dtype).requires_grad_()
    bias = values((outside,), 2, dtype).requires_grad_()
    y = function(x, w, bias, recipe=recipe, key=3)
    y.backward(values((tokens, outside), 3, dtype))
    return y.detach(), x.grad, w.grad, bias.grad


def operand(x, format):
    q = numerics.quantize(x, format)
    if not format.scale.e8m0:
        return Operand(q.codes, q.scales, format)
    codes, scales, _ = alignment.align(q.codes, q.scales, format, columns=x.shape[1])
    return Operand(codes, scales, alignment.aligned_format(format))


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "mxfp6", "mxfp4"])
def test_the_definition_gives_a_layers_three_products(name):
    recipe = exact(name)
    tokens, inside, outside = SHAPE
    x, w = values((tokens, inside), 0, torch.bfloat16), values((outside, inside), 1, torch.bfloat16)
    bias, g = values((outside,), 2, torch.bfloat16), values((tokens, outside), 3, torch.bfloat16)
    weight = recipe.weight.format
    turned = numerics.quantize(w, weight)
    turned = numerics.transpose(turned.codes, turned.scales, weight, columns=inside)
    if weight.scale.e8m0:
        codes, scales, _ = alignment.align(*(part.contiguous() for part in turned), weight, columns=outside)
        turned = Operand(codes, scales, alignment.aligned_format(weight))
    else:
        turned = Operand(turned[0].contiguous(), turned[1].contiguous(), weight)
    options = {"dtype": "bfloat16"}
    y = products.product(operand(x, recipe.input.format), operand(w, weight), "hopper_fp8", bias=bias, **options)
    d_x = products.product(operand(g, recipe.gradient.format), turned, "hopper_fp8", **options)
    columns = operand(g.mT, recipe.gradient_columnwise.format), operand(x.mT, recipe.input_columnwise.format)
    assert_equal(step(recipe)[:3], (y, d_x, products.product(*columns, "hopper_fp8", **options)))


def test_a_row_scales_dgrad_multiplies_bfloat16():
    recipe = exact("fp8_row")
    w = values((SHAPE[2], SHAPE[1]), 1, torch.bfloat16)
    q, format = numerics.quantize(w, recipe.weight.format), recipe.weight.format
    held = numerics.dequantize(q.codes, q.scales, None, format, "bfloat16", columns=SHAPE[1])
    left, right = Operand(values((SHAPE[0], SHAPE[2]), 3, torch.bfloat16), None), Operand(held.mT.contiguous(), None)
    assert_equal(step(recipe)[1], products.product(left, right, "hopper_bf16", dtype="bfloat16"))


@pytest.mark.parametrize("name", [*BY_ROW, *OTHERS])
@pytest.mark.parametrize("shape", [SHAPE, (5, 33, 7)], ids=str)
def test_the_cuda_path_has_the_cpus_bits(name, shape):
    recipe = exact(name)
    wanted = step(recipe, shape)
    emulated_order.calls.clear()
    with emulated_cuda.launches(product=emulated_order.product):
        found = step(recipe, shape)
    assert len(emulated_order.calls) == 3
    assert_equal(found[:3], wanted[:3])


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_without_kernels_and_compiled(name):
    wanted = step(exact(name))
    with switch.definition_only():
        assert_equal(step(exact(name)), wanted)
    assert_equal(step(exact(name), function=torch.compile(bfp.linear, backend="aot_eager", fullgraph=True)), wanted)


def test_a_sum_in_another_order_has_other_bits():
    assert not torch.equal(step(exact("fp8_block"))[0], step("fp8_block")[0])
    # Sums that keep fewer bits are no option.
    assert_equal(step(exact("fp8_current", fast_accum={"forward"})), step(exact("fp8_current", fast_accum=())))


@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_depends_on_itself_alone(name):
    layer = bfp.Linear(144, 72, recipe=exact(name), dtype=torch.bfloat16)
    x = values((70, 144), 0, torch.bfloat16)
    whole = layer(x)
    for first, last in ((0, 1), (3, 4), (0, 64), (69, 70)):
        assert_equal(layer(x[first:last]), whole[first:last])
    padded = torch.cat([x[:7], torch.zeros(9, 144, dtype=torch.bfloat16), 100 * x[:7]])
    assert_equal(layer(padded)[:7], whole[:7])
    assert_equal(layer(x.view(2, 35, 144)), whole.view(2, 35, 72))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_groups_have_the_bits_of_layers(name):
    x, w = values((30, 128), 0, torch.bfloat16), values((3, 72, 128), 1, torch.bfloat16)
    y = apply(x, w, None, exact(name), counts=[10, 0, 20])
    assert_equal(y[:10], bfp.linear(x[:10], w[0], recipe=exact(name)))
    assert_equal(y[10:], bfp.linear(x[10:], w[2], recipe=exact(name)))


def test_what_has_no_order_is_refused_before_anything_runs():
    x, w = values((8, 64), 0).requires_grad_(), values((32, 64), 1).requires_grad_()
    for name in ("fp8_row", "w4a8"):
        with pytest.raises(ValueError, match=f"recipe {name}: dgrad: exact_order: float32 by .* has no defined order"):
            bfp.linear(x, w, recipe=exact(name))
        bfp.linear(x.detach(), w.detach(), recipe=exact(name))
    half = [t.detach().half() for t in (x, w)]
    with pytest.raises(ValueError, match="forward: exact_order: float16 by mxfp4_e2m1"):
        bfp.linear(*half, recipe=exact(recipes.qat("mxfp4_e2m1")))
    state = bfp.LinearState(*(torch.ones(4), torch.zeros(()), torch.ones(4), torch.zeros(())))
    with pytest.raises(ValueError, match=r"exact_order runs on CPUs, and on GPUs .* 9\.0 .*; here compute capability is 8\.9"):
        exact_order.check_device((8, 9), None)
    with pytest.raises(ValueError, match="here the CUDA library is missing"):
        exact_order.check_device((9, 0), "the CUDA library is missing")
    exact_order.check_device((9, 0), None)
    assert bool((state.input_amax_history == 1).all())


def test_the_own_kernel_runs_where_cublaslt_is_faster():
    formats = Format.parse("fp8_e4m3"), Format.parse("fp8_e4m3")
    options = {"capability": (9, 0), "cublas": 130100, "dtype": "bfloat16", "fast": True}
    assert not plan(*formats, 8192, 8192, 8192, **options).own
    asked = plan(*formats, 8192, 8192, 8192, **options, exact_order=True)
    assert asked == plan(*formats, 8192, 8192, 8192, **options | {"cublas": 0, "fast": False})


def _two_layers(rank, world, name, splits):
    """A column-parallel layer and a row-parallel one behind it, cut over so many ranks: y, and the whole gradients."""
    recipe = exact(name)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    with threaded.seeded(0):
        layers = [bfp.Linear(*shape, bias=False, recipe=recipe, dtype=torch.bfloat16) for shape in ((256, 512), (512, 128))]
    for layer, style in zip(layers, ("column", "row"), strict=True):
        bfp.parallelize(layer, mesh["tp"], style, splits=splits)
    x = values((24, 256), 5, torch.bfloat16).requires_grad_()
    y = layers[1](layers[0](x))
    y.backward(values((24, 128), 6, torch.bfloat16))
    alone = layers[1](layers[0](x[3:4].detach()))
    whole = [layer.weight.grad.full_tensor() for layer in layers]
    return [t.detach() for t in (y, alone, x.grad, *whole)]


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "fp8_row"])
def test_tensor_parallelism_changes_no_bit(name):
    wanted = threaded.run(1, _two_layers, 1, name, 4)[0]
    assert_equal(wanted[1], wanted[0][3:4])
    for world in (2, 4):
        for found in threaded.run(world, _two_layers, world, name, 4):
            assert_equal(found, wanted)


def test_tensor_parallelism_without_a_tree_is_refused():
    with pytest.raises(
        threaded.OneRankFailed, match=r"2 ranks would add their terms in any order: parallelize\(.., splits=N\)"
    ):
        threaded.run(2, _two_layers, 2, "mxfp8", None)

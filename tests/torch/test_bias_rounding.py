"""y with a bias is rounded once: sums in fp32, then the bias, then the dtype of y. `test_jax_bias` says the same of JAX."""

import functools

import emulated_cuda
import pytest
import threaded
import torch
import torch.nn.functional as F
from blockfp.torch_backend.custom_ops.blackwell_products import BLACKWELL
from blockfp.torch_backend.custom_ops.matrix import Matrix
from linear_reference import Result, assert_close, expected, product, quantized
from torch.distributed.device_mesh import init_device_mesh

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import Cast

SUMS = (256 + 4) * 2.0**-24
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
        assert_close(run(x, q, bias), wanted, sums=SUMS, bias=bias.double())


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
        assert_close(y[rows], product(own, w[group]), sums=SUMS, bias=bias[group])


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
        rounded = Result(sums.value, sums.magnitude + sums.value.abs() * 2.0**-8 / SUMS)
        assert_close(y[rows], rounded, sums=SUMS, bias=bias[group])

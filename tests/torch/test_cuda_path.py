"""The host's code of the CUDA path, with kernels that the definition carries out, against float64 and the CPU's path."""

import contextlib
import functools
import hashlib

import emulated_cuda
import pytest
import torch
from arrays import tensors_of, values
from blockfp.torch_backend.ops.product import matrix
from linear_reference import MIXED, hold_linear
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.formats import FORMATS
from blockfp.recipes import Cast

# Products are summed in float64, or in fp32 by torch.
SUMS = 2.0**-18
# Codes that are aligned are those of the format but for this part of a group's largest magnitude.
ALIGNED = 2.0**-15


hold = functools.partial(hold_linear, launches=emulated_cuda.launches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_products(name, dtype):
    hold(name, ALIGNED if name.startswith("mx") else SUMS, (48, 96, 128), dtype)


@pytest.mark.parametrize("shape", [(40, 33, 50), (1, 16, 16), (200, 144, 136)])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_ragged_shapes(name, shape):
    hold(name, ALIGNED if name.startswith("mx") else SUMS, shape, torch.bfloat16)


@pytest.mark.parametrize("case", MIXED)
def test_mixed(case):
    hold(recipes.fp8_current().replace(**MIXED[case]), SUMS, (48, 96, 128), torch.bfloat16)


def assert_near(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # Sums in another order move some values over a rounding's border.
        assert (ours.double() - theirs.double()).norm() <= 0.05 * theirs.double().norm()


def trained(make, x, steps=3):
    """Outputs, gradients and buffers of some steps of a module on x, with fresh parameters."""
    torch.manual_seed(0)
    module = make()
    found = []
    for step in range(steps):
        leaf = (x * (1 + step)).requires_grad_()
        y = module(leaf)
        y.backward(values(y.shape, step, y.dtype))
        found += [y.detach(), leaf.grad, *(param.grad for param in module.parameters())]
        module.zero_grad()
        bfp.update_scales(module)
    return [*found, *module.buffers()]


BFLOAT16 = {"dtype": torch.bfloat16}
MODULES = {
    "Linear": lambda recipe: bfp.Linear(64, 96, recipe=recipe, **BFLOAT16),
    "LayerNormLinear": lambda recipe: bfp.LayerNormLinear(64, 96, norm="rms_norm", recipe=recipe, **BFLOAT16),
    "LayerNormMLP": lambda recipe: bfp.LayerNormMLP(64, 128, norm="rms_norm", activation="swiglu", recipe=recipe, **BFLOAT16),
    "GELU": lambda recipe: bfp.LayerNormMLP(64, 128, activation="gelu", recipe=recipe, **BFLOAT16),
    "MultiheadAttention": lambda recipe: bfp.MultiheadAttention(64, 4, recipe=recipe, **BFLOAT16),
    "GroupedLinear": lambda recipe: Sorted(4, 64, 96, recipe=recipe, **BFLOAT16),
}


class Sorted(bfp.GroupedLinear):
    """Tokens of four experts, of which one has none."""

    def forward(self, x):
        return super().forward(x.flatten(0, -2), torch.tensor([20, 0, 9, 35], dtype=torch.int32))


APART = {"fp8_row": "a scale for each row", "mxfp4_rotated": "rotated columns", "nvfp4_4over6": "choose between two scales"}
"""Recipes whose groups are multiplied one after another, which is warned of once."""


@pytest.mark.parametrize("recipe", recipes.RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, recipe):
    x = values((2, 32, 64), 5, torch.bfloat16)
    wanted = trained(lambda: MODULES[name](recipe), x)
    warned = pytest.warns(match=APART[recipe]) if name == "GroupedLinear" and recipe in APART else contextlib.nullcontext()
    with emulated_cuda.launches(), warned:
        found = trained(lambda: MODULES[name](recipe), x)
    assert_near(found, wanted)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays(format):
    """Of a stack of matrices, cut out of a larger one, rounded both ways."""
    x = values((2, 70, 100), 3, torch.float32)[:, 2:66, :96]
    for key in (None, 11):
        expected = bfp.quantize(x, format, key=key)
        with emulated_cuda.launches():
            found = bfp.quantize(x, format, key=key)
            back = found.dequantize(torch.float32)
        assert_equal(found, expected)
        assert torch.equal(back, expected.dequantize(torch.float32))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_what_is_not_finite(recipe, value):
    x = values((4, 16, 64), 5, torch.bfloat16)
    x[1, 2, 3] = value
    wanted = trained(lambda: MODULES["Linear"](recipe), x, steps=1)
    with emulated_cuda.launches():
        found = trained(lambda: MODULES["Linear"](recipe), x, steps=1)
    assert not bool(wanted[0].isfinite().all())
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


def values_of(param):
    return (param.dequantize(torch.float32) if isinstance(param, bfp.QuantizedTensor) else param).detach()


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_training(recipe):
    def trained():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)).bfloat16()
        bfp.convert(model, recipe, weights="quantized")
        optimizer, losses = bfp.AdamW(model.parameters(), lr=1e-2), []
        for step in range(4):
            x, target = values((16, 64), step, torch.bfloat16), values((16, 32), step, torch.bfloat16)
            loss = (model(x) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        masters = [state["master"] for state in optimizer.state.values() if "master" in state]
        return [torch.stack(losses), *masters, *(values_of(param) for param in model.parameters())]

    wanted = trained()
    with emulated_cuda.launches():
        found = trained()
    assert wanted[0][-1] < wanted[0][0]
    assert_near(found, wanted)


def test_digests():
    model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 384)).bfloat16()
    bfp.convert(model, "fp8_block", weights="quantized")
    with emulated_cuda.launches():
        buckets = list(bfp.stream_weights(model, layout="fine-grained-fp8", bucket_bytes=64 << 10))
    assert len(buckets) > 1
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            found = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert bucket.sha256[name] == found


def throughout(format):
    return recipes.mxfp8().replace(**dict.fromkeys(("input", "gradient", "weight"), Cast(format)))


SQUARE = {
    "inputs and gradients": recipes.mxfp8().replace(input=Cast("mxfp8_e4m3_32x32"), gradient=Cast("mxfp8_e4m3_32x32")),
    **{format: throughout(format) for format in ("mxfp8_e4m3_32x32", "mxfp6_e2m3_32x32", "mxfp4_e2m1_32x32", "nvfp4_16x16")},
}


@pytest.mark.parametrize("shape", [(64, 96, 128), (40, 33, 50)])
@pytest.mark.parametrize("case", SQUARE)
def test_square_blocks(case, shape):
    hold(SQUARE[case], ALIGNED, shape, torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_only_an_inf_marks_the_parts_of_an_operand(format):
    x = values((64, 128), 3, torch.float32)
    for value, marked in ((float("nan"), False), (float("-inf"), True)):
        x[5, 40] = value
        q = bfp.quantize(x, format)
        parts = [part.clone() for part in tensors_of(q)]
        before = [part.clone() for part in parts]
        with emulated_cuda.launches():
            matrix.mark(x, [(q.format, parts)])
        last = parts[-1]
        assert bool((last == 255 if last.dtype is torch.uint8 else last.isnan()).all()) == marked
        for ours, theirs in zip(parts[:-1] if marked else parts, before, strict=not marked):
            assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))

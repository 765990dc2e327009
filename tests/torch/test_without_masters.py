"""AdamW(master=None): what has no gradient stays, small steps are taken on average, and the largest don't saturate."""

import emulated_cuda
import numpy as np
import pytest
import statement
import torch
from adamw_parameters import FAMILIES, weight
from arrays import tensors_of, values
from same_tensors import assert_equal
from torch import nn

import blockfp.torch as bfp
from blockfp.definition import adamw, numerics
from blockfp.formats import Format

ALL_FAMILIES = (*FAMILIES, "fp8_e5m2", "fp8_e4m3_row", "fp8_e4m3_128x128_fp32", "mxfp4_e2m1_32x32", "nvfp4_4over6_16x16")


def steps(p, gradient, count, **options):
    optimizer = bfp.AdamW([p], **({"weight_decay": 0.0, "master": None, "key": 5} | options))
    p.grad = gradient
    for _ in range(count):
        optimizer.step()
    assert "master" not in optimizer.state[p]


@pytest.mark.parametrize("name", FAMILIES)
def test_without_masters_steps_are_right_on_average(name, route):
    """A step far below the spacing of the codes is taken by as many codes as it takes."""
    p = weight((64, 512), name)
    values = p.detach().dequantize()
    optimizer = bfp.AdamW([p], lr=1e-3, weight_decay=0.0, master=None, key=9)
    p.grad = torch.ones(p.shape)
    for _ in range(20):
        optimizer.step()
    assert "master" not in optimizer.state[p]
    moved = (p.detach().dequantize() - values).mean().item()
    # Each step is -1e-3. The variance of its rounding is a quarter of the spacing squared at most; 6 deviations.
    spacing = 0.5 if p.format.element.bits == 4 else 0.25
    assert moved == pytest.approx(-20e-3, abs=6 * spacing / 2 * (20 / p.numel()) ** 0.5)


def test_without_a_master_a_bfloat16_parameter_rounds_stochastically(route):
    p = nn.Parameter(torch.ones(64, 512, dtype=torch.bfloat16))
    optimizer = bfp.AdamW([p], lr=1e-4, weight_decay=0.0, master=None, key=1)
    p.grad = -torch.ones_like(p)
    for _ in range(20):
        optimizer.step()
    assert p.detach().float().mean().item() == pytest.approx(1 + 20e-4, rel=2e-4)
    with pytest.raises(ValueError, match="float16 ones need a master"):
        bfp.AdamW([nn.Parameter(torch.ones(2, 2, dtype=torch.float16))], master=None)


def test_stochastic_weights_use_the_key_of_the_step():
    p = weight((32, 64), "mxfp8_e4m3_32x32")
    start, scales = p.detach().dequantize(), p.scales.clone()
    bfp.AdamW([p], lr=1e-2, master=None, key=77)
    optimizer = bfp.AdamW([nn.Parameter(torch.zeros(1)), p], lr=1e-2, master=None, key=77)
    p.grad = values(p.shape, 1)
    optimizer.step()
    zeros = torch.zeros_like(start)
    c = adamw.coefficients(1, 1e-2, (0.9, 0.999), 1e-8, 1e-2)
    moved, _, _ = adamw.update(start, zeros, zeros, p.grad, c)
    key = adamw.rounding_key(77, 1, 1, adamw.WEIGHT)
    expected = numerics.requantize(moved, p.format, scales, key=key)
    assert_equal(p, expected)


@pytest.mark.parametrize("name", ALL_FAMILIES)
@pytest.mark.parametrize("sign", [-1, 1], ids=["the largest grows", "the largest shrinks"])
def test_what_has_no_gradient_stays(name, sign, route):
    """Scales that followed the largest weight would take the others along: by 11% in a thousand steps."""
    x = values((64, 64), 0) * 0.02
    x[0, 0] = 0.1
    p = nn.Parameter(bfp.quantize(x, name))
    before = p.detach().dequantize()
    gradient = torch.zeros(64, 64)
    gradient[0, 0] = sign
    steps(p, gradient, 40, lr=1e-3)
    after = p.detach().dequantize()
    assert (after[0, 0] - before[0, 0]).item() == pytest.approx(-sign * 0.04, abs=0.04)
    moved = after != before
    moved[0, 0] = False
    if sign < 0:
        # Its block's scale has grown, which takes the codes along that are subnormal then, on average to where they were.
        rows, columns = p.format.block or (64, 64)
        spacing = 4 * 0.15 / p.format.element.max * 2.0 ** (p.format.element.emin - p.format.element.mantissa_bits)
        assert ((after - before).abs()[moved] <= spacing).all()
        assert (after - before)[moved].sum().abs() <= 5 * spacing * max(1, moved.sum()) ** 0.5
        moved[:rows, :columns] = False
    assert not moved.any()


@pytest.mark.parametrize("name", ALL_FAMILIES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_steps_far_below_a_spacing_are_taken_on_average(name, sign):
    """lr 3e-6 with weights of 0.02 to 0.04: a step is 1/800 to 1/6000 of a spacing. Up and down, the largest weights too."""
    x = torch.empty(512, 512).uniform_(0.02, 0.04, generator=torch.Generator().manual_seed(1))
    p = nn.Parameter(bfp.quantize(x, name))
    before, count, lr = p.detach().dequantize().double(), 40, 3e-6
    steps(p, torch.full((512, 512), float(sign)), count, lr=lr)
    moved = p.detach().dequantize().double() - before
    exact = -sign * count * lr
    # A step of 1/n of a spacing s has the variance s^2 / n, and scales may have grown by two, which rounds codes once more.
    spacing = 0.04 * 2.0**-p.format.element.mantissa_bits
    again = (p.detach().dequantize().double() - before).abs() > 1.5 * spacing
    deviation = (2 * spacing * abs(exact) / x.numel()) ** 0.5 + (0 if sign > 0 else spacing / 2 / x.numel() ** 0.5)
    assert moved.mean().item() == pytest.approx(exact, abs=5 * deviation)
    assert again.float().mean().item() < 0.01


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp4_e2m1_32x32", "nvfp4_16x16", "nvfp4_4over6_16x16", "fp8_e4m3_row"])
def test_the_step_is_the_definitions_on_the_path_of_a_gpu(name):
    """And it is that of an independent statement: dequantized, moved, and rounded with two random bytes."""
    results = []
    for emulated in (False, True):
        p = weight((70, 300), name)
        before = [part.clone() for part in tensors_of(p)]
        start = p.detach().dequantize()
        gradient = values((70, 300), 3)
        with emulated_cuda.launches() if emulated else torch.no_grad():
            steps(p, gradient, 1, lr=0.1)
        results.append(tensors_of(p))
    assert all(map(torch.equal, *results))
    zeros = torch.zeros_like(start)
    moved, _, _ = adamw.update(start, zeros, zeros, gradient, adamw.coefficients(1, 0.1, (0.9, 0.999), 1e-8, 0.0))
    u = statement.random_bytes(adamw.rounding_key(5, 1, 0, adamw.WEIGHT), 0, moved.numel(), 2).reshape(moved.shape)
    tensor = float(before[2]) if len(before) > 2 else None
    codes, scales, tensor = statement.requantize(moved.numpy(), name, before[1].numpy(), tensor, u)
    got = [part.numpy() for part in results[0]]
    np.testing.assert_array_equal(statement.unpack(got[0], Format.parse(name).element.bits, 300), codes)
    np.testing.assert_array_equal(got[1], scales)
    assert tensor is None or got[2] == tensor


def test_an_infinite_or_missing_amax_leaves_scales_as_they_are():
    for what, name in ((0.0, "fp8_e4m3"), (float("inf"), "fp8_e4m3_128x128")):
        x = torch.full((32, 128), what)
        q = numerics.requantize(x, name, torch.full((1, 1), 0.25), key=1)
        assert q.scales.item() == 0.25
        assert numerics.dequantize(*q, name, "float32", columns=128).max() == (448 / 4 if what else 0)

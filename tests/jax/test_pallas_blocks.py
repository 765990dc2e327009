"""A block as the Pallas kernels compute it, on plain arrays, bit by bit against the definition."""

import numpy as np
import pytest
from blockfp.jax_backend.implementations.pallas import blocks
from same_bits import assert_same_bits
from samples import KINDS, all_patterns, sample

from blockfp.definition import bits, layout, numerics, scaling
from blockfp.formats import FORMATS, Format

EIGHT_BITS = [f for f in FORMATS if f.element.bits == 8]
NVFP4 = [f for f in FORMATS if f.scale.two_level and not f.scale.four_over_six]
SHAPE = (128, 256)


def inputs(dtypes=("float32", "float16", "bfloat16")):
    for dtype in dtypes:
        yield from (sample(kind, SHAPE, dtype) for kind in KINDS)
        if dtype != "float32":
            yield all_patterns(dtype)


def split(x, format):
    """x's blocks with the axes within a block, and how a value per block is repeated over them."""
    split = layout.split_blocks(x, format.block or x.shape)
    return split, (1, 3), lambda per_block: per_block[:, None, :, None]


@pytest.mark.filterwarnings("ignore:(overflow|invalid|underflow):RuntimeWarning")
@pytest.mark.parametrize("format", EIGHT_BITS, ids=str)
def test_codes_and_scales_of_8_bit_formats(format):
    for x in inputs():
        values, axes, spread = split(x, format)
        stored, multiplier = blocks.scales(values, axes[::-1], format, x.dtype.name)
        codes = blocks.codes(blocks.to_fp32(values), spread(multiplier), format.element, on_gpu=False)
        codes = layout.join_blocks(codes, x.shape)
        expected = numerics.quantize(x, format)
        stored = stored.view(np.float32) if format.scale.dtype == "float32" else stored.astype(np.uint8)
        assert_same_bits(stored, expected.scales)
        assert_same_bits(codes, expected.codes)
        for dtype in ("float32", "float16", "bfloat16"):
            decode = spread(blocks.decode_scale(expected.scales, format))
            decoded = blocks.values(layout.split_blocks(codes, format.block or x.shape), decode, format.element, dtype)
            values = numerics.dequantize(*expected, format, dtype, columns=x.shape[1])
            assert_same_bits(layout.join_blocks(decoded, x.shape), values)


@pytest.mark.filterwarnings("ignore:(overflow|invalid|underflow):RuntimeWarning")
@pytest.mark.parametrize("format", NVFP4, ids=str)
def test_codes_and_scales_of_nvfp4(format):
    for x in inputs():
        values, axes, spread = split(x, format)
        multiplier = scaling.nvfp4_multiplier(numerics.amax(x, format).tensor.reshape(1), format)
        tensor_scale = scaling.reciprocal(multiplier).view(np.float32)
        amax, nan = blocks.largest(values, axes[::-1]), blocks.holds_nan(values, axes[::-1])
        stored, encode = blocks.nvfp4_scales(amax, nan, multiplier.view(np.float32), tensor_scale, format, on_gpu=False)
        codes = layout.join_blocks(blocks.e2m1_codes(blocks.to_fp32(values), spread(encode), on_gpu=False), x.shape)
        expected = numerics.quantize(x, format)
        assert_same_bits(stored.astype(np.uint8), expected.scales)
        assert_same_bits(layout.pack(codes.astype(np.uint8), 4), expected.codes)


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "fp8_e5m2_1x128"])
def test_powers_of_two_are_those_of_the_quotient(name):
    """Every mantissa near where MAX / amax crosses a power of two, at every exponent, and all others at one."""
    format = next(f for f in FORMATS if f.name == name)
    near = np.arange(0x600000 - 64, 0x600000 + 64, dtype=np.int32)
    amax = (np.arange(255, dtype=np.int32)[:, None] << 23) + np.concatenate([near, np.arange(64, dtype=np.int32)])
    amax = np.concatenate([amax.ravel(), (127 << 23) + np.arange(1 << 23, dtype=np.int32)[::7], [0, 1, 2, bits.INFINITY]])
    amax = amax.astype(np.int32)
    for dtype, largest in bits.LARGEST_FINITE.items():
        expected = scaling.fp8_multiplier(amax, format.element, format.scale, largest)
        stored, multiplier = blocks.scales_of_amax(amax, format, dtype)
        assert_same_bits(multiplier.view(np.int32), expected)
        assert_same_bits(stored, scaling.reciprocal(expected))


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxint8"])
def test_rounded_up_scales_are_those_of_the_rule(name):
    format = Format.parse(name)
    rng = np.random.default_rng(0)
    near = bits.constant_bits(format.element.max) + np.arange(-64, 64, dtype=np.int32)
    amax = ((np.arange(255, dtype=np.int32)[:, None] << 23) + (near & 0x7FFFFF)).ravel()
    amax = np.concatenate([amax, rng.integers(0, bits.INFINITY, 1 << 16), rng.integers(0, 1 << 24, 1 << 16), [bits.INFINITY]])
    amax = amax.astype(np.int32)
    stored, _ = blocks.scales_of_amax(amax, format, "float32")
    assert_same_bits(stored, scaling.e8m0_scale(amax, format.element, format.scale.name))


@pytest.mark.parametrize("units", [-2, -1, 0, 1, 2])
def test_quotients_from_near_ones(units, monkeypatch):
    """Exact, wherever within two units of the quotient the division of the GPU ends up."""
    monkeypatch.setattr(blocks, "_near_quotient", lambda a, b: ((a / b).view(np.int32) + np.int32(units)).view(np.float32))
    rng = np.random.default_rng(0)
    near = rng.integers(-3, 4, 1 << 16) + rng.choice([bits.ONE, 0x3FE00000, 0x40000000, 0x40600000], 1 << 16)
    divisors = np.concatenate([near, rng.integers(1, bits.INFINITY, 1 << 16), rng.integers(1, 1 << 23, 1 << 12)])
    divisors = divisors.astype(np.int32)
    for dividend in (1.0, 448.0, 57344.0):
        pattern = bits.constant_bits(dividend)
        assert_same_bits(blocks.divide(pattern, divisors), bits.divide(np.full_like(divisors, pattern), divisors))

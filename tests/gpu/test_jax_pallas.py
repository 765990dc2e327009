"""Pallas kernels on a GPU, bit by bit against the definition on NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits
from samples import DTYPES, KINDS, all_patterns, sample

from blockfp.definition import numerics
from blockfp.formats import FORMATS

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
arrays = pytest.importorskip("blockfp.jax_backend.implementations.pallas.arrays", exc_type=ImportError)

WHOLE, RAGGED = (256, 512), (133, 150)


def inputs(format, dtype, shape):
    """Every kind of sample; where scales are per block, all of them in one array."""
    kinds = [sample(kind, shape, dtype) for kind in KINDS]
    if dtype != "float32" and shape == WHOLE:
        kinds.append(np.resize(all_patterns(dtype), shape))
    if format.has_tensor_scale or shape != WHOLE:
        return kinds
    return [np.concatenate(kinds)]


def formats(operation):
    return [f for f in FORMATS if arrays.refusal(operation, f) is None]


def every_case(operation, dtypes=("float32", "float16", "bfloat16")):
    """All formats in bfloat16, and one of each kind of kernel in the other dtypes."""
    few = ("fp8_e4m3", "mxfp8_e4m3", "mxint8", "fp8_e5m2_1x128", "mxfp8_e5m2_32x32", "fp8_e4m3_128x128", "nvfp4", "nvfp4_16x16")
    cases = [(f, dtype) for f in formats(operation) for dtype in dtypes if dtype == "bfloat16" or f.name in few]
    return pytest.mark.parametrize(("format", "dtype"), cases, ids=str)


@every_case("quantize")
def test_rowwise(format, dtype):
    run = jax.jit(lambda x: arrays.quantize(x, format))
    for shape in (WHOLE, RAGGED):
        for x in inputs(format, dtype, shape):
            assert_same_bits(run(x), numerics.quantize(x, format))


@every_case("quantize_columnwise")
def test_columnwise(format, dtype):
    run = jax.jit(lambda x: arrays.columnwise_quantize(x, format, rows=False)[1])
    for shape in (WHOLE, RAGGED):
        for x in inputs(format, dtype, shape):
            assert_same_bits(run(x), numerics.quantize(np.swapaxes(x, 0, 1), format))


@every_case("quantize_both")
def test_both(format, dtype):
    run = jax.jit(lambda x: arrays.columnwise_quantize(x, format, rows=True))
    for shape in (WHOLE, RAGGED):
        for x in inputs(format, dtype, shape):
            rows, columns = run(x)
            assert_same_bits(rows, numerics.quantize(x, format))
            assert_same_bits(columns, numerics.quantize(np.swapaxes(x, 0, 1), format))


@pytest.mark.parametrize("format", formats("dequantize"), ids=str)
def test_dequantize(format):
    for dtype in DTYPES:
        for shape in (WHOLE, RAGGED) if dtype == "bfloat16" else (WHOLE,):
            run = jax.jit(partial(arrays.dequantize_array, format=format, dtype=dtype, columns=shape[1]))
            for x in inputs(format, "float32", shape)[:4]:
                parts = numerics.quantize(x, format)
                assert_same_bits(run(*parts), numerics.dequantize(*parts, format, dtype, columns=shape[1]))
            rng = np.random.default_rng(0)
            codes = rng.integers(0, 256, parts.codes.shape, dtype=np.uint8)
            scales = rng.integers(0, 256, (*parts.scales.shape, parts.scales.itemsize), dtype=np.uint8)
            foreign = (codes, scales.view(parts.scales.dtype)[..., 0], parts.tensor_scale)
            assert_same_bits(run(*foreign), numerics.dequantize(*foreign, format, dtype, columns=shape[1]))


def test_amax():
    run = jax.jit(arrays.tensor_amax)
    for dtype in DTYPES:
        for kind in KINDS:
            x = sample(kind, RAGGED, dtype)
            assert_same_bits(run(x), numerics.amax(x, "fp8_e4m3").blocks.reshape(()))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp8_e5m2_32x32", "nvfp4"])
def test_leading_axes_and_small_arrays(name):
    format = next(f for f in FORMATS if f.name == name)
    for shape in ((2, 3, 37, 45), (1, 1), (3, 5, 32), (2, 0)):
        x = sample("bf16_valued", shape, "bfloat16")
        got = jax.jit(lambda x: arrays.quantize(x, format))(x)
        assert_same_bits(got, numerics.quantize(x, format))
        values = arrays.dequantize_array(*got, format, "float32", columns=shape[-1])
        assert_same_bits(values, numerics.dequantize(*numerics.quantize(x, format), format, "float32", columns=shape[-1]))
        if arrays.refusal("quantize_both", format) is None:
            rows, columns = jax.jit(lambda x: arrays.columnwise_quantize(x, format, rows=True))(x)
            assert_same_bits(rows, numerics.quantize(x, format))
            assert_same_bits(columns, numerics.quantize(np.swapaxes(x, -1, -2), format))


def test_more_than_2_to_the_31_elements():
    format = next(f for f in FORMATS if f.name == "mxfp8_e4m3")
    rows = (1 << 31) // 4096 + 64
    x = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.int32, (rows, 4096), 0).astype(jnp.bfloat16))()
    codes, scales, _ = jax.jit(lambda x: arrays.quantize(x, format))(x)
    tail = np.asarray(x[-64:])
    assert_same_bits(codes[-64:], numerics.quantize(tail, format).codes)
    assert_same_bits(scales[-64:], numerics.quantize(tail, format).scales)

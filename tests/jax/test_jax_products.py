"""Products with defined bits in JAX programs: those of the definition in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from blockfp.jax_backend.implementations.product import product

from blockfp.definition import numerics, products
from blockfp.definition.products import Operand
from blockfp.formats import Format


def sides(format, k, seed=0):
    """One operand in NumPy, and the same in JAX."""
    x = np.random.default_rng(seed).standard_normal((6 + 3 * seed, k)).astype(np.float32)
    if format is None:
        codes, scales = x.astype(ml_dtypes.bfloat16), np.full((1,), 0.75, np.float32)
    else:
        codes, scales, _ = numerics.quantize(x, format)
    parsed = None if format is None else Format.parse(format)
    return Operand(codes, scales, parsed), Operand(jnp.asarray(codes), jnp.asarray(scales), parsed)


CASES = (
    ("fp8_e4m3_1x128_fp32", "fp8_e5m2_1x128_fp32", "hopper_fp8"),
    ("fp8_e4m3", "fp8_e4m3", "hopper_fp8"),
    (None, None, "hopper_bf16"),
    ("mxfp8_e4m3", "mxfp4_e2m1_32x32", "blackwell_mx"),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("left", "right", "summation"), CASES)
def test_has_the_definitions_bits(left, right, summation, dtype):
    (a, of_a), (b, of_b) = sides(left, 160), sides(right, 160, 1)
    rng = np.random.default_rng(2)
    bias, addend = rng.standard_normal(9).astype(np.float32), rng.standard_normal((6, 9)).astype(np.float16)

    def run(codes, other, bias, addend):
        return product(of_a._replace(codes=codes), of_b._replace(codes=other), summation, dtype=dtype, bias=bias, addend=addend)

    got = jax.jit(run)(of_a.codes, of_b.codes, bias, addend)
    want = products.product(a, b, summation, dtype=dtype, bias=bias, addend=addend)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
    plain = products.product(a, b, summation)
    np.testing.assert_array_equal(np.asarray(product(of_a, of_b, summation)).view(np.int32), plain.view(np.int32))


def test_the_library_runs_on_a_cpu_and_the_definition_elsewhere():
    (_, a), (_, b) = sides("fp8_e4m3", 32), sides("fp8_e4m3", 32, 1)
    traced = jax.jit(lambda x, y: product(a._replace(codes=x), b._replace(codes=y), "hopper_fp8")).trace(a.codes, b.codes)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")]
    assert ["blockfp_cpu_product_1" in text for text in texts] == [True, False]
    assert "shift_left" in texts[1]


def test_the_definition_runs_what_the_library_has_not():
    (a, of_a), (b, of_b) = sides(None, 3), sides(None, 3, 1)
    got = product(of_a, of_b, "fp32_in_order")
    np.testing.assert_array_equal(np.asarray(got), products.product(a, b, "fp32_in_order"))

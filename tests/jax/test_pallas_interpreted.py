"""The Pallas kernels interpreted on a CPU, where JAX can: the bits of the definition.

XLA's arithmetic on CPUs flushes subnormal numbers, so values and scales are normal ones. (tests/gpu has all.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits
from samples import sample

from blockfp.definition import numerics
from blockfp.formats import Format

where = "blockfp.jax_backend.implementations.pallas"
arrays, mosaic = (
    pytest.importorskip(f"{where}.{name}", reason="Mosaic GPU can't be imported", exc_type=ImportError)
    for name in ("arrays", "mosaic")
)
pytestmark = pytest.mark.skipif(not mosaic.CAN_INTERPRET, reason="this JAX interprets no Mosaic GPU on a CPU")

ROWWISE = (
    "fp8_e4m3",
    "fp8_e5m2_pow2",
    "fp8_e4m3_1x128",
    "fp8_e4m3_128x128_fp32",
    "mxfp8_e4m3",
    "mxfp8_e5m2_32x32",
    "mxint8",
    "nvfp4",
    "nvfp4_16x16",
)


def values(dtype="bfloat16"):
    x = sample("bf16_valued", (133, 150), dtype)
    x[0, :4] = (np.nan, 0.0, -0.0, 3e4)
    return x


def interpreted(function, *operands):
    with mosaic.interpreted():
        return jax.block_until_ready(jax.jit(function)(*operands))


@pytest.mark.parametrize("name", ROWWISE)
def test_there_and_back(name):
    x, format = values(), Format.parse(name)
    q = interpreted(lambda x: arrays.quantize(x, format), x)
    assert_same_bits(q, numerics.quantize(x, format))
    found = interpreted(lambda *q: arrays.dequantize_array(*q, format, "float32", columns=150), *q)
    assert_same_bits(found, numerics.dequantize(*map(np.asarray, q[:2]), q[2], format, "float32", columns=150))


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_e4m3", "bfloat16"), ("fp8_e5m2_1x128_fp32", "float16"), ("mxint8", "float32")]
)
def test_columnwise_and_both(name, dtype):
    x, format = values(dtype), Format.parse(name)
    wanted = numerics.quantize(x, format), numerics.quantize(np.ascontiguousarray(x.T), format)
    for rows in (True, False):
        row, column = interpreted(lambda x, rows=rows: arrays.columnwise_quantize(x, format, rows=rows), x)
        assert_same_bits(column, wanted[1])
        if rows:
            assert_same_bits(row, wanted[0])


def test_amax():
    x = values("float32")
    assert interpreted(arrays.tensor_amax, jnp.asarray(x)) == np.nanmax(np.abs(x)).view(np.int32)

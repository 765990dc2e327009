"""Codes and scales in the small dtypes of JAX and PyTorch: the bits of NumPy's, and arrays made of them."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
from blockfp.jax_backend.linear import products  # noqa: E402
from same_bits import assert_same_bits  # noqa: E402
from samples import sample  # noqa: E402

import blockfp  # noqa: E402
import blockfp.jax  # noqa: E402
import blockfp.torch  # noqa: E402
from blockfp.formats import FORMATS  # noqa: E402

X = sample("bf16_valued", (3, 40, 70), "float32")
WITH_DTYPE = [format for format in FORMATS if format.element.bits != 6]


@pytest.mark.parametrize("format", WITH_DTYPE, ids=str)
def test_jax(format):
    reference, q = blockfp.quantize(X, format), blockfp.jax.quantize(jnp.asarray(X), format)
    views = (q.view_codes(), q.view_scales())
    assert_same_bits(views, (reference.view_codes(), reference.view_scales()))

    def made_of(codes, scales):
        make = blockfp.jax.QuantizedArray.from_parts
        return make(codes, scales, q.tensor_scale, format=format, columns=70, dtype="float32")

    for again in (made_of(*views), jax.jit(made_of)(*views), made_of(reference.view_codes(), reference.view_scales())):
        assert_same_bits((again.codes, again.scales), (q.codes, q.scales))


@pytest.mark.parametrize("format", WITH_DTYPE, ids=str)
def test_torch(format):
    reference, q = blockfp.quantize(X, format), blockfp.torch.quantize(torch.from_numpy(X), format)
    codes, scales = q.view_codes(), q.view_scales()
    assert (codes.data_ptr(), scales.data_ptr()) == (q.codes.data_ptr(), q.scales.data_ptr())
    if format.element.bits == 8:
        assert str(codes.dtype) == f"torch.{reference.view_codes().dtype}"
    else:
        assert (codes.dtype, codes.shape) == (torch.float4_e2m1fn_x2, (3, 40, 35))
    assert str(scales.dtype) == f"torch.{reference.view_scales().dtype}"
    make = blockfp.torch.QuantizedTensor.from_parts
    again = make(codes, scales, q.tensor_scale, format=format, columns=70, dtype=torch.float32)
    assert_same_bits((again.codes.numpy(), again.scales.numpy()), (reference.codes, reference.scales))


@pytest.mark.parametrize("make", [blockfp.jax.quantize, blockfp.torch.quantize], ids=["jax", "torch"])
def test_six_bits_have_no_dtype(make):
    x = jnp.asarray(X) if make is blockfp.jax.quantize else torch.from_numpy(X)
    with pytest.raises(TypeError, match=r"no dtype for e3m2: .* blockfp.definition.layout.unpack"):
        make(x, "mxfp6_e3m2").view_codes()
    assert "e8m0" in str(make(x, "mxfp6_e3m2").view_scales().dtype)


def test_elements_of_another_format_are_refused():
    codes, scales = blockfp.quantize(X, "mxfp8_e5m2").view_codes(), blockfp.quantize(X, "mxfp8_e5m2").scales
    message = "codes must be uint8 or float8_e4m3fn for mxfp8_e4m3, got float8_e5m2"
    options = {"format": "mxfp8_e4m3", "columns": 70}
    with pytest.raises(TypeError, match=message):
        blockfp.jax.QuantizedArray.from_parts(jnp.asarray(codes), jnp.asarray(scales), dtype="float32", **options)
    codes = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e5m2)
    with pytest.raises(TypeError, match=message):
        blockfp.torch.QuantizedTensor.from_parts(codes, torch.from_numpy(scales), dtype=torch.float32, **options)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2_32x32", "nvfp4", "nvfp4_16x16"])
def test_operands_of_block_scaled_products_are_the_values(name):
    """Operands of Blackwell's products, which this machine may not run: one scale for each row and block of columns."""
    q = blockfp.jax.quantize(jnp.asarray(X[0]), name)
    codes, scales = (np.asarray(part.astype("float32")) for part in products._as_scaled(q))
    columns = q.format.block[1]
    values = codes[0] * np.repeat(scales[0], columns, axis=1)[:, :70]
    expected = values if q.tensor_scale is None else values * float(q.tensor_scale)
    np.testing.assert_allclose(q.dequantize(), expected, rtol=1e-6)

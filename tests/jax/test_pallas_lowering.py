"""Every Pallas kernel lowers for CUDA on a machine without a GPU, whole, ragged and in small."""

import jax
import jax.numpy as jnp
import pytest

from blockfp.definition import layout
from blockfp.formats import Format

arrays = pytest.importorskip(
    "blockfp.jax_backend.implementations.pallas.arrays", reason="Mosaic GPU can't be imported", exc_type=ImportError
)


def lower(function, *arguments):
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])(*arguments)
    return exported.mlir_module().count("mosaic_gpu_v2")


def shaped(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


ROWWISE = (
    "fp8_e4m3",
    "fp8_e5m2_pow2",
    "fp8_e4m3_1x128",
    "fp8_e5m2_1x128_fp32",
    "fp8_e4m3_128x128",
    "mxfp8_e4m3",
    "mxfp8_e5m2_floor",
    "mxfp8_e4m3_32x32",
    "mxint8",
    "nvfp4",
    "nvfp4_16x16",
)


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rowwise(name, dtype):
    format = Format.parse(name)
    kernels = 2 if format.has_tensor_scale else 1  # amax and cast
    for shape in ((256, 512), (2, 37, 45)) if dtype == "bfloat16" else ((256, 512),):
        assert lower(lambda x: arrays.quantize(x, format), shaped(shape, dtype)) == kernels


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3"])
@pytest.mark.parametrize("operation", ["quantize_columnwise", "quantize_both"])
def test_columnwise(name, operation):
    format = Format.parse(name)
    if reason := arrays.refusal(operation, format):
        assert "needs JAX 0.11" in reason
        pytest.skip(reason)
    lower(lambda x: arrays.columnwise_quantize(x, format, rows=operation == "quantize_both"), shaped((130, 260)))


@pytest.mark.parametrize("name", [*ROWWISE, "mxfp4_e2m1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dequantize(name, dtype):
    format, shape = Format.parse(name), (2, 37, 150)
    parts = (
        shaped(layout.codes_shape(shape, format), "uint8"),
        shaped(layout.scales_shape(shape, format), format.scale.dtype),
        shaped((), "float32") if format.scale.two_level else None,
    )
    assert lower(lambda *parts: arrays.dequantize_array(*parts, format, dtype, columns=shape[-1]), *parts) == 1


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_vmapped(name):
    format = Format.parse(name)

    @jax.vmap
    def there_and_back(x):
        q = arrays.quantize_batched(x, format)
        return arrays.dequantize_batched(*q, format, "bfloat16", x.shape[-1])

    assert lower(there_and_back, shaped((3, 64, 96))) >= 2


def test_what_has_no_kernel_is_named():
    assert arrays.refusal("quantize", Format.parse("mxfp6_e3m2")) == "no Pallas kernel does quantize of mxfp6_e3m2"
    refused = arrays.refusal("quantize_both", Format.parse("mxfp8_e4m3_32x32"))
    assert refused == "no Pallas kernel does quantize_both of mxfp8_e4m3_32x32"

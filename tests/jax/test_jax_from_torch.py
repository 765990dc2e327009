"""Quantized tensors of PyTorch taken over by JAX, without a copy."""

import numpy as np
import pytest
from samples import bits_of, sample

import blockfp.jax as bfp

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8_e4m3", "bfloat16"), ("fp8_e4m3_128x128", "float32"), ("mxfp6_e3m2_32x32", "bfloat16"), ("nvfp4", "float32")],
)
def test_the_same_array(name, dtype):
    from blockfp.torch import quantize

    x = sample("bf16_valued", (2, 96, 160), dtype)
    tensor = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
    theirs, ours = quantize(tensor, name), bfp.quantize(x, name)
    q = bfp.from_torch(theirs)
    assert (q.format, q.shape, q.dtype) == (ours.format, ours.shape, ours.dtype)
    for got, expected in ((q.codes, ours.codes), (q.scales, ours.scales), (q.tensor_scale, ours.tensor_scale)):
        assert (got is None) == (expected is None)
        if got is not None:
            np.testing.assert_array_equal(bits_of(np.asarray(got)), bits_of(np.asarray(expected)))
    np.testing.assert_array_equal(bits_of(np.asarray(q.dequantize())), bits_of(np.asarray(ours.dequantize())))


def test_memory_is_shared():
    from blockfp.torch import quantize

    theirs = quantize(torch.ones(64, 128), "mxfp8_e4m3")
    q = bfp.from_torch(theirs)
    for ours, tensor in ((q.codes, theirs.codes), (q.scales, theirs.scales)):
        if tensor.data_ptr() % 64 == 0:
            assert ours.unsafe_buffer_pointer() == tensor.data_ptr()


def test_there_and_back():
    from blockfp.torch import from_jax

    q = bfp.quantize(sample("gaussian", (33, 70), "bfloat16"), "nvfp4")
    again = bfp.from_torch(from_jax(q))
    assert (again.format, again.shape, again.dtype, again.origin) == (q.format, q.shape, q.dtype, q.origin)
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.scales, q.scales)
    np.testing.assert_array_equal(again.tensor_scale, q.tensor_scale)


@pytest.mark.parametrize("wrong", [None, 3, np.zeros((4, 4), np.float32)])
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError, match="QuantizedTensor"):
        bfp.from_torch(wrong)
    with pytest.raises(TypeError, match="QuantizedTensor"):
        bfp.from_torch(bfp.quantize(np.ones((4, 32), np.float32), "mxint8"))

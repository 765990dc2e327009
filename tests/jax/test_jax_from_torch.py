"""Quantized arrays of PyTorch in JAX and of JAX in PyTorch, without a copy."""

import jax
import numpy as np
import pytest
from held_formats import FORMATS
from same_bits import assert_same_bits, assert_same_parts
from samples import sample

import blockfp.jax as bfp

torch = pytest.importorskip("torch")
from same_tensors import assert_equal  # noqa: E402

import blockfp.torch as torch_face  # noqa: E402


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8_e4m3", "bfloat16"), ("fp8_e4m3_128x128", "float32"), ("mxfp6_e3m2_32x32", "bfloat16"), ("nvfp4", "float32")],
)
def test_the_same_array(name, dtype):
    x = sample("bf16_valued", (2, 96, 160), dtype)
    tensor = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
    theirs, ours = torch_face.quantize(tensor, name), bfp.quantize(x, name)
    q = bfp.from_torch(theirs)
    assert (q.format, q.shape, q.dtype) == (ours.format, ours.shape, ours.dtype)
    assert_same_parts(q, ours)
    assert_same_bits(q.dequantize(), ours.dequantize())


def test_memory_is_shared():
    theirs = torch_face.quantize(torch.ones(64, 128), "mxfp8_e4m3")
    q = bfp.from_torch(theirs)
    for ours, tensor in ((q.codes, theirs.codes), (q.scales, theirs.scales)):
        if tensor.data_ptr() % 64 == 0:
            assert ours.unsafe_buffer_pointer() == tensor.data_ptr()


def test_there_and_back():
    q = bfp.quantize(sample("gaussian", (33, 70), "bfloat16"), "nvfp4")
    again = bfp.from_torch(torch_face.from_jax(q))
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


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_format_there_and_back(format):
    x = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    there = bfp.quantize(jax.numpy.asarray(x).astype("bfloat16"), format)
    q = torch_face.from_jax(there)
    assert (q.format, q.shape, q.dtype) == (format, (40, 96), torch.bfloat16)
    expected = torch_face.quantize(torch.from_numpy(x).bfloat16(), format)
    assert_equal(q, expected)
    assert torch.equal(q.dequantize(), expected.dequantize())
    assert q.codes.data_ptr() == there.codes.unsafe_buffer_pointer()
    back = bfp.from_torch(q)
    np.testing.assert_array_equal(np.asarray(back.codes), np.asarray(there.codes))
    assert back.format is format


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"blockfp\.jax\.QuantizedArray, got Tensor"):
        torch_face.from_jax(torch.zeros(3))
    with pytest.raises(TypeError, match="got QuantizedTensor"):
        torch_face.from_jax(torch_face.quantize(torch.zeros(4, 32), "mxfp8_e4m3"))

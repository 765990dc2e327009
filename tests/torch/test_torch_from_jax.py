"""Quantized arrays of JAX in PyTorch, and back, without a copy."""

import numpy as np
import pytest
import torch
from held_formats import FORMATS
from same_tensors import assert_equal

import blockfp.torch as bfp

jax = pytest.importorskip("jax")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_there_and_back(format):
    import blockfp.jax

    x = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    there = blockfp.jax.quantize(jax.numpy.asarray(x).astype("bfloat16"), format)
    q = bfp.from_jax(there)
    assert (q.format, q.shape, q.dtype) == (format, (40, 96), torch.bfloat16)
    expected = bfp.quantize(torch.from_numpy(x).bfloat16(), format)
    assert_equal(q, expected)
    assert torch.equal(q.dequantize(), expected.dequantize())
    assert q.codes.data_ptr() == there.codes.unsafe_buffer_pointer()
    back = blockfp.jax.from_torch(q)
    np.testing.assert_array_equal(np.asarray(back.codes), np.asarray(there.codes))
    assert back.format is format


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"blockfp\.jax\.QuantizedArray, got Tensor"):
        bfp.from_jax(torch.zeros(3))
    with pytest.raises(TypeError, match="got QuantizedTensor"):
        bfp.from_jax(bfp.quantize(torch.zeros(4, 32), "mxfp8_e4m3"))

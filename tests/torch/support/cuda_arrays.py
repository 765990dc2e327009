"""NumPy arrays on the GPU and back, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")


def to_gpu(x):
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def to_numpy(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def assert_same(got, expected, what):
    """Bits of every field of a result; torch tensors against NumPy arrays."""
    for name, g, e in zip(("codes", "scales", "tensor_scale"), got, expected, strict=True):
        if e is None:
            assert g is None, what
            continue
        g, e = to_numpy(g), np.asarray(e)
        assert g.shape == e.shape, f"{what}: {name} has shape {g.shape}, not {e.shape}"
        different = np.ascontiguousarray(g).view(np.uint8) != np.ascontiguousarray(e).view(np.uint8)
        if different.any():
            first = np.argwhere(different)[0]
            raise AssertionError(f"{what}: {int(different.sum())} bytes of {name} {g.shape} differ, first at {first}")

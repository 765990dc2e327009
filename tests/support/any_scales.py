"""Scales of any bits, as those of before that `requantize` goes on from."""

import numpy as np

from blockfp.definition import layout


def scales_of(shape, format, seed, origin=(0, 0)):
    """Scales of any bits, and a tensor scale."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 256, (*layout.scales_shape(shape, format, origin), 4), dtype=np.uint8)
    tensor_scale = np.array([1.0, 3e-5, 1e-40, np.nan, 2e38][seed % 5], np.float32) if format.scale.two_level else None
    if format.scale.dtype == "float32":
        return scales.view(np.float32)[..., 0], tensor_scale
    return np.ascontiguousarray(scales[..., 0]), tensor_scale

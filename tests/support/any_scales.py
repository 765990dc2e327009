"""Inputs of `requantize`: arrays, and scales of any bits that it goes on from."""

import numpy as np
from samples import sample

from blockfp.definition import layout, numerics


def scales_of(shape, format, seed, origin=(0, 0)):
    """Scales of any bits, and a tensor scale."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 256, (*layout.scales_shape(shape, format, origin), 4), dtype=np.uint8)
    tensor_scale = np.array([1.0, 3e-5, 1e-40, np.nan, 2e38][seed % 5], np.float32) if format.scale.two_level else None
    if format.scale.dtype == "float32":
        return scales.view(np.float32)[..., 0], tensor_scale
    return np.ascontiguousarray(scales[..., 0]), tensor_scale


def requantized(format, shapes):
    """Arrays of every kind, scales of any bits, and keys."""
    for number, kind in enumerate(("bf16_valued", "exponents", "special", "subnormal", "huge")):
        for shape in shapes:
            for key in (None, (0xDEADBEEF, 7)):
                yield sample(kind, shape), scales_of(shape, format, number), key


def shard_of_a_whole(format):
    """A shard, scales of any bits, the amaxes of the whole, and its place there with a key."""
    whole = sample("bf16_valued", (190, 290))
    x = whole[7:52, 24:96]
    found, amax = numerics.amax(whole, format), numerics.amax(x, format, origin=(7, 24))
    amax = found if format.block is None else amax._replace(tensor=found.tensor, blocks=amax.blocks + (1 << 22))
    return x, scales_of(x.shape, format, 0, (7, 24)), amax, {"origin": (7, 24), "shape": (190, 290), "key": 11}

"""Files as other libraries write them, and what their bytes mean."""

import json

import ml_dtypes
import numpy as np

from blockfp.files.modelfile import Entry, write_safetensors

FP8, E8M0, BF16 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16))


def write(path, arrays, config=None):
    entries = [Entry(name, array.dtype, array.shape) for name, array in arrays.items()]
    write_safetensors(path, entries, arrays.items(), {"format": "pt"})
    if config is not None:
        path.with_name("config.json").write_text(json.dumps(config))
    return path


def uniform(low, high, shape):
    return np.random.default_rng(shape).uniform(low, high, shape)


def some_bytes(*shape, below=256):
    return np.random.default_rng(shape).integers(0, below, shape, dtype=np.uint8)


def fp8_codes(*shape):
    """Any FP8 codes but NaN."""
    codes = some_bytes(*shape)
    return np.where(codes & 0x7F == 0x7F, 0x12, codes).astype(np.uint8)


def values_of(codes):
    """The E2M1 numbers of packed bytes, the low four bits first."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return np.where(nibbles & 8, -1, 1) * magnitudes[nibbles & 7]


def spread(scales, rows, columns, shape):
    """A scale for each element."""
    return np.repeat(np.repeat(scales.astype(np.float64), rows, -2), columns, -1)[..., : shape[-2], : shape[-1]]

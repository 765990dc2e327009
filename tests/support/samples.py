"""Inputs that show what Gaussian data hides: every array here has once told two roundings apart."""

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

KINDS = ("gaussian", "bf16_valued", "integers", "exponents", "powers", "random_bits", "subnormal", "huge", "zeros", "special")


def sample(kind: str, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """An array of one kind; deterministic."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    size = int(np.prod(shape))
    if kind == "gaussian":
        x = rng.standard_normal(size)
    elif kind == "bf16_valued":
        x = rng.standard_normal(size).astype(ml_dtypes.bfloat16).astype(np.float64)
    elif kind == "integers":
        x = rng.integers(-448, 449, size).astype(np.float64)
    elif kind == "exponents":
        # Runs of 16 share an exponent, so that blocks lie anywhere from subnormal to the largest values.
        exponent = np.repeat(rng.integers(-149, 128, -(-size // 16)), 16)[:size]
        x = np.ldexp(rng.uniform(1, 2, size) * rng.choice([-1, 1], size), exponent)
    elif kind == "powers":
        # A power of two, one of its neighbours in fp32, or a multiple of 1/8 of it.
        base = np.ldexp(np.ones(size), rng.integers(-20, 20, size)).astype(np.float32)
        near = np.nextafter(base, rng.choice(np.array([0, np.inf], np.float32), size))
        x = np.where(rng.random(size) < 0.5, near, base * rng.integers(8, 16, size) / 8).astype(np.float64)
        x *= rng.choice([-1, 1], size)
    elif kind == "random_bits":
        pattern = rng.integers(0, 1 << 32, size, dtype=np.uint64).astype(np.uint32)
        if dtype == "float32":
            return pattern.view(np.float32).reshape(shape).copy()
        return pattern.astype(np.uint16).view(DTYPES[dtype]).reshape(shape).copy()
    elif kind == "subnormal":
        x = np.ldexp(rng.integers(-(1 << 12), 1 << 12, size).astype(np.float64), -149)
    elif kind == "huge":
        x = rng.uniform(0.5, 1, size) * rng.choice([-1, 1], size) * float(ml_dtypes.finfo(DTYPES[dtype]).max)
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], size)
    else:
        x = rng.standard_normal(size)
        for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0):
            x[rng.random(size) < 0.02] = value
        x[: size // 8] = np.nan
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32).astype(DTYPES[dtype]).reshape(shape)


def all_patterns(dtype: str) -> np.ndarray:
    """All 65,536 patterns of a 16-bit dtype, 256 x 256."""
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).reshape(256, 256)


def bits_of(x: np.ndarray) -> np.ndarray:
    """Unsigned integers with the same bits, for comparisons that see NaN and the sign of zero."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")

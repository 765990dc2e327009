"""What XLA compiles has the bits of the definition on NumPy, for every format: codes, scales, dequantized values.

The programs are also read: none may hold a division, which XLA replaces by a product with a reciprocal, nor an exponential,
logarithm or power, which are inexact.
"""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import DTYPES, KINDS, all_patterns, bits_of, sample

import blockfp.jax as bfp
from blockfp.definition import decoding, layout, numerics
from blockfp.definition.rounding import fold_in
from blockfp.formats import ELEMENTS, FORMATS, Format

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
SHAPE = (133, 150)  # ragged along both axes for every block, and more than one block of each
WORDS = (0xDEADBEEF, 0x87654321)


FORBIDDEN = re.compile(r"\b(divide|remainder|exponential|exponential-minus-one|log|log-plus-one|power|r?sqrt|cbrt)\(")


def compiled(function, *arguments):
    """The compiled function, after a look at the program before and after XLA's optimizations."""
    lowered = jax.jit(function).lower(*arguments)
    program = lowered.compile()
    for text in (lowered.compiler_ir("hlo").as_hlo_text(), program.as_text()):
        assert "ENTRY" in text
        assert FORBIDDEN.findall(text) == []
        assert "custom-call(" not in text
    return program


@cache
def cases(dtype: str) -> np.ndarray:
    """18 tensors: every kind of sample and, of a 16-bit dtype, all its patterns, in order and shuffled."""
    arrays = [sample(kind, SHAPE, dtype) for kind in KINDS]
    if dtype == "float32":
        arrays += [sample(kind, SHAPE, dtype, seed) for kind in ("random_bits", "exponents") for seed in range(1, 5)]
    else:
        patterns = all_patterns(dtype).reshape(-1)
        for order in (patterns, np.random.default_rng(1).permutation(patterns)):
            filled = np.zeros(4 * SHAPE[0] * SHAPE[1], order.dtype)
            filled[: order.size] = order
            arrays += list(filled.reshape(4, *SHAPE))
    return np.stack(arrays)


def assert_same(got, expected, x=None):
    """Equal bits; if not, the first difference and what it came from."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    different = np.argwhere(bits_of(got) != bits_of(expected))
    if len(different):
        at = tuple(different[0])
        source = f", input bits {bits_of(x)[at]:#x}" if x is not None and x.shape == got.shape else ""
        pytest.fail(f"{len(different)} differ, first at {at}: {bits_of(got)[at]:#x}, not {bits_of(expected)[at]:#x}{source}")


def parts(q):
    return q.codes, q.scales, q.tensor_scale


def assert_same_parts(got, expected, x=None):
    for name, a, b in zip(numerics.Quantized._fields, got, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_same(a, b, x)


def stacked(quantized):
    """Parts of several tensors, each stacked as vmap does."""
    return [None if p[0] is None else np.stack(p) for p in zip(*quantized, strict=True)]


def foreign_parts(format: Format, seed: int):
    """Random bytes as codes and as scales: Inf, NaN, subnormal and negative scales, codes that are never written."""
    rng = np.random.default_rng(seed)

    def random(shape, dtype):
        size = np.dtype(dtype).itemsize
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8).view(dtype)

    codes = random(layout.codes_shape(SHAPE, format), np.uint8)
    scales = random(layout.scales_shape(SHAPE, format), format.scale.dtype)
    tensor_scale = random((1,), np.float32)[0].reshape(()) if format.scale.two_level else None
    return numerics.Quantized(codes, scales, tensor_scale)


@BY_NAME
def test_vmapped_tensors_of_every_dtype(format):
    made = []
    for dtype in DTYPES:
        x = cases(dtype)
        q = compiled(jax.vmap(lambda x: bfp.quantize(x, format, implementation="xla")), x)(x)
        expected = [numerics.quantize(case, format) for case in x]
        assert_same_parts(parts(q), stacked(expected), x)
        # The dtype is static: of one nominal dtype, all dequantize in one program.
        made.append((replace(q, dtype=np.dtype("float32")), expected))
    foreign = [foreign_parts(format, seed) for seed in range(len(x))]
    codes, scales, tensor_scale = stacked(foreign)
    made.append((replace(made[0][0], codes=codes, scales=scales, tensor_scale=tensor_scale), foreign))

    dequantize = compiled(jax.vmap(lambda q: [q.dequantize(name, implementation="xla") for name in DTYPES]), made[0][0])
    for q, each in made:
        for name, values in zip(DTYPES, dequantize(q), strict=True):
            assert_same(values, np.stack([numerics.dequantize(*e, format, name, columns=SHAPE[1]) for e in each]))


@BY_NAME
def test_leading_axes_and_stochastic_rounding(format):
    quantize = None
    for kind, seed in (("bf16_valued", 0), ("exponents", 2**63 + 12345), ("special", 42)):
        x = sample(kind, (2, 3, 33, 47), "bfloat16")
        key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        quantize = quantize or compiled(
            lambda x, key: bfp.quantize(x, format, key=jnp.asarray(key), implementation="xla"), x, key
        )
        assert_same_parts(parts(quantize(x, key)), numerics.quantize(x, format, key=seed), x)


def test_the_look_at_the_program_sees_a_division():
    with pytest.raises(AssertionError, match="divide"):
        compiled(lambda x: x / 3, jnp.ones(4))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2_128x128", "mxfp6_e2m3", "mxfp4_e2m1_32x32", "nvfp4"])
def test_empty_and_single(format):
    for shape in ((0, 32), (4, 0), (2, 0, 5), (0, 0), (1, 1)):
        x = np.zeros(shape, np.float32)
        q = bfp.quantize(x, format, key=3, implementation="xla")
        assert_same_parts(parts(q), numerics.quantize(x, format, key=3))
        assert q.shape == q.dequantize(implementation="xla").shape == shape


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "nvfp4"])
def test_double_precision_mode_changes_nothing(format):
    x = sample("bf16_valued", (40, 72))
    with jax.enable_x64(True):
        q = bfp.quantize(x, format, key=7, implementation="xla")
        assert_same_parts(parts(q), numerics.quantize(x, format, key=7), x)
        assert_same(q.dequantize(implementation="xla"), numerics.dequantize(*parts(q), format, "float32", columns=72))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_array_rounded_in_the_same_program_is_really_rounded(dtype):
    """XLA may keep an intermediate result in higher precision than its dtype says; no code may show it."""

    @jax.jit
    def program(x, scale):
        y = (x * scale).astype(dtype)
        return (
            y,
            bfp.quantize(bfp.fake_quantize(y, "fp8_e4m3", implementation="xla"), "mxint8", implementation="xla"),
            bfp.quantize(y, "mxint8", implementation="xla"),
        )

    y, again, once = program(sample("gaussian", (64, 256)), np.float32(1 / 3))
    y = np.asarray(y)
    assert_same_parts(parts(once), numerics.quantize(y, "mxint8"))
    coarse = numerics.dequantize(*numerics.quantize(y, "fp8_e4m3"), "fp8_e4m3", dtype, columns=256)
    assert_same_parts(parts(again), numerics.quantize(coarse, "mxint8"))


def test_every_form_of_a_key():
    x = sample("gaussian", (16, 64))
    seed = (WORDS[0] << 32) | WORDS[1]
    expected = numerics.quantize(x, "nvfp4", key=seed)
    typed = jax.random.wrap_key_data(jnp.array(WORDS, jnp.uint32))
    forms = (seed, WORDS, list(WORDS), np.array(WORDS, np.uint32), np.array(WORDS), jax.random.key_data(typed), typed)
    for key in forms:
        assert_same_parts(parts(bfp.quantize(x, "nvfp4", key=key, implementation="xla")), expected, x)
    jitted = jax.jit(lambda x, key: bfp.quantize(x, "nvfp4", key=key, implementation="xla"))
    for key in (typed, jax.random.key_data(typed)):
        assert_same_parts(parts(jitted(x, key)), expected, x)
    assert_same_parts(
        parts(bfp.quantize(x, "nvfp4", key=jax.random.key(42), implementation="xla")), numerics.quantize(x, "nvfp4", key=42), x
    )


def test_a_new_seed_compiles_nothing():
    x = sample("gaussian", (16, 64))
    bfp.quantize(x, "mxint8", key=1, implementation="xla")
    with jax.no_tracing():
        bfp.quantize(x, "mxint8", key=2, implementation="xla")


def test_fold_in_is_that_of_jax():
    for seed in (0, 42, 2**32 - 1):
        key = jax.random.key(seed)
        for number in (0, 1, 2, 12345, 2**32 - 1):
            expected = np.asarray(jax.random.key_data(jax.random.fold_in(key, number)))
            assert fold_in(seed, number) == tuple(expected.tolist())
    folded = jax.jit(fold_in)(jax.random.key_data(key), jnp.int32(12345))
    assert_same(folded.view(jnp.uint32), jax.random.key_data(jax.random.fold_in(key, 12345)))


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_all_codes_times_all_scale_bytes(element):
    codes = np.tile(np.arange(256, dtype=np.int32), (256, 1)) & ((1 << element.bits) - 1)
    scales = (np.arange(256, dtype=np.int32) << 23)[:, None]
    for power_of_two in (True, False):
        run = jax.jit(lambda c, s, p=power_of_two: decoding.scaled(c, element, s, power_of_two=p))
        assert_same(run(codes, scales), decoding.scaled(codes, element, scales, power_of_two=power_of_two))

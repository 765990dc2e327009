"""XLA's programs have the bits of the definition on NumPy, for every format, rowwise and columnwise."""

import executors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from executors import KEY as WORDS
from same_bits import assert_same_bits, assert_same_parts, parts_of
from samples import sample

import blockfp.jax as bfp
from blockfp.definition import numerics, scaling
from blockfp.definition.rotation import rotate
from blockfp.definition.rounding import fold_in
from blockfp.formats import ELEMENTS


@pytest.fixture(params=executors.of("jax"), ids=str)
def executor(request):
    with request.param.ready() as executor:
        yield executor


# What XLA fuses, reorders and replaces must leave the bits as they are.
@pytest.mark.optimized(executors.ARITHMETIC)
class TestEveryInput(executors.EveryInput):
    """XLA's programs of the definition, and the CPU library in its programs."""


def test_the_look_at_the_program_sees_a_division():
    with pytest.raises(AssertionError, match="divide"):
        executors.read_program(lambda x: x / 3, jnp.ones(4))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2_128x128", "mxfp6_e2m3", "mxfp4_e2m1_32x32", "nvfp4"])
def test_empty_and_single(format):
    for shape in ((0, 32), (4, 0), (2, 0, 5), (0, 0), (1, 1)):
        x = np.zeros(shape, np.float32)
        q = bfp.quantize(x, format, key=3, implementation="xla")
        assert_same_parts(q, numerics.quantize(x, format, key=3))
        assert q.shape == q.dequantize(implementation="xla").shape == shape


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "nvfp4"])
def test_double_precision_mode_changes_nothing(format):
    x = sample("bf16_valued", (40, 72))
    with jax.enable_x64(True):
        q = bfp.quantize(x, format, key=7, implementation="xla")
        assert_same_parts(q, numerics.quantize(x, format, key=7))
        assert_same_bits(q.dequantize(implementation="xla"), numerics.dequantize(*parts_of(q), format, "float32", columns=72))


@pytest.mark.optimized
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
    assert_same_parts(once, numerics.quantize(y, "mxint8"))
    coarse = numerics.dequantize(*numerics.quantize(y, "fp8_e4m3"), "fp8_e4m3", dtype, columns=256)
    assert_same_parts(again, numerics.quantize(coarse, "mxint8"))


def test_every_form_of_a_key():
    x = sample("gaussian", (16, 64))
    seed = (WORDS[0] << 32) | WORDS[1]
    expected = numerics.quantize(x, "nvfp4", key=seed)
    typed = jax.random.wrap_key_data(jnp.array(WORDS, jnp.uint32))
    forms = (seed, WORDS, list(WORDS), np.array(WORDS, np.uint32), np.array(WORDS), jax.random.key_data(typed), typed)
    for key in forms:
        assert_same_parts(bfp.quantize(x, "nvfp4", key=key, implementation="xla"), expected)
    jitted = jax.jit(lambda x, key: bfp.quantize(x, "nvfp4", key=key, implementation="xla"))
    for key in (typed, jax.random.key_data(typed)):
        assert_same_parts(jitted(x, key), expected)
    q = bfp.quantize(x, "nvfp4", key=jax.random.key(42), implementation="xla")
    assert_same_parts(q, numerics.quantize(x, "nvfp4", key=42))


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
    assert_same_bits(folded.view(jnp.uint32), jax.random.key_data(jax.random.fold_in(key, 12345)))


@pytest.mark.optimized
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_all_codes_times_all_scale_bytes(element):
    codes = np.tile(np.arange(256, dtype=np.int32), (256, 1)) & ((1 << element.bits) - 1)
    scales = (np.arange(256, dtype=np.int32) << 23)[:, None]
    for power_of_two in (True, False):
        run = jax.jit(lambda c, s, p=power_of_two: scaling.scaled(c, element, s, power_of_two=p))
        assert_same_bits(run(codes, scales), scaling.scaled(codes, element, scales, power_of_two=power_of_two))


SHAPE = (2, 40, 70)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2_32x32", "nvfp4"])
def test_columnwise_and_both(format, implementation):
    x = sample("bf16_valued", SHAPE, "bfloat16")
    want = numerics.quantize(np.swapaxes(x, -1, -2), format)
    assert_same_parts(bfp.quantize_columnwise(x, format, implementation=implementation), want)
    row, column = jax.jit(lambda x: bfp.quantize_both(x, format, implementation=implementation))(x)
    assert_same_parts(column, want)
    assert_same_parts(row, numerics.quantize(x, format))
    assert (row.shape, column.shape) == (SHAPE, (2, 70, 40))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_rotated_and_stochastic(implementation):
    x = sample("gaussian", SHAPE[1:])
    q = bfp.quantize_columnwise(x, "nvfp4", key=3, rotate=True, implementation=implementation)
    assert_same_parts(q, numerics.quantize(rotate(x.T), "nvfp4", key=3))


def test_gradients_are_straight_through():
    x, w = (jnp.asarray(sample(kind, SHAPE)) for kind in ("gaussian", "integers"))

    def loss(x):
        row, column = bfp.quantize_both(x, "mxfp8_e4m3")
        again = bfp.quantize_columnwise(x, "mxint8")
        return (row.dequantize() * w).sum() + (column.dequantize() * w.mT).sum() + (again.dequantize() * 2).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * w + 2)


def test_bad_input():
    with pytest.raises(TypeError, match="x must be a JAX or NumPy array, got list"):
        bfp.quantize_both([1.0], "mxint8")
    with pytest.raises(RuntimeError, match="implementation='pallas' can't run here"):
        bfp.quantize_columnwise(jnp.ones((4, 32)), "mxint8", implementation="pallas")

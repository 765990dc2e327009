"""FFI, Pallas and XLA on one GPU give the definition's bits, alone and inside JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_parts
from samples import KINDS, bits_of, sample

import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.formats import FORMATS, FP8_E4M3, MXFP8, Format

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

choice = pytest.importorskip("blockfp.jax_backend.implementations.choice")
ops = pytest.importorskip("blockfp.jax_backend.implementations.ops")
SHAPE = (133, 150)


def can(name, operation, format, stochastic=False):
    if choice.missing(name) is not None:
        return False
    try:
        return choice.choose(name, operation, format=format, stochastic=stochastic) is not None
    except ValueError:
        return False


@pytest.mark.parametrize("name", choice.NAMES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_bits(format, name):
    if choice.missing(name):
        pytest.skip(choice.missing(name))
    for kind in KINDS:
        x = sample(kind, SHAPE, "bfloat16")
        expected = numerics.quantize(x, format)
        if can(name, "quantize", format):
            assert_same_parts(bfp.quantize(x, format, implementation=name), expected)
        if can(name, "quantize", format, stochastic=True):
            q = bfp.quantize(x, format, key=2**40 + 7, implementation=name)
            assert_same_parts(q, numerics.quantize(x, format, key=2**40 + 7))
        if can(name, "dequantize", format):
            parts = (None if part is None else jnp.asarray(part) for part in expected)
            q = bfp.QuantizedArray.from_parts(*parts, format=format, columns=SHAPE[1], dtype=x.dtype)
            values = numerics.dequantize(*expected, format, "bfloat16", columns=SHAPE[1])
            np.testing.assert_array_equal(bits_of(np.asarray(q.dequantize(implementation=name))), bits_of(values))


DIRECTIONS = [
    *((format, {}) for format in FORMATS),
    *((format, {"eps": 2.0**-3}) for format in FORMATS if format.scale.dtype == "float32"),
    *((format, {"key": 11}) for format in map(Format.parse, ("nvfp4", "mxfp6_e3m2", "fp8_e5m2", "fp8_e5m2_1x128"))),
    *((format, {"rotate": True}) for format in map(Format.parse, ("nvfp4", "mxfp4_e2m1"))),
    (Format.parse("nvfp4"), {"rotate": True, "key": 11}),
]


@pytest.mark.parametrize(("format", "options"), DIRECTIONS, ids=str)
def test_directions(format, options):
    """Both directions, from one read and columnwise alone, with what training asks of them."""
    turned, eps, key = options.get("rotate", False), options.get("eps", 0.0), options.get("key")
    words = None if key is None else np.array([0, key], np.uint32)
    for kind in ("gaussian", "special"):
        for shape in (SHAPE, (2, 40, 24)):
            x = sample(kind, shape, "bfloat16")
            with np.errstate(all="ignore"):
                flipped = np.ascontiguousarray(np.swapaxes(x, -1, -2))
                flipped = rotate(flipped) if turned else flipped
            expected = [numerics.quantize(each, format, eps=eps, key=key) for each in (x, flipped)]
            how = {"format": format, "eps": eps, "rotate": turned}
            assert_same_parts(ops.quantize_columnwise(x, words, **how), expected[1])
            both = ops.quantize_both(x, None if key is None else np.tile(words, 2), **how)
            for got, want in zip(both, expected, strict=True):
                assert_same_parts(got, want)
            if eps:
                assert_same_parts(ops.quantize(x, None, format=format, eps=eps), expected[0])


@pytest.mark.parametrize("name", [None, *choice.NAMES])
def test_transformations(name):
    if name and choice.missing(name):
        pytest.skip(choice.missing(name))
    x = sample("bf16_valued", (3, 64, 96), "bfloat16")

    def loss(x):
        return (bfp.fake_quantize(x, MXFP8, implementation=name).astype(jnp.float32) ** 2).sum()

    q = jax.jit(jax.vmap(lambda x: bfp.quantize(x, "fp8_e4m3", implementation=name)))(x)
    for i in range(3):
        expected = numerics.quantize(x[i], "fp8_e4m3")
        np.testing.assert_array_equal(np.asarray(q.codes[i]), expected.codes)
        np.testing.assert_array_equal(np.asarray(q.scales[i]), expected.scales)
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(loss))(x)), np.asarray(jax.grad(lambda x: loss(x))(x)))
    on_cpu = jax.device_put(x, jax.devices("cpu")[0])
    if name in (None, "xla"):
        assert_same_parts(bfp.quantize(on_cpu, MXFP8, implementation=name), numerics.quantize(x, MXFP8))


@pytest.mark.parametrize("shape", [SHAPE, (2, 40, 24), (0, 16)])
def test_amax(shape):
    for kind in KINDS:
        x = sample(kind, shape, "bfloat16")
        np.testing.assert_array_equal(ops.amax(x, format=FP8_E4M3).blocks, numerics.amax(x, FP8_E4M3).blocks)


def test_what_is_chosen():
    there = [name for name in choice.NAMES if choice.missing(name) is None]
    assert choice.choose(None, "quantize", format=MXFP8).name == (there[0] if jax.device_count() == 1 else "xla")

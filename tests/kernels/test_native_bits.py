"""The CPU kernels against the definition, bit for bit: every format, dtype, instruction set and kind of input."""

import executors
import numpy as np
import pytest
from held_formats import FORMATS
from same_bits import assert_same_bits
from samples import DTYPES, sample

from blockfp.definition import numerics
from blockfp.formats import Format
from blockfp.kernels import native

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)


def assert_each(run, expected):
    """Asserts that `run` returns the expected bits with each instruction set that this processor has."""
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        assert_same_bits(run(), expected)


def assert_quantized(x, format, **options):
    expected = numerics.quantize(x, format, **options)
    assert_each(lambda: native.quantize(x, format, **options), expected)
    return expected


def assert_dequantized(parts, format, **place):
    for dtype in DTYPES:
        expected = numerics.dequantize(*parts, format, dtype, **place)
        assert_each(lambda dtype=dtype: native.dequantize(*parts, format, dtype, **place), expected)


def assert_defined(x, format, *, origin=(0, 0), **options):
    """amax, quantize and dequantize of x give what the definition gives."""
    assert_each(lambda: native.amax(x, format, origin=origin), numerics.amax(x, format, origin=origin))
    parts = assert_quantized(x, format, origin=origin, **options)
    assert_dequantized(parts, format, columns=x.shape[-1], origin=origin)


@pytest.fixture(params=executors.of("kernels"), ids=str)
def executor(request):
    with request.param.ready() as executor:
        yield executor


class TestEveryInput(executors.EveryInput, executors.EveryShape):
    """Each instruction set."""


def test_an_executor_is_wrong_after_another_was_right():
    """Results are compared with digests of the definition's; one other bit is seen."""
    x, right = sample("gaussian", (3, 70)), executors.one_by_one(native.quantize, native.dequantize)

    def one_code_off(x, format, key):
        q = native.quantize(x, format, key=key)
        q.codes[2, 5] ^= 1
        return q

    wrong = executors.one_by_one(one_code_off, lambda *parts, **options: -native.dequantize(*parts, **options))
    for _ in range(2):
        parts = executors.hold(right, [x], "mxfp8_e4m3")
        executors.hold_values(right, parts, "mxfp8_e4m3", 70)
        with pytest.raises(AssertionError, match=r"mxfp8_e4m3, float32 array 0, key None \[0\]: 1 differ, first at"):
            executors.hold(wrong, [x], "mxfp8_e4m3")
        with pytest.raises(AssertionError, match="mxfp8_e4m3 to float32, array 0"):
            executors.hold_values(wrong, parts, "mxfp8_e4m3", 70)


@BY_NAME
def test_amaxes(format):
    for dtype in DTYPES:
        for x in executors.inputs(dtype):
            assert_each(lambda x=x: native.amax(x, format), numerics.amax(x, format))


@pytest.mark.parametrize("name", ["avx512", "avx2", "scalar"])
def test_instruction_sets(name):
    """Says which of them the other tests of this file could not run."""
    if name not in native.instruction_sets():
        pytest.skip(f"this processor has no {name}")
    native.use_instruction_set(name)
    assert native.instruction_set() == name


@BY_NAME
def test_stochastic_rounding(format):
    for kind in ("bf16_valued", "exponents", "special"):
        for columns in (64, 57):
            assert_defined(sample(kind, (9, columns), "bfloat16"), format, key=0x123456789ABCDEF0)


@BY_NAME
def test_shapes(format):
    for shape in ((2, 3, 33, 47), (1, 1), (3, 1, 129), (130, 3), (4, 15), (0, 32), (4, 0), (2, 0, 5), (0, 4, 8)):
        assert_defined(sample("bf16_valued", shape), format)


@BY_NAME
def test_origins(format):
    x = sample("exponents", (2, 37, 150), "float32")
    for origin in ((0, 1), (3, 7), (127, 127), (130, 48), (5, 4)):
        assert_defined(x, format, origin=origin, key=(7, 9), shape=(300, 400))


@BY_NAME
def test_scale_rules_at_their_edges(format):
    """One amax a block: each exponent with the mantissas where a rule or a rounding turns."""
    mantissas = (0, 1, 2, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000, 0x7FFFFE, 0x7FFFFF)
    patterns = np.array([(e << 23) | m for e in range(255) for m in mantissas] + [0x7F800000], np.uint32)
    rows = np.zeros((len(patterns), 128), np.float32)
    rows[:, 5] = patterns.view(np.float32)
    rows[:, 6] = -rows[:, 5] / 3
    if format.per_tensor:
        for row in rows[::7]:
            assert_quantized(row[None], format)
    else:
        step = format.block[0]
        x = np.repeat(rows[:: 7 if step > 1 else 1], step, axis=0)[:12000]
        for nominal in ("float32", "float16", "bfloat16"):
            assert_quantized(x, format, nominal=nominal)


@BY_NAME
def test_every_half_way_point(format):
    """Numbers half-way between two codes and their neighbours in fp32, under a scale that is a power of two."""
    element = format.element
    fields = np.arange(2 * (element.max_code + 1)) / 2
    step = 1 << element.mantissa_bits
    exponent = np.maximum(fields // step, 1) - element.bias - element.mantissa_bits
    values = np.ldexp(np.where(fields >= step, step + fields % step, fields), exponent.astype(int)).astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-1))])
    x = np.resize(np.concatenate([values, -values]), (8, -(-len(values) // 4)))
    amax = numerics.amax(x, format)
    unit = np.float32(element.max).view(np.int32)
    tensor = None if amax.tensor is None else (np.float32(448) * np.float32(element.max)).view(np.int32).reshape(())
    amax = numerics.Amax(np.full_like(amax.blocks, unit), amax.nan, tensor)
    for key in (None, 3):
        assert_quantized(x, format, amax=amax, key=key)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2_128x128_fp32", "mxfp6_e2m3", "nvfp4_16x16"])
def test_tiles_and_threads(name):
    """Arrays of several tiles along both axes, on one thread and on as many as there are."""
    format = Format.parse(name)
    for shape, origin in (((300, 1500), (0, 0)), ((3, 9000), (5, 3)), ((2, 9000), (0, 16)), ((40, 17000), (0, 0))):
        x = sample("exponents", shape, "bfloat16")
        parts = numerics.quantize(x, format, origin=origin)
        place = {"columns": shape[1], "origin": origin}
        values = numerics.dequantize(*parts, format, "bfloat16", **place)
        for threads in (1, 0):
            native.set_threads(threads)
            assert_each(lambda x=x, origin=origin: native.quantize(x, format, origin=origin), parts)
            assert_each(lambda parts=parts, place=place: native.dequantize(*parts, format, "bfloat16", **place), values)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 0.125])
def test_eps(eps):
    x = sample("exponents", (40, 256))
    for name in ("fp8_e4m3", "fp8_e5m2_1x128", "fp8_e4m3_128x128_fp32"):
        assert_quantized(x, name, eps=eps)


@BY_NAME
def test_given_amax(format):
    """Amaxes reduced with another rank's are used as they are."""
    x, other = sample("bf16_valued", (40, 150)), sample("special", (40, 150), seed=1)
    pairs = zip(native.amax(x, format), native.amax(other, format), strict=True)
    reduced = numerics.Amax(*(None if a is None else np.maximum(a, b) for a, b in pairs))
    assert_quantized(x, format, amax=reduced)


@pytest.mark.parametrize(("name", "shape"), [("fp8_e4m3_128x128", (520, 1300)), ("mxfp4_e2m1_32x32", (140, 4300))])
def test_tiles_are_wider_where_there_are_enough_for_all_threads(name, shape):
    for dtype in ("bfloat16", "float32"):
        x = sample("special", shape, dtype)
        parts = numerics.quantize(x, name)
        values = numerics.dequantize(*parts, name, dtype, columns=shape[1])
        for threads in (1, 64):
            native.set_threads(threads)
            assert_same_bits(native.quantize(x, name), parts)
            assert_same_bits(native.dequantize(*parts, name, dtype, columns=shape[1]), values)

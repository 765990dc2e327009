"""The CPU kernels' AdamW step and `requantize` against the definition: masters, moments, codes and scales, bit for bit."""

import numpy as np
import pytest
from adamw_cases import FUSED, Parameter, table
from any_scales import requantized, shard_of_a_whole
from held_formats import FORMATS
from same_bits import assert_same_bits
from samples import bits_of, sample

from blockfp.definition import adamw, numerics
from blockfp.formats import Format
from blockfp.kernels import native
from blockfp.kernels.step_table import row


def run(parameters, steps=2, **settings):
    settings = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01} | settings
    lr = settings.pop("lr", 1e-2)
    for t in range(1, steps + 1):
        c = adamw.coefficients(t, lr, **settings)
        expected = [p.expected(c, t) for p in parameters]
        native.adamw(table([p.step(c, t) for p in parameters]))
        for p, e in zip(parameters, expected, strict=True):
            assert_same_bits(p.state(), e)


@pytest.mark.parametrize("name", native.instruction_sets() if native.available() else ())
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masters_and_moments(name, moments, dtype):
    native.use_instruction_set(name)
    run([Parameter((37, 300), moments, dtype), Parameter((1, 7), moments, dtype, copy="bfloat16", seed=1)])


@pytest.mark.parametrize("name", native.instruction_sets() if native.available() else ())
@pytest.mark.parametrize("format", FUSED, ids=str)
def test_codes(name, format):
    native.use_instruction_set(name)
    run([Parameter((70, 300), format=format, dtype="bfloat16")], steps=1)


@pytest.mark.parametrize("decoupled", [True, False])
def test_many_shapes_at_once(decoupled):
    mx = Format.parse("mxfp8_e4m3_32x32")
    shapes = [(1, 1), (3, 5, 33), (0, 16), (16, 0), (129, 257), (2, 2, 64, 128)]
    parameters = [Parameter(shape, "bfloat16", format=mx, seed=i) for i, shape in enumerate(shapes)]
    parameters += [Parameter((200, 1030), copy="float16", seed=9), Parameter((1, 999), seed=10)]
    run(parameters, decoupled=decoupled, weight_decay=0.1)


def test_threads_change_nothing():
    for threads in (1, 3):
        native.set_threads(threads)
        run([Parameter((600, 1100), "fp8", format=Format.parse("fp8_e4m3_128x128"))], steps=1)


@pytest.mark.parametrize("moments", ["bfloat16", "fp8"])
def test_a_shard_rounds_as_the_whole(moments):
    run([Parameter((5, 256), moments, start=(0, 11, 128), whole=(40, 500))])
    run([Parameter((5, 77), moments, start=(3, 11, 256), whole=(40, 333))])


def test_special_values_and_subnormals():
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 1e-20], np.float32)
    for moments in ("float32", "bfloat16", "fp8"):
        p = Parameter((9, 9), moments, format=Format.parse("mxfp4_e2m1_32x32"))
        p.gradient = np.broadcast_to(special, (9, 9)).copy()
        p.weight = p.gradient.T.copy()
        c = adamw.coefficients(1, 1e-2, (0.9, 0.999), 1e-8, 0.01)
        with np.errstate(all="ignore"):
            expected = p.expected(c, 1)
        native.adamw(table([p.step(c, 1)]))
        for got, wanted in zip(p.state()[:3], expected[:3], strict=True):
            got, wanted = (x[0] if isinstance(x, tuple) else x for x in (got, wanted))
            if got.dtype != np.uint8:  # one NaN is as good as another
                got, wanted = (np.where(np.isnan(x), np.ones((), x.dtype), x) for x in (got, wanted))
            np.testing.assert_array_equal(bits_of(got), bits_of(wanted))
        assert_same_bits(p.state()[3], expected[3])


def test_no_learning_rate_and_no_finite_gradient():
    p = Parameter((64, 64), format=Format.parse("mxfp8_e4m3_32x32"))
    before = [np.copy(x) for x in (p.weight, p.out, p.out_scales)]
    native.adamw(table([p.step(adamw.coefficients(1, 0.0, (0.9, 0.999), 1e-8, 0.1), 1)]))
    assert_same_bits((p.weight, p.out, p.out_scales), tuple(before))
    before, c = [np.copy(x) for x in (p.weight, p.out, p.first[0])], adamw.coefficients(1, 1.0, (0.9, 0.999), 1e-8, 0.1)
    native.adamw(table([p.step(c._replace(skip=1.0), 1)]))
    assert_same_bits((p.weight, p.out, p.first[0]), tuple(before))


def test_the_gradient_is_unscaled_first():
    scaled, plain = Parameter((8, 40)), Parameter((8, 40))
    scaled.gradient = scaled.gradient * 1024
    c = adamw.coefficients(1, 1e-2, (0.9, 0.999), 1e-8, 0.1)
    native.adamw(table([scaled.step(c._replace(unscale=1 / 1024), 1), plain.step(c, 1)]))
    assert_same_bits(scaled.state(), plain.state())


def test_what_a_row_refuses():
    with pytest.raises(ValueError, match="whole tensor"):
        row((8, 40), "float32", "float32", None, Format.parse("nvfp4_16x16"), whole=(8, 40))
    with pytest.raises(TypeError, match="gradient must be of float32"):
        row((8, 40), "float64", "float32", whole=(8, 40))
    with pytest.raises(TypeError, match="moments must be of float32"):
        row((8, 40), "float32", "float16", whole=(8, 40))


EVERY_INSTRUCTION_SET = pytest.mark.usefixtures("instruction_set")


@pytest.fixture(params=native.instruction_sets() if native.available() else ())
def instruction_set(request):
    native.use_instruction_set(request.param)
    yield
    native.use_instruction_set(native.instruction_sets()[0])


@EVERY_INSTRUCTION_SET
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_kind_of_input_and_scale(format):
    for x, scales, key in requantized(format, ((133, 150), (2, 3, 33, 47), (0, 32))):
        assert_same_bits(native.requantize(x, format, *scales, key=key), numerics.requantize(x, format, *scales, key=key))
    own = numerics.quantize(sample("gaussian", (70, 290)), format)
    y = numerics.dequantize(*own, format, "float32", columns=290) * np.float32(1.001)
    assert_same_bits(native.requantize(y, format, *own[1:], key=3), numerics.requantize(y, format, *own[1:], key=3))


@EVERY_INSTRUCTION_SET
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_shard_with_amaxes_of_the_whole(format):
    x, scales, amax, place = shard_of_a_whole(format)
    got = native.requantize(x, format, *scales, amax=amax, **place)
    assert_same_bits(got, numerics.requantize(x, format, *scales, amax=amax, **place))


@EVERY_INSTRUCTION_SET
def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="requantize float32, got float16"):
        native.requantize(np.zeros((2, 32), np.float16), "mxfp8_e4m3", np.zeros((2, 1), np.uint8))

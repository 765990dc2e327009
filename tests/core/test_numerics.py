"""The definition on NumPy against the independent statement, for every format, on inputs that tell roundings apart."""

import numpy as np
import pytest
import statement
from drawn import examples
from held_formats import ALL, FORMATS
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from samples import DTYPES, KINDS, all_patterns, bits_of, sample

from blockfp.definition import four_over_six, numerics, scaling
from blockfp.formats import ELEMENTS, Format

BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)


def assert_matches_statement(x, format, key=None, **options):
    codes, scales, tensor_scale = numerics.quantize(x, format, key=key, **options)
    u = None if key is None else statement.random_bytes((key >> 32, key & 0xFFFFFFFF), 0, x.size).reshape(x.shape)
    expected = statement.quantize(x, format.name, u=u, **options)
    columns = x.shape[-1]
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(statement.unpack(codes, format.element.bits, columns), expected[0])
    if tensor_scale is not None:
        assert tensor_scale.dtype == np.float32
        assert tensor_scale == expected[2]
    for name, dtype in DTYPES.items():
        y = numerics.dequantize(codes, scales, tensor_scale, format, name, columns=columns)
        again = statement.dequantize(expected[0], expected[1], expected[2], format.name, dtype)
        assert y.dtype == dtype
        nan = np.isnan(again)
        np.testing.assert_array_equal(np.isnan(y), nan)
        np.testing.assert_array_equal(bits_of(y)[~nan], bits_of(again)[~nan])
        canonical = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[name]
        assert (bits_of(y)[nan] == canonical).all()


@BY_NAME
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_input(format, dtype):
    for kind in KINDS:
        assert_matches_statement(sample(kind, (37, 150), dtype), format)


@BY_NAME
def test_stochastic_rounding(format):
    for kind in ("bf16_valued", "exponents", "special"):
        assert_matches_statement(sample(kind, (9, 52), "bfloat16"), format, key=0x123456789ABCDEF0)


@BY_NAME
def test_leading_axes_and_ragged_ends(format):
    for shape in ((2, 3, 33, 47), (1, 1), (3, 1, 129), (130, 3)):
        assert_matches_statement(sample("bf16_valued", shape), format)


@BY_NAME
def test_empty(format):
    for shape in ((0, 32), (4, 0), (2, 0, 5), (0, 0)):
        q = numerics.quantize(np.zeros(shape, np.float32), format)
        assert numerics.dequantize(*q, format, "float32", columns=shape[-1]).shape == shape
        assert q.scales.size == (1 if format.per_tensor else 0)
        if format.per_tensor:
            assert q.scales.item() == 1
        if format.scale.two_level:
            assert q.tensor_scale == 1


@BY_NAME
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_patterns_of_16_bits(format, dtype):
    # In order, so that blocks share exponents; shuffled, so that they don't.
    x = all_patterns(dtype)
    shuffled = np.random.default_rng(1).permutation(x.reshape(-1)).reshape(x.shape)
    for array in (x, shuffled):
        codes, scales, _ = numerics.quantize(array, format)
        expected = statement.quantize(array, format.name)
        np.testing.assert_array_equal(scales, expected[1])
        np.testing.assert_array_equal(statement.unpack(codes, format.element.bits, 256), expected[0])


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_all_codes_decode(element):
    codes = np.arange(256 if element.bits == 8 else 1 << element.bits, dtype=np.int32)
    decoded = scaling.scaled(codes, element, np.array([0x3F800000], np.int32)).view(np.float32)
    np.testing.assert_array_equal(decoded, statement.decode(codes, element.name).astype(np.float32))


@given(
    x=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=40), elements=st.floats(width=32)),
    format=st.sampled_from(ALL),
    key=st.none() | st.integers(0, 2**64 - 1),
)
@examples(150)
def test_arbitrary_arrays(x, format, key):
    assert_matches_statement(x, format, key)


@BY_NAME
def test_own_scales_give_the_codes_back(format):
    for kind in ("bf16_valued", "exponents", "huge", "subnormal", "zeros"):
        x = sample(kind, (64, 96))
        q = numerics.quantize(x, format)
        y = numerics.dequantize(*q, format, "float32", columns=96)
        again = statement.unpack(numerics.encode(y, format, q.scales, q.tensor_scale), format.element.bits, 96)
        codes = statement.unpack(q.codes, format.element.bits, 96)
        zero = codes == 0 if format.element.signed == "complement" else codes << (9 - format.element.bits) & 0xFF == 0
        told = np.isfinite(y) & ((y != 0) | zero)
        assert told.all() or kind in ("exponents", "huge") or format.scale.two_level
        np.testing.assert_array_equal(again[told], codes[told])


@BY_NAME
def test_transpose_is_the_quantized_transpose(format):
    x = sample("bf16_valued", (2, 70, 45))
    q = numerics.quantize(x, format)
    if not format.square:
        with pytest.raises(ValueError, match="square"):
            numerics.transpose(q.codes, q.scales, format, columns=45)
        return
    codes, scales = numerics.transpose(q.codes, q.scales, format, columns=45)
    expected = numerics.quantize(np.swapaxes(x, -1, -2), format)
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(scales, expected.scales)


@BY_NAME
@pytest.mark.parametrize("origin", [(7, 0), (0, 24), (130, 200)])
def test_a_window_is_part_of_the_whole(format, origin):
    """With amaxes of the whole and its origin, a window has the whole's codes and its own part of the scales."""
    whole = sample("bf16_valued", (190, 290))
    row, column = origin
    window = whole[row : row + 45, column : column + 72]
    expected = numerics.quantize(whole, format, key=5)
    full = numerics.amax(whole, format)
    if format.block is None:
        cut = full
    else:
        (r, c) = format.block
        grid = (slice(row // r, -(-(row + 45) // r)), slice(column // c, -(-(column + 72) // c)))
        cut = full._replace(blocks=full.blocks[grid], nan=None if full.nan is None else full.nan[grid])
        if format.scale.four_over_six:
            cut = cut._replace(members=four_over_six.members(whole, format)[grid])
    q = numerics.quantize(window, format, key=5, origin=origin, shape=whole.shape, amax=cut)
    y = numerics.dequantize(*q, format, "float32", columns=72, origin=origin)
    want = numerics.dequantize(*expected, format, "float32", columns=290)[row : row + 45, column : column + 72]
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(q.scales, expected.scales if format.block is None else expected.scales[grid])


def test_partial_amaxes_reduce_by_maximum():
    x = sample("special", (64, 64))
    for format in FORMATS:
        whole = numerics.amax(x, format)
        if format.block is not None:
            continue
        parts = [numerics.amax(part, format) for part in (x[:10], x[10:])]
        np.testing.assert_array_equal(np.maximum(parts[0].blocks, parts[1].blocks), whole.blocks)


def test_eps_and_nominal_dtype():
    tiny = np.full((4, 128), 1e-40, np.float32)
    for name in ("fp8_e4m3", "fp8_e4m3_1x128", "fp8_e5m2_128x128_fp32"):
        assert_matches_statement(tiny, Format.parse(name), eps=2.0**-10)
        for nominal in DTYPES:
            assert_matches_statement(tiny, Format.parse(name), nominal=nominal)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((4, 4)), TypeError, "float64"),
        (np.zeros((4, 4), np.int32), TypeError, "int32"),
        (np.zeros(4, np.float32), ValueError, "two or more axes"),
        (np.float32(1).reshape(()), ValueError, "two or more axes"),
    ],
)
def test_refused_input(x, error, message):
    with pytest.raises(error, match=message):
        numerics.quantize(x, "mxfp8_e4m3")


def test_refused_arguments():
    x = np.zeros((4, 32), np.float32)
    with pytest.raises(ValueError, match="mxfp8_e4m3"):
        numerics.quantize(x, "mxfp8_e4m")
    with pytest.raises(TypeError, match="Format"):
        numerics.quantize(x, 8)
    with pytest.raises(ValueError, match="key"):
        numerics.quantize(x, "mxfp8_e4m3", key=-1)
    with pytest.raises(ValueError, match="eps"):
        numerics.quantize(x, "mxfp8_e4m3", eps=1e-3)
    with pytest.raises(ValueError, match="nominal"):
        numerics.quantize(x, "fp8_e4m3_1x128", nominal="float64")
    q = numerics.quantize(x, "mxfp8_e4m3")
    with pytest.raises(ValueError, match="columns"):
        numerics.dequantize(*q, "mxfp8_e4m3", "float32", columns=31)
    with pytest.raises(ValueError, match="must have shape"):
        numerics.dequantize(q.codes, q.scales[:2], None, "mxfp8_e4m3", "float32", columns=32)
    with pytest.raises(ValueError, match="tensor_scale"):
        numerics.dequantize(q.codes, q.scales, np.float32(1), "mxfp8_e4m3", "float32", columns=32)
    with pytest.raises(ValueError, match="dtype"):
        numerics.dequantize(*q, "mxfp8_e4m3", "float64", columns=32)


@pytest.mark.parametrize("kind", ["gaussian", "exponents", "special"])
def test_a_given_multiplier_stands_instead_of_the_amax(kind):
    x, multiplier = sample(kind, (5, 48)), np.float32(3.7)
    q = numerics.quantize(x, "fp8_e4m3", multiplier=np.asarray(multiplier))
    np.testing.assert_array_equal(q.scales, np.full((1, 1), np.float32(1) / multiplier))
    expected = statement.to_element(statement.mul32(x, multiplier), "e4m3")
    np.testing.assert_array_equal(q.codes, expected)
    with pytest.raises(ValueError, match="multiplier replaces amax, and needs a format with one scale per tensor"):
        numerics.quantize(x, "mxfp8_e4m3", multiplier=multiplier)

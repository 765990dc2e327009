"""MS-EDEN: bits against a plain statement, corner cases, and what is unbiased."""

import numpy as np
import pytest
import statement
from samples import DTYPES, KINDS, bits_of, sample

from blockfp.definition import eden, layout, numerics, rotation
from blockfp.definition.rounding import fold_in, key_words

FOLDS = {"gradient": 1, "input": 2}


def check_against_the_statement(z, key, operand="gradient"):
    codes, scales, tensor_scale = eden.quantize(z, "nvfp4", key, operand)
    expected = statement.eden(z, fold_in(key, FOLDS[operand]))
    np.testing.assert_array_equal(layout.unpack(codes, 4, z.shape[1]), expected[0])
    np.testing.assert_array_equal(scales, expected[1])
    assert tensor_scale == expected[2]
    assert tensor_scale.shape == ()
    return scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operand", FOLDS)
def test_against_the_statement(kind, operand):
    check_against_the_statement(sample(kind, (7, 70)), 5, operand)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    check_against_the_statement(sample("gaussian", (5, 48), dtype), (1 << 40) + 3)


def test_blocks_of_few_magnitudes():
    """Values on codes' boundaries, blocks whose scale is subnormal or zero, and those whose codes are all zero."""
    rng = np.random.default_rng(0)
    z = rng.integers(-24, 25, (40, 64)).astype(np.float32) / 4
    z *= 2.0 ** rng.integers(-24, 1, (40, 4)).repeat(16, axis=1).astype(np.float32)
    scales = check_against_the_statement(z, 9)
    assert (scales == 0).any()
    assert ((scales > 0) & (scales < 8)).any()
    # Codes of 6 alone, which need no correction; and those that all lie on one side of theirs.
    z = np.full((32, 16), 6.0, np.float32)
    assert len(np.unique(check_against_the_statement(z, 1))) == 1
    z[:, 1:] = 2.49
    assert (check_against_the_statement(z, 1) > numerics.quantize(z * (256 / 448), "nvfp4").scales[0, 0] - 8).all()


def test_corner_cases():
    z = sample("gaussian", (4, 64))
    z[0, 3], z[1, :], z[3, 16:32] = np.nan, 0, 1e-30
    z[2, 40] = -0.0
    scales = check_against_the_statement(z, 2)
    assert scales[0, 0] == 0x7F
    assert (scales[1] == 0).all()
    assert scales[3, 1] == 0
    z[2, 17] = np.inf
    scales = check_against_the_statement(z, 2)
    assert scales[2, 1] == 0x7E
    for shape in ((0, 16), (3, 0)):
        empty = eden.quantize(np.zeros(shape, np.float32), "nvfp4", 0)
        assert empty.codes.shape == (shape[0], shape[1] // 2)
        assert eden.rotate(np.zeros(shape, np.float32), 0).shape == shape
    huge = np.full((2, 16), np.finfo(np.float32).max, np.float32)
    assert (check_against_the_statement(huge, 2) < 0x7F).all()


def test_scales_never_saturate():
    """The bound of 256 leaves room for the largest correction of the block that has the tensor's amax."""
    rng = np.random.default_rng(3)
    for key in range(20):
        z = rng.uniform(0.2, 0.25, (256, 16)).astype(np.float32)
        z[:, 0] = rng.uniform(5, 6, 256)
        scales = eden.quantize(z, "nvfp4", key).scales
        assert scales.max() < 0x7E
        assert statement.decode(scales, "e4m3").max() <= 288


def test_refusals():
    z = sample("gaussian", (2, 16))
    for format in ("nvfp4_16x16", "mxfp4_e2m1"):
        with pytest.raises(ValueError, match=f"in blocks of 1x16, got {format}: use nvfp4"):
            eden.quantize(z, format, 0)
    with pytest.raises(ValueError, match="origin 16 of a rotated axis must be a multiple of 128"):
        eden.rotate(z, 0, 16)


@pytest.mark.parametrize("columns", [5, 16, 40, 128, 130, 250])
def test_rotation_against_the_statement(columns):
    key = (7, 11)
    x = sample("gaussian", (3, columns), "bfloat16")
    x[0, 2] = 2.0**-99
    z = rotation.rotate_randomly(x, key)
    assert z.dtype == np.float32
    for row, rotated in zip(x, z, strict=True):
        np.testing.assert_array_equal(bits_of(rotated), bits_of(statement.randomly_hadamard(row, key)))
    np.testing.assert_allclose(rotation.rotate_back(z, key), x.astype(np.float32), atol=1e-6)


def test_rotation_keeps_products_and_parts():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((rows, 300)).astype(np.float32) for rows in (6, 5))
    rotated = [eden.rotate(m, 8).astype(np.float64) for m in (a, b)]
    np.testing.assert_allclose(rotated[0] @ rotated[1].T, a.astype(np.float64) @ b.T, atol=1e-4)
    np.testing.assert_array_equal(eden.rotate(a[:, 128:], 8, 128), eden.rotate(a, 8)[:, 128:])
    assert (eden.rotate(a, 8) != eden.rotate(a, 9)).any()
    tiny = np.full((1, 128), 2.0**-99, np.float32)
    assert not eden.rotate(tiny, 8).any()


def test_parts_have_the_bits_of_the_whole():
    x = sample("gaussian", (10, 300))
    key, shape = 77, (10, 300)
    z = eden.rotate(x, key)
    whole = eden.quantize(z, "nvfp4", key, "input")
    amax = numerics.amax(z, "nvfp4")
    for rows, columns in ((slice(0, 4), slice(0, 128)), (slice(4, 10), slice(0, 256)), (slice(3, 9), slice(128, 300))):
        part = eden.rotate(x[rows, columns], key, columns.start)
        origin = (rows.start, columns.start)
        own = numerics.amax(part, "nvfp4")._replace(tensor=amax.tensor)
        q = eden.quantize(part, "nvfp4", key, "input", origin=origin, shape=shape, amax=own)
        np.testing.assert_array_equal(q.codes, whole.codes[rows, columns.start // 2 : columns.stop // 2])
        np.testing.assert_array_equal(q.scales, whole.scales[rows, columns.start // 16 : -(-columns.stop // 16)])
        assert q.tensor_scale == whole.tensor_scale


def estimates(x, keys, cast):
    """(mean of the estimates, their mean squared error), over keys."""
    total, squared = np.zeros(x.shape), 0.0
    for key in keys:
        estimate = cast(x, key).astype(np.float64)
        total += estimate
        squared += np.square(estimate - x).mean()
    return total / len(keys), squared / len(keys)


def by_eden(x, key):
    q = eden.quantize(eden.rotate(x, key), "nvfp4", key)
    return eden.rotate_back(numerics.dequantize(*q, "nvfp4", "float32", columns=x.shape[1]), key)


def by_element(x, key):
    q = numerics.quantize(x, "nvfp4", key=key)
    return numerics.dequantize(*q, "nvfp4", "float32", columns=x.shape[1])


def by_nearest(x, key):
    q = numerics.quantize(eden.rotate(x, key), "nvfp4")
    return eden.rotate_back(numerics.dequantize(*q, "nvfp4", "float32", columns=x.shape[1]), key)


def along(estimate, x):
    return (estimate * x).sum() / np.square(x, dtype=np.float64).sum()


def test_unbiased_at_half_the_error():
    """Over keys the mean comes as near to x as an unbiased estimate's does: its error falls as one over their number."""
    x = np.random.default_rng(0).standard_normal((48, 256)).astype(np.float32)
    few, error = estimates(x, range(100), by_eden)
    many, _ = estimates(x, range(1000, 1300), by_eden)
    for mean, count in ((few, 100), (many, 300)):
        assert 0.95 < np.square(mean - x).mean() / (error / count) < 1.05
    _, of_elements = estimates(x, range(100), by_element)
    assert error < 0.0096
    assert error < 0.515 * of_elements
    # Along x nothing but the scale's rounding is left of an estimate's error. To nearest it is shorter than x.
    assert abs(along(few, x) - 1) < 3e-4
    nearest, _ = estimates(x, range(20), by_nearest)
    assert along(nearest, x) < 0.997


def test_products_are_unbiased():
    """The product of two operands that are rotated alike, each with random bits of its own."""
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal((24, 256)).astype(np.float32) for _ in range(2))
    exact, total, squared, count = a.astype(np.float64) @ b.T, 0, 0.0, 300
    for key in range(count):
        values = [
            numerics.dequantize(*eden.quantize(eden.rotate(m, key), "nvfp4", key, name), "nvfp4", "float32", columns=256)
            for m, name in ((a, "gradient"), (b, "input"))
        ]
        product = values[0].astype(np.float64) @ values[1].T
        total, squared = total + product, squared + np.square(product - exact).mean()
    assert 0.85 < np.square(total / count - exact).mean() / (squared / count / count) < 1.15


def test_the_operands_draw_different_bits():
    z = sample("gaussian", (16, 64))
    gradient, input = (eden.quantize(z, "nvfp4", 3, operand) for operand in ("gradient", "input"))
    np.testing.assert_array_equal(gradient.codes, input.codes)
    assert (gradient.scales != input.scales).any()
    assert key_words(fold_in(3, 1)) != key_words(fold_in(3, 2))


def test_an_end_known_only_at_run_time():
    """The groups are those of the axis cut there, whatever is left of a whole group."""
    whole = sample("gaussian", (2, 384))
    for end in (*range(1, 130), 200, 255, 256, 300, 384):
        x = np.where(np.arange(384) < end, whole, np.float32(0))
        z = eden.rotate(x, 5, 0, np.int32(end))
        np.testing.assert_array_equal(z[:, :end], eden.rotate(x[:, :end], 5))
        np.testing.assert_array_equal(eden.rotate(x[:, 128:], 5, 128, np.int32(end))[:, : max(end - 128, 0)], z[:, 128:end])
        np.testing.assert_array_equal(eden.rotate_back(z, 5, 0, np.int32(end))[:, :end], eden.rotate_back(z[:, :end], 5))

"""4-over-6: which of two scales a block takes, where there is no choice, and blocks of which a part is elsewhere."""

import numpy as np
import pytest
import statement
from held_formats import OTHER_CHOICES
from samples import DTYPES, KINDS, sample

from blockfp.definition import four_over_six, layout, numerics
from blockfp.definition.numerics import Amax
from blockfp.formats import Format

NAMES = ("nvfp4_4over6", "nvfp4_4over6_16x16")
BY_NAME = pytest.mark.parametrize("name", ["nvfp4_4over6", "nvfp4_4over6_16x16", "nvfp4_4over6_448_mse_16x16"])


def scales_of(rows, name="nvfp4_4over6"):
    return numerics.quantize(np.asarray(rows, np.float32), name).scales.view("u1").reshape(-1).tolist()


def e4m3(value):
    return int(statement.to_element(np.float64(value), "e4m3"))


def test_a_block_takes_the_scale_that_errs_less():
    # Where 6 is the amax, a scale of 256 stands for 1 and one of 384 for 1.5.
    exact_by_6 = [6.0, 3.0, 2.0, 1.0, 0.5, 1.5, 4.0] + [0.0] * 9
    exact_by_4 = [6.0, 4.5, 3.0, 1.5, 2.25, 0.75] + [0.0] * 10
    assert scales_of([exact_by_6]) == [e4m3(256)]
    assert scales_of([exact_by_4]) == [e4m3(384)]
    assert scales_of([exact_by_4, exact_by_6]) == [e4m3(384), e4m3(256)]
    # Equal errors take 6.
    assert scales_of([[6.0] * 16]) == [e4m3(256)]
    assert scales_of([[0.0] * 16]) == [0]


def test_one_block_of_16x16_weighs_all_its_rows():
    exact_by_4 = [6.0, 4.5, 3.0, 1.5, 2.25, 0.75] + [0.0] * 10
    exact_by_6 = [6.0, 3.0, 2.0, 1.0, 0.5, 1.5, 4.0] + [0.0] * 9
    assert scales_of([exact_by_4] * 15 + [exact_by_6], NAMES[1]) == [e4m3(384)]
    assert scales_of([exact_by_6] * 15 + [exact_by_4], NAMES[1]) == [e4m3(256)]


def test_a_bound_of_448_leaves_no_room_for_4_at_the_tensors_amax():
    exact_by_4 = [6.0, 4.5, 3.0, 1.5, 2.25, 0.75] + [0.0] * 10
    # Where 6 is the tensor's amax a scale of 448 stands for 1, and that for 4 saturates there: equal errors take 6.
    assert scales_of([exact_by_4], "nvfp4_4over6_448") == [e4m3(448)]
    # For 6 the amax 4 has 298.7, which is rounded to 288.
    smaller = [4.0, 3.0, 2.0, 1.0, 1.5, 0.5] + [0.0] * 10
    assert scales_of([exact_by_4, smaller], "nvfp4_4over6_448") == [e4m3(448), e4m3(448)]
    assert scales_of([exact_by_4, smaller]) == [e4m3(384), e4m3(256)]


def test_squares_weigh_one_large_error_more_than_many_small_ones():
    # By 6 only 5 errs, by 1 (it is as far from 4 as from 6). By 4 the codes stand for 6, 4.5, 3, 2.25, 1.5, .. : 5 errs by 0.5,
    # four times 1 by 0.25.
    x = [6.0, 5.0, 1.0, 1.0, 1.0, 1.0] + [0.0] * 10
    assert scales_of([x]) == [e4m3(256)]
    assert scales_of([x], "nvfp4_4over6_mse") == [e4m3(384)]
    assert scales_of([x] * 16, "nvfp4_4over6_16x16") == [e4m3(256)]
    assert scales_of([x] * 16, "nvfp4_4over6_mse_16x16") == [e4m3(384)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_take_6(value):
    x = np.zeros((2, 16), np.float32)
    x[:, :6] = [6.0, 4.5, 3.0, 1.5, 2.25, 0.75]  # exact by 4
    x[1, 7] = value
    q = numerics.quantize(x, NAMES[0])
    if np.isnan(value):
        # The other block is as ever; codes are those of the scale for 6, which is written as NaN.
        assert q.scales.reshape(-1).tolist() == [e4m3(384), 0x7F]
        plain = numerics.encode(x[1:], NAMES[0], np.array([[e4m3(256)]], np.uint8), q.tensor_scale)
        np.testing.assert_array_equal(q.codes[1:], plain)
    else:
        assert q.tensor_scale == 1
        assert q.scales.reshape(-1).tolist() == [e4m3(1.0), e4m3(448)]


@pytest.mark.parametrize("format", OTHER_CHOICES, ids=str)
def test_another_bound_and_another_error_are_as_stated(format):
    for dtype in DTYPES:
        for kind in KINDS:
            x = sample(kind, (21, 37), dtype)
            q, (codes, scales, tensor_scale) = numerics.quantize(x, format), statement.quantize(x, format.name)
            np.testing.assert_array_equal(q.scales, scales)
            np.testing.assert_array_equal(layout.unpack(q.codes, 4, 37), codes)
            assert q.tensor_scale == tensor_scale


def test_it_errs_less_than_plain_nvfp4():
    x = sample("gaussian", (256, 512))
    absolute, squared = {}, {}
    for name in ("nvfp4", "nvfp4_4over6", "nvfp4_4over6_448", "nvfp4_4over6_mse", "nvfp4_4over6_448_mse"):
        y = numerics.dequantize(*numerics.quantize(x, name), name, "float32", columns=512)
        absolute[name], squared[name] = np.abs(y - x).mean(), np.square(y - x).mean()
    for bound in ("", "_448"):
        by_magnitude, by_square = f"nvfp4_4over6{bound}", f"nvfp4_4over6{bound}_mse"
        assert absolute[by_magnitude] < 0.97 * absolute["nvfp4"]
        assert squared[by_square] < 0.97 * squared["nvfp4"]
        # Each is the best by its own measure.
        assert absolute[by_magnitude] < absolute[by_square]
        assert squared[by_square] < squared[by_magnitude]


@BY_NAME
@pytest.mark.parametrize("origin", [(0, 0), (5, 0), (0, 3), (7, 9)])
def test_members_are_the_elements_of_each_block(name, origin):
    x = sample("special", (2, 21, 37))
    format = Format.parse(name)
    members = four_over_six.members(x, format, origin=origin)
    assert members.shape == (*layout.scales_shape(x.shape, format, origin), format.block[0] * format.block[1])
    given = numerics.amax(x, format, origin=origin)._replace(members=members)
    for with_members, own in zip(
        numerics.quantize(x, format, origin=origin, amax=given), numerics.quantize(x, format, origin=origin), strict=True
    ):
        np.testing.assert_array_equal(with_members, own)


@BY_NAME
def test_a_part_of_a_block_with_all_its_members_takes_the_scale_of_the_whole(name):
    """Two ranks that cut blocks anywhere, and exchange amaxes and members by an elementwise maximum."""
    format = Format.parse(name)
    for kind in KINDS:
        whole = sample(kind, (21, 45))
        expected = numerics.quantize(whole, format)
        tensor = numerics.amax(whole, format).tensor
        y = numerics.dequantize(*expected, format, "float32", columns=45)
        for axis, cut in ((1, 23), (0, 9)):
            block = format.block[axis]
            parts = np.split(whole, [cut], axis)
            origins = [(0, 0), (0, cut) if axis else (cut, 0)]
            found = [numerics.amax(x, format, origin=o) for x, o in zip(parts, origins, strict=True)]
            members = [four_over_six.members(x, format, origin=o) for x, o in zip(parts, origins, strict=True)]
            if cut % block:
                for field in ("blocks", "nan", "members"):
                    of = members if field == "members" else [getattr(amax, field) for amax in found]
                    sides = [np.moveaxis(of[0], axis, 0), np.moveaxis(of[1], axis, 0)]
                    shared = np.maximum(sides[0][-1], sides[1][0])
                    sides[0][-1], sides[1][0] = shared, shared
            for x, origin, amax, own in zip(parts, origins, found, members, strict=True):
                q = numerics.quantize(x, format, origin=origin, amax=Amax(amax.blocks, amax.nan, tensor, own))
                values = numerics.dequantize(*q, format, "float32", columns=x.shape[1], origin=origin)
                window = tuple(slice(o, o + n) for o, n in zip(origin, x.shape, strict=True))
                np.testing.assert_array_equal(values, y[window])


def test_members_that_do_not_fit_are_refused():
    x = np.ones((16, 32), np.float32)
    given = numerics.amax(x, NAMES[1])
    members = four_over_six.members(x, NAMES[1])
    with pytest.raises(
        ValueError, match=r"amax\.members of nvfp4_4over6_16x16 must have shape \(1, 2, 256\), got \(1, 2, 16\)"
    ):
        numerics.quantize(x, NAMES[1], amax=given._replace(members=members[..., :16]))
    with pytest.raises(ValueError, match=r"amax\.members is for formats whose blocks choose between scales, got nvfp4"):
        numerics.quantize(x, "nvfp4", amax=numerics.amax(x, "nvfp4")._replace(members=members))
    with pytest.raises(ValueError, match="format must be one in blocks, got fp8_e4m3"):
        four_over_six.members(x, "fp8_e4m3")

"""Reduce-scatters of codes: each rank's array is rounded as the whole that it is, whatever the cuts, and sums have an order."""

import numpy as np
import pytest
from samples import sample
from statement import random_bytes

import blockfp
from blockfp.definition.rounding import fold_in
from blockfp.formats import FORMATS
from blockfp.sharding import simulate
from blockfp.sharding.reducing import ALIGNMENT, check_reduce_format, sent_bytes, sent_layout, term_keys

LOCAL = [format for format in FORMATS if format.block and format.block[0] == 1 and not format.scale.two_level]
BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)]
"""The shapes of a Llama-8B block."""


@pytest.mark.parametrize("format", LOCAL, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_are_those_of_whole_arrays(format, ranks):
    terms = [sample("gaussian", (11, 2, 72), seed=rank) for rank in range(ranks)]
    whole = blockfp.fake_quantize(terms[0], format, key=fold_in(7, 0))
    for rank in range(1, ranks):
        whole = whole + blockfp.fake_quantize(terms[rank], format, key=fold_in(7, rank))
    parts = simulate.reduce_scatter(terms, format, key=7)
    assert len({part.shape for part in parts[:1]}) == 1
    np.testing.assert_array_equal(np.concatenate(parts), whole, strict=True)
    halves = simulate.reduce_scatter(terms, format, key=7, factor=2)
    np.testing.assert_array_equal(np.concatenate(halves), whole / 2)


@pytest.mark.parametrize("format", LOCAL, ids=str)
def test_what_is_not_finite_arrives(format):
    terms = [sample("gaussian", (4, 96), seed=rank) for rank in range(2)]
    terms[0][0, 3], terms[1][1, 40], terms[1][3, 95] = np.inf, -np.inf, np.nan
    got = np.concatenate(simulate.reduce_scatter(terms, format, key=0))
    assert np.isnan(got[[0, 1, 3], [3, 40, 95]]).all()
    assert np.isfinite(got[2]).all()


def test_vectors_are_added_as_they_are():
    terms = [sample("gaussian", (7,), seed=rank) for rank in range(3)]
    terms[0][0] = np.inf
    got = np.concatenate(simulate.reduce_scatter(terms, "mxfp8_e5m2", key=0))
    np.testing.assert_array_equal(got, terms[0] + terms[1] + terms[2])


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e4m3_1x128"])
def test_the_mean_over_keys_is_the_sum(format):
    terms = [sample("gaussian", (4, 64), seed=rank) for rank in range(3)]
    exact, sums = sum(term.astype(np.float64) for term in terms), np.zeros((4, 64))
    nearest = np.concatenate(simulate.reduce_scatter(terms, format)) - exact
    for key in range(400):
        sums += np.concatenate(simulate.reduce_scatter(terms, format, key=key))
    error = sums / 400 - exact
    assert np.abs(error).mean() < 0.15 * np.abs(nearest).mean()
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(error.size)


def test_keys():
    reductions = np.array([[0, 3], [5, 1 << 33]])
    for rank in (0, 3):
        got = term_keys(11, (2, 70000), reductions, rank)
        assert got.dtype == np.int32
        for index, reduction in np.ndenumerate(reductions):
            number = (2, 70000)[index[1]]
            want = fold_in(fold_in(fold_in(11, number), int(reduction) & 0xFFFFFFFF), rank)
            np.testing.assert_array_equal(got[index].view(np.uint32), want)
    assert random_bytes(fold_in(11, 1), 0, 8).tolist() != random_bytes(fold_in(11, 2), 0, 8).tolist()


@pytest.mark.parametrize("format", LOCAL, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_layout_has_a_place_for_everything(format, ranks):
    shapes = ((10, 3, 40), (7,), (1, 1), (16, 0), (64, 200))
    made = sent_layout(format, shapes, ranks, 4)
    places = sorted((place, part.end) for part in made.parts for place in (part.codes, part.scales) if place is not None)
    assert all(place % ALIGNMENT == 0 for place, _ in places)
    for part, shape in zip(made.parts, shapes, strict=True):
        chunk = -(-shape[0] // ranks)
        if part.scales is None:
            assert part.end - part.codes == 4 * chunk
            continue
        whole = blockfp.quantize(np.zeros((chunk, *shape[1:]), np.float32), format)
        assert whole.scales.nbytes == part.end - part.scales
        assert 0 <= part.scales - part.codes - whole.codes.nbytes < ALIGNMENT
    assert made.size % ALIGNMENT == 0
    assert made.parts[-1].end <= made.size < made.parts[-1].end + ALIGNMENT


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxfp8_e4m3", "fp8_e5m2_1x128", "fp8_e4m3_1x128_fp32"])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes_are_half_of_those_of_bfloat16(format, ranks):
    assert sent_bytes(format, BLOCK, ranks) <= 0.52 * sent_bytes(None, BLOCK, ranks)
    assert sent_bytes(None, BLOCK, ranks) == (ranks - 1) * sum(2 * np.prod(shape) // ranks for shape in BLOCK)
    assert sent_bytes(format, BLOCK, 1) == 0


@pytest.mark.parametrize("format", [format for format in FORMATS if format not in LOCAL], ids=str)
def test_formats_whose_scales_go_beyond_a_row_are_refused(format):
    with pytest.raises(ValueError, match=f"format {format}: rows that go to different ranks must not share a scale"):
        check_reduce_format(format, "format")
    with pytest.raises(ValueError, match="must not share a scale"):
        simulate.reduce_scatter([np.zeros((2, 32), np.float32)], format)

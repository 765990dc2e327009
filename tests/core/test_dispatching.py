"""Rows in groups, and tokens that go to experts on other ranks as codes: `dispatching` and `recoding`."""

import ml_dtypes
import numpy as np
import pytest
from drawn import examples
from held_formats import FORMATS as EVERY_FORMAT
from hypothesis import given
from hypothesis import strategies as st

from blockfp.definition import groups, numerics, recoding, rotation
from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format
from blockfp.sharding import dispatching

FORMATS = (
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp4_e2m1",
    "mxint8",
    "fp8_e4m3_1x128",
    "fp8_e4m3_1x128_fp32",
    "nvfp4",
    "fp8_e4m3",
)


@st.composite
def routings(draw):
    """Tokens of each rank, and their experts."""
    total, k = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    experts = [random.integers(0, total, (each, k)) for each in tokens]
    return experts, total, random


def quantized(parts, format):
    """Each rank's rows in codes, as parts of one tensor: the largest magnitude of all is everybody's."""
    format = Format.parse(format)
    amaxes = [numerics.amax(part, format) for part in parts]
    if format.per_tensor:
        largest = np.max([amax.blocks for amax in amaxes], 0)
        amaxes = [Amax(largest, None, None) for _ in parts]
    elif format.scale.two_level:
        largest = np.max([amax.tensor for amax in amaxes])
        amaxes = [amax._replace(tensor=largest) for amax in amaxes]
    return [numerics.quantize(part, format, amax=amax) for part, amax in zip(parts, amaxes, strict=True)]


@pytest.mark.parametrize("format", FORMATS)
@examples(25)
@given(routing=routings())
def test_what_is_quantized_and_then_dispatched_is_what_is_dispatched_and_then_quantized(format, routing):
    experts, total, random = routing
    tokens = [(random.standard_normal((len(each), 160)) * 2.0 ** random.integers(-9, 9)).astype(np.float32) for each in experts]
    parsed = Format.parse(format)
    dispatching.check_rows(parsed)
    before = quantized(tokens, format)
    codes = dispatching.dispatched([q.codes for q in before], experts, total)
    scales = [q.scales for q in before]
    scales = scales if parsed.per_tensor else dispatching.dispatched(scales, experts, total)
    after = quantized(dispatching.dispatched(tokens, experts, total), format)
    for rank, q in enumerate(after):
        assert np.array_equal(q.codes, codes[rank])
        assert np.array_equal(q.scales, scales[rank])
        if q.tensor_scale is not None:
            assert q.tensor_scale == before[rank].tensor_scale


@examples()
@given(routing=routings())
def test_rows_arrive_as_one_process_would_sort_them_and_come_back_to_their_slots(routing):
    experts, total, _ = routing
    numbers = np.split(np.arange(sum(map(len, experts))), np.cumsum([len(each) for each in experts])[:-1])
    came = dispatching.dispatched(numbers, experts, total)
    (alone,) = dispatching.dispatched([np.concatenate(numbers)], [np.concatenate(experts)], total)
    assert np.array_equal(np.concatenate(came), alone)
    for own, back, to in zip(numbers, dispatching.combined(came, experts, total), experts, strict=True):
        assert np.array_equal(back, np.repeat(own[:, None], to.shape[1], 1))


def test_blocks_of_several_rows_are_refused():
    with pytest.raises(ValueError, match="tokens in fp8_e4m3_128x128 share blocks of 128 rows"):
        dispatching.check_rows(Format.parse("fp8_e4m3_128x128"))


def dequantized(q, format, columns):
    return numerics.dequantize(*q, format, "float32", columns=columns).astype(np.float64)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128"])
@examples(25)
@given(seed=st.integers(0, 2**16), spread=st.integers(0, 30))
def test_a_value_that_stays_normal_is_the_same_columnwise(format, seed, spread):
    random, parsed = np.random.default_rng(seed), Format.parse(format)
    x = random.standard_normal((77, 96)) * 2.0 ** random.integers(-spread - 1, 1, (77, 1))
    row = numerics.quantize(x.astype(np.float32), parsed)
    column = recoding.columnwise(row, parsed, parsed, columns=96)
    seen, turned = dequantized(row, parsed, 96).T, dequantized(column, parsed, 77)
    scales = np.repeat(column.scales, parsed.block[1], -1)[:, :77]
    scales = scales if scales.dtype == np.float32 else 2.0 ** (scales.astype(np.int64) - 127)
    element = ml_dtypes.finfo(getattr(ml_dtypes, "float8_e4m3fn" if "e4m3" in format else "float8_e5m2"))
    normal = np.abs(seen) >= float(element.smallest_normal) * scales
    assert np.array_equal(turned[normal], seen[normal])
    assert (np.abs(turned - seen) <= float(element.smallest_subnormal) * scales / 2).all()
    assert normal.mean() > 0.3


@pytest.mark.parametrize("format", FORMATS)
def test_the_columnwise_form_is_a_function_of_codes(format):
    parsed = Format.parse(format)
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    row = numerics.quantize(x, parsed)
    column = recoding.columnwise(row, parsed, parsed, columns=64)
    if parsed.per_tensor:
        assert np.array_equal(column.codes, row.codes.T)
        assert np.array_equal(column.scales, row.scales)
    else:
        expected = numerics.quantize(dequantized(row, parsed, 64).T.astype(np.float32), parsed)
        for part, wanted in zip(column, expected, strict=True):
            assert np.array_equal(part, wanted)


def test_nan_stays():
    x = np.ones((40, 32), np.float32)
    x[3, 5] = np.nan
    row = numerics.quantize(x, "mxfp8_e4m3")
    column = recoding.columnwise(row, "mxfp8_e4m3", "mxfp8_e4m3", columns=32)
    assert np.isnan(dequantized(column, "mxfp8_e4m3", 40)[5, 3])
    broken = Quantized(row.codes, np.full_like(row.scales, 255), None)
    assert np.isnan(dequantized(recoding.columnwise(broken, "mxfp8_e4m3", "mxfp8_e4m3", columns=32), "mxfp8_e4m3", 40)).all()


ENDS = (5, 5, 40, 168, 300)
TOKENS, FEATURES = 310, 70


def gaussian():
    return np.random.default_rng(0).standard_normal((TOKENS, FEATURES)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", sorted(map(str, EVERY_FORMAT)))
def test_groups_have_the_parts_that_each_has_by_itself(name, columnwise):
    x, format = gaussian(), Format.parse(name)
    keys = np.arange(2 * len(ENDS), dtype=np.uint32).reshape(-1, 2) if format.element.name == "e2m1" else None
    turn = rotation.rotate if name == "nvfp4" and columnwise else lambda x: x
    found = groups.quantize_groups(x, ENDS, format, columnwise=columnwise, keys=keys, turn=turn)
    wanted = groups.shapes(x.shape, len(ENDS), format, columnwise=columnwise)
    assert [(part.shape, part.dtype.name) for part in found if part is not None] == wanted
    each = groups.group_parts(found, ENDS, TOKENS, FEATURES, format, columnwise=columnwise)
    begin = 0
    for number, end in enumerate(ENDS):
        own = x[begin:end].T if columnwise else x[begin:end]
        alone = numerics.quantize(turn(own), format, key=None if keys is None else keys[number])
        for part, one in zip(each[number], alone, strict=True):
            assert part is one is None or np.array_equal(np.asarray(part), one)
        begin = end


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "mxfp6_e2m3", "nvfp4", "mxfp8_e4m3_32x32"])
def test_columns_that_fill_a_group_up_are_quantized_zeros(name):
    x, format = gaussian(), Format.parse(name)
    found = groups.quantize_groups(x, ENDS, format, columnwise=True)
    scales = found.scales.T[:FEATURES] if groups.ordered(format) else found.scales
    filled = np.zeros((groups.columns_for(TOKENS, len(ENDS)), FEATURES), x.dtype)
    for group in groups.groups_of(ENDS, TOKENS):
        filled[group.first_column : group.first_column + group.rows] = x[group.begin : group.end]
    if not format.scale.two_level:
        whole = numerics.quantize(filled.T, format)
        last = group.end_column // format.block[1]
        assert np.array_equal(found.codes, whole.codes)
        assert np.array_equal(scales[:, :last], whole.scales[:, :last])
    assert group.end_column <= filled.shape[0]


def test_ends_that_descend_or_lie_outside_are_cut():
    found = list(groups.groups_of((5, 3, 900, -1), 20))
    assert [(group.begin, group.end, group.first_column) for group in found] == [
        (0, 5, 0),
        (5, 5, 128),
        (5, 20, 128),
        (20, 20, 256),
    ]


def test_the_bounds_hold_for_any_ends():
    random = np.random.default_rng(1)
    for _ in range(200):
        tokens, count = int(random.integers(0, 700)), int(random.integers(1, 20))
        ends = sorted(random.integers(0, tokens + 1, count).tolist())
        assert list(groups.groups_of(ends, tokens))[-1].end_column <= groups.columns_for(tokens, count)

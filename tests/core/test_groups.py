"""Rows in groups: each group's codes and scales are those of the group by itself."""

import ml_dtypes
import numpy as np
import pytest
from held_formats import FORMATS

from blockfp.definition import groups, numerics, rotation
from blockfp.formats import Format

ENDS = (5, 5, 40, 168, 300)
TOKENS, FEATURES = 310, 70


def values():
    return np.random.default_rng(0).standard_normal((TOKENS, FEATURES)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", sorted(map(str, FORMATS)))
def test_groups_have_the_parts_that_each_has_by_itself(name, columnwise):
    x, format = values(), Format.parse(name)
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
    x, format = values(), Format.parse(name)
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

"""Each rank's part of codes and scales on every mesh: of a sharded array, or cut from the whole."""

import numpy as np
import pytest
from sharded import LAYOUTS, parts, shapes, sharding_of, whole_and_shards

from blockfp import formats
from blockfp.definition import layout
from blockfp.sharding import parts as saved
from blockfp.sharding.placement import Sharding, StridedShard

FORMATS = [formats.Format.parse(name) for name in ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp6_e3m2_32x32", "mxfp8_e4m3", "nvfp4")]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_parts_of_every_rank(format, name):
    for i, shape in enumerate(shapes(format)):
        sharding, _ = sharding_of(name, shape)
        _, whole = whole_and_shards(format, shape, sharding, "gaussian", seed=i)
        expected = parts(whole, format, sharding)
        for part in saved.parts(format, sharding):
            array = getattr(whole, part.name)
            assert (array.shape, array.dtype.name) == (part.shape, part.dtype)
            for region, own in zip(sharding.regions, expected, strict=True):
                inside = np.asarray(array[part.span(region)])
                want = getattr(own, part.name)
                if part.name == "codes" and not part.sharded:
                    # The first and last byte have neighbours' codes in them.
                    bits, together = format.element.bits, {8: 1, 6: 4, 4: 2}[format.element.bits]
                    first = region.start[-1] % together
                    codes = layout.unpack(inside, bits, first + region.shape[-1])[..., first:]
                    inside = layout.pack(codes, bits)
                np.testing.assert_array_equal(inside.ravel().view(np.uint8), want.ravel().view(np.uint8))
            if part.sharded:
                own_sharding = Sharding(part.shape, sharding.mesh, sharding.placements)
                for region, cut in zip(sharding.regions, own_sharding.regions, strict=True):
                    assert cut.empty if region.empty else part.span(region) == cut.slices


def test_what_is_cut_as_the_array_is():
    sharded = {
        (name, part.name): part.sharded
        for name in ("fsdp2", "hsdp", "strided2x2", "row_parallel")
        for part in saved.parts(formats.NVFP4_16x16, sharding_of(name, (192, 192))[0])
    }
    assert sharded == {
        (name, part): part != "tensor_scale"
        for name in ("fsdp2", "hsdp", "strided2x2", "row_parallel")
        for part in ("codes", "scales", "tensor_scale")
    }
    # 40 rows on two ranks: 20 are no multiple of 16.
    codes, scales, _ = saved.parts(formats.NVFP4_16x16, sharding_of("fsdp2", (40, 192))[0])
    assert (codes.sharded, scales.sharded) == (True, False)
    # 18 columns on two ranks: 9 end inside a byte.
    codes, *_ = saved.parts(formats.NVFP4, sharding_of("both_axes", (4, 18 * 3 // 2))[0])
    assert not codes.sharded


@pytest.mark.parametrize(("rows", "agree"), [(8, True), (10, False), (7, False), (12, True)])
def test_uneven_strided_shards_are_not_left_to_torch(rows, agree):
    sharding, _ = sharding_of("strided2x2", (rows, 64))
    assert isinstance(sharding.placements[0], StridedShard)
    assert saved.offsets_agree(sharding) is agree
    assert saved.offsets_agree(sharding_of("fsdp3", (rows, 64))[0])

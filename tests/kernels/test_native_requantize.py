"""The CPU kernels' `requantize` against the definition, bit for bit."""

import numpy as np
import pytest
from any_scales import scales_of
from held_formats import FORMATS
from same_bits import assert_same_bits
from samples import sample

from blockfp.definition import numerics
from blockfp.kernels import native

KINDS = ("bf16_valued", "exponents", "special", "subnormal", "huge")


@pytest.fixture(params=native.instruction_sets() if native.available() else (), autouse=True)
def instruction_set(request):
    native.use_instruction_set(request.param)
    yield
    native.use_instruction_set(native.instruction_sets()[0])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_kind_of_input_and_scale(format):
    for number, kind in enumerate(KINDS):
        for shape in ((133, 150), (2, 3, 33, 47), (0, 32)):
            x = sample(kind, shape)
            scales = scales_of(shape, format, number)
            for key in (None, (0xDEADBEEF, 7)):
                got = native.requantize(x, format, *scales, key=key)
                assert_same_bits(tuple(got), tuple(numerics.requantize(x, format, *scales, key=key)), f"{kind} {shape} {key}")
    own = numerics.quantize(sample("gaussian", (70, 290)), format)
    y = numerics.dequantize(*own, format, "float32", columns=290) * np.float32(1.001)
    assert_same_bits(
        tuple(native.requantize(y, format, *own[1:], key=3)), tuple(numerics.requantize(y, format, *own[1:], key=3))
    )


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_shard_with_amaxes_of_the_whole(format):
    whole, place = sample("bf16_valued", (190, 290)), {"origin": (7, 24), "shape": (190, 290), "key": 11}
    x = whole[7:52, 24:96]
    scales, found = scales_of(x.shape, format, 0, (7, 24)), numerics.amax(whole, format)
    amax = numerics.amax(x, format, origin=(7, 24))
    amax = found if format.block is None else amax._replace(tensor=found.tensor, blocks=amax.blocks + (1 << 22))
    got = native.requantize(x, format, *scales, amax=amax, **place)
    assert_same_bits(tuple(got), tuple(numerics.requantize(x, format, *scales, amax=amax, **place)))


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="requantize float32, got float16"):
        native.requantize(np.zeros((2, 32), np.float16), "mxfp8_e4m3", np.zeros((2, 1), np.uint8))

"""The CUDA kernels' `requantize` against the definition in NumPy, bit for bit, and steps of weights without masters."""

import numpy as np
import pytest
from any_scales import scales_of
from cuda_arrays import assert_same, to_gpu
from samples import sample

torch = pytest.importorskip("torch")
from blockfp.torch_backend.custom_ops import cuda  # noqa: E402

from blockfp.definition import numerics  # noqa: E402
from blockfp.formats import FORMATS  # noqa: E402

KINDS = ("bf16_valued", "exponents", "special", "subnormal", "huge")
SHAPES = ((133, 150), (2, 3, 33, 47), (64, 256), (0, 32))


def on_gpu(parts):
    return [None if part is None else torch.tensor(np.asarray(part), device="cuda") for part in parts]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_kind_of_input_and_scale(format):
    for number, kind in enumerate(KINDS):
        for shape in SHAPES:
            x, scales = sample(kind, shape), scales_of(shape, format, number)
            for key in (None, (0xDEADBEEF, 7)):
                got = cuda.requantize(to_gpu(x), format, *on_gpu(scales), key=key)
                assert_same(got, numerics.requantize(x, format, *scales, key=key), f"{format} {kind} {shape} {key}")
            codes, expected = cuda.encode(to_gpu(x), format, *on_gpu(scales)), numerics.encode(x, format, *scales)
            assert_same((codes, None, None), (expected, None, None), f"{format} {kind} {shape} encode")
    strided = sample("gaussian", (150, 133))
    got = cuda.requantize(to_gpu(strided).mT, format, *on_gpu(scales_of((133, 150), format, 0)), key=1)
    assert_same(got, numerics.requantize(strided.T, format, *scales_of((133, 150), format, 0), key=1), f"{format} strided")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_shard_with_amaxes_of_the_whole(format):
    whole, place = sample("bf16_valued", (190, 290)), {"origin": (7, 24), "shape": (190, 290), "key": 11}
    x = np.ascontiguousarray(whole[7:52, 24:96])
    scales, found = scales_of(x.shape, format, 0, (7, 24)), numerics.amax(whole, format)
    amax = numerics.amax(x, format, origin=(7, 24))
    amax = found if format.block is None else amax._replace(tensor=found.tensor, blocks=amax.blocks + (1 << 22))
    got = cuda.requantize(to_gpu(x), format, *on_gpu(scales), amax=numerics.Amax(*on_gpu(amax)), **place)
    assert_same(got, numerics.requantize(x, format, *scales, amax=amax, **place), str(format))


NAMES = ("fp8_e4m3", "fp8_e4m3_row", "fp8_e4m3_128x128_fp32", "mxfp8_e4m3_32x32", "mxfp4_e2m1", "nvfp4_16x16")


@pytest.mark.parametrize("name", [*NAMES, "nvfp4_4over6_16x16"])
@pytest.mark.parametrize("moments", ["float32", "fp8"])
def test_steps_are_those_of_a_cpu(name, moments):
    import blockfp.torch as bfp

    results, start = [], bfp.quantize(torch.randn(192, 328, generator=torch.Generator().manual_seed(1)), name)
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(start.clone().to(device))  # on the CPU, too, one of its own
        optimizer = bfp.AdamW([p], lr=1e-2, master=None, moments=moments, key=7)
        for step in range(3):
            p.grad = torch.randn(192, 328, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.step()
        results.append([part.cpu() for part in (p.codes, p.scales, p.tensor_scale) if part is not None])
    assert all(map(torch.equal, *results))

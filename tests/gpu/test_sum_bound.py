"""The bound of docs/numerics.md on sums, of products of values on a GPU: twice that of float32 sums that round."""

import pytest

torch = pytest.importorskip("torch")
import blockfp.torch as bfp  # noqa: E402
from blockfp import recipes  # noqa: E402


def values(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


PAIRS = (("nvfp4", "nvfp4_16x16"), ("mxint8", "mxint8_32x32"), ("fp8_e4m3_1x128_fp32", "mxfp4_e2m1_32x32"))


@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(64, 96, 512), (33, 17, 4100), (16, 16, 16384)])
@pytest.mark.parametrize("cancelling", [False, True])
def test_products_of_values(formats, shape, cancelling):
    """In formats that no unit of Hopper multiplies as codes."""
    m, n, k = shape
    x, weight = values(m, k, seed=0), values(n, k, seed=1) * 0.1
    if cancelling:
        half = k // 2
        x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
    a, b = bfp.quantize(x, formats[0]), bfp.quantize(weight, formats[1])
    recipe = recipes.qat(formats[1], formats[0])
    y = bfp.linear(x, b, recipe=recipe)
    left, right = (q.dequantize(torch.float32).double() for q in (a, b))
    lost = 2 * (k + 4) * 2.0**-24 * (left.abs() @ right.abs().mT)
    wanted = left @ right.mT
    error = (y.detach().double() - wanted).abs()
    assert bool((error <= lost + 2.0**-24 * (wanted.abs() + lost) + 1e-30).all()), f"{(error / lost).max():.3} times the bound"

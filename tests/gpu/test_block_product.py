"""Products by the library's own kernel for Hopper, against exact sums of what codes and scales stand for."""

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    import blockfp.torch as bfp
    from blockfp.formats import Format
    from blockfp.kernels import cuda_library
    from blockfp.kernels.format_numbers import format_numbers

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's", allow_module_level=True)

ROWS, SQUARES = "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32"
GRADIENT = "fp8_e5m2_1x128_fp32"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def turned(scales):
    """[.., blocks, rows filled up to a multiple of 4] of scales [.., rows, blocks]."""
    return torch.nn.functional.pad(scales.mT, (0, -scales.shape[-2] % 4)).contiguous()


def run(a, b, out, ends=None, bias=None, accumulate=False):
    numbers = [format_numbers(Format.parse(x.format)) for x in (a, b)]
    squares = numbers[1][1] == 128
    scales = b.scales.contiguous() if squares else turned(b.scales)
    rows = numbers[1][1]
    elements = numbers[0][0], numbers[1][0]
    cuda_library.library().block_product(
        a.codes, b.codes, turned(a.scales), scales, ends, bias, out, *elements, rows, accumulate
    )
    return out


def assert_close(got, a, b, added, dtype):
    """Within what the tensor cores' sums of 128 and one rounding to the dtype lose."""
    left, right = (x.dequantize(torch.float32).double() for x in (a, b))
    exact, magnitude = left @ right.mT + added, left.abs() @ right.abs().mT
    bound = 4e-4 * magnitude + torch.finfo(dtype).eps * exact.abs() + 1e-30
    assert bool((((got.double() - exact).abs()) <= bound).all())


PAIRS = ((ROWS, SQUARES), (ROWS, ROWS), (GRADIENT, SQUARES), (ROWS, GRADIENT), (GRADIENT, GRADIENT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (333, 517, 2064), (1, 7, 16), (129, 200, 144)])
def test_is_the_sum(shape, formats, dtype):
    m, n, k = shape
    a, b = bfp.quantize(random(m, k), formats[0]), bfp.quantize(random(n, k, seed=1), formats[1])
    out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
    assert_close(run(a, b, out), a, b, 0, dtype)
    assert torch.equal(run(a, b, torch.empty_like(out)), out)


@pytest.mark.parametrize("n", [256, 517])
def test_adds_a_bias_and_what_is_there(n):
    a, b = bfp.quantize(random(300, 512), ROWS), bfp.quantize(random(n, 512, seed=1), SQUARES)
    bias, before = random(n, seed=2), random(300, n, seed=3)
    assert_close(run(a, b, before.clone(), None, bias, True), a, b, bias.double() + before.double(), torch.float32)


@pytest.mark.parametrize("weight", [ROWS, SQUARES])
@pytest.mark.parametrize("n", [384, 320])
def test_groups_end_in_device_memory(weight, n):
    """Uneven and empty groups; the same values as each group's product by itself, and rows past the last end as they were."""
    ends = torch.tensor([100, 100, 357, 900], dtype=torch.int32, device="cuda")
    a = bfp.quantize(random(1000, 640), ROWS)
    weights = [bfp.quantize(random(n, 640, seed=g), weight) for g in range(4)]
    whole = bfp.quantize(torch.stack([random(n, 640, seed=g) for g in range(4)]), weight)
    out = run(a, whole, torch.full((1000, n), 7.0, device="cuda"), ends)
    first = 0
    for end, one, codes in zip(ends.tolist(), weights, whole.codes, strict=True):
        assert torch.equal(codes, one.codes)
        alone = run(a, one, torch.empty((1000, n), device="cuda"))
        assert torch.equal(out[first:end], alone[first:end])
        first = end
    assert bool((out[first:] == 7).all())


def test_replays_in_a_graph_with_other_ends():
    ends = torch.tensor([64, 256], dtype=torch.int32, device="cuda")
    a, b = bfp.quantize(random(256, 256), ROWS), bfp.quantize(random(2, 128, 256), SQUARES)
    scales, out = turned(a.scales), torch.empty((256, 128), device="cuda")

    def product():
        cuda_library.library().block_product(a.codes, b.codes, scales, b.scales, ends, None, out, 0, 0, 128, False)

    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product()
    ends.copy_(torch.tensor([200, 256], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, run(a, b, torch.empty_like(out), ends))


def test_a_nan_stays_in_its_row_and_infinities_are_seen():
    x = random(256, 256)
    x[3, 5] = float("nan")
    a, b = bfp.quantize(x, GRADIENT), bfp.quantize(random(128, 256, seed=1), SQUARES)
    bad = run(a, b, torch.empty((256, 128), device="cuda")).isnan().all(1)
    assert bad.nonzero().flatten().tolist() == [3]


def test_refuses_what_it_can_not_read():
    a, b = bfp.quantize(random(64, 72), ROWS), bfp.quantize(random(64, 72), SQUARES)
    with pytest.raises(ValueError, match="multiple of 16"):
        run(a, b, torch.empty((64, 64), device="cuda"))

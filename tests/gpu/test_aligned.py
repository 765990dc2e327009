"""MX operands aligned on a GPU: the definition's bits, and products within the bound."""

import numpy as np
import pytest
import torch
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.quantize import cuda_layouts
from cuda_arrays import capture

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import alignment, layout, numerics
from blockfp.formats import FORMATS, Format

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the route is Hopper's", allow_module_level=True)
MX = [f for f in FORMATS if alignment.can_align(f) and "floor" not in f.name]


def assert_same_bits(codes, scales, format, columns):
    """NumPy codes and scales, aligned by the kernel and by the definition."""
    wanted = alignment.align(codes, scales, format, columns=columns)
    got, powers = cuda_layouts.align(torch.from_numpy(codes).cuda(), torch.from_numpy(scales).cuda(), format, columns=columns)
    got, powers = got.cpu().numpy(), powers.cpu().numpy()
    rows, filled = codes.shape[0], -(-columns // 16) * 16
    assert got.shape == (rows, filled)
    assert powers.shape == (-(-columns // 128), -(-rows // 4) * 4)
    np.testing.assert_array_equal(powers[:, :rows].T, wanted.scales)
    np.testing.assert_array_equal(got[:, :columns], wanted.codes)
    assert not got[:, columns:].any()
    if format.square:
        assert_same_turned(codes, scales, format, columns)


def assert_same_turned(codes, scales, format, columns):
    """The same of the transposed matrix, in one pass."""
    rows = codes.shape[0]
    turned = numerics.transpose(codes, scales, format, columns=columns)
    wanted = alignment.align(*turned, format, columns=rows)
    arrays = (torch.from_numpy(x).cuda() for x in (codes, scales))
    got, powers = (x.cpu().numpy() for x in cuda_layouts.align(*arrays, format, columns=columns, transposed=True))
    assert got.shape == (columns, -(-rows // 16) * 16)
    assert powers.shape == (-(-rows // 128), -(-columns // 4) * 4)
    np.testing.assert_array_equal(powers[:, :columns].T, wanted.scales)
    np.testing.assert_array_equal(got[:, :rows], wanted.codes)
    assert not got[:, rows:].any()


def random_codes(format, rows, columns, rng):
    """Every code; those behind a row's end are zeros, as they are stored."""
    codes = rng.integers(0, 1 << format.element.bits, (rows, columns), np.uint8)
    return layout.pack(codes, format.element.bits)


@pytest.mark.parametrize("format", MX, ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (33, 200), (1, 7), (100, 17), (31, 130), (257, 4096), (5, 97), (40, 64)])
def test_bits_of_any_codes_and_scales(format, shape):
    rng = np.random.default_rng(hash(shape) % 1000)
    grid = layout.scales_shape(shape, format)
    codes = random_codes(format, *shape, rng)
    near = rng.integers(110, 140, grid, np.uint8)
    for scales in (
        near,
        rng.integers(0, 256, grid, np.uint8),
        rng.integers(0, 6, grid, np.uint8),
        rng.integers(248, 256, grid, np.uint8),
        np.full(grid, 255, np.uint8),
        np.where(rng.random(grid) < 0.3, 255, near).astype(np.uint8),
    ):
        assert_same_bits(codes, scales, format, shape[1])


@pytest.mark.parametrize("format", MX, ids=str)
def test_every_code_under_every_shift(format):
    """A block that stays, one of every code below it, for shifts of -40 to 60; and blocks of zeros under large scales."""
    rng, count = np.random.default_rng(0), 1 << format.element.bits
    tall = format.block[0]
    rows = 101 * tall
    code = rng.integers(0, count, (rows, 128), np.uint8)
    # Without NaN and Inf in the first block, and with its largest.
    code[:, :32] &= 0x3F if count == 256 else count - 1
    for r in range(rows):
        code[r, 32:128] = np.resize(np.roll(np.arange(count, dtype=np.uint8), 96 * r), 96)
    scales = np.full((101, 4), 120, np.uint8)
    scales[:, 1:] = (120 - np.arange(-40, 61))[:, None]
    codes = layout.pack(code, format.element.bits)
    assert_same_bits(codes, scales, format, 128)
    code[:, :32] = 0
    scales[:, 0] = 250
    assert_same_bits(layout.pack(code, format.element.bits), scales, format, 128)
    # Only the smallest codes, which are shifted up the most.
    small = layout.pack(np.broadcast_to(np.arange(128, dtype=np.uint8) % 2, (rows, 128)).copy(), format.element.bits)
    assert_same_bits(small, np.full((101, 4), 130, np.uint8), format, 128)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e4m3_32x32", "mxfp6_e3m2", "mxfp4_e2m1_32x32"])
def test_bits_of_codes_that_begin_anywhere(format):
    """Rows of codes that are no vectors: a slice whose first byte lies on no multiple of 16."""
    format = Format.parse(format)
    rng, rows = np.random.default_rng(1), 65
    width = layout.packed_columns(256, format.element.bits)
    codes = rng.integers(0, 256, (rows * width,), np.uint8)
    scales = rng.integers(100, 130, layout.scales_shape((rows, 256), format), np.uint8)
    room = torch.empty(rows * width + 1, dtype=torch.uint8, device="cuda")
    room[1:] = torch.from_numpy(codes).cuda()
    wanted = alignment.align(codes.reshape(rows, width), scales, format, columns=256)
    got, powers = cuda_layouts.align(room[1:].view(rows, width), torch.from_numpy(scales).cuda(), format, columns=256)
    np.testing.assert_array_equal(got.cpu().numpy(), wanted.codes)
    np.testing.assert_array_equal(powers.cpu().numpy()[:, :rows].T, wanted.scales)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e4m3_32x32", "mxfp6_e2m3_32x32"])
def test_a_stack_is_aligned_matrix_by_matrix(format):
    """Of heights that are no multiple of 4 or 32."""
    q = bfp.quantize(data("outlier columns", 3 * 45, 200, 0).view(3, 45, 200), format)
    codes, powers = cuda_layouts.align(q.codes, q.scales, q.format, columns=200)
    assert (codes.shape, powers.shape) == ((3, 45, 208), (3, 2, 48))
    for i in range(3):
        alone = cuda_layouts.align(q.codes[i], q.scales[i], q.format, columns=200)
        assert torch.equal(codes[i], alone[0])
        assert torch.equal(powers[i, :, :45], alone[1][:, :45])
    if q.format.square:
        codes, powers = cuda_layouts.align(q.codes, q.scales, q.format, columns=200, transposed=True)
        assert (codes.shape, powers.shape) == ((3, 200, 48), (3, 1, 200))
        for i in range(3):
            alone = cuda_layouts.align(q.codes[i], q.scales[i], q.format, columns=200, transposed=True)
            assert torch.equal(codes[i], alone[0])
            assert torch.equal(powers[i], alone[1])


def test_refuses_what_is_not_there():
    q = bfp.quantize(torch.randn(32, 64, device="cuda"), "mxint8")
    with pytest.raises(ValueError, match="only MXFP8, MXFP6 and MXFP4"):
        cuda_layouts.align(q.codes, q.scales, q.format, columns=64)
    q = bfp.quantize(torch.randn(32, 64, device="cuda"), "mxfp8_e4m3")
    with pytest.raises(ValueError, match="scales must be an E8M0 byte"):
        cuda_layouts.align(q.codes, q.scales[:, :1].contiguous(), q.format, columns=64)
    with pytest.raises(ValueError, match="only matrices in blocks of 32x32"):
        cuda_layouts.align(q.codes, q.scales, q.format, columns=64, transposed=True)


PAIRS = (
    ("mxfp8_e4m3", "mxfp8_e4m3_32x32"),
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp8_e5m2", "mxfp8_e4m3_32x32"),
    ("mxfp8_e5m2", "mxfp8_e5m2"),
    ("mxfp6_e3m2", "mxfp6_e3m2_32x32"),
    ("mxfp6_e2m3", "mxfp4_e2m1_32x32"),
    ("mxfp4_e2m1", "mxfp4_e2m1_32x32"),
)


def data(kind, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "outlier columns":
        x = x * torch.exp(3 * torch.randn(columns, generator=generator))
    if kind == "heavy tails":
        x = x / torch.randn(rows, columns, generator=generator).abs().clamp_min(1e-3)
    return x.cuda()


@pytest.mark.parametrize("kind", ["gaussian", "outlier columns", "heavy tails"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (130, 264, 4096), (77, 33, 50), (1, 5, 300)])
def test_products_are_within_the_bound(shape, pair, kind):
    """Of exact sums of what the codes stand for: the bound of docs/numerics.md, and what the tensor cores' own sums lose."""
    m, n, k = shape
    a, b = bfp.quantize(data(kind, m, k, 0), pair[0]), bfp.quantize(data(kind, n, k, 1), pair[1])
    assert products.route_on(a.codes.device, a.format, b.format, m, n, k).mode == "aligned"
    sides = [products.Matrix(q.parts, q.format) for q in (a, b)]
    out = products.multiply_parts(*sides, n, k, None, torch.float32, False, None)
    left, right = (q.dequantize(torch.float32).double() for q in (a, b))
    exact, magnitude = left @ right.mT, left.abs() @ right.abs().mT

    def tops(q, values):
        """The largest magnitude of those that share a scale with each element."""
        tall = q.format.block[0]
        padded = torch.nn.functional.pad(values.abs(), (0, -values.shape[1] % 128, 0, -values.shape[0] % tall))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, tall)).amax((1, 3))
        return blocks.repeat_interleave(tall, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]

    shifted = (tops(a, left) @ right.abs().mT + left.abs() @ tops(b, right).mT) / (240 << 10)
    # They keep 13 bits below the largest product of 32, which may be all of a heavy-tailed sum.
    lost = 4e-3 if kind == "heavy tails" else 4e-4
    assert bool(((out.double() - exact).abs() <= 1.01 * shifted + lost * magnitude + 1e-30).all())
    # The same product again has the same bits, and exact operands are asked for by name.
    assert torch.equal(out, products.multiply_parts(*sides, n, k, None, torch.float32, False, None))
    other = products.multiply_parts(*sides, n, k, None, torch.float32, False, None, "exact")
    assert bool(((other.double() - exact).abs() <= 1e-5 * magnitude + 1e-30).all())


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4"])
@pytest.mark.parametrize("shape", [(256, 512, 384), (77, 50, 33)])
def test_layers_are_near_the_exact_ones(name, shape):
    tokens, inside, outside = shape
    results = []
    for recipe in (name, recipes.RECIPES[name](exact_products=True)):
        x = data("gaussian", tokens, inside, 0).bfloat16().requires_grad_()
        w = data("gaussian", outside, inside, 1).bfloat16().requires_grad_()
        bias = data("gaussian", 1, outside, 2)[0].bfloat16().requires_grad_()
        y = bfp.linear(x, w, bias, recipe=recipe)
        y.backward(data("gaussian", tokens, outside, 3).bfloat16())
        results.append((y.detach(), x.grad, w.grad, bias.grad))
    for got, wanted in zip(*results, strict=True):
        error = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert float(error) < 2e-3


def test_compiled_and_captured_layers_have_eager_bits():
    layer = bfp.Linear(512, 256, recipe="mxfp8", device="cuda", dtype=torch.bfloat16)
    x = data("gaussian", 128, 512, 0).bfloat16()
    with torch.no_grad():
        eager = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), eager)
        graph, captured = capture(lambda: layer(x))
        graph.replay()
        assert torch.equal(captured, eager)


def test_an_infinity_is_seen():
    x = data("gaussian", 64, 128, 0).bfloat16()
    x[3, 5] = float("inf")
    assert bool(bfp.linear(x, data("gaussian", 32, 128, 1).bfloat16(), recipe="mxfp8").isnan().all())

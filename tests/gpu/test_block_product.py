"""Products on codes by the CUDA library, against exact sums of what codes and scales stand for."""

import pytest
import torch
from blockfp.torch_backend.ops.groups.grouped_products import multiply_groups
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.product.products import Matrix, multiply_parts
from cuda_arrays import capture
from hopper_products import PAIRS

import blockfp.torch as bfp
from blockfp.definition.groups import columns_for
from blockfp.formats import Format
from blockfp.kernels import cuda_library
from blockfp.kernels.products import plan

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)

ROWS, SQUARES, TENSOR = "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32", "fp8_e4m3"
GRADIENT, GRADIENT_TENSOR = "fp8_e5m2_1x128_fp32", "fp8_e5m2"
WHOLE_ROWS, GRADIENT_WHOLE_ROWS = "fp8_e4m3_row", "fp8_e5m2_row"
TILES = range(2)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def spread(*shape, seed=0):
    """Values whose rows and whose blocks of columns differ much in size."""
    rows, blocks = torch.arange(shape[-2]) % 7 - 3, torch.arange(shape[-1]) // 128 % 5 - 2
    return random(*shape, seed=seed) * (rows[:, None] + blocks).float().exp2().cuda()


def ordered(scales):
    """[.., blocks, rows filled up to a multiple of 4] of scales [.., rows, blocks]."""
    return torch.nn.functional.pad(scales.mT, (0, -scales.shape[-2] % 4)).contiguous()


def run(a, b, out, ends=None, bias=None, *, accumulate=False, tile=-1, own=True, in_order=False):
    """The library's product, called directly."""
    formats = [Format.parse(x.format) for x in (a, b)]
    groups, (n, k) = 0 if ends is None else ends.shape[0], b.codes.shape[-2:]
    orders = [in_order and f.block == (1, 128) for f in formats]
    planned = plan(
        *formats, a.codes.shape[0], n, k, capability=(9, 0), cublas=0 if own else 130000, dtype="bfloat16", groups=groups,
        along_k=out.ndim == 3, ordered=tuple(orders),
    )  # fmt: skip
    scales = [ordered(x.scales) if order else x.scales.contiguous() for x, order in zip((a, b), orders, strict=True)]
    workspace = torch.empty(planned.workspace if own else 33 << 20, dtype=torch.uint8, device="cuda")
    numbers = (*planned.numbers[:4], *orders, own, tile, False, accumulate)
    cuda_library.library().product(a.codes, b.codes, *scales, ends, bias, out, workspace, *numbers)
    return out


def exact(a, b):
    """The product and that of magnitudes."""
    left, right = (x.dequantize(torch.float32).double() for x in (a, b))
    return left @ right.mT, left.abs() @ right.abs().mT


def assert_close(got, a, b, added, dtype):
    """Within what the tensor cores' sums of 128 and one rounding to the dtype lose."""
    wanted, magnitude = exact(a, b)
    wanted = wanted + added
    bound = 4e-4 * magnitude + torch.finfo(dtype).eps * wanted.abs() + 1e-30
    assert bool(((got.double() - wanted).abs() <= bound).all())


SHAPES = ((512, 768, 1024), (333, 517, 2064), (1, 7, 16), (129, 200, 144), (77, 33, 41), (130, 264, 1000), (5, 1, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_sum(shape, formats, dtype):
    m, n, k = shape
    a, b = bfp.quantize(spread(m, k), formats[0]), bfp.quantize(random(n, k, seed=1), formats[1])
    out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
    assert_close(run(a, b, out), a, b, 0, dtype)
    assert torch.equal(run(a, b, torch.empty_like(out)), out)
    assert torch.equal(run(a, b, torch.empty_like(out), in_order=True), out)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("formats", [(ROWS, SQUARES), (ROWS, ROWS), (TENSOR, TENSOR)], ids="-".join)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (700, 1100, 272), (257, 136, 3200), (40, 2000, 128)])
def test_every_tile_gives_the_same_sums(tile, formats, shape):
    m, n, k = shape
    a, b = bfp.quantize(spread(m, k), formats[0]), bfp.quantize(spread(n, k, seed=1), formats[1])
    out = run(a, b, torch.full((m, n), float("nan"), device="cuda"), tile=tile)
    assert_close(out, a, b, 0, torch.float32)
    assert torch.equal(out, run(a, b, torch.empty_like(out)))


@pytest.mark.parametrize("formats", [(ROWS, SQUARES), (ROWS, ROWS), (SQUARES, ROWS), (TENSOR, TENSOR)], ids="-".join)
@pytest.mark.parametrize("shape", [(512, 768, 1024), (132, 272, 1040)])
def test_cublas_behind_the_same_function(formats, shape):
    m, n, k = shape
    a, b = bfp.quantize(spread(m, k), formats[0]), bfp.quantize(random(n, k, seed=1), formats[1])
    for dtype in (torch.bfloat16, torch.float32):
        for _ in range(2):  # planned, and found again
            assert_close(run(a, b, torch.empty((m, n), dtype=dtype, device="cuda"), own=False), a, b, 0, dtype)


def test_cublas_adds_a_bias_and_what_is_there():
    a, b = bfp.quantize(random(256, 512), TENSOR), bfp.quantize(random(272, 512, seed=1), TENSOR)
    bias, before = random(272, seed=2).bfloat16(), random(256, 272, seed=3).bfloat16()
    assert_close(run(a, b, torch.empty_like(before), None, bias, own=False), a, b, bias.double(), torch.bfloat16)
    assert_close(run(a, b, before.clone(), own=False, accumulate=True), a, b, before.double(), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("formats", [(ROWS, SQUARES), (TENSOR, TENSOR)], ids="-".join)
@pytest.mark.parametrize("n", [256, 260, 517])
def test_adds_a_bias_and_what_is_there(n, formats, dtype):
    a, b = bfp.quantize(random(300, 512), formats[0]), bfp.quantize(random(n, 512, seed=1), formats[1])
    bias, before = random(n, seed=2), random(300, n, seed=3).to(dtype)
    assert_close(run(a, b, before.clone(), None, bias, accumulate=True), a, b, bias.double() + before.double(), dtype)
    assert_close(run(a, b, before.clone(), None, bias.half()), a, b, bias.half().double(), dtype)


@pytest.mark.parametrize("k", [640, 200])
@pytest.mark.parametrize("n", [384, 320, 75])
@pytest.mark.parametrize("weight", [ROWS, SQUARES, TENSOR])
def test_groups_end_in_device_memory(weight, n, k):
    """Uneven and empty groups; the same values as each group's product by itself, and rows past the last end as they were."""
    ends = torch.tensor([0, 101, 101, 357, 900], dtype=torch.int32, device="cuda")
    a = bfp.quantize(spread(1000, k), TENSOR if weight == TENSOR else ROWS)
    weights = [bfp.quantize(random(n, k, seed=g) * (g + 1), weight) for g in range(5)]
    codes = torch.stack([one.codes for one in weights])
    scales = torch.stack([one.scales for one in weights])
    out, parts = torch.full((1000, n), 7.0, device="cuda"), a.parts
    if weight == TENSOR:
        scales, parts = scales.flatten(), [a.codes, a.scales.reshape(1)]
    stack = Matrix([codes, scales], Format.parse(weight))
    multiply_groups(Matrix(parts, Format.parse(a.format)), stack, ends, out=out)
    first = 0
    for end, one in zip(ends.tolist(), weights, strict=True):
        alone = run(a, one, torch.empty((1000, n), device="cuda"))
        assert torch.equal(out[first:end], alone[first:end])
        first = end
    assert bool((out[first:] == 7).all())


def test_groups_of_rows_have_biases_and_scales_of_their_own():
    counts, n, k = (130, 0, 57), 96, 256
    ends = torch.tensor(counts).cumsum(0).int().cuda()
    tokens = [bfp.quantize(random(count, k, seed=g) * 2**g, TENSOR) for g, count in enumerate(counts)]
    weights = [bfp.quantize(random(n, k, seed=g + 5), TENSOR) for g in range(3)]
    bias = random(3, n, seed=9)
    a = Matrix([torch.cat([t.codes for t in tokens]), torch.cat([t.scales.reshape(1) for t in tokens])], Format.parse(TENSOR))
    b = Matrix(
        [torch.stack([w.codes for w in weights]), torch.cat([w.scales.reshape(1) for w in weights])], Format.parse(TENSOR)
    )
    out = multiply_groups(a, b, ends, bias, torch.float32)
    for group, (left, right) in enumerate(zip(tokens, weights, strict=True)):
        rows = out[ends[group] - counts[group] : ends[group]]
        assert_close(rows, left, right, bias[group].double(), torch.float32)


def columnwise(values, counts, format):
    """Values [lines, rows], whose columns are cut into groups, as products along k read them; and each group's."""
    groups = [bfp.quantize(part.contiguous(), format) for part in values.split(counts, 1)]
    padded = columns_for(sum(counts), len(counts))
    codes = torch.full((values.shape[0], padded), 0x55, dtype=torch.uint8, device="cuda")
    one = Format.parse(format).per_tensor
    scales = None if one else torch.full((values.shape[0], padded // 128), float("nan"), device="cuda")
    at = 0
    for group, count in zip(groups, counts, strict=True):
        filled = -(-count // 128) * 128
        codes[:, at : at + filled] = 0
        codes[:, at : at + count] = group.codes
        if scales is not None:
            scales[:, at // 128 : (at + filled) // 128] = group.scales
        at += filled
    if scales is None:
        scales = torch.cat([group.scales.reshape(1) for group in groups])
    return Matrix([codes, scales], Format.parse(format)), groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formats", [(ROWS, ROWS), (GRADIENT, ROWS), (TENSOR, TENSOR)], ids="-".join)
@pytest.mark.parametrize("counts", [(128, 256), (100, 0, 1, 300, 129), (0, 0, 5)])
def test_groups_along_k(counts, formats, dtype):
    """Gradients of weights: groups without rows give zeros, and what is past the last group is not read."""
    m, n = 200, 264
    rows = sum(counts)
    a, lefts = columnwise(spread(m, rows), counts, formats[0])
    b, rights = columnwise(spread(n, rows, seed=1), counts, formats[1])
    ends = torch.tensor(counts).cumsum(0).int().cuda()
    out = multiply_groups(a, b, ends, dtype=dtype)
    before = random(len(counts), m, n, seed=2).to(dtype)
    added = multiply_groups(a, b, ends, out=before.clone(), accumulate=True)
    for group, count in enumerate(counts):
        if count == 0:
            assert not bool(out[group].any())
            assert torch.equal(added[group], before[group])
            continue
        assert_close(out[group], lefts[group], rights[group], 0, dtype)
        assert_close(added[group], lefts[group], rights[group], before[group].double(), dtype)
    if formats[0] != TENSOR:
        in_order = [x._replace(parts=[x.parts[0], ordered(x.parts[1])], laid=True) for x in (a, b)]
        assert torch.equal(multiply_groups(*in_order, ends, dtype=dtype), out)


@pytest.mark.parametrize("formats", [(ROWS, SQUARES), (TENSOR, TENSOR)], ids="-".join)
def test_replays_in_a_graph_with_other_ends(formats):
    ends = torch.tensor([64, 256], dtype=torch.int32, device="cuda")
    values = random(2, 128, 264)
    a = bfp.quantize(random(256, 264), formats[0])
    weights = [bfp.quantize(each, formats[1]) for each in values]
    scales = [w.scales.reshape(1) if formats[1] == TENSOR else w.scales[None] for w in weights]
    left = Matrix([a.codes, a.scales.reshape(1) if formats[0] == TENSOR else a.scales], Format.parse(formats[0]))
    right = Matrix([torch.stack([w.codes for w in weights]), torch.cat(scales)], Format.parse(formats[1]))
    out = torch.empty((256, 128), device="cuda")
    multiply_groups(left, right, ends, out=out)
    graph, _ = capture(lambda: multiply_groups(left, right, ends, out=out))
    ends.copy_(torch.tensor([200, 256], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, multiply_groups(left, right, ends, dtype=torch.float32))


@pytest.mark.parametrize("formats", [(ROWS, SQUARES), (TENSOR, TENSOR)], ids="-".join)
@pytest.mark.parametrize("own", [True, False])
def test_dense_products_replay_in_a_graph(formats, own):
    a, b = bfp.quantize(random(256, 512), formats[0]), bfp.quantize(random(128, 512, seed=1), formats[1])
    out = torch.empty((256, 128), device="cuda")
    wanted = run(a, b, out, own=own).clone()
    graph, _ = capture(lambda: run(a, b, out, own=own))
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_blocks_draw_tiles_on_many_streams_at_once():
    """Each stream, and each product of a graph, has a counter of tiles of its own; every product leaves it at zero."""
    a, b = (bfp.quantize(random(2000, k, seed=seed), ROWS) for seed, k in enumerate((640, 640)))
    wanted = run(a, b, torch.empty((2000, 2000), device="cuda"))
    outs = [torch.full_like(wanted, float("nan")) for _ in range(12)]
    captured = [torch.full_like(wanted, float("nan")) for _ in range(2)]
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for out in captured:
            run(a, b, out)
    for turn in range(3):
        graph.replay()
        for stream, out in zip(streams, outs[4 * turn :], strict=False):
            with torch.cuda.stream(stream):
                run(a, b, out)
        run(a, b, outs[0])
    torch.cuda.synchronize()
    for out in (*outs, *captured):
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("shape", [(512, 768, 1024), (333, 200, 384), (40, 75, 130)])
def test_scales_that_32_rows_share(shape):
    """As those of 1x128, one for each row, with the same in every 32."""
    m, n, k = shape
    a, b = bfp.quantize(spread(m, k), ROWS), bfp.quantize(random(n, k, seed=1), ROWS)
    bands = b.scales[::32].contiguous()
    shared = bands.repeat_interleave(32, 0)[:n].contiguous()
    call, workspace = cuda_library.library().product, torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def multiply(scales, rows, in_order):
        out = torch.full((m, n), float("nan"), device="cuda")
        call(a.codes, b.codes, a.scales, scales, None, None, out, workspace, 0, 1, 0, rows, 0, in_order, 1, -1, 0, 0)
        return out

    wanted = multiply(shared, 1, 0)
    assert torch.equal(multiply(bands, 32, 0), wanted)
    assert torch.equal(multiply(ordered(shared), 32, 1), wanted)


def test_a_nan_stays_in_its_row_and_infinities_are_seen():
    x = random(256, 256)
    x[3, 5] = float("nan")
    a, b = bfp.quantize(x, GRADIENT), bfp.quantize(random(128, 256, seed=1), SQUARES)
    for tile in (-1, 0, 1):
        bad = run(a, b, torch.empty((256, 128), device="cuda"), tile=tile).isnan().all(1)
        assert bad.nonzero().flatten().tolist() == [3]
    marked = bfp.quantize(random(256, 256), ROWS)
    marked.scales[7, 1] = float("nan")
    bad = run(marked, b, torch.empty((256, 128), device="cuda")).isnan().all(1)
    assert bad.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(333, 517, 2064), (64, 256, 384), (77, 33, 41)])
def test_the_op_multiplies_codes(shape, formats, monkeypatch):
    """Through the layer's op: ragged lengths too are no longer dequantized; b may be stored the other way round."""
    m, n, k = shape
    a, b = bfp.quantize(spread(m, k), formats[0]), bfp.quantize(random(n, k, seed=1), formats[1])
    monkeypatch.setattr(products, "_of_values", None)
    products._products.clear()
    left, right = (Matrix(x.parts, Format.parse(x.format)) for x in (a, b))
    bias = random(n, seed=4)
    for dtype in (torch.bfloat16, torch.float32):
        for fast in (False, True):
            out = multiply_parts(left, right, n, k, bias.to(dtype), dtype, fast and dtype is torch.bfloat16, None)
            wanted, magnitude = exact(a, b)
            loss = 2e-3 if fast else 4e-4
            bound = loss * magnitude + 2 * torch.finfo(dtype).eps * (wanted + bias).abs() + torch.finfo(dtype).eps * bias.abs()
            assert bool(((out.double() - wanted - bias.double()).abs() <= bound + 1e-30).all())
    if right.format.square:
        turned = bfp.quantize(random(n, k, seed=1).mT.contiguous(), formats[1])
        flipped = Matrix(turned.parts, right.format, transposed=True)
        out = multiply_parts(left, flipped, n, k, None, torch.float32, False, None)
        assert_close(out, a, b, 0, torch.float32)


def test_codes_that_begin_anywhere():
    a, b = bfp.quantize(random(64, 256), ROWS), bfp.quantize(random(48, 256, seed=1), SQUARES)
    memory = torch.zeros(64 * 256 + 16, dtype=torch.uint8, device="cuda")
    wanted = run(a, b, torch.empty((64, 48), device="cuda"))
    for shift in (1, 4, 7):
        moved = memory[shift : shift + 64 * 256].view(64, 256).copy_(a.codes)
        left = Matrix([moved, a.scales], Format.parse(ROWS))
        out = multiply_parts(left, Matrix(b.parts, Format.parse(SQUARES)), 48, 256, None, torch.float32, False, None)
        assert torch.equal(out, wanted)


def test_refuses_what_it_can_not_read():
    a, b = bfp.quantize(random(64, 72), ROWS), bfp.quantize(random(64, 72), SQUARES)
    out = torch.zeros((64, 64), device="cuda")
    call = cuda_library.library().product
    numbers = (0, 1, 0, 128, 0, 0, 1, -1, 0, 0)
    with pytest.raises(ValueError, match="workspace must have"):
        call(a.codes, b.codes, a.scales, b.scales, None, None, out, None, *numbers)
    with pytest.raises(ValueError, match="a_scales must be of"):
        call(a.codes, b.codes, a.scales.mT.contiguous(), b.scales, None, None, out, None, *numbers)
    with pytest.raises(ValueError, match="multiples of 16"):
        call(a.codes, b.codes, a.scales, b.scales, None, None, out, None, *numbers[:6], 0, *numbers[7:])
    with pytest.raises(ValueError, match="blocks must be"):
        call(a.codes, b.codes, a.scales, b.scales, None, None, out, None, 0, 1, 0, 64, *numbers[4:])
    assert not bool(out.any())

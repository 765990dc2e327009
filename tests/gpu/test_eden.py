"""MS-EDEN's kernels against the definition in NumPy, bit for bit, and the layers that use them."""

import copy

import numpy as np
import pytest
from samples import DTYPES, KINDS, sample

from blockfp.definition import eden, numerics
from blockfp.formats import Format

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    from blockfp.torch_backend.custom_ops import eden_kernels, eden_ops
    from cuda_arrays import to_gpu, to_numpy

    import blockfp.torch as bfp
    from blockfp.kernels import cuda_library

NVFP4 = Format.parse("nvfp4")
WORDS = (3, (1 << 32) - 5)
# Whole groups, the ends of an axis that is left in groups of 64, 32 and 16, and in what is less.
ROWS = (1, 15, 16, 31, 33, 48, 63, 64, 77, 96, 112, 127, 128, 129, 144, 200, 250, 256, 300, 383, 512)
# Fewer columns than a block of threads takes, as many, and more.
COLUMNS = (1, 40, 128, 131)


def key_on_gpu(words=WORDS):
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32, device="cuda")


def wanted(x, words, operand="gradient", *, columnwise=True, origin=(0, 0), shape=None, amax=None):
    """The definition's result and amaxes. The tensor scale of an operand that holds an Inf is NaN, as products see it."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = eden.rotate(np.ascontiguousarray(np.swapaxes(x, -1, -2) if columnwise else x), words, origin[1])
        found = numerics.amax(z, NVFP4)
        amaxes = found if amax is None else found._replace(tensor=np.int32(amax))
        made = eden.quantize(z, NVFP4, words, operand, origin=origin, shape=shape, amax=amaxes)
    overflows = np.isinf(x.astype(np.float32)).any() if amax is None else amax >= 0x7F800000
    return made._replace(tensor_scale=np.float32(np.nan) if overflows else made.tensor_scale), found


def same(found, expected, what):
    for name, ours, theirs in zip(("codes", "scales"), found, expected[:2], strict=False):
        different = np.argwhere(to_numpy(ours) != theirs)
        assert not len(different), f"{what}: {len(different)} of {name} differ, first at {different[0]}"
    np.testing.assert_array_equal(found[2].cpu().numpy(), expected.tensor_scale, what)


def check(x, words=WORDS, operand="gradient", *, columnwise=True, origin=(0, 0), shape=None):
    what = f"{x.dtype} {x.shape} {words} {operand} {columnwise} {origin} {shape}"
    expected, amaxes = wanted(x, words, operand, columnwise=columnwise, origin=origin, shape=shape)
    on_gpu, key = to_gpu(x), key_on_gpu(words)
    assert eden_kernels.take(on_gpu, columnwise)
    place = (operand, columnwise, list(origin), None if shape is None else list(shape))
    same(eden_ops.quantize_eden(on_gpu, None, key, *place), expected, what)
    found = eden_ops.eden_amaxes(on_gpu, key, columnwise, list(origin))
    for ours, theirs in zip(found, amaxes[:3], strict=True):
        np.testing.assert_array_equal(ours.cpu().numpy(), theirs, what)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_input(dtype, kind):
    assert cuda_library.available(), cuda_library.status()
    # Each kind takes a third of the lengths: all have them all.
    for number, rows in enumerate(ROWS[KINDS.index(kind) % 3 :: 3]):
        shape = (rows, COLUMNS[number % len(COLUMNS)])
        check(sample(kind, shape, dtype, number), operand=("input", "gradient")[number % 2])
    check(sample(kind, (40, 300), dtype), columnwise=False)


def test_magnitudes_of_every_size():
    """Tensors so small that their scale is subnormal, to those whose sums overflow; a zero row is among them."""
    rng = np.random.default_rng(0)
    for exponent in range(-150, 128, 5):
        x = (rng.standard_normal((200, 24)) * np.exp2(rng.integers(-12, 1, (1, 24)))).astype(np.float32)
        with np.errstate(over="ignore", under="ignore"):
            x = np.ldexp(x, exponent)
        x[:, 5] = 0
        check(x)
        check(x.astype(DTYPES["bfloat16"]))


def test_infinities_and_nan_alone_and_together():
    rng = np.random.default_rng(1)
    for places in ([(0, np.inf)], [(3, -np.inf), (70, np.inf)], [(5, np.nan)], [(5, np.nan), (6, np.inf)], [(255, np.inf)]):
        for dtype in DTYPES.values():
            x = rng.standard_normal((256, 5)).astype(dtype)
            for row, value in places:
                x[row, 2] = value
            check(x)
    for value in (np.inf, np.nan):
        check(np.full((150, 3), value, np.float32))


def test_places_in_the_unsharded_array():
    far = ((1000, 1 << 20), (1 << 20, 1 << 21))
    for origin, shape in (((0, 0), (72, 1024)), ((8, 128), (90, 512)), ((3, 256), (72, 1999)), far, ((7, 128), None)):
        for rows in (128, 384):
            check(sample("gaussian", (rows, 40), "bfloat16"), operand="input", origin=origin, shape=shape)
    # The end of an axis.
    check(sample("gaussian", (200, 40), "float32"), origin=(0, 128), shape=(40, 328))
    check(sample("gaussian", (37, 200), "float16"), columnwise=False, origin=(5, 128), shape=(99, 328))


def test_many_keys():
    x = sample("gaussian", (256, 16), "bfloat16")
    for seed in range(64):
        words = (seed * 0x9E3779B9 & 0xFFFFFFFF, seed * seed * 0x85EBCA6B + 1 & 0xFFFFFFFF)
        check(x, words, operand=("input", "gradient")[seed % 2])


@pytest.mark.parametrize("strided", ["columns", "rows", "expanded", "unaligned"])
def test_any_strides(strided):
    x = sample("gaussian", (260, 139), "bfloat16")
    g = to_gpu(x)
    if strided == "columns":
        g = g.mT.contiguous().mT
    elif strided == "rows":
        g = torch.cat([g, g], 1)[:, : x.shape[1]]
    elif strided == "expanded":
        x = np.broadcast_to(x[:1, :1], x.shape)
        g = g[:1, :1].expand(x.shape)
    else:
        x, g = x[1:, 3:], g[1:, 3:]
    for columnwise in (True, False):
        found = eden_ops.quantize_eden(g, None, key_on_gpu(), "input", columnwise, [0, 0], None)
        same(found, wanted(x, WORDS, "input", columnwise=columnwise)[0], f"{strided} {columnwise}")


def test_stacks_of_matrices_and_empty_ones():
    for shape in ((3, 200, 40), (2, 2, 128, 136), (1, 300, 16)):
        check(sample("gaussian", shape, "bfloat16"))
        check(sample("gaussian", shape, "bfloat16"), columnwise=False)
    for shape in ((0, 40), (40, 0), (0, 128, 64)):
        check(np.zeros(shape, np.float32))


def test_amaxes_that_ranks_have_reduced():
    x = sample("gaussian", (300, 40), "bfloat16")
    key, (_, own) = key_on_gpu(), wanted(x, WORDS)
    for tensor in (int(np.float32(9.5).view(np.int32)), int(np.float32(0.01).view(np.int32)), 0, 0x7F800000, int(own.tensor)):
        blocks, nan = (torch.tensor(np.asarray(part), device="cuda") for part in own[:2])
        given = [blocks, nan, torch.tensor(tensor, dtype=torch.int32, device="cuda")]
        found = eden_ops.quantize_eden(to_gpu(x), given, key, "gradient", True, [8, 128], [64, 512])
        same(found, wanted(x, WORDS, origin=(8, 128), shape=(64, 512), amax=tensor)[0], f"amax {tensor}")


def test_all_is_written_and_nothing_else(waiting_raises):
    """The library writes every byte of its outputs, and none beside them, wherever they lie."""
    key = key_on_gpu()
    for rows, columns, shift in ((128, 64, 0), (128, 64, 1), (250, 33, 0), (77, 130, 3), (1, 1, 1), (320, 5, 2)):
        x = torch.randn(rows, columns, device="cuda").to(torch.bfloat16)
        sizes = (columns * -(-rows // 2), columns * -(-rows // 16))
        makers = []
        for poison in (0x5A, 0xA5):
            buffers = [torch.full((512 + size,), poison, dtype=torch.uint8, device="cuda") for size in sizes]
            inner = [buffer[256 + shift : 256 + shift + size] for buffer, size in zip(buffers, sizes, strict=True)]
            scale, amax = torch.zeros((), device="cuda"), torch.full((2,), -1, dtype=torch.int32, device="cuda")
            with waiting_raises():
                cuda_library.library().quantize_eden(x, amax, key, *inner, scale, 1, True, True, 0, 0, 0, 0)
            for buffer, size in zip(buffers, sizes, strict=True):
                assert (torch.cat([buffer[: 256 + shift], buffer[256 + shift + size :]]) == poison).all()
            makers.append(inner)
        assert all(torch.equal(*pair) for pair in zip(*makers, strict=True))
        expected = wanted(to_numpy(x), WORDS)[0]
        for ours, theirs in zip(makers[0], expected[:2], strict=True):
            np.testing.assert_array_equal(ours.cpu().numpy(), theirs.reshape(-1))


def test_captured_in_a_graph_with_other_keys_and_values():
    xs = [sample("bf16_valued", (200, 136), "bfloat16", seed) for seed in (1, 2)]
    x, key = to_gpu(xs[0]), key_on_gpu()
    eden_ops.quantize_eden(x, None, key, "input", True, [0, 0], None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = eden_ops.quantize_eden(x, None, key, "input", True, [0, 0], None)
    for one, words in zip(xs, (WORDS, (9, 1)), strict=True):
        x.copy_(to_gpu(one))
        key.copy_(key_on_gpu(words))
        graph.replay()
        torch.cuda.synchronize()
        same(found, wanted(one, words, "input")[0], "replayed")


def layer_and_operands(grouped):
    torch.manual_seed(0)
    if grouped:
        layer = bfp.GroupedLinear(3, 256, 128, recipe="nvfp4_eden", dtype=torch.bfloat16)
    else:
        layer = bfp.Linear(256, 128, recipe="nvfp4_eden", dtype=torch.bfloat16)
    x, gradient = (torch.randn(300, size, device="cuda").to(torch.bfloat16) for size in (256, 128))
    return layer.to("cuda"), x.requires_grad_(), gradient, (torch.tensor([140, 0, 160], device="cuda"),) if grouped else ()


def step(layer, x, gradient, counts=()):
    x.grad = None
    y = layer(x, *counts)
    y.backward(gradient)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("grouped", [False, True])
def test_layers_are_those_of_the_definition(grouped, monkeypatch):
    """Operands have the same bits, and so have the products of them."""
    layer, *operands = layer_and_operands(grouped)
    other, taken = copy.deepcopy(layer), []
    own = eden_kernels.quantize
    monkeypatch.setattr(eden_kernels, "quantize", lambda *arguments: taken.append(arguments) or own(*arguments))
    ours = step(layer, *operands)
    assert len(taken) == (6 if grouped else 2)
    monkeypatch.setattr(eden_kernels, "take", lambda x, columnwise: False)
    theirs = step(other, *operands)
    assert len(taken) == (6 if grouped else 2)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_compiled_layers():
    layer, *operands = layer_and_operands(False)
    other = copy.deepcopy(layer)
    other.compile(fullgraph=True)
    for got, result in zip(step(other, *operands), step(layer, *operands), strict=True):
        torch.testing.assert_close(got.float(), result.float(), rtol=2.0**-7, atol=2.0**-7 * float(result.float().abs().max()))


def test_layers_wait_for_nothing(waiting_raises):
    layer, *operands = layer_and_operands(False)
    step(layer, *operands)
    with waiting_raises():
        step(layer, *operands)


def test_what_is_refused():
    x, key = torch.zeros(128, 64, device="cuda"), key_on_gpu()
    with pytest.raises(ValueError, match="origin 64 of a rotated axis must be a multiple of 128"):
        eden_ops.quantize_eden(x, None, key, "input", True, [0, 64], None)
    with pytest.raises(ValueError, match="key is on cpu and x on cuda:0"):
        eden_ops.quantize_eden(x, None, key.cpu(), "input", True, [0, 0], None)
    with pytest.raises(TypeError, match="float64"):
        eden_ops.quantize_eden(x.double(), None, key, "input", True, [0, 0], None)
    run = cuda_library.library().quantize_eden
    codes, scales, scale = (torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (64 * 64, 64 * 8, 4))
    amax = torch.zeros(2, dtype=torch.int32, device="cuda")
    for arguments, message in (
        ((x, amax, key, codes, scales, scale.view(torch.float32), 3, True, True, 0, 0, 0, 0), "operand must be 1"),
        ((x, amax, key, codes, scales, scale.view(torch.float32), 1, True, True, 8, 0, 0, 0), "row must be a multiple of 128"),
        ((x, amax[:1], key, codes, scales, scale.view(torch.float32), 1, True, True, 0, 0, 0, 0), "amax has two elements"),
        ((x, amax, key, codes[1:], scales, scale.view(torch.float32), 1, True, True, 0, 0, 0, 0), "codes_t must be"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*arguments)

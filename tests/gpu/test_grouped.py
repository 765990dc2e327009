"""Rows in groups and experts that ranks share, on GPUs: bits of each group by itself, products, graphs."""

import functools
import warnings

import arrays
import gloo
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from blockfp.torch_backend.ops.groups import cuda_groups
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp import formats, recipes
from blockfp.definition import groups, rotation
from blockfp.definition.numerics import Quantized
from blockfp.kernels import cuda_library
from blockfp.kernels.operand_cast import OperandCast

COUNTS = (5, 0, 130, 128, 257, 0, 1, 40)
# test_linear.py has fp8_row. The groups' kernels rotate NVFP4 alone, and choose no scales.
ALL_AT_ONCE = [name for name in recipes.RECIPES if name not in ("fp8_row", "mxfp4_rotated", "nvfp4_4over6")]
DTYPES = ("bfloat16", "float16", "float32")


values = functools.partial(arrays.values, dtype=torch.bfloat16)


def ends_of(counts):
    return torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()


def on_host(parts):
    return [part.cpu() for part in parts]


def defined(x, counts, format, *, columnwise, keys=None, rotate=False):
    """The definition's parts, and which of their elements belong to a group."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    turn = rotation.rotate if rotate and columnwise else lambda x: x
    own = None if keys is None else keys[:, int(columnwise)]
    parts = groups.quantize_groups(x, ends, format, columnwise=columnwise, keys=own, turn=turn)
    return [part for part in parts if part is not None], ends


def assert_same_groups(found, wanted, ends, tokens, features, format, columnwise):
    """Compares what belongs to groups: the zeros that fill them up too."""
    found, wanted = on_host(found), list(wanted)
    where = list(groups.groups_of(ends, tokens))
    bits, last = format.element.bits, where[-1]
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if i == 0:
            part = one[:, : last.end_column * bits // 8] if columnwise else one[: last.end]
            rest = other[:, : last.end_column * bits // 8] if columnwise else other[: last.end]
        elif i == 1 and format.block is not None:
            along = last.end_column // format.block[int(columnwise)]
            if groups.ordered(format):
                lines = features if columnwise else last.end
                part, rest = (t[:along, :lines] if columnwise else t[:, :lines] for t in (one, other))
            elif columnwise:
                part, rest = one[:, :along], other[:, :along]
            else:
                rows = along if format.block[0] > 1 else last.end
                part, rest = one[:rows], other[:rows]
        else:
            part, rest = one, other
        assert torch.equal(part.contiguous().view(torch.uint8), rest.contiguous().view(torch.uint8)), (format, columnwise, i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [str(format) for format in formats.FORMATS if not (format.per_row or format.scale.four_over_six)]
)
def test_bits_are_those_of_the_groups_by_themselves(name, dtype):
    assert cuda_library.available(), cuda_library.status()
    format, tokens = formats.Format.parse(name), sum(COUNTS) + 9
    for features in (256, 200, 77):
        x = values((tokens, features), dtype=getattr(torch, dtype))
        words = cuda_groups.group_rows(ends_of(COUNTS), tokens)
        both = cuda_groups.quantize_groups(x.cuda(), words, len(COUNTS), OperandCast(format, format))
        rows = cuda_groups.quantize_groups(x.cuda(), words, len(COUNTS), OperandCast(format))
        columns = cuda_groups.quantize_groups(x.cuda(), words, len(COUNTS), OperandCast(None, format))
        for columnwise, found, alone in ((False, both.row, rows.row), (True, both.column, columns.column)):
            wanted, ends = defined(x, COUNTS, format, columnwise=columnwise)
            for parts in (found, alone):
                assert_same_groups(parts, wanted, ends, tokens, features, format, columnwise)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4_e2m1", "mxfp8_e4m3", "fp8_e4m3"])
@pytest.mark.parametrize("rotate", [False, True])
def test_random_bits_and_rotation_begin_with_each_group(name, rotate):
    if rotate and name != "nvfp4":
        pytest.skip("only NVFP4 is rotated")
    format, tokens = formats.Format.parse(name), sum(COUNTS)
    keys = torch.randint(-(2**31), 2**31 - 1, (len(COUNTS), 2, 2), dtype=torch.int32)
    for features in (96, 70):
        x = values((tokens, features), 1)
        words = cuda_groups.group_rows(ends_of(COUNTS), tokens)
        cast = OperandCast(format, format, random=(True, True), rotate=rotate)
        found = cuda_groups.quantize_groups(x.cuda(), words, len(COUNTS), cast, keys=keys.cuda())
        for columnwise, parts in ((False, found.row), (True, found.column)):
            wanted, ends = defined(x, COUNTS, format, columnwise=columnwise, keys=keys, rotate=rotate)
            assert_same_groups(parts, wanted, ends, tokens, features, format, columnwise)


def test_where_groups_lie():
    random = torch.Generator().manual_seed(2)
    for count in (1, 8, 130, 1500):
        for tokens in (0, 1, 1000, 70000):
            ends = torch.randint(0, tokens + 1, (count,), generator=random).sort().values.to(torch.int32)
            words = cuda_groups.group_rows(ends.cuda(), tokens).cpu()
            assert cuda_library.library().group_words(tokens, count) == len(words)
            assert cuda_library.library().group_columns(tokens, count) == groups.columns_for(tokens, count)
            where = list(groups.groups_of(ends.tolist(), tokens))
            assert words[:count].tolist() == [group.end for group in where]
            assert words[count : 2 * count].tolist() == [group.end_column for group in where]
            table = words[-(-2 * count // 8) * 8 :].view(-1, 8)
            wanted = [
                [number, row, group.begin, group.rows, group.first_column]
                for number, group in enumerate(where)
                for row in range(0, max(group.rows, 1), 128)
            ]
            assert len(table) == tokens // 128 + count
            assert table[: len(wanted), :5].tolist() == wanted
            assert (table[len(wanted) :, 0] == -1).all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxint8", "mxfp4_e2m1", "nvfp4"])
def test_an_infinity_shows_in_its_group_alone(name):
    format, tokens = formats.Format.parse(name), sum(COUNTS)
    x = values((tokens, 256), 3)
    x[140, 7] = float("inf")
    words = cuda_groups.group_rows(ends_of(COUNTS), tokens)
    found = cuda_groups.quantize_groups(x.cuda(), words, len(COUNTS), OperandCast(format, format))
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    for columnwise, parts in ((False, found.row), (True, found.column)):
        whole = Quantized(*on_host(parts), *[None] * (3 - len(parts)))
        each = groups.group_parts(whole, ends, tokens, 256, format, columnwise=columnwise)
        for number, own in enumerate(each):
            last = own.scales if own.tensor_scale is None else own.tensor_scale
            nan = (last == 255) if last.dtype is torch.uint8 else last.isnan()
            assert nan.all() if number == 3 else not nan.any(), (name, columnwise, number)


def layer_of(recipe, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(0)
    layer = bfp.GroupedLinear(len(COUNTS), 256, 384, recipe=recipe, dtype=dtype, device="cuda", bias=bias)
    if layer.rng_key is not None:
        layer.rng_key.copy_(torch.tensor([1, 2]))
    return layer


def step(layer, x, counts, gradient):
    x = x.clone().requires_grad_()
    y = layer(x, counts)
    inputs = [x, layer.weight] if layer.bias is None else [x, layer.weight, layer.bias]
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


@pytest.mark.parametrize("recipe", ALL_AT_ONCE)
def test_layers_on_both_devices(recipe):
    layer, tokens = layer_of(recipe), sum(COUNTS)
    x, gradient = values((tokens, 256), 4).cuda(), values((tokens, 384), 5).cuda()
    here = bfp.GroupedLinear(len(COUNTS), 256, 384, recipe=recipe, dtype=torch.bfloat16)
    here.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
    found = step(layer, x, torch.tensor(COUNTS, device="cuda"), gradient)
    wanted = step(here, x.cpu(), list(COUNTS), gradient.cpu())
    for one, other in zip(found, wanted, strict=True):
        # Sums in other orders, and two roundings to bfloat16 where scales of groups come after torch's product.
        error = (one.cpu().float() - other.float()).abs().max() / other.float().abs().max()
        assert error < 2.0**-6, (recipe, float(error))
    assert not found[2][1].any()
    assert not found[2][5].any()
    for (name, one), other in zip(layer.named_buffers(), here.buffers(), strict=True):
        assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_other_dtypes(recipe, dtype):
    layer, tokens = layer_of(recipe, getattr(torch, dtype)), sum(COUNTS)
    x, gradient = (values((tokens, n), seed, dtype=getattr(torch, dtype)).cuda() for n, seed in ((256, 4), (384, 5)))
    here = bfp.GroupedLinear(len(COUNTS), 256, 384, recipe=recipe, dtype=getattr(torch, dtype))
    here.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
    with warnings.catch_warnings():
        # MX in these dtypes goes group by group.
        warnings.simplefilter("ignore")
        found = step(layer, x, torch.tensor(COUNTS, device="cuda"), gradient)
    for one, other in zip(found, step(here, x.cpu(), list(COUNTS), gradient.cpu()), strict=True):
        assert (one.cpu().float() - other.float()).abs().max() < 2.0**-8 * other.float().abs().max()


@pytest.mark.parametrize("recipe", ALL_AT_ONCE)
def test_nothing_waits_for_the_device(recipe, waiting_raises):
    layer, tokens = layer_of(recipe), sum(COUNTS)
    x, gradient = values((tokens, 256), 4).cuda(), values((tokens, 384), 5).cuda()
    counts = torch.tensor(COUNTS, device="cuda")
    for _ in range(2):
        step(layer, x, counts, gradient)
    with waiting_raises():
        step(layer, x, counts, gradient)


@pytest.mark.parametrize("recipe", ALL_AT_ONCE)
def test_graphs_follow_counts(recipe):
    layer, tokens = layer_of(recipe, bias=False), sum(COUNTS)
    x, gradient = values((tokens, 256), 4).cuda(), values((tokens, 384), 5).cuda()
    counts = torch.tensor(COUNTS, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(layer, x, counts, gradient)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step(layer, x, counts, gradient)
    for seed in range(3):
        others = torch.tensor(COUNTS)[torch.randperm(len(COUNTS), generator=torch.Generator().manual_seed(seed))]
        counts.copy_(others.cuda())
        if layer.step is not None:
            layer.step.zero_()
        graph.replay()
        got = [one.clone() for one in found]
        if layer.step is not None:
            layer.step.zero_()
        assert_equal(got, step(layer, x, counts.clone(), gradient), (recipe, seed))


def test_rows_past_the_last_end_are_zeros():
    for recipe in ("fp8_block", "fp8_current", "mxfp8", "nvfp4"):
        x = values((600, 256), 6).cuda().requires_grad_()
        w = values((len(COUNTS), 384, 256), 7, scale=0.1).cuda().requires_grad_()
        bias = values((len(COUNTS), 384), 8).cuda()
        y = bfp.grouped_mm(x, w.mT, offs=ends_of(COUNTS), bias=bias, recipe=recipe, key=1)
        y.backward(torch.full_like(y, 1.0))
        last = sum(COUNTS)
        assert not y[last:].any()
        assert y[:last].any()
        assert not x.grad[last:].any()
        assert w.grad[0].any()
        assert not w.grad[1].any()


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_compiled_layers(recipe):
    torch._dynamo.reset()
    layer, tokens = layer_of(recipe), sum(COUNTS)
    x, gradient = values((tokens, 256), 4).cuda(), values((tokens, 384), 5).cuda()
    counts = torch.tensor(COUNTS, device="cuda")
    wanted = step(layer, x, counts, gradient)
    layer.compile(fullgraph=True)
    assert_equal(step(layer, x, counts, gradient), wanted)


def test_no_groups_and_no_rows():
    for recipe in ("fp8_block", "mxfp8", "fp8_current"):
        layer = layer_of(recipe)
        x = values((0, 256), 0).cuda()
        y, *grads = step(layer, x, torch.zeros(len(COUNTS), dtype=torch.int64, device="cuda"), values((0, 384)).cuda())
        assert y.shape == (0, 384)
        assert not any(grad.any() for grad in grads)


EXPERTS, IN, HIDDEN, TOKENS = 8, 512, 256, 300


def made(recipe, ranks):
    """The same on every rank: weights of all experts, and each rank's tokens, their experts and weights, a gradient."""
    random = torch.Generator().manual_seed(0)
    format = recipes.parse(recipe).weight.format
    up = torch.randn(EXPERTS, 2 * HIDDEN, IN, generator=random, dtype=torch.bfloat16) / 16
    down = torch.randn(EXPERTS, IN, HIDDEN, generator=random, dtype=torch.bfloat16) / 16
    each = []
    for rank in range(ranks):
        tokens = TOKENS + 31 * rank
        x, gradient = (torch.randn(tokens, IN, generator=random, dtype=torch.bfloat16) for _ in range(2))
        # Expert 5 gets nothing.
        experts = torch.rand(tokens, EXPERTS - 1, generator=random).argsort(1)[:, :2]
        each.append([x, experts + 2 * (experts == 5), torch.rand(tokens, 2, generator=random), gradient])
    return [bfp.quantize(weight.cuda(), format) for weight in (up, down)], [[one.cuda() for one in rank] for rank in each]


def run(weights, tokens, recipe, group, key=3):
    up, down = (weight.detach().requires_grad_() for weight in weights)
    x, experts, scores, gradient = tokens
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    received = bfp.dispatch(x, experts, EXPERTS, recipe=recipe, group=group, key=key)
    gate, value = received.multiply(received.tokens, up).chunk(2, 1)
    y = bfp.combine(received.multiply(F.silu(gate) * value, down), received, scores)
    y.backward(gradient)
    return y.detach(), x.grad, scores.grad, up.grad, down.grad


def bits_of_one_process(rank):
    for recipe in ("mxfp8", "fp8_current", "fp8_block"):
        compared(rank, recipe)


def compared(rank, recipe):
    ranks = dist.get_world_size()
    weights, each = made(recipe, ranks)
    alone = run(weights, [torch.cat(parts) for parts in zip(*each, strict=True)], recipe, None)
    chunk = -(-EXPERTS // ranks)
    own = [weight[rank * chunk : (rank + 1) * chunk] for weight in weights]
    first = sum(len(tokens[0]) for tokens in each[:rank])
    together = run(own, each[rank], recipe, dist.group.WORLD)
    names = ("y", "x.grad", "scores.grad", "up.grad", "down.grad")
    for name, got, whole in zip(names, together, alone, strict=True):
        begin = rank * chunk if name in ("up.grad", "down.grad") else first
        expected = whole[begin : begin + len(got)]
        assert whole.isfinite().all()
        assert torch.equal(got, expected), f"{name}: {(got != expected).float().mean()}"


def test_ranks_that_share_experts_give_the_bits_of_one_process():
    gloo.run(min(2, torch.cuda.device_count()), __file__, "bits_of_one_process", backend="nccl")


def test_rows_are_those_of_the_cpu():
    for recipe in ("mxfp8", "fp8_block", "mxfp4", "nvfp4"):
        _, each = made(recipe, 1)
        x, experts, *_ = each[0]
        own = [bfp.dispatch(one, to, EXPERTS, recipe=recipe) for one, to in ((x, experts), (x.cpu(), experts.cpu()))]
        for on_gpu, on_cpu in zip(*(one.tokens.parts for one in own), strict=True):
            assert torch.equal(on_gpu.cpu(), on_cpu)
        assert torch.equal(own[0].offs.cpu(), own[1].offs)


def test_products_of_all_experts_at_once_are_near_those_of_the_cpu():
    """bfloat16, which they are for; the codes are the same, and the order of sums is another."""
    for recipe in ("mxfp8", "fp8_current", "fp8_block", "nvfp4"):
        weights, each = made(recipe, 1)
        on_gpu = run(weights, each[0], recipe, None)
        on_cpu = run([weight.cpu() for weight in weights], [one.cpu() for one in each[0]], recipe, None)
        for name, ours, theirs in zip(("y", "x.grad", "scores.grad", "up.grad", "down.grad"), on_gpu, on_cpu, strict=True):
            error = (ours.cpu().float() - theirs.float()).norm() / theirs.float().norm()
            assert error < (0.08 if recipe == "nvfp4" else 0.02), f"{recipe}, {name}: {error}"


def test_the_host_does_not_wait_on_one_gpu(waiting_raises):
    weights, (tokens,) = made("mxfp8", 1)
    run(weights, tokens, "mxfp8", None, key=None)
    with waiting_raises():
        run(weights, tokens, "mxfp8", None, key=None)

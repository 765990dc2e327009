"""`keep_codes`: a checkpoint's backward is that of the values of its inputs' codes, on any mesh, and nothing else changes."""

import copy
import gc

import pytest
import threaded
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import blockfp
import blockfp.torch as bfp


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x, scale=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, format="mxfp8_e4m3"):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.format = format

    def forward(self, x, *rest, **options):
        for block in self.blocks:
            own = {} if self.format is None else {"context_fn": bfp.keep_codes(self.format)}
            x = checkpoint(block, x, *rest, use_reentrant=False, **own, **options)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def values(x, format):
    """What codes stand for, by the NumPy face."""
    return torch.from_numpy(blockfp.quantize(x.detach().numpy(), format).dequantize())


def by_hand(model, x, g, format):
    """Gradients of x and of all parameters, block by block."""
    model.zero_grad()
    inputs = [x.detach()]
    with torch.no_grad():
        for block in model.blocks:
            inputs.append(block(inputs[-1]))
    for block, own in zip(reversed(model.blocks), reversed(inputs[:-1]), strict=True):
        own = values(own, format).requires_grad_()
        block(own).backward(g)
        g = own.grad
    return inputs[-1], [g, *(p.grad for p in model.parameters())]


def run(model, x, g):
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(g)
    return y, [x.grad, *(p.grad for p in model.parameters())]


def hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1", "fp8_e4m3_1x128", "fp8_e4m3_row"])
def test_forward_and_gradients(model, format):
    x, g = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    model.format = format
    y, gradients = run(model, x, g)
    wanted, expected = by_hand(copy.deepcopy(model), x, g, format)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    model.format = None
    assert not torch.equal(run(model, x, g)[1][0], gradients[0])
    assert hooks() is None


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
def test_quantized_blocks_keep_their_forward(model, recipe):
    bfp.convert(model, recipe)
    other, x, g = copy.deepcopy(model), torch.randn(4, 64), torch.randn(4, 64)
    other.format = None
    (y, gradients), (wanted, plain) = run(model, x, g), run(other, x, g)
    assert torch.equal(y, wanted)
    assert all(torch.isfinite(one).all() for one in gradients)
    for a, b in zip(gradients, plain, strict=True):
        assert (a - b).norm() < 0.5 * b.norm() + 1e-6


def kept_bytes(model, x):
    """Bytes of the tensors that stay after a forward, by their storages."""
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    y = model(x, preserve_rng_state=False)
    gc.collect()
    new = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before and t is not y]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in new}.values())


def test_a_boundary_is_its_codes_and_scales(model):
    model.to(torch.bfloat16)
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    assert kept_bytes(model, x) == 3 * 64 * (64 + 2)
    model.format = None
    assert kept_bytes(model, x) == 2 * 64 * 64 * 2  # the first input is the caller's


def test_what_needs_no_gradient_is_kept_as_it_is(model):
    x, g, mask = torch.randn(5, 64), torch.randn(5, 64), torch.randn(5, 64)
    seen = []

    def block(x, mask, flag, *, keyword):
        seen.append((x.detach().clone(), mask, flag, keyword))
        return (x * mask).sin() * keyword

    x.requires_grad_()
    y = checkpoint(block, x, mask, 3, use_reentrant=False, context_fn=bfp.keep_codes("mxfp8_e4m3"), keyword=mask)
    y.backward(g)
    first, again = seen
    assert torch.equal(again[0], values(first[0], "mxfp8_e4m3"))
    assert torch.equal(again[1], mask)
    assert again[2] == 3
    assert again[3] is mask


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_stays_after_errors_and_without_gradients(model, grad):
    def fails(x):
        raise KeyError("here")

    x = torch.randn(4, 64, requires_grad=True)
    with torch.set_grad_enabled(grad):
        with pytest.raises(KeyError):
            checkpoint(fails, x, use_reentrant=False, context_fn=bfp.keep_codes("mxfp8_e4m3"))
        assert hooks() is None
        with torch.inference_mode():
            model(x)
        assert model(x).requires_grad == grad
    assert hooks() is None


def test_other_hooks_get_the_codes(model):
    x, g = torch.randn(4, 64), torch.randn(4, 64)
    _, expected = run(model, x, g)
    packed = []

    def pack(t):
        packed.append((t.dtype, tuple(t.shape)))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, gradients = run(model, x, g)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert packed == [(torch.uint8, (4, 64)), (torch.uint8, (4, 2))] * 3
    # An outer checkpoint, whose recomputation saves the inner one's codes.
    x.requires_grad_()
    y = checkpoint(model, x, use_reentrant=False)
    model.zero_grad()
    y.backward(g)
    assert torch.equal(x.grad, expected[0])
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected[1:], strict=True))


def test_compiled_blocks(model):
    x, g = torch.randn(4, 64), torch.randn(4, 64)
    _, expected = run(model, x, g)
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    _, gradients = run(other, x, g)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Doubled(torch.autograd.Function):
    """A function whose saved tensor the compiler doesn't put through hooks."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
def test_compiled_checkpoints(model, recipe):
    """The compiled graph keeps what eager code keeps, and gives its bits."""
    torch._dynamo.reset()
    if recipe is not None:
        bfp.convert(model, recipe)
    other, x, g = copy.deepcopy(model), torch.randn(8, 64), torch.randn(8, 64)
    compiled, kept = torch.compile(other, backend="aot_eager", fullgraph=True), []
    for _ in range(2):
        kept.clear()
        expected = [*run(model, x, g), *model.buffers()]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y, own = compiled(a := x.clone().requires_grad_()), list(kept)
        other.zero_grad()
        y.backward(g)
        found = [y, [a.grad, *(p.grad for p in other.parameters())], *other.buffers()]
        for one, wanted in zip(found[1], expected[1], strict=True):
            assert torch.equal(one, wanted)
        assert all(torch.equal(one, wanted) for one, wanted in zip(found[2:], expected[2:], strict=True))
        assert torch.equal(y, expected[0])
    if recipe is None:
        shapes = [(t.dtype, tuple(t.shape)) for t in own if not any(t is p for p in other.parameters())]
        assert shapes == [(torch.uint8, (8, 64)), (torch.uint8, (8, 2))] * 3
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
    # Nothing of a token is kept but codes and scales.
    assert sum(t.nbytes for t in own if t.shape[:1] == (8,)) == 3 * 8 * (64 + 2)
    assert hooks() is None


def test_compiled_checkpoints_of_any_function():
    torch._dynamo.reset()
    context, mask = bfp.keep_codes("mxfp8_e4m3"), torch.randn(8, 64)

    def attention(x, mask):
        heads = (Doubled.apply(x) * mask).view(2, 4, 8, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), mask

    def step(x, mask):
        return checkpoint(attention, x, mask, use_reentrant=False, context_fn=context)

    found = []
    for one in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x = torch.randn((8, 64), generator=torch.Generator().manual_seed(0), requires_grad=True)
        y, same = one(x, mask)
        assert torch.equal(same, mask)
        y.square().sum().backward()
        found += [y, x.grad]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_compiled_checkpoint_draws_no_random_numbers():
    torch._dynamo.reset()
    context = bfp.keep_codes("mxfp8_e4m3")
    run = torch.compile(lambda x: checkpoint(F.dropout, x, use_reentrant=False, context_fn=context), backend="aot_eager")
    with pytest.raises(
        Exception, match=r"native_dropout.* would draw other .*: compile what is inside, checkpoint\(torch\.comp"
    ):
        run(torch.randn(4, 64, requires_grad=True))
    assert hooks() is None
    torch._dynamo.reset()


def test_parameters_are_kept_as_they_are():
    x, weight = torch.randn(4, 64, requires_grad=True), nn.Parameter(torch.randn(4, 64))
    y = checkpoint(torch.mul, x, weight, use_reentrant=False, context_fn=bfp.keep_codes("mxfp8_e4m3"))
    y.sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(weight.grad, values(x, "mxfp8_e4m3"))


def _rank(rank, whole, x, g, expected):
    """A rank's tokens; gradients of weights are the mean of the ranks'."""
    model = fully_shard(copy.deepcopy(whole), mesh=init_device_mesh("cpu", (2,)))
    own = x[rank].detach().clone().requires_grad_()
    model(own).backward(g[rank])
    assert torch.equal(own.grad, expected[0][rank])
    for p, e in zip(model.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(2 * p.grad.full_tensor(), e, rtol=1e-5, atol=1e-5)


def test_fsdp2(model):
    x, g = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    threaded.run(2, _rank, model, x, g, run(model, x, g)[1])


def _shards(rank, x, placement, error):
    mesh = init_device_mesh("cpu", (2,))
    own = x.chunk(2, placement.dim)[rank].clone() if isinstance(placement, Shard) else x.clone()
    d = DTensor.from_local(own, mesh, [placement], run_check=False).requires_grad_()
    seen = []

    def block(d):
        seen.append(d.detach().full_tensor())
        return d * d

    def step():
        y = checkpoint(block, d, use_reentrant=False, context_fn=bfp.keep_codes("mxfp8_e4m3"))
        y.backward(torch.ones_like(y))

    if error:
        with pytest.raises(ValueError, match=r"keep_codes\(mxfp8_e4m3\): x \[\.\., 96\] is sharded along its last axis inside"):
            step()
        assert hooks() is None
        return
    step()
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], values(x, "mxfp8_e4m3"))


@pytest.mark.parametrize(
    ("columns", "placement", "error"),
    [(64, Shard(0), False), (64, Shard(1), False), (64, Shard(2), False), (64, Replicate(), False), (96, Shard(2), True)],
    ids=str,
)
def test_blocks_are_counted_from_the_whole(columns, placement, error):
    x = torch.randn(2, 4, columns) * torch.exp2(torch.randint(-9, 9, (2, 4, columns)).float())
    threaded.run(2, _shards, x, placement, error)


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4"])
def test_formats_whose_scales_a_mesh_would_change(format):
    with pytest.raises(ValueError, match=f"format {format}: rows that go to different ranks must not share a scale"):
        bfp.keep_codes(format)
    with pytest.raises(ValueError, match="fp8"):
        bfp.keep_codes("fp8")

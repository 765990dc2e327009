"""One cast for the layers that read an input one after another; and none where anything could have written meanwhile."""

import contextlib
import ctypes
import gc
import sys
import weakref

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from arrays import values
from counted_casts import casts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes

RECIPES = ("mxfp8", "fp8_current", "fp8_block", "fp8_row", "nvfp4")
OTHER = values((4, 64), 1)


class Reads(nn.Module):
    """What q and k give for one tensor, and what k gives for a copy of it; `between` is called after q, with the tensor."""

    def __init__(self, recipe, between):
        super().__init__()
        self.q, self.k = (bfp.Linear(64, 32, bias=False, recipe=recipe) for _ in range(2))
        self.between = between

    def forward(self, x):
        h = x * 1.5
        self.q(h)
        self.between(h)
        return self.k(h), self.k(h.detach().clone())


@torch.library.custom_op("blockfp_test::says_it_writes_nothing", mutates_args=())
def says_it_writes_nothing(x: torch.Tensor) -> torch.Tensor:
    ctypes.memmove(x.data_ptr(), OTHER.data_ptr(), x.nbytes)
    return torch.empty(0)


def through(view):
    """A write through another array on the same memory."""
    return lambda h: view(h.detach()).__setitem__(..., view(OTHER))


def swapped(h):
    with torch.no_grad():
        h.data, _ = OTHER.clone(), h.data


def without_grad(write):
    return lambda h: torch.no_grad()(write)(h)


WRITES = {
    "data.mul_": lambda h: h.data.mul_(3),
    "data.copy_": lambda h: h.data.copy_(OTHER),
    "detach().data": lambda h: h.detach().data.zero_(),
    "data =": swapped,
    "set_": without_grad(lambda h: h.set_(OTHER.clone())),
    "storage": lambda h: h.untyped_storage().copy_(OTHER.untyped_storage()),
    "resized storage": lambda h: (h.untyped_storage().resize_(0), h.untyped_storage().resize_(1024), h.data.fill_(2)),
    "numpy": through(lambda t: t.numpy()),
    "numpy in place": lambda h: np.multiply(h.detach().numpy(), 3, out=h.detach().numpy()),
    "dlpack": through(torch.from_dlpack),
    "dlpack of numpy": lambda h: np.copyto(np.from_dlpack(h.detach().numpy()), OTHER.numpy()),
    "buffer": lambda h: torch.frombuffer(h.detach().numpy(), dtype=torch.float32).mul_(3),
    "address": lambda h: ctypes.memmove(h.data_ptr(), OTHER.data_ptr(), h.nbytes),
    "custom op": says_it_writes_nothing,
    "version kept": lambda h: torch.autograd._unsafe_preserve_version_counter(h).__enter__() or h.data.mul_(3),
    "mul_": lambda h: h.mul_(3),
    "index": without_grad(lambda h: h[0].zero_()),
    "out=": without_grad(lambda h: torch.mul(h, 3, out=h)),
    "view": without_grad(lambda h: h.mT[2:].zero_()),
    "foreach": without_grad(lambda h: torch._foreach_mul_([h], 3)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_written_between_two_layers_is_read(recipe, write):
    """Whatever way it is written, torch's counter of versions may know of it or not."""
    reads = Reads(recipe, WRITES[write])
    x = values((4, 64), 0)
    for tensor in (x, x.clone().requires_grad_()):
        for _ in range(2):
            found, wanted = reads(tensor)
            assert torch.equal(found, wanted)
            assert not torch.equal(wanted, reads.k(x * 1.5))


def _collectives(rank):
    def parts(h):
        return [part.contiguous() for part in (OTHER * (rank + 1)).chunk(2)]

    ways = {
        "all_reduce": lambda h: dist.all_reduce(h),
        "all_reduce later": lambda h: dist.all_reduce(h, async_op=True).wait(),
        "broadcast": lambda h: dist.broadcast(h, 0),
        "broadcast later": lambda h: dist.broadcast(h, 1, async_op=True).wait(),
        "all_gather_into_tensor": lambda h: dist.all_gather_into_tensor(h, parts(h)[0]),
        "all_to_all_single": lambda h: dist.all_to_all_single(h, OTHER * (rank + 1)),
        "scatter": lambda h: dist.scatter(h, [OTHER, OTHER * 3] if rank == 0 else None, 0),
        "send and receive": lambda h: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, OTHER * (rank + 1), 1 - rank), dist.P2POp(dist.irecv, h, 1 - rank)]
            )
        ],
    }
    torch.manual_seed(0)
    for recipe in RECIPES:
        for name, way in ways.items():
            reads = Reads(recipe, lambda h, way=way: way(h.detach()))
            for x in (values((4, 64), rank), values((4, 64), rank).requires_grad_()):
                found, wanted = reads(x)
                assert torch.equal(found, wanted), (recipe, name)


def test_what_a_collective_writes_is_read():
    gloo.run(2, __file__, "_collectives")


# ---- what calls the layers


def write(h, *_):
    h.data.mul_(3)


class Wraps(nn.Module):
    """A layer behind a write."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        write(x)
        return self.layer(x)


class Writing(bfp.Linear):
    def forward(self, x):
        write(x)
        return super().forward(x)


class WritingNorm(nn.RMSNorm):
    def forward(self, x):
        write(self.seen[0])
        return super().forward(x)


class Attention(nn.Module):
    """Query, key and value as most write them, with one module between, and what the last makes of a copy."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (bfp.Linear(64, 32, bias=False, recipe="mxfp8") for _ in range(3))
        self.norm = nn.Identity()

    def forward(self, h):
        self.norm.seen = [h]
        query = self.norm(self.q(h).view(-1, 2, 16)).transpose(0, 1)
        key = self.k(h).view(-1, 2, 16).transpose(0, 1)
        value = self.v(h).view(-1, 2, 16).transpose(0, 1)
        return query, key, value


def hooked(attention):
    attention.q.register_forward_hook(lambda layer, args, y: write(args[0]))


def hooked_before(attention):
    attention.k.register_forward_pre_hook(lambda layer, args: write(args[0]))


def patched(attention):
    attention.k.forward = lambda x: write(x) or bfp.Linear.forward(attention.k, x)


def patched_call(attention):
    attention.k.forward = lambda x: write(x) or attention.k.multiply(x)


def wrapped(attention):
    attention.k = Wraps(attention.k)


def subclassed(attention):
    attention.k.__class__ = Writing


def function(attention):
    layer = attention.k
    del attention.k
    attention.k = lambda x: write(x) or layer(x)


def a_layer_that_writes(attention):
    class Plain(nn.Linear):
        def forward(self, x):
            write(x)
            return super().forward(x)

    attention.k = Plain(64, 32)


def hooked_norm(attention):
    attention.norm = nn.RMSNorm(16)
    attention.norm.register_forward_pre_hook(lambda norm, args: write(norm.seen[0]))


def norm_of_ones_own(attention):
    attention.norm = WritingNorm(16)


def patched_norm(attention):
    attention.norm = nn.RMSNorm(16)
    attention.norm.forward = lambda x: write(attention.norm.seen[0]) or x


CALLERS = (
    *(hooked, hooked_before, patched, patched_call, wrapped, subclassed, function, a_layer_that_writes),
    *(hooked_norm, norm_of_ones_own, patched_norm),
)


@pytest.mark.parametrize("change", CALLERS, ids=lambda change: change.__name__)
def test_code_that_stands_between_two_layers_may_write(change):
    attention, x = Attention(), values((4, 64), 0)
    value = attention.v(x * 4.5)
    for _ in range(2):
        attention(x * 1.5)
    change(attention)
    for _ in range(2):
        assert torch.equal(attention(x * 1.5)[2].transpose(0, 1).flatten(1), value)


def test_hooks_of_all_modules_may_write():
    attention, x = Attention(), values((4, 64), 0)
    attention(x)
    value = attention.v(x * 3)
    seen = lambda layer, args, y: write(args[0]) if layer is attention.q else None  # noqa: E731
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(nn.modules.module.register_module_forward_hook(seen).remove)
        found = attention(x)[2]
    assert torch.equal(found.transpose(0, 1).flatten(1), value)


def test_a_debugger_may_write():
    attention, x = Attention(), values((4, 64), 0)
    attention(x.clone())
    value, done = attention.v(x * 3), []

    def watch(frame, event, argument):
        if frame.f_code is not Attention.forward.__code__:
            return None
        if "query" in frame.f_locals and not done:
            done.append(write(frame.f_locals["h"]))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        found = attention(x)[2]
    finally:
        sys.settrace(before)
    assert done
    assert torch.equal(found.transpose(0, 1).flatten(1), value)


def test_calls_of_one_function_know_nothing_of_each_other():
    """Two layers are the same places of one code, in calls that have nothing to do with each other, and in a loop."""
    q, k = (bfp.Linear(64, 32, bias=False, recipe="mxfp8") for _ in range(2))
    nothing = lambda h: None  # noqa: E731

    def both(first, second, h):
        return first(h), second(h)

    def looped(pairs, h):
        for first, second in pairs:
            found = first(h), second(h)
            write(h)
        return found

    h = values((4, 64), 0) * 1.5
    for _ in range(3):
        both(q, k, h)
        both(q, nothing, h)
        write(h)
        assert torch.equal(both(nothing, k, h)[1], k(h.clone()))
    with pytest.raises(TypeError):
        both(q, None, h)
    write(h)
    assert torch.equal(both(nothing, k, h)[1], k(h.clone()))
    h = values((4, 64), 0) * 1.5
    assert torch.equal(looped([(q, nothing), (nothing, k)], h)[1], k(values((4, 64), 0) * 4.5))


# ---- what is shared


class Three(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.a, self.b, self.c = (bfp.Linear(96, 32, recipe=recipe) for _ in range(3))

    def forward(self, x):
        a = self.a(x)
        b = self.b(x)
        return a, b, self.c(x)


def kept_for(call):
    """The plain tensors that a call keeps for its backward, each once: addresses and bytes."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return {t.data_ptr(): t.nbytes for t in saved if type(t) is torch.Tensor and t.numel()}


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 96)])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_layers_of_one_input_share_its_cast(name, shape):
    """What three layers keep of a tensor that all of them read is kept once; bits are those of layers on their own."""
    model, cast = Three(name), recipes.parse(name).input_columnwise
    codes = {layer.weight.codes.data_ptr() for layer in model.children()}
    x = values(shape, 0).requires_grad_() * 1
    kept = kept_for(lambda: model(x))
    column = bfp.quantize(values(shape, 0).flatten(0, -2).mT.contiguous(), cast.format)
    each = sum(part.nbytes for part in (column.codes, column.scales, column.tensor_scale) if part is not None)
    each = x.nbytes if cast.eden else each
    times = 3 if name == "fp8_delayed" else 1
    assert sum(size for address, size in kept.items() if address not in codes) == times * each
    alone = [layer(values(shape, 0).requires_grad_()) for layer in model.children()]
    assert all(torch.equal(a, b) for a, b in zip(model(x), alone, strict=True))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Normed(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)


class InOrder(Attention):
    """As torchtitan writes it."""

    def forward(self, x):
        query, key, value = self.q(x), self.k(x), self.v(x)
        return query, key, value


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("made", [Normed, InOrder])
def test_layers_that_nothing_stands_between_cast_once(made, grad):
    attention, x = made(), values((4, 64), 0).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        count, (_, key, value) = casts_of(attention, x * 1)
    assert count == 1
    for found, layer in ((key, attention.k), (value, attention.v)):
        found = found.transpose(0, 1).flatten(1) if made is Normed else found
        assert torch.equal(found, layer(x.detach().clone()))


@pytest.mark.parametrize("where", ["called", "checkpoint", "inference", "autocast", "frozen"])
def test_gated_mlps_cast_their_input_once(where):
    model = bfp.convert(Llama(), "mxfp8").requires_grad_(where != "frozen")
    run = (lambda x: checkpoint(model, x, use_reentrant=False)) if where == "checkpoint" else model
    context = {"inference": torch.inference_mode(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    with context.get(where, contextlib.nullcontext()):
        # What the activation makes is cast as it is made, but under autocast.
        assert casts_of(run, values((4, 64), 0))[0] == 1 + (where == "autocast")


def test_nothing_outlives_the_call():
    """Codes that were shared go when the last layer has read them, and with an error."""
    three = Three("mxfp8")
    x = values((64, 96), 0).requires_grad_() * 1
    alive = weakref.ref(x)
    three(x)
    del x
    gc.collect()
    assert alive() is None
    three.c = bfp.Linear(32, 32, recipe="mxfp8")
    x = values((64, 96), 0).requires_grad_() * 1
    alive = weakref.ref(x)
    with pytest.raises(ValueError, match="must share in"):
        three(x)
    del x
    gc.collect()
    assert alive() is None


def followed(self, h):
    a = self.q(h)
    return a, self.k(h)


def from_below(self, h, shape):
    a = self.attention.q(h).view(shape).transpose(1, 2)
    return a, self.attention.k(h)


def under_a_norm(self, h):
    return self.norm(self.q(h)), self.k(h)


def variables(q, k, h):
    return q(h), k(h)


def within_a_context(self, h, context):
    with context:
        a, b = self.q(h), self.k(h)
    return a, b


def collective(self, h):
    a = self.q(h)
    dist.all_reduce(h)
    return a, self.k(h)


def in_place(self, h, memory):
    a = self.q(h)
    memory *= 2
    return a, self.k(h)


def item(self, h, memory):
    a = self.q(h)
    memory[0] = 1
    return a, self.k(h)


def attribute(self, h):
    a = self.q(h)
    h.data = a
    return a, self.k(h)


def result_of_arithmetic(self, h):
    return self.q(h) * 2, self.k(h)


def branch(self, h, both):
    a = self.q(h)
    return a, self.k(h) if both else a


def loop(self, h):
    for _ in range(2):
        a = self.q(h)
        b = self.k(h)
    return a, b


def endless(self, h):
    while True:
        self.q(h)
        self.k(h)


def activation(self, h):
    return F.silu(self.q(h)) * self.k(h)


def yielded(self, h):
    yield self.q(h)
    yield self.k(h)


def keyword(self, h):
    return self.q(x=h), self.k(x=h)


def several(self, h, mask):
    return self.q(h, mask), self.k(h, mask)


def handled(self, h):
    try:
        a = self.q(h)
    except ValueError:
        a = None
    return a, self.k(h)


@pytest.mark.parametrize(
    ("function", "layers"),
    [
        (followed, [("self", "q"), ("self", "k")]),
        (from_below, [("self", "attention", "q"), ("self", "attention", "k")]),
        (under_a_norm, [("self", "q"), ("self", "k")]),
        (variables, [("q",), ("k",)]),
        (within_a_context, [("self", "q"), ("self", "k")]),
        *((function, []) for function in (collective, in_place, item, attribute, result_of_arithmetic, branch, loop, endless)),
        *((function, []) for function in (activation, yielded, keyword, several, handled)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_bytecode_proves(function, layers):
    from blockfp.torch_backend.linear.callers import _read

    found = _read(function.__code__)
    assert [one.layer for _, one in sorted(found.items())] == layers
    assert [one.before for _, one in sorted(found.items())] == [None, *sorted(found)[:-1]][: len(layers)]


def test_compiled_layers_share_a_cast():
    """Layers that read one input quantize it once, and keep its codes once."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    first, second = (bfp.Linear(64, 32, recipe="mxfp8") for _ in range(2))

    def kept(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "blockfp" in str(node.target)])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    run = torch.compile(lambda x: (first(x), second(x)), backend=backend, fullgraph=True)
    sum(y.square().sum() for y in run(values((8, 64), 0).requires_grad_())).backward()
    forward, backward = graphs
    # One cast in each direction: of an input of the graph the backward keeps codes.
    assert sorted(forward) == ["blockfp.product.default"] * 2 + ["blockfp.quantize_operand.default"] * 2
    assert backward == ["blockfp.linear_backward.default"] * 2

"""One cast for the layers that read an input in a forward that is known; and none where anything could write meanwhile."""

import contextlib
import copy
import ctypes
import gc
import pickle
import sys
import threading
import weakref

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from arrays import values
from blockfp.torch_backend.modules import known_classes
from blockfp.torch_backend.modules.layer_calls import SharesInput, sharing
from casting import CASTING
from counted_casts import casts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes

RECIPES = ("mxfp8", "fp8_current", "fp8_delayed", "fp8_block", "fp8_row", "nvfp4")
OTHER = values((4, 64), 1)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The classes of this file are those of a library that is known."""
    mlp = bfp.MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn")
    monkeypatch.setitem(known_classes.KNOWN, __name__, (bfp.SharedInput("q", "k", "v"), mlp))


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
    "data =": swapped,
    "set_": without_grad(lambda h: h.set_(OTHER.clone())),
    "storage": lambda h: h.untyped_storage().copy_(OTHER.untyped_storage()),
    "resized storage": lambda h: (h.untyped_storage().resize_(0), h.untyped_storage().resize_(1024), h.data.fill_(2)),
    "numpy": through(lambda t: t.numpy()),
    "dlpack": through(torch.from_dlpack),
    "dlpack of numpy": lambda h: np.copyto(np.from_dlpack(h.detach().numpy()), OTHER.numpy()),
    "buffer": lambda h: torch.frombuffer(h.detach().numpy(), dtype=torch.float32).mul_(3),
    "address": lambda h: ctypes.memmove(h.data_ptr(), OTHER.data_ptr(), h.nbytes),
    "custom op": says_it_writes_nothing,
    "version kept": lambda h: torch.autograd._unsafe_preserve_version_counter(h).__enter__() or h.data.mul_(3),
    "mul_": lambda h: h.mul_(3),
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


@gloo.on(2)
def test_what_a_collective_writes_is_read(rank):
    ways = {
        "all_reduce": lambda h: dist.all_reduce(h),
        "all_reduce later": lambda h: dist.all_reduce(h, async_op=True).wait(),
        "broadcast": lambda h: dist.broadcast(h, 0),
        "all_gather_into_tensor": lambda h: dist.all_gather_into_tensor(h, (OTHER * (rank + 1))[:2].contiguous()),
        "all_to_all_single": lambda h: dist.all_to_all_single(h, OTHER * (rank + 1)),
        "scatter": lambda h: dist.scatter(h, [OTHER, OTHER * 3] if rank == 0 else None, 0),
    }
    torch.manual_seed(0)
    for recipe in RECIPES:
        for name, way in ways.items():
            reads = Reads(recipe, lambda h, way=way: way(h.detach()))
            for x in (values((4, 64), rank), values((4, 64), rank).requires_grad_()):
                found, wanted = reads(x)
                assert torch.equal(found, wanted), (recipe, name)


class Attention(nn.Module):
    """Query, key and value, with one module between."""

    def __init__(self, recipe="mxfp8", features=64, convert=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(features, 32, bias=False) for _ in range(3))
        self.norm = nn.Identity()
        if convert:
            bfp.convert(self, recipe)

    def forward(self, h):
        self.norm.seen = [h]
        query = self.norm(self.q(h))
        key = self.k(h)
        return query, key, self.v(h)


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


def hooked(attention):
    attention.q.register_forward_hook(lambda layer, args, y: write(args[0]))


def hooked_before(attention):
    attention.k.register_forward_pre_hook(lambda layer, args: write(args[0]))


def patched(attention):
    attention.k.forward = lambda x: write(x) or bfp.Linear.forward(attention.k, x)


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
    attention.norm.register_forward_pre_hook(lambda norm, args: write(norm.seen[0]))


def patched_norm(attention):
    attention.norm.forward = lambda x: write(attention.norm.seen[0]) or x


CHANGES = (hooked, hooked_before, patched, wrapped, subclassed, function, a_layer_that_writes, hooked_norm, patched_norm)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_code_that_users_put_between_two_layers_may_write(change):
    attention, x = Attention(), values((4, 64), 0)
    value = attention.v(x * 4.5)
    for _ in range(2):
        attention(x * 1.5)
    change(attention)
    for _ in range(2):
        assert torch.equal(attention(x * 1.5)[2], value)


def test_a_forward_that_replaced_the_librarys_may_write(monkeypatch):
    attention, x = Attention(), values((4, 64), 0)
    value = attention.v(x * 3)

    def forward(self, h):
        query = self.q(h)
        write(h)
        return query, self.k(h), self.v(h)

    monkeypatch.setattr(Attention, "forward", forward)
    assert torch.equal(attention(x.clone())[2], value)
    # Before it was converted, too: this function is the class's module's own, but another's isn't.
    monkeypatch.setattr(Attention, "forward", eval("lambda self, h: (self.q(h), h.data.mul_(3), self.v(h))", {}))
    assert not isinstance(Attention(), SharesInput)


def test_hooks_of_all_modules_may_write():
    attention, x = Attention(), values((4, 64), 0)
    attention(x)
    value = attention.v(x * 3)
    seen = lambda layer, args, y: write(args[0]) if layer is attention.q else None  # noqa: E731
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(nn.modules.module.register_module_forward_hook(seen).remove)
        found = attention(x)[2]
    assert torch.equal(found, value)


def test_calls_know_nothing_of_each_other():
    attention, x = Attention(), values((4, 64), 0)
    attention(x)
    write(x)
    assert torch.equal(attention(x)[2], attention.v(x.clone()))
    # Layers called by themselves, and those of another call that ended in an error.
    attention.q(x)
    write(x)
    assert torch.equal(attention.k(x), attention.k(x.clone()))
    attention.v = bfp.Linear(32, 32, recipe="mxfp8")
    with pytest.raises(ValueError, match="must share in"):
        attention(x)
    write(x)
    assert torch.equal(attention.k(x), attention.k(x.clone()))


def test_threads_know_nothing_of_each_other():
    attention, found = Attention(), []
    x = values((4, 64), 0)
    with sharing([attention.q, attention.k]):
        attention.q(x)
        write(x)
        thread = threading.Thread(target=lambda: found.append(attention.k(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], attention.k(x.clone()))


def kept_for(call):
    """The plain tensors that a call keeps for its backward, each once: addresses and bytes."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return {t.data_ptr(): t.nbytes for t in saved if type(t) is torch.Tensor and t.numel()}


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 96)])
@pytest.mark.parametrize("name", CASTING)
def test_layers_of_one_input_share_its_cast(name, shape):
    """What three layers keep of a tensor that all of them read is kept once; bits are those of layers on their own."""
    model, cast = Attention(name, 96), recipes.parse(name).input_columnwise
    layers = [model.q, model.k, model.v]
    codes = {layer.weight.codes.data_ptr() for layer in layers}
    x = values(shape, 0).requires_grad_() * 1
    kept = kept_for(lambda: model(x))
    column = bfp.quantize(values(shape, 0).flatten(0, -2).mT.contiguous(), cast.format)
    each = sum(part.nbytes for part in (column.codes, column.scales, column.tensor_scale) if part is not None)
    assert sum(size for address, size in kept.items() if address not in codes) == each
    alone = [layer(values(shape, 0).requires_grad_()) for layer in layers]
    assert all(torch.equal(a, b) for a, b in zip(model(x), alone, strict=True))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("where", ["called", "checkpoint", "inference", "autocast", "frozen"])
@pytest.mark.parametrize("made", [Llama, Attention])
def test_an_input_is_cast_once(made, where):
    model = bfp.convert(Llama(), "mxfp8") if made is Llama else Attention()
    model.requires_grad_(where != "frozen")
    run = (lambda x: checkpoint(model, x, use_reentrant=False)) if where == "checkpoint" else model
    context = {"inference": torch.inference_mode(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    with context.get(where, contextlib.nullcontext()):
        # What the activation makes is cast as it is made, but under autocast.
        assert casts_of(run, values((4, 64), 0))[0] == 1 + (where == "autocast" and made is Llama)


def test_each_of_two_inputs_is_cast():
    class Cross(Attention):
        def forward(self, h, memory):
            return self.q(h), self.k(memory), self.v(memory)

    Cross.__module__ = __name__
    model, (h, memory) = Cross(), (values((4, 64), seed) for seed in range(2))
    count, (query, key, value) = casts_of(model, h, memory)
    assert count == 2
    for found, layer, x in ((query, model.q, h), (key, model.k, memory), (value, model.v, memory)):
        assert torch.equal(found, layer(x))


def test_nothing_outlives_the_last_layer():
    model = Attention()
    x = values((64, 64), 0).requires_grad_() * 1
    alive = weakref.ref(x)
    model(x)
    model.norm.seen = None
    del x
    gc.collect()
    assert alive() is None


def test_copies_and_files_are_of_the_librarys_class():
    attention, x = Attention(), values((4, 64), 0)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert type(other) is type(attention)
        assert isinstance(other, Attention)
        assert all(torch.equal(a, b) for a, b in zip(attention(x), other(x), strict=True))
    assert sys.modules[__name__].Attention is type(attention).made_of


def test_what_is_not_converted_or_not_known_keeps_its_class(monkeypatch):
    model = bfp.convert(Attention(convert=False), "mxfp8", filter_fn=lambda path, layer: path != "k")
    assert type(model) is Attention
    # The rest of it later.
    assert isinstance(bfp.convert(model, "mxfp8"), SharesInput)
    monkeypatch.delitem(known_classes.KNOWN, __name__)
    assert type(Attention()) is Attention


def test_compiled_layers_share_a_cast():
    """Layers that read one input quantize it once, and keep its codes once."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []
    model = Attention()

    def kept(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "blockfp" in str(node.target)])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    run = torch.compile(model, backend=backend, fullgraph=True)
    sum(y.square().sum() for y in run(values((8, 64), 0).requires_grad_())).backward()
    forward, backward = graphs
    # One cast in each direction: of an input of the graph the backward keeps codes.
    assert sorted(forward) == ["blockfp.product.default"] * 3 + ["blockfp.quantize_operand.default"] * 2
    assert backward == ["blockfp.linear_backward.default"] * 3

"""Layers around an activation as one function: the bits, state and errors of the layers one after the other.

The CUDA path runs with kernels that the definition carries out. "Apart" are the same layers where no kernel is said to cast the
activation's gradient.
"""

import contextlib
from unittest import mock

import emulated_cuda
import pytest
import torch
from arrays import values, with_scales
from blockfp.torch_backend.modules import layer_calls
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp

OTHERS = ("fp8_current", "fp8_block", "mxfp8")
"""Recipes whose layers are called one after the other: to cast their gradients so is no faster."""
KINDS = ("swiglu", "gelu", "apart", "halves", "alone")
BFLOAT16 = {"dtype": torch.bfloat16}


class Apart(nn.Module):
    """gate and up are two layers."""

    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 96, bias=bias, **BFLOAT16) for _ in range(2))
        self.down, self.act = nn.Linear(96, 64, **BFLOAT16), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Halves(nn.Module):
    """One layer computes gate and up side by side."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(64, 192, bias=False, **BFLOAT16), nn.Linear(96, 64, **BFLOAT16)
        self.act = nn.GELU()

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(64, 96, bias=False, **BFLOAT16), nn.Linear(96, 64, **BFLOAT16), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


ROWS = {
    "apart": (Apart, bfp.MLPParts("up", "down", "act", "gate")),
    "halves": (Halves, bfp.MLPParts("both", "down", "act", "both")),
    "alone": (Alone, bfp.MLPParts("up", "down", "act")),
}


def mlp(kind, recipe):
    torch.manual_seed(0)
    if kind in ROWS:
        cls, row = ROWS[kind]
        return with_scales(bfp.convert(cls(), recipe, fuse={cls: row}))
    return with_scales(bfp.LayerNormMLP(64, 96, False, recipe=recipe, norm="rms_norm", activation=kind, **BFLOAT16))


def _none(*_):
    """A function, which compilers trace."""
    return False


@contextlib.contextmanager
def apart():
    with mock.patch.object(layer_calls, "casts_gradient", _none), mock.patch.dict(layer_calls.gradient_casts, clear=True):
        yield


def trained(model, run, steps=2, tokens=32, needs_x=True):
    """Results, gradients and buffers of some steps."""
    found = []
    for step in range(steps):
        x = values((2, tokens, 64), step, torch.bfloat16).requires_grad_(needs_x)
        y = run(x)
        y.backward(values(y.shape, 9 + step, y.dtype))
        found += [y.detach(), x.grad, *(param.grad for param in model.parameters())]
        model.zero_grad()
        bfp.update_scales(model)
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def counted():
    library = emulated_cuda.Library()
    return library, {"quantize_gradient": library.quantize_gradient}


def casts_of(kind, recipe="fp8_delayed"):
    """How many gradients a backward casts as they are made."""
    return 0 if recipe in OTHERS else 2 if kind == "apart" else 1


@pytest.mark.parametrize(("kind", "recipe"), [*((kind, "fp8_delayed") for kind in KINDS), *(("swiglu", one) for one in OTHERS)])
def test_bits(kind, recipe):
    library, functions = counted()
    with emulated_cuda.launches(**functions):
        model = mlp(kind, recipe)
        ours = trained(model, model)
        assert len(library.calls) == 2 * casts_of(kind, recipe)
        model = mlp(kind, recipe)
        with apart():
            assert_equal(ours, trained(model, model))
        assert len(library.calls) == 2 * casts_of(kind, recipe)


@pytest.mark.parametrize("kind", ["swiglu", "apart"])
def test_compiled(kind):
    library, functions = counted()
    found = []
    with emulated_cuda.launches(**functions):
        for context in (contextlib.nullcontext(), apart()):
            torch._dynamo.reset()
            with context:
                model = mlp(kind, "fp8_delayed")
                found.append(trained(model, torch.compile(model, backend="aot_eager", fullgraph=True)))
            assert len(library.calls) == 2 * casts_of(kind)
    assert_equal(*found)


@pytest.mark.parametrize("kind", ["swiglu", "apart"])
@pytest.mark.parametrize("tokens", [12, 7, 0])
def test_other_lengths(tokens, kind):
    """No kernel casts these gradients; the operations do."""
    with emulated_cuda.launches():
        ours, theirs = mlp(kind, "fp8_delayed"), mlp(kind, "fp8_delayed")
        found = trained(ours, ours, tokens=tokens)
        with apart():
            assert_equal(found, trained(theirs, theirs, tokens=tokens))


def _frozen(model):
    layer = model.down
    layer.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", ["gelu", "apart"])
def test_what_needs_no_gradient(kind):
    """x, or the last layer's weight."""
    for change, needs_x in ((lambda model: model, False), (_frozen, True)):
        library, functions = counted()
        with emulated_cuda.launches(**functions):
            ours, theirs = (change(mlp(kind, "fp8_delayed")) for _ in range(2))
            found = trained(ours, ours, needs_x=needs_x)
            with apart():
                assert_equal(found, trained(theirs, theirs, needs_x=needs_x))
        assert len(library.calls) == 2 * casts_of(kind)


def test_weights_in_high_precision():
    library, functions = counted()
    with emulated_cuda.launches(**functions):
        cls, row = ROWS["apart"]
        found = []
        for context in (contextlib.nullcontext(), apart()):
            torch.manual_seed(0)
            model = with_scales(bfp.convert(cls(), "fp8_delayed", weights="high_precision", fuse={cls: row}))
            with context:
                found.append(trained(model, model))
        assert_equal(*found)
        assert len(library.calls) == 2 * casts_of("apart")


def test_checkpoints_and_two_backwards():
    with emulated_cuda.launches():
        for wrap in (lambda model: lambda x: checkpoint(model, x, use_reentrant=False), lambda model: model):
            ours, theirs = mlp("swiglu", "fp8_delayed"), mlp("swiglu", "fp8_delayed")
            found = trained(ours, wrap(ours))
            with apart():
                assert_equal(found, trained(theirs, wrap(theirs)))
        x = values((32, 64), 1, torch.bfloat16).requires_grad_()
        y = ours(x)
        first = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert_equal(first, torch.autograd.grad(y, x, torch.ones_like(y)))


@pytest.mark.parametrize("kind", ["swiglu", "apart"])
def test_gradients_of_gradients(kind):
    found = []
    with emulated_cuda.launches():
        for context in (contextlib.nullcontext(), apart()):
            model = mlp(kind, "fp8_delayed")
            x = values((32, 64), 1, torch.bfloat16).requires_grad_()
            with context:
                y = model(x)
            weights = list(model.parameters())
            gradient = values(y.shape, 3, y.dtype).requires_grad_()
            first = torch.autograd.grad(y, (x, *weights), gradient, create_graph=True)
            squares = sum((one.float() ** 2).sum() for one in first)
            second = torch.autograd.grad(squares, (x, gradient, *weights), allow_unused=True)
            found.append([*first, *model.buffers(), *(one for one in second if one is not None)])
    for ours, theirs in zip(*found, strict=True):
        # Sums are rounded to bfloat16 in another order.
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()
    assert_equal(*([*each[: len(first)]] for each in found))


def test_layers_are_called_where_somebody_would_tell():
    """Hooks, biases, frozen weights, `observe`, autocast, no gradients: the layers one after the other."""
    library, functions = counted()

    def backward(model, x=None):
        x = values((32, 64), 1, torch.bfloat16).requires_grad_() if x is None else x
        y = model(x)
        y.backward(torch.ones_like(y))
        return len(library.calls)

    with emulated_cuda.launches(**functions):
        model = mlp("apart", "fp8_delayed")
        for hook in (
            lambda: model.gate.register_forward_hook(lambda *_: None),
            lambda: model.up.register_full_backward_hook(lambda *_: None),
            lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
        ):
            handle = hook()
            assert backward(model) == 0
            handle.remove()
        with torch.autocast("cpu", torch.bfloat16):
            assert backward(model) == 0
        with bfp.observe(model):
            assert backward(model) == 0
        model.gate.weight.requires_grad_(False)
        assert backward(model) == 0
        cls, row = ROWS["apart"]
        assert backward(with_scales(bfp.convert(cls(bias=True), "fp8_delayed", fuse={cls: row}))) == 0
        assert backward(bfp.convert(cls(), "fp8_delayed", fuse={cls: row})) == 0, "it has no scale yet"
        assert backward(mlp("apart", "nvfp4")) == 0
        normed = mlp("gelu", "fp8_delayed")
        handle = normed.up.register_forward_hook(lambda *_: None)
        assert backward(normed) == 0
        handle.remove()
        assert backward(normed) == 1

"""The autograd function of two layers with an activation between them, whose gradient is cast as it is made.

    forward   gate = x w_gate^T,  up = x w_up^T,  y = a w^T,  a = activation(gate) * up, cast as it is made
    backward  da = g w,  dw = g^T a;  d_gate and d_up, cast as they are made of da, gate and up, and never stored
              dx, dw_gate and dw_up from the codes of d_gate and d_up

`LayerFunction`'s forward runs inside for each layer, and the layers' backwards, each with a context of its own; what those save
is saved here. The bits are those of the layers one after the other, which gradients of gradients run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockfp.kernels import switch
from blockfp.recipes import Recipe

from ..ops.layer.activations import Gating
from ..ops.layer.linear_ops import Casts
from ..ops.library import outputs
from ..torch_internals import apply_of, unsafe_view, unwrap_if_dead
from . import prologue
from .call import Call
from .layer_function import NO_STATE, LayerFunction, not_dense
from .linear import LinearState, call_of, known_by
from .second_order import OfInput, backward_with_graph, plus, taken


class OneOfMLP(NamedTuple):
    """A layer's weight, recipe, state, and casts of x that it shares."""

    weight: Tensor
    recipe: Recipe
    state: LinearState | None
    casts: Casts | None


class Inner:
    """What a layer's forward sets and saves, in place of autograd's context; a compiler wants the backward to leave it alone.

    Attributes:
        saved_tensors: what the layer saved, until it is saved by the function around it.
        count: how many these are.
    """

    saved_tensors: tuple[Any, ...] = ()
    count = 0

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors, self.count = tensors, len(tensors)

    def set_materialize_grads(self, value: bool) -> None:
        """Does nothing: no gradient of an inner layer is missing."""


class MLPFunction(torch.autograd.Function):
    """y from x, the weights of gate and up (or None), weight and bias of the last layer, a `Call` for each, the casts of x that
    gate and up share, and the tensors of the layers' states: outside of compilers all in one tuple.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        gate_call: Call,
        up_call: Call | None,
        call: Call,
        shared: Any,
        *states: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if type(states[0]) is tuple:
            (states,) = states
        firsts = [(gate_weight, gate_call)]
        if up_weight is not None and up_call is not None:
            firsts.append((up_weight, up_call))
        inners, made, saved, place = [], [], [], 0
        for one, own in firsts:
            inner = Inner()
            casts = None if shared is None else shared[place > 0]
            result = LayerFunction.forward(inner, x, None, one, None, own, casts, *states[place : place + 7])
            made.append(result[0] if isinstance(result, tuple) else result)
            inners.append(inner)
            place += 7
        if shared is not None:
            for casts in shared:
                if casts is not None:
                    # What nobody saved is needed no more.
                    casts.clear()
        last = Inner()
        gate, up = made if len(made) > 1 else (made[0], None)
        y: Any = LayerFunction.forward(last, gate, up, weight, bias, call, None, *states[place:])
        inners.append(last)
        for inner in inners:
            saved += inner.saved_tensors
            inner.saved_tensors = ()
        ctx.inners = inners
        if call.traced:
            ctx.save_for_backward(*saved)
            return y
        # As in `LayerFunction`. Second-order gradients go to the weights themselves.
        anchor = x.new_empty(0)
        ctx.waiting = []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, gate_weight, up_weight, anchor)
        return y, anchor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, carried: Tensor | None = None):
        *inners, last = ctx.inners
        rest = (None,) * (len(ctx.needs_input_grad) - 5)
        saved = ctx.saved_tensors
        if gradient is None:
            return taken(ctx.waiting, saved[-1].dtype), None, None, None, None, *rest
        compiled = torch.compiler.is_compiling()
        if not compiled:
            if gradient.layout is not torch.strided:
                raise not_dense(gradient)
            if torch.is_grad_enabled():
                return *_with_graph(ctx, gradient, saved), *rest
            ctx.maybe_clear_saved_tensors()
        # From here on each tensor lives until its product is done.
        saved = list(saved)
        first = 0
        for inner in inners:
            first += inner.count
        own = saved[first : first + last.count]
        del saved[first:]
        d_weight, d_bias, sources = _last_backward(last, gradient, own, compiled, len(inners) > 1)
        d_weights: list[Tensor | None] = [None, None]
        d_x = None
        for index, inner in enumerate(inners):
            kept, parts = saved[: inner.kept], saved[inner.kept : inner.kept + inner.parts]
            del saved[: inner.count]
            d_one, d_weights[index], _ = inner.call.layer.backward(inner, sources.pop(0), kept, parts, [], compiled)
            d_x = d_one if d_x is None or d_one is None else d_x + d_one
        if d_x is not None and carried is not None:
            d_x = plus(d_x, taken(ctx.waiting, d_x.dtype))
        return d_x, *d_weights, d_weight, d_bias, *rest


def _last_backward(
    last: Any, gradient: Tensor, saved: list[Any], compiled: bool, gated: bool
) -> tuple[Tensor | None, Tensor | None, list[prologue.Source]]:
    """Returns the gradients of the last layer's weight and bias, and the sources of the gradients before the activation.

    Empties `saved`.
    """
    first = last.kept + last.parts
    kept, parts, points = saved[: last.kept], saved[last.kept : first], saved[first : first + 2]
    saved.clear()
    made, d_weight, d_bias = last.call.layer.backward(last, gradient, kept, parts, points, compiled)
    assert made is not None
    source = prologue.Source(made, points[0], points[1], last.call.prologue, False)
    return d_weight, d_bias, [source, source._replace(of_up=True)] if gated else [source]


# ---- gradients of gradients


class _Known(torch.autograd.Function):
    """Returns a first layer's output, which the forward kept; its gradient goes where the layer's would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, output: Tensor, inner: Inner) -> Tensor:
        ctx.inner = inner
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        inner: Any = ctx.inner
        if torch.is_grad_enabled():
            d_x, d_weight, _ = backward_with_graph(inner, gradient)
        else:
            kept, parts = list(inner.saved_tensors[: inner.kept]), list(inner.saved_tensors[inner.kept : -1])
            d_x, d_weight, _ = inner.call.layer.backward(inner, gradient, kept, parts, [], False)
        return d_x, d_weight, None, None


def _with_graph(ctx: Any, gradient: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Returns gradients of x and all weights and the bias that can be differentiated again: layer by layer."""
    *inners, last = ctx.inners
    *saved, gate_weight, up_weight, anchor = saved
    again = []
    for inner in inners:
        # Another run may come, with other tensors.
        again.append(copy.copy(inner))
        again[-1].waiting, again[-1].saved_tensors = ctx.waiting, (*saved[: inner.kept + inner.parts], anchor)
        saved = saved[inner.count :]
    inners = again
    weights = [gate_weight] if up_weight is None else [gate_weight, up_weight]
    gate, up, weight, bias = saved[last.kept + last.parts :]
    x = anchor.new_empty(()).expand(gate.shape[0], inners[0].shape[1])
    if inners[0].call.needs[0]:
        x = OfInput.apply(anchor, x, ctx.waiting)
    known = [_Known.apply(x, *one) for one in zip(weights, (gate, up), inners, strict=False)]
    call = replace(last.call, training=False)
    gate, up = known if len(known) > 1 else (known[0], None)
    y = LayerFunction.apply(gate, up, weight, bias, call, None, *last.state)
    wanted = [*known, *(one for one, needed in zip((weight, bias), call.needs[1:], strict=True) if needed)]
    found = list(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    d_x: Tensor | None = None
    d_weights: list[Tensor | None] = [None, None]
    for place, inner in enumerate(inners):
        d_one, d_weights[place], _ = backward_with_graph(inner, found.pop(0))
        d_x = d_one if d_x is None or d_one is None else d_x + d_one
    d_last = [found.pop(0) if needed else None for needed in call.needs[1:]]
    return d_x, *d_weights, *d_last


# ---- the call

_run = apply_of(MLPFunction)
_calls: dict[Any, tuple[Call, Call | None, Call]] = switch.plans()


def apply_mlp(x: Tensor, layers: Sequence[OneOfMLP], bias: Tensor | None, gating: Gating) -> Tensor:
    """Computes layers with `gating` before the last, where `layer_calls.fused_mlp` found that they can be one function.

    `bias` is the last one's.
    """
    rows = x if x.ndim == 2 else x.flatten(0, -2)
    *firsts, last = layers
    traced = torch.compiler.is_compiling()
    known: Any = [gating]
    calls = None
    if not traced:
        for one in layers:
            known.append(known_by(rows, one.weight, bias, one.recipe, one.state, None, False, None))
        known = tuple(known)
        calls = _calls.get(known)
    if calls is None:
        own = [call_of(rows, one.weight, None, one.recipe, one.state, None, False, None) for one in firsts]
        after = call_of(rows, last.weight, bias, last.recipe, last.state, None, False, None, gating, made=True)
        calls = own[0], own[1] if len(own) > 1 else None, after
        if not traced:
            switch.kept(_calls, known, calls)
    tensors: tuple[Tensor | None, ...] = ()
    for one in layers:
        state = one.state
        tensors += NO_STATE if state is None else (*state[:6], state.observed)
    weights = firsts[0].weight, firsts[1].weight if len(firsts) > 1 else None, last.weight
    if traced:
        y: Any = MLPFunction.apply(rows, *weights, bias, *calls, None, *tensors)
        y = outputs(y, rows, weights[0], bias)
    else:
        y, _ = _run(unwrap_if_dead(rows), *weights, bias, *calls, (firsts[0].casts, firsts[-1].casts), tensors)
    return y if x.ndim == 2 else unsafe_view(y, [*x.shape[:-1], y.shape[-1]])

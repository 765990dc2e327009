"""MLPs of other libraries, whose activation and cast `convert` makes one operation.

An MLP is known by what its `forward` does, not by its name: its bytecode is that of one of the functions below, whatever its
layers are called. So LlamaMLP and all that are written like it (Qwen, Mistral, Gemma, ..), Phi3MLP, torchtitan's FeedForward,
and those with one activation between two layers are taken; a forward that differs in one instruction stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from blockfp.kernels.once import once

from ..custom_ops.activations import Activation, activate
from ..linear.gated_function import Gating
from .derived import Derived, derive
from .forwards import FUNCTIONS, GELU, SILU, watched
from .gated_product import fused_product
from .shared_inputs import sharing


def _llama(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _llama_at_once(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _torchtitan(self, x):
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def _plain(self, x):
    return self.down(F.gelu(self.up(x)))


def _plain_tanh(self, x):
    return self.down(F.gelu(self.up(x), approximate="tanh"))


def _plain_module(self, x):
    return self.down(self.act(self.up(x)))


def _plain_by_nn(self, x):
    return self.down(nn.functional.gelu(self.up(x)))


def _plain_tanh_by_nn(self, x):
    return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


def _phi3(self, hidden_states):
    up_states = self.gate_up_proj(hidden_states)

    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)

    return self.down_proj(up_states)


def _siglip(self, hidden_states):
    hidden_states = self.fc1(hidden_states)
    hidden_states = self.activation_fn(hidden_states)
    hidden_states = self.fc2(hidden_states)
    return hidden_states


class _Roles(NamedTuple):
    """The roles of the names in a forward, as places among them; None for a role that it hasn't.

    Attributes:
        down: the layer behind the activation.
        gate: the layer before it; of both halves, where there is no up.
        up: the layer that makes what is multiplied with, or None.
        act: the activation's module, or the name of the function that stands there.
        halves: whether gate and up come from one layer.
        fixed: further names, which must be these, by their places. F and nn must be torch's.
    """

    down: int
    gate: int
    up: int | None
    act: int | Activation
    halves: bool = False
    fixed: dict[int, str] = {}  # noqa: RUF012


_FORWARDS: dict[Callable[..., Any], _Roles] = {
    _llama: _Roles(0, 2, 3, 1),
    _llama_at_once: _Roles(0, 2, 3, 1),
    _torchtitan: _Roles(0, 3, 4, "silu", fixed={1: "F", 2: "silu"}),
    _phi3: _Roles(3, 0, None, 2, halves=True, fixed={1: "chunk"}),
    _siglip: _Roles(2, 0, None, 1),
    _plain_module: _Roles(0, 2, None, 1),
    _plain: _Roles(0, 3, None, "gelu", fixed={1: "F", 2: "gelu"}),
    _plain_tanh: _Roles(0, 3, None, "gelu_tanh", fixed={1: "F", 2: "gelu"}),
    _plain_by_nn: _Roles(0, 4, None, "gelu", fixed={1: "nn", 2: "functional", 3: "gelu"}),
    _plain_tanh_by_nn: _Roles(0, 4, None, "gelu_tanh", fixed={1: "nn", 2: "functional", 3: "gelu"}),
}

_GLOBALS = {"F": F, "nn": nn}


_KINDS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of a function that say how it is called; others are of the file that it stands in."""


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """All that a function does, but for the names it uses, its docstring and the lines it stands on."""
    return (
        *(code.co_code, code.co_consts[1:], code.co_argcount, code.co_kwonlyargcount, code.co_flags & _KINDS),
        *(code.co_freevars, code.co_cellvars, code.co_exceptiontable, len(code.co_names)),
    )


_KNOWN = {
    _instructions(function.__code__): roles for function, roles in _FORWARDS.items() if isinstance(function, FunctionType)
}


_TRANSFORMERS = "transformers.activations"


class Parts(NamedTuple):
    """The names of an MLP's modules; None for one that it hasn't.

    Attributes:
        down, gate, up, act, halves: as of `_Roles`.
        function: the activation, where it is no module.
    """

    down: str
    gate: str
    up: str | None
    act: str | None
    halves: bool
    function: Activation | None = None


def parts_of(cls: type[nn.Module]) -> Parts | None:
    """Returns the names of the parts of MLPs of this class; None of other modules."""
    forward = cls.forward
    if not isinstance(forward, FunctionType) or forward.__defaults__ or hasattr(forward, "__wrapped__"):
        return None
    roles = _KNOWN.get(_instructions(forward.__code__))
    names = forward.__code__.co_names
    if roles is None or any(names[place] != name for place, name in roles.fixed.items()):
        return None
    if any(forward.__globals__.get(name) is not _GLOBALS[name] for name in roles.fixed.values() if name in _GLOBALS):
        return None
    up = None if roles.up is None else names[roles.up]
    act, function = (names[roles.act], None) if isinstance(roles.act, int) else (None, roles.act)
    found = Parts(names[roles.down], names[roles.gate], up, act, roles.halves, function)
    # Their names as modules: each is one, and none is the MLP's own method.
    return found if all(name is None or not hasattr(cls, name) for name in found[:4]) else None


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the name of the function that a module computes; None where it isn't known, or its calls are seen by hooks."""
    if watched(module) or (F.gelu, F.silu) != FUNCTIONS:
        return None
    if type(module) is nn.SiLU:
        return None if module.inplace or nn.SiLU.forward is not SILU else "silu"
    if type(module) is nn.GELU:
        if nn.GELU.forward is not GELU:
            return None
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    cls: Any = type(module)
    if cls.__module__ != _TRANSFORMERS or cls.forward.__module__ != _TRANSFORMERS or hasattr(cls.forward, "__wrapped__"):
        return None
    if cls.__name__ == "SiLUActivation":
        return "silu"
    if cls.__name__ not in ("GELUActivation", "GELUTanh"):
        return None
    # They may hold a formula of their own instead.
    act: Any = module.act
    if act is F.gelu:
        return "gelu"
    tanh = (
        isinstance(act, functools.partial) and act.func is F.gelu and not act.args and act.keywords == {"approximate": "tanh"}
    )
    return "gelu_tanh" if tanh else None


def fused_class(mlp: nn.Module) -> type[FusedMLP] | None:
    """Returns the class that an MLP is to become; None for what is no such MLP, or has a forward put into it."""
    cls = type(mlp)
    if issubclass(cls, FusedMLP) or "forward" in vars(mlp) or parametrize.is_parametrized(mlp):
        return None
    parts = parts_of(cls)
    if parts is None or not all(name is None or isinstance(mlp._modules.get(name), nn.Module) for name in parts[:4]):
        return None
    act = None if parts.act is None else mlp._modules[parts.act]
    if act is not None and activation_of(act) is None:
        return None
    return _derived(cls)


class FusedMLP(Derived, nn.Module):
    """Base of the classes of `fused_class`: the forward casts what the activation makes as it is made, with the same bits.

    `known` is the forward of the class that they are made of, whose work they do.
    """

    known: ClassVar[Any]
    parts: ClassVar[Parts]

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        if self.made_of.forward is not self.known or len(inputs) != 1 or options or (F.gelu, F.silu) != FUNCTIONS:
            return self.made_of.forward(self, *inputs, **options)
        (x,) = inputs
        parts = self.parts
        down, gate, up, act = (None if name is None else self._modules[name] for name in parts[:4])
        assert down is not None
        assert gate is not None
        with sharing((gate, up)):
            first = gate(x)
            second = None if up is None else up(x)
        activation = parts.function if act is None else activation_of(act)
        if activation is not None:
            y = fused_product(down, first, second, Gating(activation, "halves" if parts.halves else "apart"))
            if y is not None:
                return y
        if parts.halves:
            first, second = first.chunk(2, dim=-1)
        made = act(first) if act is not None else activate(first, None, parts.function or "")
        return down(made if second is None else made * second)


@once
def _derived(cls: type[nn.Module]) -> type[FusedMLP]:
    members = {"known": staticmethod(cls.forward), "parts": parts_of(cls), "rebuild": staticmethod(_rebuild_mlp)}
    return derive(cls, "Fused", (FusedMLP,), **members)


def _rebuild_mlp(cls: type[nn.Module]) -> nn.Module:
    made: Any = cls if parts_of(cls) is None else _derived(cls)
    return made.__new__(made)

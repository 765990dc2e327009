"""MLPs of other libraries, whose activation and cast `convert` makes one operation.

An MLP is known by what its `forward` does, not by its name: its bytecode is that of one of the functions below, whatever its
layers are called. So LlamaMLP and all that are written like it (Qwen, Mistral, Gemma, ..), Phi3MLP, torchtitan's FeedForward, and those with
one activation between two layers are taken; a forward that differs in one instruction stays as it is.
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

from ..custom_ops.activations import Activation
from ..linear.gated_function import Gating
from .gated_product import fused_product, has_hooks


def _llama(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _llama_at_once(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _torchtitan(self, x):
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


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
    """What the names in a forward stand for, as places among them; None for a role that it hasn't.

    Attributes:
        down: the layer behind the activation.
        gate: the layer before it; of both halves, where there is no up.
        up: the layer that makes what is multiplied with, or None.
        act: the activation's module; None where it is F.silu.
        halves: whether gate and up come from one layer.
        others: further names, which must be these.
    """

    down: int
    gate: int
    up: int | None
    act: int | None
    halves: bool = False
    others: tuple[tuple[int, str], ...] = ()


_FORWARDS: dict[Callable[..., Any], _Roles] = {
    _llama: _Roles(0, 2, 3, 1),
    _llama_at_once: _Roles(0, 2, 3, 1),
    _torchtitan: _Roles(0, 3, 4, None, others=((1, "F"), (2, "silu"))),
    _phi3: _Roles(3, 0, None, 2, halves=True, others=((1, "chunk"),)),
    _siglip: _Roles(2, 0, None, 1),
}


_KINDS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of a function that say how it is called; others are of the file that it stands in."""


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """All that a function does, but for the names it uses, its docstring and the lines it stands on."""
    return (
        *(code.co_code, code.co_consts[1:], code.co_argcount, code.co_kwonlyargcount, code.co_flags & _KINDS),
        *(code.co_freevars, code.co_cellvars, code.co_exceptiontable, len(code.co_names)),
    )


_KNOWN = {_instructions(function.__code__): roles for function, roles in _FORWARDS.items() if isinstance(function, FunctionType)}


_TRANSFORMERS = "transformers.activations"


class Parts(NamedTuple):
    """The names of an MLP's modules; None for one that it hasn't.

    Attributes:
        down, gate, up, act, halves: as of `_Roles`.
    """

    down: str
    gate: str
    up: str | None
    act: str | None
    halves: bool


def parts_of(cls: type[nn.Module]) -> Parts | None:
    """Returns the names of the parts of MLPs of this class; None of other modules."""
    forward = cls.forward
    if not isinstance(forward, FunctionType) or forward.__defaults__ or hasattr(forward, "__wrapped__"):
        return None
    roles = _KNOWN.get(_instructions(forward.__code__))
    names = forward.__code__.co_names
    if roles is None or any(names[place] != name for place, name in roles.others):
        return None
    if roles.act is None and forward.__globals__.get("F") is not F:
        return None
    up, act = (None if place is None else names[place] for place in (roles.up, roles.act))
    found = Parts(names[roles.down], names[roles.gate], up, act, roles.halves)
    # Their names as modules: each is one, and none is the MLP's own method.
    return found if all(name is None or not hasattr(cls, name) for name in found[:4]) else None


def activation_of(module: nn.Module | None) -> Activation | None:
    """Returns the name of the function that a module computes; None where it isn't known, or its calls are seen by hooks.

    A module of None stands for F.silu.
    """
    if module is None:
        return "silu"
    if "forward" in vars(module) or has_hooks(module):
        return None
    if type(module) is nn.SiLU:
        return None if module.inplace else "silu"
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    cls: Any = type(module)
    if cls.__module__ != _TRANSFORMERS or cls.forward.__module__ != _TRANSFORMERS:
        return None
    if cls.__name__ == "SiLUActivation":
        return "silu"
    if cls.__name__ not in ("GELUActivation", "GELUTanh"):
        return None
    # They may hold a formula of their own instead.
    act: Any = module.act
    if act is F.gelu:
        return "gelu"
    tanh = isinstance(act, functools.partial) and act.func is F.gelu and not act.args and act.keywords == {"approximate": "tanh"}
    return "gelu_tanh" if tanh else None


def fused_class(mlp: nn.Module) -> type[FusedMLP] | None:
    """Returns the class that an MLP is to become; None for what is no such MLP, or has a forward put into it."""
    cls = type(mlp)
    if issubclass(cls, FusedMLP) or "forward" in vars(mlp) or parametrize.is_parametrized(mlp):
        return None
    parts = parts_of(cls)
    if parts is None or not all(name is None or isinstance(mlp._modules.get(name), nn.Module) for name in parts[:4]):
        return None
    if activation_of(None if parts.act is None else mlp._modules[parts.act]) is None:
        return None
    return _derived(cls)


class FusedMLP(nn.Module):
    """Base of the classes of `fused_class`: the forward casts what the activation makes as it is made, with the same bits.

    They are pickled, and copied, by the class that they are made of.
    """

    made_of: ClassVar[type[nn.Module]]
    parts: ClassVar[Parts]

    def forward(self, x: Tensor) -> Tensor:
        down, gate, up, act, halves = (self._modules[name] if isinstance(name, str) else name for name in self.parts)
        assert down is not None
        assert gate is not None
        first = gate(x)
        second = None if up is None else up(x)
        activation = activation_of(act)
        if activation is not None:
            y = fused_product(down, first, second, Gating(activation, "halves" if halves else "apart"))
            if y is not None:
                return y
        if halves:
            first, second = first.chunk(2, dim=-1)
        made = F.silu(first) if act is None else act(first)
        return down(made if second is None else made * second)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if "made_of" not in vars(type(self)):
            # FSDP2 derives a class from this one, and others may.
            return super().__reduce_ex__(protocol)  # pyright: ignore[reportReturnType]
        return _rebuild, (self.made_of,), self.__getstate__()


@once
def _derived(cls: type[nn.Module]) -> type[FusedMLP]:
    members: dict[str, Any] = {"made_of": cls, "parts": parts_of(cls), "__module__": cls.__module__}
    made: Any = type(f"Fused{cls.__name__}", (FusedMLP, cls), members)
    return made


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    # Another version of a library may have another forward, which is then what is meant.
    made: Any = cls if parts_of(cls) is None else _derived(cls)
    return made.__new__(made)

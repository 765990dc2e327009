"""Fuses the activation of other libraries' MLPs with the cast of the layer that follows.

A row of `known_classes` names an MLP's parts. To verify it, the class's forward is called once on stand-ins that record its
operations; an MLP that computes anything else is skipped. The module itself isn't run and needs no values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockfp.kernels.switch import once

from ..modules.known_classes import FUNCTIONS, GELU, SILU, Derived, DoesNotFit, MLPParts, check_own_forward, derive, watched
from ..modules.layer_calls import fused_mlp, fused_product, sharing
from ..ops.layer.activations import Activation, Gating, activate

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
_RELU = "F.relu("


class _Value:
    """Records an expression of an MLP's input. Operations that known MLPs don't use raise DoesNotFit."""

    def __init__(self, text: str):
        self.text = text

    def __mul__(self, other: Any) -> _Value:
        if not isinstance(other, _Value):
            return NotImplemented
        # Multiplication is commutative to the bit, so the order of factors is normalized.
        return _Value(" * ".join(sorted((self.text, other.text))))

    def chunk(self, chunks: int, dim: int = 0) -> list[_Value]:
        if (chunks, dim) != (2, -1):
            raise DoesNotFit(f"its forward calls chunk({chunks}, dim={dim})")
        return [_Value(f"{self.text}.chunk(2, dim=-1)[{half}]") for half in range(2)]

    def square(self) -> _Value:
        if not self.text.startswith(_RELU):
            raise DoesNotFit(f"its forward squares {self.text}")
        return _Value(f"F.relu2({self.text.removeprefix(_RELU)}")

    def pow(self, exponent: Any) -> _Value:
        if exponent != 2:
            raise DoesNotFit(f"its forward raises {self.text} to {exponent}")
        return self.square()

    __pow__ = pow

    def __getattr__(self, name: str) -> Any:
        raise DoesNotFit(f"its forward asks for {self.text}.{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Value:
        options = {name: value for name, value in (kwargs or {}).items() if (name, value) != ("inplace", False)}
        for name, function, wanted in (
            ("silu", F.silu, {}),
            ("gelu", F.gelu, {}),
            ("gelu_tanh", F.gelu, {"approximate": "tanh"}),
            ("relu", F.relu, {}),
        ):
            if func is function and options == wanted and len(args) == 1:
                return _Value(f"F.{name}({args[0].text})")
        if func is torch.square and not options:
            return args[0].square()
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise DoesNotFit(f"its forward calls {getattr(func, '__name__', func)}({given})")


class _Layers:
    """Stands in for an MLP: calls of its layers are recorded, any other attribute raises DoesNotFit."""

    def __init__(self, names: Container[str | None], training: bool):
        self._names, self.training = names, training

    def __getattr__(self, name: str) -> Callable[[_Value], _Value]:
        if name not in self._names:
            raise DoesNotFit(f"its forward asks for self.{name}")
        return lambda x: _Value(f"{name}({x.text})")


_TRANSFORMERS = "transformers.activations"


class Parts(NamedTuple):
    """Names of an MLP's modules, None for absent ones.

    Without `up` there is no multiplication; `gate` is then the layer before the activation. `halves` says that the layer `gate`
    computes gate and up side by side. `function` is the activation if no module `act` computes it.
    """

    down: str
    gate: str
    up: str | None
    act: str | None
    halves: bool
    function: Activation | None = None

    @property
    def formula(self) -> str:
        """The expression that the forward should return for the input "x"."""
        first, up = _Value(f"{self.gate}(x)"), None if self.up is None else _Value(f"{self.up}(x)")
        if self.halves:
            first, up = first.chunk(2, -1)
        made = _Value(f"{self.act or f'F.{self.function}'}({first.text})")
        return f"{self.down}({(made if up is None else made * up).text})"


def parts_of(mlp: nn.Module, row: MLPParts) -> Parts:
    """Returns an MLP's parts by a row; raises DoesNotFit if they don't exist or the forward computes something else."""
    halves = row.gate == row.up
    up = None if halves or row.gate is None else row.up
    act = row.activation if row.activation in mlp._modules else None
    function: Any = row.activation if act is None else None
    names = [name for name in (row.down, row.gate or row.up, up, act) if name is not None]
    for name in names:
        if not isinstance(mlp._modules.get(name), nn.Module) or hasattr(type(mlp), name):
            raise DoesNotFit(f"it has no module {name!r}")
    if act is None and function not in ACTIVATIONS:
        raise DoesNotFit(f"activation {function!r} is neither a module of it nor one of {', '.join(ACTIVATIONS)}")
    if act is not None and activation_of(mlp.get_submodule(act)) is None:
        known = "torch.nn.SiLU and GELU and transformers' own are, without hooks and with their own forward"
        raise DoesNotFit(f"{act}, {mlp._modules[act]}, isn't known to compute {', '.join(ACTIVATIONS)} ({known})")
    parts = Parts(row.down, row.gate or row.up, up, act, halves, function)
    reason = why_not(type(mlp).forward, parts)
    if reason is not None:
        raise DoesNotFit(reason)
    return parts


@once
def why_not(forward: Any, parts: Parts) -> str | None:
    """Returns how a class's forward differs from `parts.formula`, in training or evaluation; None if it doesn't."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return "its forward is wrapped by another function"
    for training in (True, False):
        try:
            y = forward(_Layers(parts[:4], training), _Value("x"))
        except DoesNotFit as error:
            return str(error)
        except Exception as error:
            return f"its forward does more than call these ({type(error).__name__}: {error})"
        if not isinstance(y, _Value) or y.text != parts.formula:
            return f"its forward returns {y.text if isinstance(y, _Value) else y}, not {parts.formula}"
    return None


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the name of the function that a module computes; None if it is unknown or hooks observe the module."""
    if watched(module) or (F.gelu, F.silu, F.relu) != FUNCTIONS:
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
    if cls.__name__ in ("SiLUActivation", "ReLUSquaredActivation"):
        return "silu" if cls.__name__ == "SiLUActivation" else "relu2"
    if cls.__name__ not in ("GELUActivation", "GELUTanh"):
        return None
    # transformers' classes may replace F.gelu with a formula of their own.
    act: Any = module.act
    if act is F.gelu:
        return "gelu"
    tanh = (
        isinstance(act, functools.partial) and act.func is F.gelu and not act.args and act.keywords == {"approximate": "tanh"}
    )
    return "gelu_tanh" if tanh else None


def fused_class(mlp: nn.Module, row: MLPParts) -> type[FusedMLP]:
    """Returns the class that replaces an MLP's class; raises DoesNotFit if the row doesn't describe the MLP."""
    check_own_forward(mlp)
    return _derived(type(mlp), parts_of(mlp, row))


class FusedMLP(Derived, nn.Module):
    """Base of the classes of `fused_class`: quantizes the activation's output as it is computed, with the same bits.

    `known` is the forward of the original class at conversion. If that has been replaced since, the replacement runs unfused.
    """

    known: ClassVar[Any]
    parts: ClassVar[Parts]

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        if self.made_of.forward is not self.known or len(inputs) != 1 or options or (F.gelu, F.silu, F.relu) != FUNCTIONS:
            return self.made_of.forward(self, *inputs, **options)
        (x,) = inputs
        parts = self.parts
        modules: Any = self._modules
        down, gate = modules[parts.down], modules[parts.gate]
        up, act = None if parts.up is None else modules[parts.up], None if parts.act is None else modules[parts.act]
        activation = parts.function if act is None else activation_of(act)
        gating = None if activation is None else Gating(activation, "halves" if parts.halves else "apart")
        if gating is not None:
            y = fused_mlp((gate,) if up is None else (gate, up), down, x, gating)
            if y is not None:
                return y
        with sharing((gate, up)):
            first = gate(x)
            second = None if up is None else up(x)
        if gating is not None:
            y = fused_product(down, first, second, gating)
            if y is not None:
                return y
        if parts.halves:
            first, second = first.chunk(2, dim=-1)
        made = act(first) if act is not None else activate(first, None, parts.function or "")
        return down(made if second is None else made * second)


@once
def _derived(cls: type[nn.Module], parts: Parts) -> type[FusedMLP]:
    members = {"known": staticmethod(cls.forward), "parts": parts, "rebuild": staticmethod(_rebuild_mlp)}
    return derive(cls, "Fused", (FusedMLP,), **members, rebuilt_from=(cls, *parts))


def _rebuild_mlp(cls: type[nn.Module], *parts: Any) -> nn.Module:
    made: Any = cls if why_not(cls.forward, Parts(*parts)) else _derived(cls, Parts(*parts))
    return made.__new__(made)

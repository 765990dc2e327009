"""Classes of other libraries by qualified name, and the fusions that `convert` applies to them.

No library is imported for this; names come from a module's class and its bases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class MLPParts:
    """Names the parts of an MLP that returns down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    A value of `convert(.., fuse=)`, which verifies it by calling the class's `forward` on stand-ins that record its operations.

    Attributes:
        up: the layer whose output is multiplied with the gate's; without a gate, the layer before the activation.
        down: the last layer.
        activation: the module that computes it; or "silu", "gelu", "gelu_tanh" (tanh approximation) or "relu2" (squared ReLU)
            if `forward` calls the function of `torch.nn.functional`.
        gate: the layer before the activation. Equal to `up` if one layer computes both, the gate first.
    """

    up: str
    down: str
    activation: str
    gate: str | None = None


@dataclass(frozen=True, init=False)
class SharedInput:
    """Names layers that read one tensor, such as query, key and value projections; the tensor is cast once.

    A value of `convert(.., fuse=)`. You promise, since nothing can verify it, that nothing writes into the input tensor between
    the first and the last of these layers' calls.

    Attributes:
        layers: their names.
    """

    layers: tuple[str, ...]

    def __init__(self, *layers: str):
        object.__setattr__(self, "layers", layers)

    def __repr__(self) -> str:
        return f"SharedInput({', '.join(map(repr, self.layers))})"


Row = MLPParts | SharedInput


class DoesNotFit(ValueError):
    """A row doesn't describe a module; the message says why."""


_MLPS: tuple[Row, ...] = (
    MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn"),
    MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="activation_fn"),
    MLPParts(gate="gate_up_proj", up="gate_up_proj", down="down_proj", activation="activation_fn"),
    MLPParts(gate="input_linear", up="input_linear", down="output_linear", activation="activation"),
    MLPParts(gate="w1", up="w3", down="w2", activation="silu"),
    MLPParts(up="up_proj", activation="act_fn", down="down_proj"),
    MLPParts(up="fc1", activation="activation_fn", down="fc2"),
    MLPParts(up="fc1", activation="activation", down="fc2"),
    MLPParts(up="fc1", activation="act_fn", down="fc2"),
    MLPParts(up="fc1", activation="act", down="fc2"),
    MLPParts(up="lin1", activation="act", down="lin2"),
    MLPParts(up="linear1", activation="activation", down="linear2"),
    MLPParts(up="linear1", activation="gelu", down="linear2"),
    MLPParts(up="linear_1", activation="act", down="linear_2"),
    MLPParts(up="linear_fc1", activation="act_fn", down="linear_fc2"),
    MLPParts(up="linear_in", activation="act", down="linear_out"),
    MLPParts(up="dense1", activation="intermediate_act_fn", down="dense2"),
    MLPParts(up="dense1", activation="adapter_act_fn", down="dense2"),
    MLPParts(up="dense_h_to_4h", activation="act", down="dense_4h_to_h"),
    MLPParts(up="proj_out", activation="activation_fn", down="vision_head"),
    MLPParts(up="in_layer", activation="silu", down="out_layer"),
)

KNOWN: dict[str, tuple[Row, ...]] = {
    "transformers.models.": (
        *_MLPS,
        SharedInput("q_proj", "k_proj", "v_proj"),
        SharedInput("query", "key", "value"),
        SharedInput("q", "k", "v"),
    ),
    "transformers_modules.": _MLPS,
    "torchtitan.models.": (*_MLPS, SharedInput("wq", "wk", "wv")),
}
"""Rows for classes by prefix of their qualified names; a row applies if the class has all parts that it names.

MLP rows are verified like a user's, so a class that computes something else is skipped. `SharedInput` rows rely on these
libraries' sources, where no such class writes between the layers; code that transformers downloads (`transformers_modules`) is
unknown.
"""

CONV1D = "transformers.pytorch_utils.Conv1D"
TRANSFORMERS_MOE = "transformers.integrations.moe"
"""File with the forward that transformers' decorator gives experts, and with their default gate."""
TITAN_EXPERTS = "torchtitan.models.common.moe.GroupedExperts"
TITAN_ROUTER = "torchtitan.models.common.moe.TokenChoiceTopKRouter"
PEFT_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"


def name_of(cls: type) -> str:
    """Returns a class's qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def base_named(cls: type, name: str) -> type | None:
    """Returns the class, or base class, with this qualified name; None if there is none."""
    return next((base for base in cls.__mro__ if name_of(base) == name), None)


def rows_of(cls: type[nn.Module]) -> tuple[Row, ...]:
    """Returns the rows for the library class that defines this class's forward; () if the forward was replaced."""
    own = next(base for base in cls.__mro__ if "forward" in vars(base))
    name = name_of(own)
    rows = next((rows for place, rows in KNOWN.items() if name.startswith(place)), ())
    return rows if rows and forward_of(own) is not None else ()


def check_own_forward(module: nn.Module) -> None:
    """Raises DoesNotFit if a module has its own forward or parametrizations."""
    if "forward" in vars(module):
        raise DoesNotFit("its forward was replaced in the module")
    if parametrize.is_parametrized(module):
        raise DoesNotFit("it has parametrizations")


# ---- derived classes


class Derived:
    """Base of the classes that `convert` derives from other libraries' classes; pickles and copies refer to those.

    Attributes:
        made_of: the library's class, which is also a base.
        rebuild: a function that creates an empty module from `rebuilt_from`.
        rebuilt_from: its arguments. Another version of the library may have another forward, which is then used.
    """

    made_of: type[nn.Module]
    rebuild: ClassVar[Callable[..., nn.Module]]
    rebuilt_from: ClassVar[tuple[Any, ...]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if "made_of" not in vars(type(self)):
            # FSDP2 and others derive classes from this one.
            return super().__reduce_ex__(protocol)  # pyright: ignore[reportReturnType]
        return self.rebuild, self.rebuilt_from, self.__getstate__()


def derive(made_of: type[nn.Module], prefix: str, bases: tuple[type, ...], **members: Any) -> Any:
    """Creates a class derived from `bases` and a library's class, and named after the latter."""
    members = {"rebuilt_from": (made_of,)} | members | {"made_of": made_of, "__module__": made_of.__module__}
    return type(f"{prefix}{made_of.__name__}", (*bases, made_of), members)


# ---- forwards


def forward_of(cls: type[nn.Module]) -> Any:
    """Returns the forward that a library's class came with, including its own decorators; None if it was replaced."""
    forward: Any = cls.forward
    library = cls.__module__.partition(".")[0]
    own = inspect.unwrap(forward, stop=lambda function: module_of(function).partition(".")[0] != library)
    return forward if module_of(own) == cls.__module__ else None


def module_of(function: Any) -> str:
    """Returns the name of the module that defines a function; unlike `__module__`, wrappers don't copy it."""
    return getattr(function, "__globals__", {}).get("__name__", "")


LINEAR, SEQUENTIAL = forward_of(nn.Linear), forward_of(nn.Sequential)
GELU, SILU = forward_of(nn.GELU), forward_of(nn.SiLU)
FUNCTIONS = F.gelu, F.silu, F.relu
"""torch's activation functions at import, before anyone patches them."""


def watched(*modules: nn.Module) -> bool:
    """Returns whether hooks (a module's or global ones) or an assigned forward observe calls of any of these modules."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return True
        if "forward" in module.__dict__:
            return True
    of_all = hooks_of_all
    before, after = of_all._global_forward_pre_hooks, of_all._global_forward_hooks
    return bool(before or after or of_all._global_backward_hooks or of_all._global_backward_pre_hooks)

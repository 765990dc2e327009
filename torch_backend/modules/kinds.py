"""The layers that `convert` can quantize where they stand, their new classes, and why others stay."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from blockfp.kernels.once import once

from .linear import Linear
from .quantized_layer import QuantizedLayer
from .transposed_linear import TransposedLinear

HOOKS_THAT_MAKE_WEIGHTS = ("WeightNorm", "SpectralNorm", "BasePruningMethod")
"""Names of torch's hooks that compute a weight of other parameters before each forward."""


def base_kind(layer: nn.Module) -> type[Linear] | type[TransposedLinear] | None:
    """Returns blockfp's layer that multiplies as this one does; None where there is none.

    That is `Linear` for `torch.nn.Linear` and its subclasses with its own forward, and `TransposedLinear` for transformers'
    `Conv1D`, likewise. Whether the weight is one that can be quantized is not asked.
    """
    if isinstance(layer, QuantizedLayer | NonDynamicallyQuantizableLinear):
        return None
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return Linear
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if conv1d is not None and isinstance(layer, conv1d) and type(layer).forward is conv1d.forward:
        return TransposedLinear
    return None


def why_not(module: nn.Module, param: Tensor) -> str:
    """Returns why a parameter of a module without a `base_kind` stays as it is."""
    name = type(module).__name__
    if isinstance(module, NonDynamicallyQuantizableLinear | nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention multiplies with its weights itself; bfp.MultiheadAttention has quantized ones"
    if isinstance(module, nn.Linear):
        return f"a {name} has a forward of its own, not torch.nn.Linear's"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return EMBEDDING
    if type(module).__module__.startswith("torch."):
        return f"a {name} is no linear layer"
    held = f"a {name} has it as a parameter of its own, in no layer"
    return f"{held}; bfp.GroupedLinear holds experts" if param.ndim == 3 and param.shape[0] > 1 else held


EMBEDDING = "an embedding is looked up, not multiplied"


def check_layer(path: str, layer: nn.Module, kind: type[Linear] | type[TransposedLinear]) -> None:
    """Checks that a layer that has a kind can become it, with nothing of it lost.

    Raises:
        ValueError: it can't; the reason names the layer.
    """
    where = f"{path!r}, a {type(layer).__name__}," if path else f"the {type(layer).__name__}"
    leave = "or leave the layer as it is with filter_fn="
    if parametrize.is_parametrized(layer):
        made: Any = layer.parametrizations
        each = ", ".join(f"{name}: {type(one).__name__}" for name in made for one in made[name])
        raise ValueError(
            f"{where} has parametrizations ({each}), which compute its weight of other parameters: call "
            f"torch.nn.utils.parametrize.remove_parametrizations first, {leave}"
        )
    for hook in layer._forward_pre_hooks.values():
        names = {cls.__name__ for cls in type(hook).__mro__}
        if names.intersection(HOOKS_THAT_MAKE_WEIGHTS):
            raise ValueError(
                f"{where} has a {type(hook).__name__} hook, which computes its weight of other parameters before each forward: "
                f"remove it first (torch.nn.utils.remove_weight_norm, .. or prune.remove), {leave}"
            )
    weight = layer._parameters.get("weight")
    if not isinstance(weight, Tensor):
        raise ValueError(f"{where} has no parameter named weight: make it one, {leave}")
    if isinstance(weight, nn.UninitializedParameter):
        raise ValueError(f"{where} has no shape yet: run the model once before it is converted, {leave}")
    if type(weight) is not nn.Parameter:
        raise ValueError(
            f"the weight of {where} is a {type(weight).__name__}: convert the model before it is sharded or its weights are "
            f"replaced, {leave}"
        )
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise ValueError(f"the weight of {where} has hooks, which a new parameter loses: register them after convert, {leave}")
    bound = [name for name, value in vars(layer).items() if getattr(value, "__self__", None) is layer or name == "forward"]
    if bound:
        raise ValueError(
            f"{where} has methods put into it ({', '.join(bound)}), which would go on calling the layer as it was: convert the "
            f"model before they are (accelerate's hooks, torchtitan's parallelize), {leave}"
        )
    taken = sorted(
        _names(kind) & {*vars(layer), *layer._buffers, *layer._parameters, *layer._modules, *_own(type(layer), kind)}
    )
    if taken:
        raise ValueError(f"{where} has {', '.join(taken)}, which are names of a {kind.__name__}'s: rename them, {leave}")


@cache
def _names(kind: type[Linear] | type[TransposedLinear]) -> frozenset[str]:
    """Returns the names that a kind has and its torch base lacks."""
    like = kind(1, 1, recipe="mxfp8", device="meta")
    plain = nn.Linear(1, 1, device="meta")
    return frozenset({*vars(like), *like._buffers, *dir(kind)} - {*vars(plain), *dir(nn.Linear)})


def _own(cls: type, kind: type[QuantizedLayer]) -> set[str]:
    """Returns the names that a class adds to torch's."""
    return {name for base in cls.__mro__ if base not in kind.__mro__ for name in vars(base)}


class Derived:
    """Base of the classes of `quantized_class`: they are pickled, and copied, by the class that they are made of."""

    made_of: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if "made_of" not in vars(type(self)):
            # FSDP2 derives a class from this one, and others may.
            return super().__reduce_ex__(protocol)  # pyright: ignore[reportReturnType]
        return _rebuild_layer, (self.made_of,), self.__getstate__()


def quantized_class(cls: type[nn.Module], kind: type[QuantizedLayer]) -> type[QuantizedLayer]:
    """Returns the new class of a layer: the kind itself for torch's own, else a class derived from both, the kind first."""
    return kind if cls is nn.Linear else _derived(cls, kind)


@once
def _derived(cls: type[nn.Module], kind: type[QuantizedLayer]) -> type[QuantizedLayer]:
    members: dict[str, Any] = {"made_of": cls, "__module__": cls.__module__}
    reset: Any = getattr(cls, "reset_parameters", None)
    if reset is not None and reset is not nn.Linear.reset_parameters:

        def reset_parameters(self: Any) -> None:
            reset(self)
            self.reset_buffers()

        members["reset_parameters"] = reset_parameters
    return type(f"Quantized{cls.__name__}", (Derived, kind, cls), members)


def _rebuild_layer(cls: type[nn.Module]) -> nn.Module:
    kind = Linear if issubclass(cls, nn.Linear) else TransposedLinear
    made = quantized_class(cls, kind)
    return made.__new__(made)

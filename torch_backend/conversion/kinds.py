"""Decides which layers `convert` can quantize, derives their new classes, and explains why others are skipped."""

from __future__ import annotations

import functools
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from blockfp.formats import Format
from blockfp.kernels.switch import once

from ..modules import model_names
from ..modules.experts import OWN, PRODUCT, Experts
from ..modules.known_classes import CONV1D, LINEAR, PEFT_LAYER, TITAN_ROUTER, Derived, base_named, derive, forward_of
from ..modules.linear import Linear, TransposedLinear
from ..modules.quantized_layer import QuantizedLayer
from ..quantized_tensor.tensor import DTYPES
from ..weights.module_state import check_free
from .experts_kinds import KINDS, experts_kind

Kind = type[Linear] | type[TransposedLinear] | type[Experts]
"""The class that a layer becomes."""

HOOKS_THAT_MAKE_WEIGHTS = ("WeightNorm", "SpectralNorm", "BasePruningMethod")
"""Names of torch's hooks that compute a weight from other parameters before each forward."""

ROUTERS = ("Router", "Gate", "Gating")
"""Name endings of transformers' router classes."""


def base_kind(layer: nn.Module) -> Kind | None:
    """Returns blockfp's counterpart of a layer, or None; doesn't check whether the weight can be quantized.

    `Linear` for `torch.nn.Linear` and subclasses that use its forward, `TransposedLinear` likewise for transformers' `Conv1D`,
    and a class of `experts_kinds` for experts.
    """
    if isinstance(layer, QuantizedLayer | NonDynamicallyQuantizableLinear):
        return None
    if isinstance(layer, nn.Linear) and type(layer).forward is LINEAR:
        return Linear
    conv1d: Any = base_named(type(layer), CONV1D)
    if conv1d is not None and type(layer).forward is forward_of(conv1d):
        return TransposedLinear
    return experts_kind(layer)


def adapter_layers(model: nn.Module) -> set[nn.Module]:
    """Returns the layers of PEFT's adapters, which are trained next to quantized weights."""
    adapted: list[Any] = [module for module in model.modules() if base_named(type(module), PEFT_LAYER)]
    held = (vars(module)["_modules"].get(name) for module in adapted for name in module.adapter_layer_names)
    return {layer for adapters in held if adapters is not None for layer in adapters.modules()}


def router_modules(model: nn.Module) -> set[nn.Module]:
    """Returns the router modules of a transformers or torchtitan model with their children, which are not quantized.

    They are the classes whose router logits a transformers model records, and torchtitan's routers. A rounded logit may choose
    another expert, which costs more than a quantized product saves.
    """
    named: set[str] = set()
    for module in model.modules():
        recorded: Any = getattr(type(module), "_can_record_outputs", None) or {}
        found = recorded.get("router_logits", []) if isinstance(recorded, dict) else []
        for one in found if isinstance(found, list) else [found]:
            cls = getattr(one, "target_class", one)
            named.add(getattr(cls, "__name__", ""))
    # A few models declare the whole block, which also returns the logits.
    named = {name for name in named if name.endswith(ROUTERS)}
    routers = [
        module
        for module in model.modules()
        if base_named(type(module), TITAN_ROUTER) or any(cls.__name__ in named for cls in type(module).__mro__)
    ]
    return {module for router in routers for module in router.modules()}


def weight_names(kind: Kind, layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that a layer's kind quantizes."""
    found = kind.found_in(layer) if issubclass(kind, Experts) else None
    return ("weight",) if found is None else tuple(found[0])


def quantized_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a converted module's quantized parameters; () for any other module."""
    if isinstance(module, Experts):
        return tuple(module.biases)
    return ("weight",) if isinstance(module, QuantizedLayer) else ()


def input_formats(model: nn.Module) -> dict[str, Format]:
    """Returns the formats in which layers quantize their inputs, by the weight's name, under its first name if it is tied.

    A layer with delayed scaling, whose scales are of earlier steps, isn't in it.
    """
    found: dict[int, tuple[str, Format | None]] = {}
    for path, module in model_names.modules(model).items():
        for own in quantized_names(module):
            layer: Any = module.product_of(own) if isinstance(module, Experts) else module
            recipe, name = layer.linear_recipe, f"{path}.{own}" if path else own
            found.setdefault(id(module.get_parameter(own)), (name, None if recipe.delayed else recipe.input.format))
    return {name: format for name, format in found.values() if format is not None}


def bias_names(module: nn.Module) -> tuple[str | None, ...]:
    """Returns the names of a module's biases, which have two axes for experts."""
    if isinstance(module, Experts):
        return tuple(module.biases.values())
    if isinstance(module, QuantizedLayer | nn.Linear):
        return ("bias",)
    kind = experts_kind(module)
    found = None if kind is None else kind.found_in(module)
    return () if found is None else tuple(found[0].values())


def why_not(module: nn.Module, param: Tensor) -> str:
    """Returns the reason why a parameter of a module without a `base_kind` isn't quantized."""
    name = type(module).__name__
    if isinstance(module, NonDynamicallyQuantizableLinear | nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention multiplies with its weights itself; bfp.MultiheadAttention has quantized ones"
    if isinstance(module, nn.Linear):
        return f"a {name} has its own forward, not torch.nn.Linear's"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return EMBEDDING
    if type(module).__module__.startswith("torch."):
        return f"a {name} is not a linear layer"
    held = f"a {name} has it as its own parameter, outside of any layer"
    return f"{held}; bfp.GroupedLinear holds experts" if param.ndim == 3 and param.shape[0] > 1 else held


EMBEDDING = "an embedding is looked up, not multiplied"
ROUTER = "it chooses experts, and routers stay in high precision"


def check_layer(path: str, layer: nn.Module, kind: Kind) -> None:
    """Raises ValueError, or TypeError for a dtype, naming the layer, if it can't become its kind without losing something."""
    where = f"{path!r}, a {type(layer).__name__}," if path else f"the {type(layer).__name__}"
    leave = "or exclude the layer by filter_fn="
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
    for name in weight_names(kind, layer):
        _check_weight(where, name, layer._parameters.get(name), leave)
    bound = [name for name, value in vars(layer).items() if getattr(value, "__self__", None) is layer or name == "forward"]
    if bound:
        raise ValueError(
            f"{where} has methods put into it ({', '.join(bound)}), which would keep calling the layer as it was: "
            f"convert the model before they are added (accelerate's hooks, torchtitan's parallelize), {leave}"
        )
    taken = sorted(
        _names(kind) & {*vars(layer), *layer._buffers, *layer._parameters, *layer._modules, *_own(type(layer), kind)}
    )
    if taken:
        raise ValueError(f"{where} has {', '.join(taken)}, which are names of a {kind.__name__}'s: rename them, {leave}")


def _check_weight(where: str, name: str, weight: Any, leave: str) -> None:
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"{where} has no parameter named {name}: make it one (of a FullyShardedDataParallel: convert the model first, and "
            f"shard it by fully_shard), {leave}"
        )
    if isinstance(weight, nn.UninitializedParameter):
        raise ValueError(f"{where} has no shape yet: run the model once before it is converted, {leave}")
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"the {name} of {where} must be one of {', '.join(map(str, DTYPES))}, got {weight.dtype}: cast the model first, "
            f"{leave}"
        )
    if weight.layout is not torch.strided:
        raise ValueError(f"the {name} of {where} has layout {weight.layout}: make it a parameter of to_dense(), {leave}")
    if type(weight) is not nn.Parameter:
        raise ValueError(
            f"the {name} of {where} is a {type(weight).__name__}: convert the model before it is sharded or its weights are "
            f"replaced, {leave}"
        )
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise ValueError(f"the {name} of {where} has hooks, which a new parameter loses: register them after convert, {leave}")
    check_free(weight, f"the {name} of {where}", f"convert the model first, have it let go of the {name}, {leave}")


@cache
def _names(kind: Kind) -> frozenset[str]:
    """Returns the names that a kind has and its torch base lacks."""
    if issubclass(kind, Experts):
        products = {name + PRODUCT for name in kind.names}
        return frozenset({*OWN, *products, *dir(kind)} - {*kind.__annotations__, *dir(nn.Module), "forward", "extra_repr"})
    like = kind(1, 1, recipe="mxfp8", device="meta", dtype=torch.float32)
    plain = nn.Linear(1, 1, device="meta")
    return frozenset({*vars(like), *like._buffers, *dir(kind)} - {*vars(plain), *dir(nn.Linear)})


def _own(cls: type, kind: Kind) -> set[str]:
    """Returns the names that a class adds to torch's."""
    return {name for base in cls.__mro__ if base not in kind.__mro__ for name in vars(base)}


def quantized_class(cls: type[nn.Module], kind: Kind) -> type[QuantizedLayer] | type[Experts]:
    """Returns a layer's new class: `Linear` itself for torch's, else one derived from the kind and the layer's class."""
    return Linear if cls is nn.Linear else _derived(cls, kind)


@once
def _derived(cls: type[nn.Module], kind: Kind) -> type[QuantizedLayer] | type[Experts]:
    members: dict[str, Any] = {"rebuild": staticmethod(_rebuild_layer)}
    if not issubclass(kind, Linear):
        members["forward"] = _following(cls, kind)
    reset: Any = getattr(cls, "reset_parameters", None)
    if reset is not None and reset is not nn.Linear.reset_parameters:

        def reset_parameters(self: Any) -> None:
            reset(self)
            self.reset_buffers()

        members["reset_parameters"] = reset_parameters
    return derive(cls, "Quantized", (Derived, kind), **members)


def _following(cls: Any, kind: Any) -> Any:
    """Returns a derived class's forward: the kind's, or the class's own if one of its methods has been replaced since."""
    known = {name: getattr(cls, name) for name in (kind.seams if issubclass(kind, Experts) else ("forward",))}

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        for name, function in known.items():
            if getattr(cls, name) is not function:
                return cls.forward(self, *args, **options)
        return kind.forward(self, *args, **options)

    return forward


def _rebuild_layer(cls: type[nn.Module]) -> nn.Module:
    experts = next((kind for kind in KINDS if kind.knows(cls)), None)
    made = quantized_class(cls, experts or (Linear if issubclass(cls, nn.Linear) else TransposedLinear))
    return made.__new__(made)

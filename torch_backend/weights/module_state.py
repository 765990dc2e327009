"""Saves quantized parameters of modules as parts in state dicts, and loads parts or high-precision values.

A pre-hook removes a quantized weight's entries from the state dict before torch would copy them; a post-hook loads them after
FSDP2's hooks have put the sharded parameters back into the module.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockfp.files.names import FORMAT, LAYER_BUFFERS, SUFFIXES
from blockfp.formats import FORMATS

from ..distributed_internals import holder_of
from ..quantized_tensor import sharding
from ..quantized_tensor.sharding import placed
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from .cast_weight import CastWeight
from .loading import load_high_precision_
from .state_dict import REMEDY, check_format, empty_entry, format_of, load_parts_, stored, stored_parts, take_parts


class InParts(nn.Module):
    """A module whose quantized parameters appear as codes and scales in state dicts.

    This rank's parts of `weight` are attributes with their state dict names: `weight_codes`, `weight_scale`,
    `weight_tensor_scale` and `weight_format_FORMAT`. torch and accelerate look up each state dict name in the module. Classes
    with other quantized parameters add these attributes by `part_properties`.
    """


class RecipeState(nn.Module):
    """A module without parameters that holds a recipe's state for one weight of another module."""


def keep_in_parts(module: nn.Module) -> None:
    """Registers hooks that show quantized parameters as parts in state dicts and load parts or high-precision values.

    `load_state_dict` raises ValueError, leaving the parameter unchanged, for codes of another format and missing or misshapen
    parts. Under FSDP2 both state dict calls are collective. The module's `keep_init` says whether to keep original values.
    """
    loading = _LoadHooks()
    module.register_state_dict_post_hook(_show_parts)
    module.register_load_state_dict_pre_hook(loading.take_out)
    module.register_load_state_dict_post_hook(loading.load)


def part_properties(name: str) -> dict[str, property]:
    """Returns properties for reading this rank's parts of a quantized parameter by their state dict names."""
    return {name + suffix: _part(name, suffix) for suffix in (*SUFFIXES.values(), *(f"{FORMAT}{format}" for format in FORMATS))}


def _part(name: str, suffix: str) -> property:
    def part(module: InParts) -> Tensor:
        local = sharding.local_of(module.get_parameter(name))
        found = None
        if isinstance(local, QuantizedTensor):
            held = (local.codes, local.scales, local.tensor_scale)
            own = dict(zip(SUFFIXES.values(), held, strict=True)) | {f"{FORMAT}{local.format}": empty_entry(local, local.shape)}
            found = own.get(suffix)
        if found is None:
            raise AttributeError(f"{type(module).__name__} has no {name}{suffix}: its {name} is {local!r}")
        return found.detach()

    return property(part, doc=f"This rank's part of the quantized {name} that state dicts call {name}{suffix}.")


for _name, _property in part_properties("weight").items():
    setattr(InParts, _name, _property)


def state_names(module: nn.Module) -> set[str]:
    """Returns the names of all buffers that recipes may use in a module and its `RecipeState` children."""
    paths = [path for path, inner in module.named_modules() if inner is module or isinstance(inner, RecipeState)]
    return {f"{path}.{name}".removeprefix(".") for path in paths for name in chain(*LAYER_BUFFERS)}


def _show_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        local = sharding.local_of(param)
        if isinstance(local, CastWeight):
            state_dict[prefix + name] = placed(param, local.values.detach())
        elif isinstance(local, QuantizedTensor):
            for suffix, part in stored(param).items():
                state_dict[prefix + name + suffix] = part


@dataclass
class _Taken:
    """A module's own entries of a load, kept between the hooks.

    Attributes:
        prefix: prefix of the module's names.
        assign: whether new parameters are assigned.
        parts, values: parts by suffix, and high-precision values, by parameter name.
        not_missing: names of recipe buffers, which the state dict of an unquantized model lacks.
    """

    prefix: str = ""
    assign: bool = False
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    not_missing: set[str] = field(default_factory=set)


class _LoadHooks:
    """The load hooks of one module."""

    def __init__(self):
        self.taken = _Taken()

    def __reduce__(self):
        # There is nothing to copy or pickle between loads.
        return _LoadHooks, ()

    def take_out(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        self.taken = taken = _Taken(prefix, bool(metadata.get("assign_to_params_buffers")))
        buffers = {prefix + name for name in state_names(module)}
        plain = False
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            key = prefix + name
            local, value, theirs = sharding.local_of(param), state_dict.get(key), format_of(key, state_dict)
            if not isinstance(local, QuantizedTensor):
                if theirs is not None:
                    raise ValueError(f"{key} is {param.dtype} in the model and {theirs} in the loaded state: {REMEDY}")
                plain |= isinstance(value, Tensor)
                if isinstance(local, CastWeight) and _fits(key, param, value):
                    taken.values[name] = state_dict.pop(key)
                continue
            if taken.assign and (param.is_meta or sharding.mesh_of(param) is None):
                check_free(param, key, "load it with assign=False, or earlier")
            if not isinstance(value, Tensor):
                # If frozen parameters are ignored, torch removes only the weight's own name; remove its parts too.
                for suffix in [*SUFFIXES.values(), f"{FORMAT}{theirs}"]:
                    state_dict.pop(key + suffix, None)
            elif (copied := _copied(param, value)) is not None:
                del state_dict[key]
                if copied.ndim == param.ndim:
                    taken.values[name], plain = placed(param, copied), True
                else:
                    taken.parts[name] = _from_first_rank(param, key, state_dict)
            else:
                check_format(param, key, state_dict)
                if theirs is not None:
                    taken.parts[name] = take_parts(param, key, state_dict)
                    del state_dict[key]
                elif _fits(key, param, value):
                    taken.values[name], plain = state_dict.pop(key), True
        if plain and not any(name in state_dict for name in buffers):
            taken.not_missing = buffers

    def load(self, module: nn.Module, incompatible: Any) -> None:
        taken, self.taken = self.taken, _Taken()
        found = {taken.prefix + name for name in (*taken.parts, *taken.values)} | taken.not_missing
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in found]
        for name, values in taken.parts.items():
            param = module.get_parameter(name)
            if taken.assign and sharding.mesh_of(param) is None:
                become_tensor(param, nn.Parameter(_made_of(param, values), param.requires_grad))
                continue
            if taken.assign and param.is_meta:
                codes = sharding.local_of(values[SUFFIXES["codes"]])
                become_tensor(param, _made_for(param, param.dtype, codes.device))
            load_parts_(param, values, taken.prefix + name)
        for name, value in taken.values.items():
            param = module.get_parameter(name)
            if taken.assign and param.is_meta:
                become_tensor(param, _made_for(param, value.dtype, sharding.local_of(value).device))
            load_high_precision_(param, value, keep_init=getattr(module, "keep_init", True))


def _fits(key: str, param: Tensor, value: Any) -> bool:
    """Returns whether an entry has values for a parameter. torch copies or rejects other shapes and codes."""
    if not isinstance(value, Tensor) or value.shape != param.shape or isinstance(sharding.local_of(value), QuantizedTensor):
        return False
    if value.dtype not in DTYPES:
        raise TypeError(f"{key} must hold values in one of {', '.join(map(str, DTYPES))}, got {value.dtype}")
    if value.is_meta:
        raise ValueError(f"{key} is on the meta device in the loaded state, and has no values")
    return True


def _copied(param: Tensor, value: Tensor) -> Tensor | None:
    """Takes rank 0's values that torch copied into this rank's shard of a parameter, or returns None."""
    local: Any = sharding.local_of(value)
    copied = local.geometry.copied if isinstance(local, QuantizedTensor) else None
    if copied is not None:
        own: Any = sharding.local_of(param)
        local.geometry.copied = own.geometry.copied = None
    return copied


def _from_first_rank(param: Tensor, key: str, state_dict: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Broadcasts the parts that only rank 0's state dict has; torch's own broadcast handles parameters only."""
    problem: list[str | None] = [None]
    values: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        try:
            check_format(param, key, state_dict)
            values = take_parts(param, key, state_dict)
            for part in stored_parts(param):
                value = values[SUFFIXES[part.name]]
                if (tuple(value.shape), value.dtype) != (part.shape, getattr(torch, part.dtype)):
                    problem[0] = f"{key}{SUFFIXES[part.name]} must be {part.dtype} of shape {part.shape}, got {value.dtype} of "
                    problem[0] += f"{tuple(value.shape)}"
        except ValueError as error:
            problem[0] = str(error)
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ValueError(problem[0])
    mesh, device = sharding.mesh_of(param), sharding.local_of(param).device
    received = {}
    for part in stored_parts(param):
        suffix = SUFFIXES[part.name]
        whole = torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device if mesh is None else mesh.device_type)
        if values:
            whole.copy_(values[suffix])
        dist.broadcast(whole, src=0)
        received[suffix] = whole.to(device)
    return received


def _made_of(param: Tensor, values: dict[str, Tensor]) -> QuantizedTensor:
    """Builds an unsharded parameter from these very parts."""
    q: Any = param
    found = [values.get(SUFFIXES[part.name]) for part in stored_parts(param)]
    made = QuantizedTensor.from_parts(*found, format=q.format, columns=q.shape[-1], dtype=q.dtype, origin=q.origin)  # pyright: ignore
    made.geometry.loaded = "codes"
    return made


def _made_for(param: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Allocates a meta parameter with this dtype on this device."""
    local = sharding.local_of(param).detach()
    return nn.Parameter(placed(param, torch.empty_like(local.to(dtype), device=device)), param.requires_grad)


# ---- replacing parameters in place


def check_free(param: Tensor, name: str, remedy: str) -> None:
    """Raises ValueError if something holds the parameter that `become_tensor` would break."""
    holder = holder_of(param)
    if holder is not None:
        raise ValueError(f"{name} is held by {holder}, and can't be replaced without its knowledge: {remedy}")


def become_tensor(param: Tensor, new: Tensor) -> None:
    """Turns a parameter into `new` in place; its gradient and other libraries' attributes (`vars(param)`) are kept.

    The object's identity doesn't change, so optimizers and other modules that hold it see the new tensor. Call `check_free`
    first; don't use `new` afterwards.
    """
    gradient = param.grad
    torch.utils.swap_tensors(param, new)
    for mark, value in vars(new).items():
        vars(param).setdefault(mark, value)
    param.grad = gradient


def become(thing: nn.Module | Tensor, cls: type) -> None:
    """Changes an object's class, as torch's `fully_shard` does; its identity, and so everything that refers to it, is kept.

    The constructor of `cls` isn't run. Raises TypeError if the two classes have different memory layouts.
    """
    changed: Any = thing
    changed.__class__ = cls


class ReplacedParameter(Tensor):
    """A parameter that was replaced: every operation on it raises.

    It can't become a DTensor, whose slots differ.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            "this parameter is no longer the model's: parallelize has replaced it, and training it would have no "
            "effect. Build optimizers, and whatever else uses model.parameters(), after parallelize"
        )

    def __repr__(self, **_: Any) -> str:
        return "ReplacedParameter()"


def retire(param: Tensor) -> None:
    """Makes every operation on a replaced parameter raise."""
    become(param, ReplacedParameter)

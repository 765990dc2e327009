"""Finds the modules for which `convert` derives fused classes: activation with cast, or one cast shared by several layers."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..modules.known_classes import SEQUENTIAL, DoesNotFit, MLPParts, Row, SharedInput, base_named, name_of, rows_of
from ..modules.layer_calls import SharesInput, fused_product, sharing_class
from ..modules.linear import Linear
from ..modules.model_names import named_modules
from ..modules.quantized_layer import QuantizedLayer
from ..ops.layer.activations import Gating
from .gated_mlp import FusedMLP, activation_of, fused_class

Fuse = Mapping[type[nn.Module] | str, Row]
"""Rows by class, or by the class's qualified name."""


def fused_classes(model: nn.Module, made: Container[nn.Module], fuse: Fuse | None) -> dict[nn.Module, type[nn.Module]]:
    """Maps each module that has a row and quantized layers to its fused class.

    `made` holds the layers about to be quantized; `fuse` takes precedence over `known_classes.KNOWN`. The model isn't changed.
    Raises TypeError if `fuse` isn't a mapping of classes to rows, and ValueError if a row doesn't fit a module or no module has
    its class.
    """
    asked = {_name_of_key(key): _checked(row) for key, row in _items(fuse)}
    found: dict[nn.Module, type[nn.Module]] = dict.fromkeys(sequentials(model, made), FusedSequential)
    missing = set(asked)
    for path, module in named_modules(model):
        cls = type(module)
        if isinstance(module, FusedMLP | SharesInput):
            missing -= {name for name in missing if base_named(cls, name)}
            continue
        name = next((name for name in asked if _forward_is_of(cls, name)), None)
        for row in rows_of(cls) if name is None else (asked[name],):
            try:
                new = fused_class(module, row) if isinstance(row, MLPParts) else sharing_class(module, row)
            except DoesNotFit as error:
                if name is None:
                    continue
                raise ValueError(f"fuse: {path!r}, a {cls.__name__}, doesn't fit {row}: {error}") from None
            layers = (row.down,) if isinstance(row, MLPParts) else row.layers
            children = (module.get_submodule(layer) for layer in layers)
            if all(isinstance(child, QuantizedLayer) or child in made for child in children):
                found[module] = new
            break
        missing.discard(name or "")
    if missing:
        raise ValueError(
            f"fuse: the model has no module with the forward of {', '.join(sorted(missing))}: name the class that the forward "
            "is written in, with its module"
        )
    return found


def _items(fuse: Fuse | None) -> list[tuple[type[nn.Module] | str, Row]]:
    if fuse is not None and not isinstance(fuse, Mapping):
        raise TypeError(f"fuse must be a mapping of classes to bfp.MLPParts or bfp.SharedInput, got {type(fuse).__name__}")
    return list((fuse or {}).items())


def _name_of_key(key: type[nn.Module] | str) -> str:
    if isinstance(key, type) and issubclass(key, nn.Module):
        return name_of(key)
    if isinstance(key, str):
        return key
    raise TypeError(f"a key of fuse must be a module class or its qualified name, got {key!r}")


def _checked(row: Row) -> Row:
    if not isinstance(row, MLPParts | SharedInput):
        raise TypeError(f"a value of fuse must be a bfp.MLPParts or a bfp.SharedInput, got {row!r}")
    names = row.layers if isinstance(row, SharedInput) else (row.up, row.down, row.activation, row.gate or row.up)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"fuse: names of modules must be strings, got {row}")
    if len(names) < 2:
        raise ValueError(f"fuse: SharedInput takes the names of two layers or more, got {row}")
    return row


def _forward_is_of(cls: type[nn.Module], name: str) -> bool:
    """Returns whether a class inherits its forward from the class of this name."""
    base = base_named(cls, name)
    return base is not None and cls.forward is base.forward  # pyright: ignore[reportAttributeAccessIssue]


class FusedSequential(nn.Sequential):
    """An `nn.Sequential` that fuses each activation with the `Linear` after it, with the same bits. Calls hooked modules."""

    def forward(self, input: Any) -> Any:
        if nn.Sequential.forward is not SEQUENTIAL:
            return nn.Sequential.forward(self, input)
        modules = list(self)
        place = 0
        while place < len(modules):
            y = None
            if place + 1 < len(modules) and isinstance(modules[place + 1], Linear) and isinstance(input, Tensor):
                y = _at_once(modules[place], modules[place + 1], input)
            input, place = (modules[place](input), place + 1) if y is None else (y, place + 2)
        return input


def _at_once(first: nn.Module, layer: nn.Module, x: Tensor) -> Tensor | None:
    """Returns layer(first(x)) with `first` and the layer's cast in one op; None if both must be called."""
    activation = activation_of(first)
    return None if activation is None else fused_product(layer, x, None, Gating(activation, "apart"))


def sequentials(model: nn.Module, made: Container[nn.Module]) -> Iterator[nn.Sequential]:
    """Yields plain `nn.Sequential` modules (no subclasses) in which a known activation precedes a layer in `made`."""
    for module in model.modules():
        if (
            type(module) is not nn.Sequential
            or nn.Sequential.forward is not SEQUENTIAL
            or "forward" in vars(module)
            or parametrize.is_parametrized(module)
        ):
            continue
        modules = list(module)
        if any(layer in made and activation_of(first) is not None for first, layer in itertools.pairwise(modules)):
            yield module

"""`convert`: a model's linear layers become quantized ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from blockfp import recipes
from blockfp.recipes import ByPath, Compute, Recipe

from .linear import Linear
from .quantized_layer import Weights


def convert(
    model: nn.Module,
    recipe: Recipe | str | ByPath,
    filter: Callable[[str, nn.Module], bool] | None = None,
    *,
    weights: Weights = "quantized",
    compute: Compute = "quantized",
    keep_init: bool = True,
) -> nn.Module:
    """Replaces every `torch.nn.Linear` of a model by a `Linear` with its values, in place.

    Call it before `fully_shard`, before compiling, and before building the optimizer, which must see the new parameters.

    Args:
        model: any module, on the meta device too.
        recipe: a `Recipe`, its name, or a function from the layer's path ("layers.0.up") to one of these, or to None for a
            layer that stays as it is (`blockfp.recipes.by_operand` makes one of a function that gives formats).
        filter: called with path and layer; False leaves the layer as it is.
        weights, compute, keep_init: see `Linear`.

    Returns:
        The model; a new layer if the model itself is a linear layer.

    Raises:
        TypeError: model is not a module, or filter no function.
        ValueError: there is nothing to convert, a layer's weight is shared with a module that is not converted, or the model is
            sharded already.

    Example:
        >>> convert(model, "mxfp8", filter=lambda path, layer: path != "head")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a layer's path and of the layer, got {filter!r}")
    chosen: dict[nn.Linear, Recipe] = {}
    for path, module in model.named_modules():
        # Subclasses have a forward of their own.
        if type(module) is not nn.Linear or (filter is not None and not filter(path, module)):
            continue
        one = recipes.resolve(recipe, path)
        if one is not None:
            _check_plain(path, module)
            chosen[module] = one
    if not chosen:
        raise ValueError("model holds no torch.nn.Linear to convert, or filter and recipe leave all of them as they are")
    _check_shared(model, chosen)
    replacements: dict[nn.Linear, Linear] = {}
    by_weight: dict[Tensor, Linear] = {}
    for layer, one in chosen.items():
        new = Linear.from_linear(layer, one, weights=weights, compute=compute, keep_init=keep_init)
        first = by_weight.setdefault(layer.weight, new)
        if first.recipe.weight != new.recipe.weight:
            raise ValueError(f"layers that share a weight need one weight format, got {first.recipe} and {new.recipe}")
        new.weight = first.weight
        replacements[layer] = new
    for module in list(model.modules()):
        # A module may hold the same layer under several names.
        for name, child in list(module._modules.items()):
            if isinstance(child, nn.Linear) and child in replacements:
                setattr(module, name, replacements[child])
    return replacements.get(model, model) if isinstance(model, nn.Linear) else model


def _check_plain(path: str, layer: nn.Linear) -> None:
    if type(layer.weight) is not nn.Parameter:
        raise ValueError(f"the weight of {path!r} is a {type(layer.weight).__name__}: convert the model before it is sharded")


def _check_shared(model: nn.Module, chosen: dict[nn.Linear, Recipe]) -> None:
    weights = {layer.weight: layer for layer in chosen}
    for path, module in model.named_modules():
        if module in chosen:
            continue
        for name, param in module.named_parameters(recurse=False):
            if param in weights:
                raise ValueError(
                    f"{path}.{name} is the weight of a linear layer too: quantizing that would untie them; leave the layer "
                    "as it is with filter=, or untie them yourself first"
                )

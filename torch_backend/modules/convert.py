"""`convert`: makes a model's linear layers quantized ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from blockfp import patterns, recipes
from blockfp.recipes import ByPath, Compute, Recipe

from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.module_state import become, become_tensor
from .experts import Experts
from .fusing import Fuse, fused_classes
from .kinds import (
    Kind,
    adapter_layers,
    base_kind,
    check_layer,
    quantized_class,
    quantized_names,
    router_modules,
    weight_names,
)
from .model_names import named_modules
from .quantized_layer import QuantizedLayer, Weights
from .summary import Summary, summary, tied_elsewhere

Made = QuantizedLayer | Experts


class _Chosen(NamedTuple):
    path: str
    recipe: Recipe
    kind: Kind


@patterns.takes_filter
def convert(
    model: nn.Module,
    recipe: Recipe | str | ByPath,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    *,
    weights: Weights = "quantized",
    compute: Compute = "quantized",
    keep_init: bool = True,
    fuse: Fuse | None = None,
) -> nn.Module:
    """Makes every `torch.nn.Linear` of a model a `Linear` with its values, where it stands.

    So are subclasses of `torch.nn.Linear` with its own forward, and transformers' `Conv1D`: they become a class derived from
    `Linear` (for a `Conv1D` from a layer that multiplies so) and from their own. A layer stays the same object: its hooks, its
    attributes, its bias and whatever refers to it stay. Its weight stays the same parameter too, which is quantized now: an
    optimizer that holds it trains on as one that is built afterwards, with the state that it has. `summary` says what was done,
    and what was left and why.

    Experts are converted too, where transformers (5) or torchtitan holds those of a layer in 3-D parameters: these keep their
    names and shapes, each expert's rows are a tensor of their own as in `GroupedLinear`, and the module's forward multiplies
    by groups, whatever `config._experts_implementation` says.

    MLPs of transformers and torchtitan with silu or gelu (LlamaMLP and those like it, Phi3MLP, FeedForward, one activation
    between two layers) get a class derived from theirs, too: what the activation makes is quantized as it is made. So does
    `torch.nn.Sequential` where such a layer follows an activation, or torch's RMSNorm, whose output is quantized as it is made
    on a GPU. Attention of these libraries, whose query, key and value layers read one tensor, gets a derived class that casts
    it once. `fuse` says the same of your own classes. No bit changes, and where somebody looks (hooks, adapters in the layer's
    place) all is made as before.

    A layer whose weight another module has too (a head that is tied to an embedding) is left as it is, with a warning, where
    there is no filter_fn. So are all that multiplies in other ways, with a warning where that is more than a tenth of the
    parameters in matrices (embeddings aside). `torch.nn.TransformerEncoderLayer` and `torch.nn.TransformerEncoder` with
    converted layers no longer take torch's fused path in evaluation, which would multiply with the weights itself.
    The layers of PEFT's adapters stay as they are, and so do the routers of transformers and torchtitan, which choose experts.

    Call it before `fully_shard`, `DistributedDataParallel` and whatever else takes hold of gradients or memory of parameters:
    `DistributedDataParallel(convert(model, ..))`, accelerate's `prepare(convert(model, ..))`. A model that such a wrapper holds
    is refused. So is one of whose results one still waits for its backward. Call it before compiling, too.

    Args:
        model: any module, on the meta device too.
        recipe: a `Recipe`, its name, or a function from the layer's path ("layers.0.up", without the names of torch.compile's
            and other wrappers) to one of these, or to None for a layer that stays as it is (`blockfp.recipes.by_operand` makes
            one of a function that gives formats); or a mapping of patterns of paths to these, `{"^head$": None,
            "down": "mxfp8", "": "nvfp4"}`. Patterns are regular expressions, of which the first that is found in the path
            counts; layers where none is stay as they are.
        filter_fn: called with path and layer, or with layer and path where its parameters' names say so, as torchao's
            `(module, fqn)`; False leaves the layer as it is.
        weights, compute, keep_init: see `Linear`.
        fuse: what classes of your own compute, by class or by its qualified name ("package.module.Class"): an `MLPParts` or a
            `SharedInput`. It holds for modules with that class's forward, whose layers are converted.

    Returns:
        The model.

    Raises:
        TypeError: model is not a module; fuse is no such mapping; filter_fn is no function, or it takes every layer by path
            and layer and would leave some by layer and path, and its parameters' names don't say which it means.
        ValueError: there is nothing to convert, a mapping's pattern is found in no layer that could be converted, the weight of
            a layer that filter_fn chose is shared with a module that is not converted, a layer would lose something
            (parametrizations, weight norm, pruning, hooks of its weight, methods that were put into it), or the model is
            sharded already, or its weights are held by a wrapper or a result of it; a class in fuse isn't in the model, or does
            something else than is said of it. The model is as it was then.

    Example:
        >>> convert(model, "mxfp8", filter_fn=lambda path, layer: path != "head")
        >>> convert(model, "mxfp8", fuse={MyMLP: MLPParts(gate="w1", up="w3", down="w2", activation="silu")})
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = _chosen(model, recipe, filter_fn)
    tied = _tied(model, chosen, declared=filter_fn is None)
    if tied and filter_fn is not None:
        path, elsewhere = next(iter(tied.items()))
        raise ValueError(
            f"{elsewhere} is the weight of a linear layer too, {path!r}: quantizing that would untie them; leave the layer as "
            "it is with filter_fn=, or untie them yourself first"
        )
    chosen = {layer: one for layer, one in chosen.items() if one.path not in tied}
    if not chosen:
        left = f": {', '.join(tied)} shares its weight with {', '.join(tied.values())}" if tied else ""
        raise ValueError(
            f"model holds no torch.nn.Linear to convert, or filter_fn and recipe leave all of them as they are{left}"
        )
    for layer, one in chosen.items():
        check_layer(one.path, layer, one.kind)
    made = _made(chosen, weights, compute, keep_init)
    fused = fused_classes(model, made, fuse)
    _commit(made)
    for module, cls in fused.items():
        become(module, cls)
    _leave_fast_paths(model)
    _warn(summary(model), tied)
    return model


def _chosen(
    model: nn.Module, recipe: Recipe | str | ByPath, filter_fn: Callable[[str, nn.Module], bool] | None
) -> dict[nn.Module, _Chosen]:
    candidates: list[tuple[str, nn.Module]] = []
    # What attention multiplies with itself isn't its layers' to quantize, and adapters are what is trained in their stead.
    taken = adapter_layers(model) | {
        child for module in model.modules() if isinstance(module, nn.MultiheadAttention) for child in module.children()
    }
    routers = router_modules(model)
    kinds: dict[nn.Module, Kind] = {}
    for path, module in named_modules(model):
        kind = None if module in taken else base_kind(module)
        if kind is not None:
            candidates.append((path, module))
            kinds[module] = kind
    asked = [(path, module) for path, module in candidates if module not in routers]
    chosen: dict[nn.Module, _Chosen] = {}
    for (path, module), chooses in zip(asked, patterns.select(filter_fn, asked), strict=True):
        one = recipes.resolve(recipe, path) if chooses else None
        if one is not None:
            chosen[module] = _Chosen(path, one, kinds[module])
    if candidates:
        recipes.check_paths(recipe, [path for path, _ in candidates])
    return chosen


def convertible(model: nn.Module, filter_fn: Callable[[str, nn.Module], bool] | None = None) -> set[nn.Module]:
    """Returns the layers that `convert` would change by one recipe for all: none of attention's own, and none that is tied."""
    chosen = _chosen(model, "mxfp8", filter_fn)
    tied = _tied(model, chosen, declared=filter_fn is None)
    return {layer for layer, one in chosen.items() if one.path not in tied}


def _tied(model: nn.Module, chosen: dict[nn.Module, _Chosen], *, declared: bool) -> dict[str, str]:
    """Returns the paths of chosen layers that share their weight with a module that isn't converted, and its name there.

    declared: also of those that aren't tied now, but that the model says it will tie.
    """
    named = tied_elsewhere(model) if declared else {}
    owners: dict[Tensor, str] = {}
    for path, module in named_modules(model):
        if module not in chosen:
            for name, param in module.named_parameters(recurse=False):
                owners.setdefault(param, f"{path}.{name}".lstrip("."))
    tied = {}
    for layer, one in chosen.items():
        for name in weight_names(one.kind, layer):
            weight, known = layer._parameters.get(name), named.get(f"{one.path}.{name}")
            elsewhere = known if weight is None else owners.get(weight, known)
            if elsewhere is not None:
                tied[one.path] = elsewhere
    return tied


def _made(chosen: dict[nn.Module, _Chosen], weights: Weights, compute: Compute, keep_init: bool) -> dict[nn.Module, Made]:
    """Makes a new layer for each; those that share a weight share the new one. The model stays as it is."""
    made: dict[nn.Module, Made] = {}
    by_weight: dict[Tensor, tuple[Made, str]] = {}
    for layer, one in chosen.items():
        options: Any = {"weights": weights, "compute": compute, "keep_init": keep_init}
        try:
            new = _new_layer(layer, one, options)
        except ValueError as error:
            raise ValueError(f"{one.path!r}: {error}") from None
        for name in quantized_names(new):
            first, first_name = by_weight.setdefault(layer.get_parameter(name), (new, name))
            if first.recipe.weight != new.recipe.weight or first.transposed != new.transposed:
                raise ValueError(f"layers that share a weight need one weight format, got {first.recipe} and {new.recipe}")
            new._parameters[name] = first.get_parameter(first_name)
        # A class that can't be derived from raises here, before anything is changed.
        quantized_class(type(layer), one.kind)
        made[layer] = new
    return made


def _new_layer(layer: Any, one: _Chosen, options: Any) -> Made:
    if issubclass(one.kind, Experts):
        return one.kind.from_experts(layer, one.recipe, **options)
    return one.kind.from_linear(layer, one.recipe, **options)


def _commit(made: dict[nn.Module, Made]) -> None:
    """Turns each layer into the one that was made for it, where it stands: references, hooks and attributes stay."""
    # Layers that share a weight share the new one, which it becomes once.
    weights = {
        layer.get_parameter(name): new.get_parameter(name) for layer, new in made.items() for name in quantized_names(new)
    }
    for weight, new in weights.items():
        become_tensor(weight, new)
        if isinstance(weight, QuantizedTensor):
            # No other values than before: a master that an optimizer keeps of it already stays.
            weight.geometry.loaded = None
    for layer, new in made.items():
        # A class may set attributes in its own way.
        vars(layer).update({name: value for name, value in vars(new).items() if name not in vars(layer)})
        kind: Any = type(new)
        become(layer, quantized_class(type(layer), kind))
        layer._modules.update(new._modules)
        layer._buffers.update(new._buffers)
        layer._non_persistent_buffers_set.update(new._non_persistent_buffers_set)
        assert isinstance(layer, QuantizedLayer | Experts)
        hooks = dict(layer._state_dict_hooks)
        layer._state_dict_hooks.clear()
        layer.register_hooks()
        # Behind blockfp's own: a hook that was there sees what is saved, not a tensor that holds codes.
        layer._state_dict_hooks.update(hooks)


def _leave_fast_paths(model: nn.Module) -> None:
    """Tells torch's encoders that theirs would not call the layers they hold."""
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    for encoder in encoders:
        if _quantized(encoder):
            encoder.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and _quantized(module):
            module.use_nested_tensor = False


def _quantized(module: nn.Module) -> bool:
    return any(quantized_names(inner) for inner in module.modules())


def _warn(done: Summary, tied: dict[str, str]) -> None:
    if tied:
        each = ", ".join(f"{path!r} (with {elsewhere})" for path, elsewhere in tied.items())
        warnings.warn(
            f"blockfp.torch.convert left layers in high precision whose weight another module shares: {each}. Nothing is to be "
            f"done where that is meant; filter_fn=lambda path, layer: path not in {sorted(tied)} says so.",
            UserWarning,
            stacklevel=4,
        )
    if done.unasked > done.in_matrices / 10:
        most = sorted((left for left in done.left if left.unasked), key=lambda left: -left.parameters)
        each = "; ".join(f"{left.path} {list(left.shape)}: {left.reason}" for left in most[:3])
        more = f" and {len(most) - 3} more" if len(most) > 3 else ""
        warnings.warn(
            f"blockfp.torch.convert left {done.unasked / done.in_matrices:.0%} of the parameters in matrices as they are, "
            f"which nobody asked for: {each}{more}. blockfp.torch.summary(model) shows all of it. Only layers are converted "
            "(those that filter_fn= is asked about): torch.nn.Linear, its subclasses with its own forward, transformers' "
            "Conv1D, and experts of transformers and torchtitan. Other experts can be held by bfp.GroupedLinear, or by a layer "
            "for each.",
            UserWarning,
            stacklevel=4,
        )

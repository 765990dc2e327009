"""`convert`: replaces a model's linear layers by quantized ones, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from blockfp import patterns, recipes
from blockfp.recipes import ByPath, Compute, Recipe, RecipeName

from ..modules.experts import Experts
from ..modules.model_names import named_modules
from ..modules.quantized_layer import QuantizedLayer, Weights
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.module_state import become, become_tensor
from .fusing import Fuse, fused_classes
from .kinds import Kind, adapter_layers, base_kind, check_layer, quantized_class, quantized_names, router_modules, weight_names
from .summary import Summary, summary, tied_elsewhere

Made = QuantizedLayer | Experts


class _Chosen(NamedTuple):
    path: str
    recipe: Recipe
    kind: Kind


M = TypeVar("M", bound=nn.Module)


@patterns.takes_filter
def convert(
    model: M,
    recipe: Recipe | RecipeName | ByPath,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    *,
    weights: Weights = "quantized",
    compute: Compute = "quantized",
    keep_init: bool = True,
    fuse: Fuse | None = None,
) -> M:
    """Converts every `torch.nn.Linear` of a model to `Linear`, in place and with its values.

    Subclasses of `torch.nn.Linear` that use its forward, and transformers' `Conv1D`, become a class derived from their own and
    from `Linear` (from a layer with a transposed weight for `Conv1D`). A layer stays the same object, with its hooks,
    attributes and bias. Its weight stays the same parameter object, now quantized, so existing optimizers keep working with
    their state. `summary` reports what was converted, what wasn't, and why.

    Experts of transformers (5) and torchtitan in 3-D parameters are converted too. Parameters keep their names and shapes, each
    expert's rows are quantized separately as in `GroupedLinear`, and the module's forward uses grouped products whatever
    `config._experts_implementation` says.

    Fusions change no bits and are skipped where hooks or adapters observe a layer. MLPs of transformers and torchtitan
    with silu or gelu (LlamaMLP and similar, Phi3MLP, FeedForward, one activation between two layers) become a derived class
    that quantizes the activation's output as it is computed. So does `torch.nn.Sequential` with a converted layer after an
    activation, or after torch's RMSNorm on a GPU. Attention of these libraries, whose query, key and value layers read one
    tensor, casts it once. `fuse` declares the same for your own classes.

    Without filter_fn, a layer that shares its weight with another module (a head tied to an embedding) is skipped with a
    warning. Other modules with matrices are skipped too, with a warning if they have more than a tenth of the parameters in
    matrices (embeddings aside). Layers of PEFT's adapters, and routers of transformers and torchtitan, which choose experts,
    are not converted. `torch.nn.TransformerEncoder` and its layers no longer take torch's fused evaluation path, which bypasses
    the layers.

    Call it before compiling and before anything that holds parameters' gradients or memory, such as `fully_shard`:
    `DistributedDataParallel(convert(model, ..))`, accelerate's `prepare(convert(model, ..))`. A model that such a wrapper
    holds, or with a result that still waits for its backward, is rejected.

    Args:
        model: any module, on the meta device too.
        recipe: a `Recipe`, its name, or a function from a layer's path ("layers.0.up", without names added by torch.compile and
            other wrappers) to one of these, or to None to skip the layer (`blockfp.recipes.by_operand` makes one from a
            function that returns formats). Or a mapping from patterns of paths to these, `{"^head$": None, "down": "mxfp8", "":
            "nvfp4"}`: the first regular expression found in the path applies; layers without a match are skipped.
        filter_fn: called with path and layer, or with layer and path if its parameter names say so, as torchao's `(module,
            fqn)`; False skips the layer.
        weights, compute, keep_init: see `Linear`.
        fuse: declares the structure of your own classes, by class or qualified name ("package.module.Class"), as an `MLPParts`
            or a `SharedInput`. It applies to modules with that class's forward whose layers are converted.

    Returns:
        The model.

    Raises:
        TypeError: model is not a module, fuse is not such a mapping, or filter_fn is not a function or its argument order is
            ambiguous.
        ValueError: there is nothing to convert; a mapping's pattern matches no layer; a layer chosen by filter_fn shares its
            weight with an unconverted module; a layer would lose something (parametrizations, weight norm, pruning, hooks of
            its weight, methods assigned to it); the model is already sharded; a wrapper or a pending result holds its weights;
            or a class in fuse isn't in the model or computes something else. The model is unchanged.

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
            f"{elsewhere} is also the weight of linear layer {path!r}: quantizing it would untie them; exclude the "
            "layer by filter_fn=, or untie them first"
        )
    chosen = {layer: one for layer, one in chosen.items() if one.path not in tied}
    if not chosen:
        left = f": {', '.join(tied)} shares its weight with {', '.join(tied.values())}" if tied else ""
        converted = [path for path, module in model.named_modules() if isinstance(module, Made)]
        if converted and not left:
            more = ", .." * (len(converted) > 3)
            left = f"; quantized already (set_recipe changes recipes): {', '.join(converted[:3])}{more}"
        raise ValueError(f"model holds no torch.nn.Linear to convert, or filter_fn and recipe exclude all of them{left}")
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
    model: nn.Module, recipe: Recipe | RecipeName | ByPath, filter_fn: Callable[[str, nn.Module], bool] | None
) -> dict[nn.Module, _Chosen]:
    candidates: list[tuple[str, nn.Module]] = []
    # nn.MultiheadAttention multiplies with its children's weights itself; adapters are trained in high precision.
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
    """Returns the layers that `convert` would change with one recipe for all."""
    chosen = _chosen(model, "mxfp8", filter_fn)
    tied = _tied(model, chosen, declared=filter_fn is None)
    return {layer for layer, one in chosen.items() if one.path not in tied}


def _tied(model: nn.Module, chosen: dict[nn.Module, _Chosen], *, declared: bool) -> dict[str, str]:
    """Returns the paths of chosen layers that share their weight with an unconverted module, and its name there.

    With `declared`, includes ties that the model declares but hasn't made yet.
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
    """Builds the new layers without changing the model; layers that share a weight share the new one."""
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
        # A class that can't be subclassed raises here, before anything changes.
        quantized_class(type(layer), one.kind)
        made[layer] = new
    return made


def _new_layer(layer: Any, one: _Chosen, options: Any) -> Made:
    if issubclass(one.kind, Experts):
        return one.kind.from_experts(layer, one.recipe, **options)
    return one.kind.from_linear(layer, one.recipe, **options)


def _commit(made: dict[nn.Module, Made]) -> None:
    """Turns each layer into its new class in place, which preserves references, hooks and attributes."""
    # A shared weight is replaced once.
    weights = {
        layer.get_parameter(name): new.get_parameter(name) for layer, new in made.items() for name in quantized_names(new)
    }
    for weight, new in weights.items():
        become_tensor(weight, new)
        if isinstance(weight, QuantizedTensor):
            # The values haven't changed, so an optimizer's existing master stays valid.
            weight.geometry.loaded = None
    for layer, new in made.items():
        # Without setattr, which a class may override.
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
        # blockfp's hooks run first, so that existing hooks see the saved parts instead of a tensor of codes.
        layer._state_dict_hooks.update(hooks)


def _leave_fast_paths(model: nn.Module) -> None:
    """Disables the fused paths of torch's encoders, which bypass their layers."""
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
            f"blockfp.torch.convert left layers in high precision because another module shares their weight: {each}. "
            f"If that is intended, pass filter_fn=lambda path, layer: path not in {sorted(tied)}.",
            UserWarning,
            stacklevel=4,
        )
    if done.unasked > done.in_matrices / 10:
        most = sorted((left for left in done.left if left.unasked), key=lambda left: -left.parameters)
        each = "; ".join(f"{left.path} {list(left.shape)}: {left.reason}" for left in most[:3])
        more = f" and {len(most) - 3} more" if len(most) > 3 else ""
        warnings.warn(
            f"blockfp.torch.convert left {done.unasked / done.in_matrices:.0%} of the parameters in matrices "
            f"unconverted without being asked to: {each}{more}. blockfp.torch.summary(model) lists all of them. Only "
            "layers that filter_fn= sees are converted: torch.nn.Linear, its subclasses with its own forward, "
            "transformers' Conv1D, and experts of transformers and torchtitan. For other experts use "
            "bfp.GroupedLinear, or one layer per expert.",
            UserWarning,
            stacklevel=4,
        )

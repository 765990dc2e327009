"""Flax (0.12): nnx and linen models with quantized kernels in dense layers.

    model = convert(model, "mxfp8", lambda path, layer: path != "head")

Compute gradients with `bfp.value_and_grad` and updates with `bfp.adamw`, or optax under `bfp.with_masters`, as for any tree
with quantized leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

from blockfp import patterns, recipes
from blockfp.recipes import ByPath, Recipe, RecipeName

from ..jax_backend.arrays.array import is_quantized
from ..jax_backend.linear.linear import linear
from ..jax_backend.params.params import Filter, quantize_weight

KEYS = "quantize"
"""Name of the random stream for recipes with stochastic rounding."""


_traced_with = jax.make_user_context()
"""Distinguishes traces of a model: `linen.jit` caches programs by a module's class and fields, which don't determine
them here."""


@patterns.takes_filter
def convert(
    model: Any, recipe: Recipe | RecipeName | ByPath, filter_fn: Filter | None = None, *, rngs: nnx.Rngs | None = None
) -> Any:
    """Quantizes the kernels of a model's dense layers; their products follow the recipe.

    Converts layers of exactly the classes `nnx.Linear` and `linen.Dense` with lax's dot_general; others are unchanged. An nnx
    layer is converted in place. A linen module is wrapped: `init` creates quantized kernels under the same paths. Kernels are
    [.., in, out], so weight formats must have square blocks or one scale per tensor, which have exact transposes.

    Args:
        model: an nnx model, or an unbound linen module.
        recipe: a `Recipe`, its name, a function from a layer's path ("layers.0.up") to a recipe, or a mapping of patterns of
            paths (`recipes.ByPath`). Functions and mappings may give None, which leaves a layer unchanged.
        filter_fn: called with path and layer, or layer and path if its parameters' names say so; False leaves the layer
            unchanged.
        rngs: for nnx models: each layer whose recipe rounds stochastically gets its own stream. A linen model takes `apply(..,
            rngs={"quantize": key})`.

    Returns:
        The nnx model, or a linen module that replaces the given one.

    Raises:
        TypeError: model is neither.
        ValueError: the model has no such layer, or none that matches a mapping's pattern (for linen: at `init`), or is
            converted already; rngs are missing; the recipe uses delayed scaling or a weight format without exact transpose; a
            layer contains adapters, or is stacked along an axis other than the first.
    """
    if isinstance(model, Quantized):
        raise ValueError(f"model is converted already, by {model.recipe}: convert model.module, by a mapping for two recipes")
    if isinstance(model, linen.Module):
        if rngs is not None:
            raise ValueError("rngs is for nnx models: a linen model takes rngs={'quantize': key} at apply")
        return Quantized(model, recipe, filter_fn)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be a flax.nnx.Module or a flax.linen.Module, got {type(model).__name__}")
    named = [
        (".".join(map(str, keys)), layer)
        for keys, layer in nnx.iter_modules(model)
        if type(layer) is nnx.Linear and layer.dot_general is lax.dot_general
    ]
    chosen = []
    for (path, layer), taken in zip(named, patterns.select(filter_fn, named), strict=True):
        one = _recipe_of(path, recipe) if taken else None
        if one is not None:
            _check_stack(path, layer)
            _check_alone(path, (name for name, value in vars(layer).items() if isinstance(value, nnx.Param)))
            chosen.append((layer, one))
    _check_found(recipe, [path for path, _ in named], chosen, "flax.nnx.Linear")
    drawing = next((one for _, one in chosen if _draws(one)), None)
    if drawing is not None and rngs is None:
        raise ValueError(f"rngs = None: recipe {drawing} rounds stochastically and needs one, such as nnx.Rngs(quantize=0)")
    for layer, one in chosen:
        layer.kernel = layer.kernel.replace(quantize_weight(layer.kernel.get_value(), one.weight.format))
        layer.recipe, layer.keys = one, _keys_for(layer, rngs) if rngs is not None and _draws(one) else None
        # Change the class in place, because shared layers, lists and users' attributes refer to the object.
        layer.__class__ = QuantizedLinear
    return model


def _check_stack(path: str, layer: nnx.Linear) -> None:
    """Raises ValueError for layers stacked along an axis other than the first, because blocks need the matrix axes last."""
    shape, one = layer.kernel.get_value().shape, (layer.in_features, layer.out_features)
    if shape[-2:] != one:
        raise ValueError(
            f"{path}: a kernel of shape {shape} is not a stack of kernels {one}: layers must be stacked along axis 0, "
            "as by nnx.vmap with out_axes=0"
        )


def _check_alone(path: str, names: Iterable[str]) -> None:
    """Raises ValueError for a layer with additional parameters, which a product of codes would ignore."""
    if others := sorted(set(names) - {"kernel", "bias"}):
        raise ValueError(
            f"{path} holds {', '.join(others)}, like layers adapted by qwix's LoRA; a quantized layer has only a kernel "
            "and a bias: add adapters as separate modules (flax.nnx.LoRA), or exclude the layer by filter_fn"
        )


def _keys_for(layer: nnx.Linear, rngs: nnx.Rngs) -> nnx.Rngs:
    """Returns random streams for a layer; a stack of layers (nnx.scan, nnx.vmap) gets one per layer."""
    stack = layer.kernel.get_value().shape[:-2]
    return rngs.fork().split(stack) if stack else rngs.fork()


def _check_found(recipe: Any, paths: list[str], chosen: Any, kind: str) -> None:
    """Raises ValueError if no layer was chosen, or a mapping's pattern matches none of these paths."""
    if paths:
        recipes.check_paths(recipe, paths)
    if not chosen:
        raise ValueError(
            f"model holds no {kind} to convert, or filter_fn and recipe exclude all of them; converted layers keep their recipe"
        )


class QuantizedLinear(nnx.Linear):
    """The layer that replaces `flax.nnx.Linear`."""

    recipe: Recipe
    keys: nnx.Rngs | None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        bias = None if self.bias is None else self.bias.get_value()
        key = None if self.keys is None else self.keys[KEYS]()
        return _multiply(self, inputs, self.kernel.get_value(), bias, self.recipe, key, out_sharding)


class Quantized(linen.Module):
    """The module that wraps a linen module: the same parameters, with the chosen kernels quantized."""

    module: linen.Module
    recipe: Any
    filter_fn: Filter | None = None

    def setup(self):
        linen.share_scope(self, self.module)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.call("__call__", *args, **options)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the model by name: `quantized.apply(variables, "encode", x, method="call")`."""
        found: dict[str, Recipe | None] = {}
        recipe = tuple(self.recipe.items()) if isinstance(self.recipe, Mapping) else self.recipe
        # A new object per init, so that no init reuses another's trace and misses the layers found in it.
        traced_with = object() if self.is_initializing() else (recipe, self.filter_fn)
        with linen.intercept_methods(partial(_intercept, self.recipe, self.filter_fn, found)), _traced_with(traced_with):
            y = getattr(self.module, method)(*args, **options)
        if self.is_initializing():
            _check_found(self.recipe, list(found), any(found.values()), "flax.linen.Dense")
        return y


def _intercept(
    recipe: Any, filter_fn: Any, found: dict[str, Recipe | None], forward: Any, args: Any, options: Any, context: Any
) -> Any:
    """Runs a method of a linen module, or the quantized product for a chosen layer; see `intercept_methods`.

    `found` collects the path of each candidate layer with its recipe or None.
    """
    layer: Any = context.module
    if type(layer) is not linen.Dense or context.method_name != "__call__":
        return forward(*args, **options)
    if layer.dot_general not in (None, lax.dot_general) or layer.dot_general_cls is not None:
        return forward(*args, **options)
    path = ".".join(layer.path)
    taken = filter_fn is None or patterns.path_first(filter_fn)(path, layer)
    found[path] = one = _recipe_of(path, recipe) if taken else None
    held = layer.get_variable("params", "kernel")
    held = held.value if isinstance(held, linen.Partitioned) else held
    if is_quantized(held) and (one is None or one.weight.format is not held.format):
        wanted = "the layer isn't converted" if one is None else f"recipe {one} wants {one.weight.format}"
        raise ValueError(f"{path}: the kernel is in {held.format}, and {wanted}: convert the model as when the kernel was made")
    if one is None:
        return forward(*args, **options)
    if not layer.has_variable("params", "kernel"):
        # The layer's own initializers create the values that are quantized.
        forward(*args, **options)
    _check_alone(path, layer.variables["params"])
    boxed = layer.get_variable("params", "kernel")
    kernel = _unboxed(boxed)
    if layer.is_initializing() and not is_quantized(kernel):
        kernel = quantize_weight(kernel, one.weight.format)
        layer.put_variable("params", "kernel", linen.meta.replace_boxed(boxed, kernel))
    bias = linen.meta.unbox(layer.get_variable("params", "bias")) if layer.use_bias else None
    key = layer.make_rng(KEYS) if _draws(one) else None
    x = args[0] if args else options["inputs"]
    return _multiply(layer, x, kernel, bias, one, key, options.get("out_sharding"))


def _unboxed(variable: Any) -> Any:
    """Unboxes a variable with named axes. Quantized values keep their placement; plain ones are constrained."""
    if isinstance(variable, linen.Partitioned) and is_quantized(variable.value):
        return variable.value
    return linen.meta.unbox(variable)


def _recipe_of(path: str, recipe: Any) -> Recipe | None:
    one = recipes.resolve(recipe, path)
    if one is None or one.weight.format is None:
        return None
    if one.delayed is not None:
        raise ValueError(f"{path}: delayed scaling keeps a state for each layer: give the layer a dot_general that has it")
    if not one.weight.format.square:
        raise ValueError(
            f"{path}: recipe {one} has weights in {one.weight.format}, with scales along in, and a kernel [in, out] of such "
            "codes has no exact transpose. Give the layer dot_general=functools.partial(blockfp.jax.dot_general, recipe=..), "
            "or the model qwix's rule, which quantize the kernel at each use; or take a format in square blocks"
        )
    return one


def _draws(recipe: Recipe) -> bool:
    return recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic


def _multiply(layer: Any, x: Any, kernel: Any, bias: Any, recipe: Recipe, key: Any, out_sharding: Any) -> jax.Array:
    """Computes in the dtype that flax would: the layer's, or the promotion of x, kernel and bias."""
    if out_sharding is not None:
        raise ValueError(f"out_sharding = {out_sharding}: quantized products run inside shard_map, or where XLA lays them")
    if layer.precision is not None or getattr(layer, "preferred_element_type", None) is not None:
        raise ValueError("precision and preferred_element_type must be None: the recipe determines how products accumulate")
    dtype = layer.dtype or jnp.result_type(x, kernel.dtype, *([] if bias is None else [bias]))
    return linear(x.astype(dtype), kernel.mT, None if bias is None else bias.astype(dtype), recipe=recipe, key=key)

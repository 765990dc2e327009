"""Parameter trees with quantized leaves: quantization and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockfp import patterns, recipes
from blockfp.definition.layout import DTYPES
from blockfp.recipes import ByPath, Recipe, RecipeName

from ..arrays.array import QuantizedArray, is_quantized, with_derivative, wrap_parts
from ..implementations import explicit, ops
from ..implementations.carriers import Shares, carrier_of
from ..implementations.derivatives import straight_through
from .trees import describe, map_with_path

Filter = Callable[[str, Any], bool]
"""Called with a leaf's path ("layers.0.up.weight") and the leaf; in the other order if its parameters' names say so."""


def is_matrix(path: str, leaf: Any) -> bool:
    """Returns whether a leaf is a float array with two or more axes, which `quantize_params` quantizes by default.

    Includes float64, so that `quantize_params` raises: leaving out weights drawn by NumPy would go unnoticed.
    """
    return getattr(getattr(leaf, "dtype", None), "name", None) in (*DTYPES, "float64") and leaf.ndim >= 2


@patterns.takes_filter
def quantize_params(tree: Any, recipe: Recipe | RecipeName | ByPath, *, filter_fn: Filter = is_matrix) -> Any:
    """Quantizes a tree's weights in a recipe's weight format.

    Weights are [..., out, in]; each matrix of a stack (for scan, or experts) is quantized separately. Use `filter_fn` to
    exclude embeddings and other arrays that no quantized product reads. A weight in the recipe's format stays as it is.

    Args:
        tree: parameters.
        recipe: a `Recipe`, its name, a function from a weight's path ("layers.0.up.weight") to a recipe, or a mapping of
            patterns of paths (`recipes.ByPath`). Functions and mappings may give None, which leaves a weight unquantized.
        filter_fn: selects the leaves to quantize, by path and leaf (`Filter`).

    Raises:
        TypeError, ValueError: a leaf can't be quantized, or is in another recipe's format (the message names its path),
            `filter_fn` selects nothing, or a pattern of the mapping matches no path (for a recipe: no path that `filter_fn`
            selects).

    Example:
        >>> params = bfp.quantize_params(params, "mxfp8", filter_fn=lambda path, leaf: path.endswith("weight"))
    """
    asked: list[tuple[str, Any]] = []
    map_with_path(lambda path, leaf: asked.append((path, leaf)), tree)
    answers = iter(patterns.select(filter_fn, asked))
    weights: list[str] = []
    others: list[str] = []

    def convert(path: str, leaf):
        taken, made = next(answers), is_quantized(leaf)
        (weights if taken or made else others).append(path)
        chosen = recipes.resolve(recipe, path) if taken else None
        if made and chosen is not None:
            check_format(leaf, chosen)
        if made or chosen is None or chosen.weight.format is None:
            return leaf
        return with_derivative(quantize_weight(leaf, chosen.weight.format), leaf)

    converted = map_with_path(convert, tree)
    recipes.check_paths(recipe, [*weights, *others])
    if others and not weights:
        raise none_taken("tree", others)
    if isinstance(recipe, Mapping):
        # A pattern with None may match leaves that filter_fn excludes anyway.
        recipes.check_paths({pattern: one for pattern, one in recipe.items() if one is not None}, weights)
    return converted


def check_format(weight: QuantizedArray, recipe: Recipe) -> None:
    """Raises ValueError unless a quantized weight has the recipe's weight format."""
    if weight.format is not recipe.weight.format:
        raise ValueError(
            f"weight is in {weight.format}, and recipe {recipe} wants {recipe.weight.format or 'high precision'}: take a "
            "recipe of its format, or quantize its values, quantize_params(dequantize_params(params), recipe)"
        )


def none_taken(name: str, paths: Sequence[str]) -> ValueError:
    """Returns the error for a filter that takes none of the leaves at these paths of the argument `name`."""
    some = ", ".join(map(repr, paths[:5])) + (", .." if len(paths) > 5 else "")
    return ValueError(f"{name} holds no weight to quantize: filter_fn takes none of {some}")


def quantize_weight(
    x: jax.Array, format, *, nominal: np.dtype | None = None, shared: bool = False, mark: bool = False
) -> QuantizedArray:
    """Quantizes a weight, or each weight of a stack separately; the result is a constant (see `with_derivative`).

    x is [..., out, in]. `nominal` is the result's dtype, x's own by default. With `shared`, a stack's matrices share one tensor
    scale. `mark` is that of `ops.quantize`.
    """
    if not is_matrix("", x) or x.dtype == np.float64:
        raise TypeError(
            f"a weight must be a float32, float16 or bfloat16 array of two or more axes, got {describe(x)}: cast it first, or "
            "leave it out by filter_fn"
        )
    dtype = np.dtype(x.dtype) if nominal is None else nominal

    def one(matrix):
        amax = ops.amax_in_passing(matrix, format, x.size // max(matrix.size, 1))
        return ops.quantize(matrix, None, amax, format=format, nominal=dtype.name, mark=mark)

    for _ in range(x.ndim - 2 if format.has_tensor_scale and not shared else 0):
        one = jax.vmap(one)
    return wrap_parts(one(x), format, x).replace(dtype=dtype)


def shares_scale(q: QuantizedArray) -> bool:
    """Returns whether all matrices of a stack share one tensor scale, as when the whole stack is quantized at once."""
    if not q.format.has_tensor_scale:
        return False
    return q.scales.shape[:-2] != q.codes.shape[:-2] if q.tensor_scale is None else q.tensor_scale.ndim == 0


def dequantize_params(tree: Any, dtype: Any = None) -> Any:
    """Dequantizes a tree's quantized leaves to `dtype` or their own dtype; returns other leaves unchanged."""

    def one(q: QuantizedArray):
        read = lambda q: q.dequantize(dtype)  # noqa: E731
        for _ in range(q.codes.ndim - 2 if q.format.has_tensor_scale and not shares_scale(q) else 0):
            read = jax.vmap(read)
        values = read(q.without_carrier())
        return values if q.carrier is None else straight_through(values, q.carrier)

    return map_with_path(lambda _, leaf: one(leaf) if is_quantized(leaf) else leaf, tree)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` for trees that contain quantized arrays.

    The gradient of a QuantizedArray is a plain array of its shape and nominal dtype: the straight-through derivative with
    respect to the original array. A carrier next to the codes receives it (`QuantizedArray`). The gradient of a `LayerState` is
    a `DelayedState`, or None.

    Args:
        fun: a function that returns a scalar, or (scalar, other) with `has_aux`.
        argnums: positional arguments to differentiate with respect to.
        has_aux: as for `jax.value_and_grad`.

    Raises:
        TypeError: a leaf of such an argument is neither quantized nor a float array; the message names its path.
    """
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @wraps(fun)
    def differentiated(*args, **kwargs):
        if max(positions) >= len(args):
            raise TypeError(f"argnums = {argnums} needs {max(positions) + 1} positional arguments, got {len(args)}")
        chosen = tuple(args[i] for i in positions)

        def of_plain(*plain):
            whole = list(args)
            for i, tree, leaves in zip(positions, chosen, plain, strict=True):
                whole[i] = jax.tree.map(_with_carrier, tree, leaves, is_leaf=_is_node)
            return fun(*whole, **kwargs)

        points = tuple(map_with_path(_primal, tree, is_leaf=_is_node) for tree in chosen)
        value, gradients = jax.value_and_grad(of_plain, argnums=tuple(range(len(points))), has_aux=has_aux)(*points)
        if has_aux:
            value = (value[0], jax.tree.map(_without_lone_carrier, value[1], is_leaf=_is_node))
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return differentiated


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.grad` for trees that contain quantized arrays; arguments, gradients and errors as for `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux=has_aux)

    @wraps(fun)
    def gradient(*args, **kwargs):
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _primal(path: str, leaf):
    """Returns the point to differentiate at: a plain leaf itself, zeros for a quantized one."""
    if is_quantized(leaf):
        zeros = explicit.zeros_beside(leaf.codes, leaf.shape, leaf.dtype)
        # A second derivative is taken with respect to the same array.
        return zeros if leaf.carrier is None else straight_through(zeros, leaf.carrier)
    if isinstance(leaf, Shares):
        return leaf.differentiated()
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"gradients are taken of float and quantized arrays, got {describe(leaf)}: leave it out of the argument"
        )
    return leaf


def _is_node(leaf: object) -> bool:
    return is_quantized(leaf) or isinstance(leaf, Shares)


def _with_carrier(leaf, point):
    if isinstance(leaf, Shares):
        return leaf.at(point).shared()
    return leaf.replace(tangent=carrier_of(point)) if is_quantized(leaf) else point


def _without_lone_carrier(leaf):
    """Drops the carrier of a leaf in a differentiated function's auxiliary output, which is no longer needed."""
    if isinstance(leaf, Shares):
        return leaf.unshared()
    return with_derivative(leaf, leaf.tangent) if is_quantized(leaf) and leaf.tangent is not None else leaf

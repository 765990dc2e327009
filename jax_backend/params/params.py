"""Parameter trees with quantized leaves: making them, and differentiating with respect to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockfp import patterns, recipes
from blockfp.definition.views import DTYPES
from blockfp.recipes import ByPath, Recipe

from ..arrays.array import QuantizedArray, is_quantized, with_derivative, wrap_parts
from ..implementations import explicit, ops
from ..implementations.carriers import Shares, carrier_of
from ..implementations.derivatives import straight_through
from .trees import describe, map_with_path

Filter = Callable[[str, Any], bool]
"""Called with a leaf's path ("layers.0.up.weight") and the leaf; in the other order where its parameters' names say so."""


def is_matrix(path: str, leaf: Any) -> bool:
    """Returns True for a float array of two or more axes, which `quantize_params` quantizes by default.

    So is one of float64, which can't be quantized: left as it is, a weight that NumPy drew would stay so unnoticed.
    """
    return getattr(getattr(leaf, "dtype", None), "name", None) in (*DTYPES, "float64") and leaf.ndim >= 2


@patterns.takes_filter
def quantize_params(tree: Any, recipe: Recipe | str | ByPath, *, filter_fn: Filter = is_matrix) -> Any:
    """Quantizes a tree's weights in a recipe's weight format.

    Weights are [..., out, in]; each matrix of a stack (for scan, or experts) is quantized as an array of its own. Embeddings
    and others that no quantized product reads are to be left out by `filter_fn`.

    Args:
        tree: parameters.
        recipe: a `Recipe`, its name, or a function from a weight's path ("layers.0.up.weight") to one of these, or to None for
            one that stays as it is; or a mapping of patterns of paths to these (`recipes.ByPath`).
        filter_fn: which leaves to quantize, by path and leaf (`Filter`).

    Raises:
        TypeError, ValueError: a leaf can't be quantized; the message names its path. Or filter_fn takes none; or a mapping's
            pattern is found in none, or one that stands for a recipe in none that filter_fn takes.

    Example:
        >>> params = bfp.quantize_params(params, "mxfp8", filter_fn=lambda path, leaf: path.endswith("weight"))
    """
    asked: list[tuple[str, Any]] = []
    map_with_path(lambda path, leaf: None if is_quantized(leaf) else asked.append((path, leaf)), tree)
    answers = iter(patterns.select(filter_fn, asked))
    weights: list[str] = []
    others: list[str] = []

    def convert(path: str, leaf):
        taken = is_quantized(leaf) or next(answers)
        (weights if taken else others).append(path)
        chosen = recipes.resolve(recipe, path) if taken and not is_quantized(leaf) else None
        if chosen is None or chosen.weight.format is None:
            return leaf
        return with_derivative(quantize_weight(leaf, chosen.weight.format), leaf)

    converted = map_with_path(convert, tree)
    recipes.check_paths(recipe, [*weights, *others])
    if others and not weights:
        raise ValueError(
            "tree holds no weight to quantize: filter_fn takes none of "
            f"{', '.join(map(repr, others[:5]))}{', ..' if len(others) > 5 else ''}"
        )
    if isinstance(recipe, Mapping):
        # None may stand for what wouldn't be quantized anyway.
        recipes.check_paths({pattern: one for pattern, one in recipe.items() if one is not None}, weights)
    return converted


def quantize_weight(x: jax.Array, format, *, nominal: np.dtype | None = None, shared: bool = False) -> QuantizedArray:
    """Quantizes a weight, or each of a stack of them, as an array of its own; a constant (see `with_derivative`).

    Args:
        x: [..., out, in].
        format: the format.
        nominal: dtype of the result; x's own by default.
        shared: whether a stack's matrices have one scale per tensor in common.
    """
    if not is_matrix("", x) or x.dtype == np.float64:
        raise TypeError(
            f"a weight must be a float32, float16 or bfloat16 array of two or more axes, got {describe(x)}: cast it first, or "
            "leave it out by filter_fn"
        )
    dtype = np.dtype(x.dtype) if nominal is None else nominal

    def one(matrix):
        return ops.quantize(matrix, None, format=format, nominal=dtype.name)

    for _ in range(x.ndim - 2 if format.has_tensor_scale and not shared else 0):
        one = jax.vmap(one)
    return wrap_parts(one(x), format, x).replace(dtype=dtype)


def shares_scale(q: QuantizedArray) -> bool:
    """Returns True where all matrices of a stack share one scale per tensor, as `quantize` of all of it gives them."""
    if not q.format.has_tensor_scale:
        return False
    return q.scales.shape[:-2] != q.codes.shape[:-2] if q.tensor_scale is None else q.tensor_scale.ndim == 0


def dequantize_params(tree: Any, dtype: Any = None) -> Any:
    """Dequantizes a tree's quantized leaves, to `dtype` or each one's own; other leaves stay as they are."""

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
    """`jax.value_and_grad` for trees that hold quantized arrays.

    Where an argument has a QuantizedArray, its gradient has a plain array of the same shape and nominal dtype: the derivative
    with respect to the array that was quantized, straight-through. A carrier beside the codes takes it (`QuantizedArray`).

    Args:
        fun: a function with a scalar result, or (scalar, other) with `has_aux`.
        argnums: which positional arguments to differentiate with respect to.
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
                one = jax.tree.map(_with_carrier, tree, leaves, is_leaf=is_quantized)
                whole[i] = jax.tree.map(lambda x: x.shared() if _shares(x) else x, one, is_leaf=_shares)
            return fun(*whole, **kwargs)

        points = tuple(map_with_path(_primal, tree) for tree in chosen)
        value, gradients = jax.value_and_grad(of_plain, argnums=tuple(range(len(points))), has_aux=has_aux)(*points)
        if has_aux:
            value = (value[0], jax.tree.map(_without_lone_carrier, value[1], is_leaf=lambda x: is_quantized(x) or _shares(x)))
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return differentiated


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """`jax.grad` for trees that hold quantized arrays; arguments, gradients and errors are those of `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux=has_aux)

    @wraps(fun)
    def gradient(*args, **kwargs):
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _primal(path: str, leaf):
    """The point to differentiate at: a plain leaf itself, zeros for a quantized one."""
    if is_quantized(leaf):
        zeros = explicit.zeros_beside(leaf.codes, leaf.shape, leaf.dtype)
        # Who differentiates this gradient does so with respect to the same array.
        return zeros if leaf.carrier is None else straight_through(zeros, leaf.carrier)
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"gradients are taken of float and quantized arrays, got {describe(leaf)}: leave it out of the argument"
        )
    return leaf


def _shares(leaf: object) -> bool:
    return isinstance(leaf, Shares)


def _with_carrier(leaf, point):
    return leaf.replace(tangent=carrier_of(point)) if is_quantized(leaf) else point


def _without_lone_carrier(leaf):
    """Drops the carrier, which nothing wants any more, of a leaf that a differentiated function gives beside its value."""
    if _shares(leaf):
        return leaf.unshared()
    return with_derivative(leaf, leaf.tangent) if is_quantized(leaf) and leaf.tangent is not None else leaf

"""`dot_general`: `lax.dot_general` with quantized operands, for libraries whose layers take such a function."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition.rounding import Key, fold_in
from blockfp.definition.views import DTYPES
from blockfp.recipes import Recipe

from ..arrays.array import QuantizedArray
from ..implementations import ops
from .delayed import DelayedState, for_each, of_all
from .linear import linear_to


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | str,
    key: Key | None = None,
    state: DelayedState | None = None,
) -> Any:
    """Computes `jax.lax.dot_general` with the operands of the product and of its gradients quantized as a recipe says.

    lhs is the recipe's input and rhs its weight: free axes are flattened, contracted ones too, and then it is `linear` of
    [tokens, in] and [out, in]; of each pair of matrices, where there are batch axes. Each of these is a tensor of its own, but
    for delayed scaling: all pairs share one state, and the largest amax counts.

    Args:
        lhs: float32, float16 or bfloat16.
        rhs: as lhs; or quantized, a matrix that is contracted along its last axis (along its first: in square blocks).
        dimension_numbers: ((contracted axes of lhs, of rhs), (batch axes of lhs, of rhs)).
        precision: must be None or a default, or a pair of such: a recipe says how products accumulate.
        preferred_element_type: dtype of the result; lhs's by default.
        out_sharding: must be None: `linear` inside shard_map has products over several devices.
        recipe: a `Recipe` or its name.
        key, state: as for `linear`.

    Returns:
        The product; (product, state) where a state is given.

    Raises:
        TypeError, ValueError: as `linear` and `lax.dot_general`; a quantized rhs that isn't contracted as its blocks allow.

    Example:
        >>> layer = flax.nnx.Linear(64, 256, rngs=rngs, dot_general=functools.partial(bfp.dot_general, recipe="mxfp8"))
    """
    if not all(each in (None, "default", lax.Precision.DEFAULT) for each in _each(precision)):
        raise ValueError(f"precision = {precision}: the recipe's fast_accum says how products accumulate; leave it None")
    if out_sharding is not None:
        raise ValueError(
            f"out_sharding = {out_sharding}: quantized products over several devices run inside shard_map, see linear"
        )
    if isinstance(lhs, QuantizedArray):
        raise TypeError("lhs must be an array in high precision, got a QuantizedArray: the recipe quantizes it")
    # JAX's own errors of shapes that don't fit.
    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), *shapes)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    batch = tuple(lhs.shape[axis] for axis in lhs_batch)
    x, tokens = _as_matrices(lhs, tuple(lhs_contract), tuple(lhs_batch))
    w: Any
    if isinstance(rhs, QuantizedArray):
        w, features = _quantized_matrix(rhs, tuple(rhs_contract), tuple(rhs_batch))
    else:
        w, features = _as_matrices(rhs, tuple(rhs_contract), tuple(rhs_batch))
    wanted = x.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    dtype = wanted if wanted.name in DTYPES else x.dtype
    if not batch:
        y = linear_to(dtype, x, w, None, recipe, key, state)
    else:
        # Each matrix has a key of its own.
        words = None if key is None else jnp.asarray(ops.key_array(key))
        count = math.prod(batch)
        keys = None if words is None else jax.vmap(lambda i: fold_in(words, i))(jnp.arange(count, dtype=jnp.int32))
        states = None if state is None else for_each(state, count)
        each = jax.vmap(lambda x, w, key, state: linear_to(dtype, x, w, None, recipe, key, state))
        y = each(x.reshape(count, *x.shape[-2:]), w.reshape(count, *w.shape[-2:]), keys, states)
    if state is not None:
        y, new = y
        state = of_all(new) if batch else new
    y = y.reshape(*batch, *tokens, *features).astype(wanted)
    return y if state is None else (y, state)


def _each(precision: Any) -> tuple[Any, ...]:
    return tuple(precision) if isinstance(precision, tuple | list) else (precision,)


def _as_matrices(x: jax.Array, contract: tuple[int, ...], batch: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """([batch.., free, contracted], lengths of the free axes)."""
    free = tuple(axis for axis in range(x.ndim) if axis not in contract and axis not in batch)
    lengths = tuple(x.shape[axis] for axis in free)
    moved = jnp.transpose(x, (*batch, *free, *contract))
    shape = (*(x.shape[axis] for axis in batch), math.prod(lengths), math.prod(x.shape[axis] for axis in contract))
    return moved.reshape(shape), lengths


def _quantized_matrix(rhs: QuantizedArray, contract: tuple[int, ...], batch: tuple[int, ...]):
    if rhs.ndim != 2 or batch or len(contract) != 1:
        raise ValueError(f"a quantized rhs must be a matrix with one contracted axis, got shape {rhs.shape} and {contract}")
    if contract[0] % 2 == 0:
        rhs = rhs.mT
    return rhs, (rhs.shape[0],)

"""`dot_general`: `lax.dot_general` with quantized operands, for libraries whose layers accept such a function."""

from __future__ import annotations

import math
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from blockfp.definition.layout import DTYPES
from blockfp.definition.rounding import Key, fold_in
from blockfp.recipes import Recipe, RecipeName

from ..arrays.array import QuantizedArray
from ..implementations import explicit, ops
from .delayed import DelayedState, given_back, of_all
from .layer_state import LayerState, takes_layer_state
from .linear import linear_to


@overload
def dot_general(
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: None = None,
) -> jax.Array: ...
@overload
def dot_general(
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: DelayedState,
) -> tuple[jax.Array, DelayedState]: ...
@overload
def dot_general(
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: None = None,
    state: LayerState,
) -> tuple[jax.Array, LayerState]: ...
@takes_layer_state
def dot_general(
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | RecipeName,
    key: Key | None = None,
    state: DelayedState | None = None,
) -> Any:
    """Computes `jax.lax.dot_general` with the operands of the product and of its gradients quantized by a recipe.

    lhs is the recipe's input and rhs its weight. Free axes and contracted axes are flattened, and `linear` multiplies [tokens,
    in] by [out, in], for each pair of matrices if there are batch axes. Each matrix is quantized separately; only a state of
    delayed scaling is shared by all pairs, with the largest amax.

    Args:
        lhs: float32, float16 or bfloat16.
        rhs: like lhs, or a quantized matrix, contracted along its last axis (or its first, with square blocks).
        dimension_numbers: ((contracted axes of lhs, of rhs), (batch axes of lhs, of rhs)).
        precision: must be None, the default, or a pair of these: the recipe determines how products accumulate.
        preferred_element_type: dtype of the result; lhs's by default.
        out_sharding: the result's PartitionSpec or NamedSharding on a mesh with Explicit axes; None derives it from the
            operands (see `linear`).
        recipe: a `Recipe` or its name.
        key, state: as for `linear`.

    Returns:
        The product, or (product, state) if a state is given.

    Raises:
        TypeError, ValueError: as `linear` and `lax.dot_general`; or a quantized rhs is contracted along an axis that its blocks
            don't allow.

    Example:
        >>> layer = flax.nnx.Linear(64, 256, rngs=rngs, dot_general=functools.partial(bfp.dot_general, recipe="mxfp8"))
    """
    if not all(each in (None, "default", lax.Precision.DEFAULT) for each in _each(precision)):
        raise ValueError(f"precision = {precision}: must be None; the recipe's fast_accum determines how products accumulate")
    if out_sharding is not None and not (isinstance(out_sharding, PartitionSpec | NamedSharding) and _is_explicit(lhs)):
        raise ValueError(
            f"out_sharding = {out_sharding}: must be a PartitionSpec or NamedSharding of lhs's mesh with Explicit axes; "
            "inside shard_map each rank has its own result"
        )
    if isinstance(lhs, QuantizedArray):
        raise TypeError("lhs must be an array in high precision, got a QuantizedArray: the recipe quantizes it")
    # Raises JAX's own errors for incompatible shapes.
    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
    jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimension_numbers), *shapes)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    batch = tuple(lhs.shape[axis] for axis in lhs_batch)
    x, tokens = _with_one_contracted("lhs", lhs, tuple(lhs_contract), tuple(lhs_batch))
    w: Any
    if isinstance(rhs, QuantizedArray):
        w, features = _quantized_matrix(rhs, tuple(rhs_contract), tuple(rhs_batch))
    else:
        w, features = _with_one_contracted("rhs", rhs, tuple(rhs_contract), tuple(rhs_batch))
        w = _merged("rhs", w, len(batch), len(features))
    wanted = x.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    dtype = wanted if wanted.name in DTYPES else x.dtype
    if not batch:
        y = linear_to(dtype, x, w, None, recipe, key, state)
    else:
        # Each matrix has its own key.
        words = None if key is None else jnp.asarray(ops.key_array(key))
        count = math.prod(batch)
        keys = None if words is None else jax.vmap(lambda i: fold_in(words, i))(jnp.arange(count, dtype=jnp.int32))
        shared = None if state is None else state.shared()
        each = jax.vmap(lambda x, w, key: linear_to(dtype, x, w, None, recipe, key, shared))
        x, w = (_merged(name, operand, 0, len(batch)) for name, operand in (("lhs", x), ("rhs", w)))
        y = each(x, w, keys)
    if state is not None:
        y, new = y
        state = given_back(of_all(new), state) if batch else new
    shape = (*batch, *tokens, *features)
    y = (y if y.shape == shape else y.reshape(shape)).astype(wanted)
    y = y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
    return y if state is None else (y, state)


def _each(precision: Any) -> tuple[Any, ...]:
    return tuple(precision) if isinstance(precision, tuple | list) else (precision,)


def _is_explicit(x: jax.Array) -> bool:
    return explicit.mesh_of(x) is not None or bool(jax.sharding.get_abstract_mesh().explicit_axes)


def _with_one_contracted(
    name: str, x: jax.Array, contract: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns x as [batch.., free.., contracted] and the lengths of the free axes."""
    free = tuple(axis for axis in range(x.ndim) if axis not in contract and axis not in batch)
    moved = jnp.transpose(x, (*batch, *free, *contract))
    return _merged(name, moved, len(batch) + len(free), len(contract)), tuple(x.shape[axis] for axis in free)


def _merged(name: str, x: jax.Array, first: int, count: int) -> jax.Array:
    """Merges `count` axes starting at `first`; raises ValueError if an Explicit axis cuts any but the first of them."""
    if count == 1:
        return x
    if explicit.mesh_of(x) is not None:
        for axis in range(first + 1, first + count):
            cut = explicit.axis_names(explicit.spec_of(x)[axis])
            if cut:
                raise ValueError(
                    f"axes {tuple(range(first, first + count))} of {name} become one, and axis {axis} is cut over {cut[0]!r}, "
                    "a mesh axis of type Explicit (counted with batch axes first, then free ones): of such axes only the "
                    "first may be cut"
                )
    return x.reshape(*x.shape[:first], math.prod(x.shape[first : first + count]), *x.shape[first + count :])


def _quantized_matrix(rhs: QuantizedArray, contract: tuple[int, ...], batch: tuple[int, ...]):
    if rhs.ndim != 2 or batch or len(contract) != 1:
        raise ValueError(f"a quantized rhs must be a matrix with one contracted axis, got shape {rhs.shape} and {contract}")
    if contract[0] % 2 == 0:
        rhs = rhs.mT
    return rhs, (rhs.shape[0],)

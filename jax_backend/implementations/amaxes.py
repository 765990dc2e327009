"""Amaxes as cotangents: values whose accumulation is the maximum.

JAX adds the cotangents of a value that is used several times: in several calls, in a scan that closes over it, in copies made
by vmap. Amaxes must be combined by maximum instead. So these cotangents have their own dtype, float32 in memory, which defines
its addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .jax_internals import EArray, ExtendedDType, extended_scalar, physical_result_handler, register_array


class _Rules:
    allow_conversion = True

    @staticmethod
    def physical_element_aval(dtype: Any) -> ShapedArray:
        return ShapedArray((), np.dtype(np.float32))

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        return dtype

    @staticmethod
    def add(dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return as_amax(_larger(as_float(x), as_float(y)))

    @staticmethod
    def zero(dtype: Any) -> jax.Array:
        return as_amax(jnp.zeros((), jnp.float32))

    @staticmethod
    def full(shape, fill_value, dtype: Any) -> jax.Array:
        return as_amax(jnp.full(shape, fill_value, jnp.float32))

    @staticmethod
    def global_sharded_result_handler(aval, out_sharding, committed):
        return physical_result_handler(aval, out_sharding, committed).wrap(lambda buffer: _Concrete(aval, buffer))


class _Concrete(EArray):
    """Concrete amaxes."""

    __slots__ = ()


class _amax(extended_scalar):
    """Scalar type of amaxes."""


@dataclass(frozen=True, repr=False)
class _AmaxDType(ExtendedDType):
    _rules = _Rules
    type = _amax  # pyright: ignore[reportAssignmentType]
    itemsize = 4  # pyright: ignore[reportAssignmentType]
    name = "amax"  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return self.name


register_array(_Concrete, lambda x, y: _Rules.add(AMAX, x, y))

AMAX = _AmaxDType()
"""The dtype of amaxes, which are non-negative."""


def as_amax(x: jax.Array) -> jax.Array:
    """Converts float32 to amaxes."""
    return lax.convert_element_type(x, AMAX)


def as_float(x: jax.Array) -> jax.Array:
    """Converts amaxes to float32."""
    return lax.convert_element_type(x, jnp.float32)


def is_amax(x: Any) -> bool:
    """Returns whether x is an array (or shape) of amaxes."""
    return getattr(x, "dtype", None) is AMAX


def largest(x: jax.Array) -> jax.Array:
    """Returns the maximum of amaxes along the first axis."""
    return as_amax(jnp.max(as_float(x).view(jnp.int32), axis=0, initial=0).view(jnp.float32))


def repeated(x: jax.Array, count: int) -> jax.Array:
    """Repeats amaxes `count` times along a new first axis."""
    return as_amax(jnp.broadcast_to(as_float(x), (count, *x.shape)))


def _larger(x: jax.Array, y: jax.Array) -> jax.Array:
    # Integer maximum, which no compiler rewrites.
    return jnp.maximum(x.view(jnp.int32), y.view(jnp.int32)).view(jnp.float32)

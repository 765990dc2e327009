"""Amaxes as cotangents: numbers whose sum is the largest of them.

JAX adds up the cotangents of what is used more than once: in several calls, in a scan that closes over it, in copies that vmap
makes. The amax of several tensors is the largest of theirs. So these cotangents have a dtype of their own, float32 in memory,
which says how they are added.
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
    """Amaxes that aren't traced."""

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
"""The dtype of amaxes, which are 0 or more."""


def as_amax(x: jax.Array) -> jax.Array:
    """Makes amaxes of float32 numbers."""
    return lax.convert_element_type(x, AMAX)


def as_float(x: jax.Array) -> jax.Array:
    """The float32 numbers of amaxes."""
    return lax.convert_element_type(x, jnp.float32)


def is_amax(x: Any) -> bool:
    """Returns True for amaxes, or what stands for them (a shape)."""
    return getattr(x, "dtype", None) is AMAX


def largest(x: jax.Array) -> jax.Array:
    """The largest amaxes along the first axis."""
    return as_amax(jnp.max(as_float(x).view(jnp.int32), axis=0, initial=0).view(jnp.float32))


def repeated(x: jax.Array, count: int) -> jax.Array:
    """Amaxes, once for each of `count`, along a new first axis."""
    return as_amax(jnp.broadcast_to(as_float(x), (count, *x.shape)))


def _larger(x: jax.Array, y: jax.Array) -> jax.Array:
    # As integers, whose maximum no compiler takes apart.
    return jnp.maximum(x.view(jnp.int32), y.view(jnp.int32)).view(jnp.float32)

"""Carriers: arrays without bytes that accompany a differentiated array's codes and receive its gradient.

JAX gives integers, such as codes, no tangents. A carrier has the shape of the original array, elements of zero bytes, and
tangents of the original's dtype. It passes through all transformations like any array, and programs store nothing for it. JAX
calls such element types extended dtypes (random keys have one); this module implements the interface that JAX expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .jax_internals import (
    EArray,
    ExtendedDType,
    extended_scalar,
    physical_aval,
    physical_result_handler,
    register_array,
    saved_as_they_are,
)


class _Rules:
    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype: CarrierDType):
        # Float32, because JAX pads gathers with NaN.
        return ShapedArray((0,), np.dtype(np.float32))

    @staticmethod
    def tangent_dtype(dtype: CarrierDType) -> Any:
        return dtype.of

    @staticmethod
    def full(shape, fill_value, dtype: CarrierDType):
        return carrier_of(lax.full(shape, 0, dtype.of))

    @staticmethod
    def zero(dtype: CarrierDType):
        return carrier_of(lax.full((), 0, dtype.of))

    @staticmethod
    def global_sharded_result_handler(aval, out_sharding, committed):
        return physical_result_handler(aval, out_sharding, committed).wrap(lambda buffer: _Concrete(aval, buffer))

    @staticmethod
    def make_sharded_array(aval, sharding, arrays, committed):
        return _Concrete(aval, physical_result_handler(aval, sharding, committed)([a._data for a in arrays]))


class _carrier(extended_scalar, np.inexact):
    """Scalar type of carriers; inexact, because libraries require that of differentiable arrays (`eqx.is_inexact_array`)."""


@dataclass(frozen=True, repr=False)
class CarrierDType(ExtendedDType):
    """The dtype of carriers for arrays of dtype `of`, a NumPy or an extended dtype."""

    of: Any
    _rules = _Rules
    type = _carrier  # pyright: ignore[reportAssignmentType]
    itemsize = 0  # pyright: ignore[reportAssignmentType]

    @property
    def name(self) -> str:
        return f"carrier<{self.of.name}>"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        # JAX and NumPy quote this in errors about unsupported dtypes.
        return (
            f"{self.name} (beside the codes of a QuantizedArray, which aren't values: blockfp.jax.dequantize_params(tree) has "
            "values, and their gradient)"
        )


class _Concrete(EArray):
    """A concrete carrier."""

    __slots__ = ()
    nbytes = 0  # pyright: ignore[reportAssignmentType]


register_array(_Concrete)


class Shares:
    """Base of tree nodes whose cotangents are combined in another way than by addition.

    `value_and_grad` calls `shared`, so that all uses have one carrier.
    """

    def differentiated(self) -> Any:
        """Returns the arrays that have derivatives, as a tree."""
        raise NotImplementedError

    def at(self, point: Any) -> Any:
        """Returns a copy with these in place of `differentiated`."""
        raise NotImplementedError

    def shared(self) -> Any:
        """Returns a copy with a carrier that receives the cotangents of all uses."""
        raise NotImplementedError

    def unshared(self) -> Any:
        """Returns a copy without the carrier; the arrays' cotangent goes to it."""
        raise NotImplementedError


class Watch:
    """Tracks whether an array quantized in a trace is differentiated there, and whether its codes leave without a carrier.

    Attributes:
        live: the array is known to be differentiated, so its carrier must stay with its codes.
        escaped: the codes were taken apart without their carrier.
    """

    def __init__(self) -> None:
        self.live = self.escaped = False
        self._making = True

    def made(self) -> Watch:
        """Marks the carrier as complete: a later differentiation happens after its trace has ended."""
        self._making = False
        return self

    def differentiated(self) -> None:
        """Raises TypeError if differentiated codes have lost their carrier."""
        if self._making:
            self.live = True
        elif self.escaped and not self.live:
            raise TypeError(
                "the gradient of an array that was quantized inside a function which JAX traces by itself (jit, checkpoint, "
                "scan, cond, ..) is lost, because codes left it, or went through a transformation or jax.tree.map there, "
                "without what takes it: differentiate inside jit (jax.jit(jax.grad(f)) instead of jax.grad(jax.jit(f))); or "
                "give on quantize(x, ..).with_carrier(); or quantize and dequantize in one function; or, where no gradient is "
                "wanted, quantize jax.lax.stop_gradient(x)"
            )


def carrier_of(x: jax.Array, watch: Watch | None = None) -> Any:
    """Makes the carrier of x, or of the array that x carries; it has x's tangent."""
    return _carrier_p.bind(x, watch=watch)


def is_carrier(x: Any) -> bool:
    """Returns whether x is a carrier (or its shape)."""
    return isinstance(getattr(x, "dtype", None), CarrierDType)


saved_as_they_are(is_carrier)


def _dtype(x) -> CarrierDType:
    if is_carrier(x):
        return x.dtype
    return CarrierDType(x.dtype if isinstance(x.dtype, ExtendedDType) else np.dtype(x.dtype))


def _of_concrete(x, *, watch):
    lies = getattr(x, "sharding", None)
    if isinstance(lies, NamedSharding):
        # A carrier has its array's sharding, so that the gradient gets it too.
        data = jnp.zeros((*x.shape, 0), np.float32, device=NamedSharding(lies.mesh, PartitionSpec(*lies.spec)))
        return _Concrete(jax.typeof(x).update(dtype=_dtype(x), weak_type=False), data)
    return _Concrete(ShapedArray(np.shape(x), _dtype(x)), jnp.zeros((*np.shape(x), 0), np.float32))


def _lowered(ctx, x, *, watch):
    (aval,) = ctx.avals_out
    ctx = ctx.replace(avals_out=[physical_aval(aval)])
    return mlir.lower_fun(lambda x: jnp.zeros((*x.shape, 0), np.float32), multiple_results=False)(ctx, x)


def _jvp(primals, tangents, *, watch):
    if watch is not None:
        watch.differentiated()
    return carrier_of(primals[0], watch), tangents[0]


_carrier_p = Primitive("carrier")
_carrier_p.def_impl(_of_concrete)
_carrier_p.def_abstract_eval(lambda x, *, watch: x.update(dtype=_dtype(x), weak_type=False))
mlir.register_lowering(_carrier_p, _lowered)
batching.primitive_batchers[_carrier_p] = lambda args, dims, *, watch: (carrier_of(args[0], watch), dims[0])
ad.primitive_jvps[_carrier_p] = _jvp

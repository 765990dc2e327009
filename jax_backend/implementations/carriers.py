"""Carriers: arrays without bytes that stand for a differentiated array beside its codes, and take its gradient.

Codes are integers, which JAX gives no tangent. A carrier has the shape of the array that was quantized, elements of no bytes,
and tangents of that array's dtype: it goes through every transformation as arrays do, and no program stores anything for it.
JAX knows such elements as extended dtypes (its random keys have one); what follows is what it asks of them.
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
        # Of a dtype that has the NaN with which JAX fills up what it gathers.
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
    """Scalar type of carriers; inexact, because libraries ask that of what may have a gradient (`eqx.is_inexact_array`)."""


@dataclass(frozen=True, repr=False)
class CarrierDType(ExtendedDType):
    """The dtype of carriers of arrays of dtype `of`, a NumPy or an extended one."""

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
        # JAX's and NumPy's errors about calculating with an array of a dtype that they don't know quote this.
        return (
            f"{self.name} (beside the codes of a QuantizedArray, which aren't values: blockfp.jax.dequantize_params(tree) has "
            "values, and their gradient)"
        )


class _Concrete(EArray):
    """A carrier that isn't traced."""

    __slots__ = ()
    nbytes = 0  # pyright: ignore[reportAssignmentType]


register_array(_Concrete)


class Shares:
    """The base of what stands in a tree for arrays whose cotangents are joined in another way than by addition.

    `value_and_grad` shares it, so that all uses have one carrier.
    """

    def shared(self) -> Any:
        """Returns this with a carrier for all uses, to which each of them gives its cotangent."""
        raise NotImplementedError

    def unshared(self) -> Any:
        """Returns this without the carrier, whose cotangent comes from the arrays'."""
        raise NotImplementedError


class Watch:
    """The fate of an array that was quantized in a trace: differentiated there or not, and its codes taken on or not.

    Attributes:
        live: the array is known to be differentiated, so that its carrier must stay beside its codes.
        escaped: the codes were taken apart without their carrier.
    """

    def __init__(self) -> None:
        self.live = self.escaped = False
        self._making = True

    def made(self) -> Watch:
        """Notes that the carrier is there: what differentiates it from now on does so after its trace has ended."""
        self._making = False
        return self

    def differentiated(self) -> None:
        """Raises TypeError where codes that are differentiated have lost their carrier."""
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
    """Makes the carrier of x, or of what x is the carrier of: its tangent is x's."""
    return _carrier_p.bind(x, watch=watch)


def is_carrier(x: Any) -> bool:
    """Returns True for a carrier, or what stands for one (a shape)."""
    return isinstance(getattr(x, "dtype", None), CarrierDType)


saved_as_they_are(is_carrier)


def _dtype(x) -> CarrierDType:
    if is_carrier(x):
        return x.dtype
    return CarrierDType(x.dtype if isinstance(x.dtype, ExtendedDType) else np.dtype(x.dtype))


def _of_concrete(x, *, watch):
    lies = getattr(x, "sharding", None)
    if isinstance(lies, NamedSharding):
        # A carrier lies as what it stands for, or the gradient would lie elsewhere.
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

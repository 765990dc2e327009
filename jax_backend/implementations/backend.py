"""The interface of backends: operations and their arguments."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format

MaybeArray = jax.Array | None


class Backend(ABC):
    """Base of the backends XLA, CPU library, CUDA library and Pallas, which give the same bits.

    Arrays are positional arguments and traced; all others are static. Backends are compared by identity.

    Attributes:
        name: the backend's name for `implementation=`.
        platform: the only platform that can run its programs; None for all platforms.
        asked: whether the caller named the backend; then the definition never replaces it.
        marks: whether its quantizing methods take `mark`, as the wrapper `marked` does.
    """

    name: ClassVar[str]
    platform: ClassVar[str | None] = None
    marks: ClassVar[bool] = False

    def __init__(self, *, asked: bool = False) -> None:
        self.asked = asked

    def __repr__(self) -> str:
        return f"{type(self).__name__}(asked={self.asked})"

    def missing(self) -> str | None:
        """Returns why the backend can't run on this machine, or None."""
        return None

    def refusal(self, operation: str, *, format: Format, **options: Any) -> str | None:
        """Returns why the backend has no kernel for an operation, or None.

        `operation` names a method below; `options` holds its static arguments, and `stochastic` for stochastic rounding.
        """
        return None

    @abstractmethod
    def amax(self, x: jax.Array, *, format: Format) -> Amax:
        """Computes `numerics.amax` of x [..., rows, columns]."""

    @abstractmethod
    def quantize(
        self, x: jax.Array, key: MaybeArray, amax: MaybeArray, *, format: Format, eps: float = 0.0, nominal: str | None = None
    ) -> Quantized:
        """Quantizes x as `numerics.quantize` does.

        Args:
            x: float32, float16 or bfloat16 [..., rows, columns].
            key: uint32 of shape (2,) for stochastic rounding; None rounds to nearest.
            amax: the tensor's amax for formats with a tensor scale: int32 bits, or a float32 multiplier instead (delayed
                scaling); None computes it.
            format: the format.
            eps: lower bound of amaxes.
            nominal: the dtype whose largest finite value bounds multipliers; x's by default.
        """

    @abstractmethod
    def quantize_columnwise(
        self, x: jax.Array, key: MaybeArray, amax: MaybeArray, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> Quantized:
        """Quantizes x.mT, rotated along its last axis first if `rotate`; `amax` is that of the transposed, rotated array."""

    @abstractmethod
    def quantize_both(
        self, x: jax.Array, key: MaybeArray, amax: MaybeArray, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        """Computes `quantize` and `quantize_columnwise`; kernels read x only once.

        `key` is uint32 of shape (4,), two words per result, or None. `amax` applies to both directions, so it can't be used if
        one is rotated.
        """

    @abstractmethod
    def dequantize(
        self,
        codes: jax.Array,
        scales: jax.Array,
        tensor_scale: MaybeArray,
        *,
        format: Format,
        dtype: str,
        columns: int,
        origin: tuple[int, int] = (0, 0),
    ) -> jax.Array:
        """Dequantizes codes and scales as `numerics.dequantize` does."""


# ---- overflow


_E8M0_NAN = 0xFF


def marked(quantize: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a quantizing operation that makes all scales NaN if its first argument contains an Inf.

    Codes saturate, so they alone don't show it. A NaN has a NaN code, or its block a NaN scale.
    """

    def run(x: jax.Array, *rest: Any, **options: Any) -> Any:
        finite = ~jnp.isinf(x).any()
        return jax.tree.map(
            partial(unless, finite), quantize(x, *rest, **options), is_leaf=lambda node: isinstance(node, Quantized)
        )

    return run


def unless(finite: jax.Array, parts: Quantized) -> Quantized:
    """Makes scales, or tensor scales, NaN unless `finite`: bool (), or [stack] for each matrix of a stack."""
    if parts.tensor_scale is not None:
        return parts._replace(tensor_scale=jnp.where(finite, parts.tensor_scale, jnp.nan))
    return parts._replace(scales=jnp.where(finite[..., None, None], parts.scales, nan_scale(parts.scales)))


def nan_scale(scales: jax.Array) -> jax.Array:
    """Returns NaN as a scale of a format without a tensor scale."""
    return jnp.asarray(_E8M0_NAN if scales.dtype == jnp.uint8 else jnp.nan, scales.dtype)


# ---- what backends share


def missing_library(platform: str, library: Any) -> str | None:
    """Returns why a kernel library can't run in JAX programs for `platform`, or None.

    `library` is the module that loads it: `native` or `cuda_library`.
    """
    if jax.default_backend() != platform:
        return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
    if importlib.util.find_spec("jax_tvm_ffi") is None:
        return "the package jax-tvm-ffi is not installed"
    return None if library.available() else library.status()


def keys_of_both(key: MaybeArray) -> tuple[MaybeArray, MaybeArray]:
    """Splits the key of `quantize_both` into the keys of its two results."""
    return (None, None) if key is None else (key[:2], key[2:])


def amax_of_tensor(bits: jax.Array, x: jax.Array) -> Amax:
    """Returns the `Amax` of an array x with one scale, from the int32 bits of its largest magnitude."""
    return Amax(bits.reshape((1,) * x.ndim), None, None)


def refusal_of_amax(operation: str, format: Format) -> str | None:
    """Returns why a GPU's kernels don't compute the amaxes of a format, or None."""
    if operation != "amax" or format.per_tensor:
        return None
    return "the kernels look for the amax of a whole tensor"

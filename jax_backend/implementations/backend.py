"""The base of backends: the operations that each of them has, and the arguments that these take."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax

from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format

MaybeArray = jax.Array | None


class Backend(ABC):
    """The base of backends: XLA, the CPU library, the CUDA library and Pallas, which give the same bits.

    Arrays are positional arguments and traced; the others are static. Backends are compared by identity.

    Attributes:
        name: the backend's name as users write it (`implementation=`).
        platform: the one platform its programs run on; None where each can run them.
        asked: True where the caller named the backend: the definition never stands in for it.
    """

    name: ClassVar[str]
    platform: ClassVar[str | None] = None

    def __init__(self, *, asked: bool = False) -> None:
        self.asked = asked

    def __repr__(self) -> str:
        return f"{type(self).__name__}(asked={self.asked})"

    def missing(self) -> str | None:
        """Returns the reason why the backend can't run on this machine, or None."""
        return None

    def refusal(self, operation: str, *, format: Format, **options: Any) -> str | None:
        """Returns the reason why the backend has no kernel for an operation, or None.

        Args:
            operation: the name of a method below.
            format: the format.
            options: `stochastic`, True for stochastic rounding, and the static arguments of the method.
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
            key: uint32 of shape (2,) for stochastic rounding, or None to round to nearest.
            amax: the amax of the whole tensor, for formats that have a scale for it: int32 bits, or float32 for the
                multiplier that stands instead of it (delayed scaling); None to compute it.
            format: the format.
            eps: the least amax that scales are made of.
            nominal: the dtype whose largest number bounds scales; by default that of x.
        """

    @abstractmethod
    def quantize_columnwise(
        self, x: jax.Array, key: MaybeArray, amax: MaybeArray, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> Quantized:
        """Quantizes x.mT, rotated along its last axis first if `rotate` is True.

        Args:
            x, key, format, eps: as for `quantize`.
            amax: the amax of the transposed, rotated array.
            rotate: applies the random Hadamard transform.
        """

    @abstractmethod
    def quantize_both(
        self, x: jax.Array, key: MaybeArray, amax: MaybeArray, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        """Computes `quantize` and `quantize_columnwise`, from one read of x where there is a kernel for that.

        Args:
            x, format, eps, rotate: as for `quantize_columnwise`.
            key: uint32 of shape (4,), two words for each result, or None.
            amax: the amax of both directions, so of no use where one is rotated.
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
        """Decodes the values of codes and scales as `numerics.dequantize` does."""


def missing_library(platform: str, library: Any) -> str | None:
    """Returns the reason why a kernel library can't run in programs for JAX's platform, or None.

    Args:
        platform: the library's, as JAX names it.
        library: the module that loads it: `native` or `cuda_library`.
    """
    if jax.default_backend() != platform:
        return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
    if importlib.util.find_spec("jax_tvm_ffi") is None:
        return "the package jax-tvm-ffi is not installed"
    return None if library.available() else library.status()


def keys_of_both(key: MaybeArray) -> tuple[MaybeArray, MaybeArray]:
    """Splits the key of `quantize_both` into those of its two results."""
    return (None, None) if key is None else (key[:2], key[2:])


def amax_of_tensor(bits: jax.Array, x: jax.Array) -> Amax:
    """The `Amax` of an array x with one scale, from the int32 bits of its largest magnitude."""
    return Amax(bits.reshape((1,) * x.ndim), None, None)


def refusal_of_amax(operation: str, format: Format) -> str | None:
    """Returns the reason why a GPU's kernels don't compute the amaxes of a format, or None."""
    if operation != "amax" or format.per_tensor:
        return None
    return "the kernels look for the amax of a whole tensor"

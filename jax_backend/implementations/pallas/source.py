"""What the kernels quantize: an array, or what an activation makes of a gate and an up, which is never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import activations
from . import blocks


@partial(jax.tree_util.register_dataclass, data_fields=("gate", "up"), meta_fields=("activation",))
@dataclass(frozen=True)
class Source:
    """The input of a quantizing kernel, a pytree.

    Attributes:
        gate: the array itself, or what the activation takes.
        up: multiplies the activation; or None.
        activation: its name, or None.
    """

    gate: jax.Array
    up: jax.Array | None = None
    activation: str | None = None

    @classmethod
    def of(cls, x: jax.Array | Source) -> Source:
        """Returns x, an array by itself."""
        return x if isinstance(x, Source) else cls(x)

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays that a kernel reads."""
        return [self.gate] if self.up is None else [self.gate, self.up]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each array."""
        return self.gate.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of each array, to which the activation and its product are rounded."""
        return self.gate.dtype

    def made(self, values: Sequence[jax.Array]) -> jax.Array:
        """Returns what is quantized, from a part of each array; see `activations.activated`."""
        if self.activation is None:
            return values[0]
        out = _FUNCTIONS[self.activation](blocks.to_fp32(values[0])).astype(self.dtype)
        # The product of 16-bit numbers is exact in fp32, so it is rounded once.
        return out if self.up is None else (blocks.to_fp32(out) * blocks.to_fp32(values[1])).astype(self.dtype)


# ---- XLA's functions, to the bit: PTX of both has the same operations, of which XLA fuses none but those of tanh

# Cephes' coefficients, highest power first: erf(x) / x in x^2, and erfc(x) x exp(x^2) in 1 / x^2 for |x| below 2 and above it.
_ERF = (7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2, 1.128358514861418e-1,
        -3.761262582423300e-1, 1.128379165726710)  # fmt: skip
_ERFC_BELOW_2 = (2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1, 6.210004621745983e-1,
                 -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1)  # fmt: skip
_ERFC_ABOVE_2 = (-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786, -1.015265279202700,
                 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1)  # fmt: skip
_UNDERFLOW = -88.72283905206835  # exp gives zero below
# Eigen's, of tanh's numerator and denominator in x^2; constant beyond the limit.
_TANH_ABOVE = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-8, 1.48572235717979e-5,
               6.37261928875436e-4, 4.89352455891786e-3)  # fmt: skip
_TANH_BELOW = (1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3)
_TANH_LIMIT = 7.99881172180175781


def _apart(product: jax.Array) -> jax.Array:
    """Returns the product, which fuses with no sum then: that would round once."""
    return jnp.maximum(product, float(np.finfo(np.float32).min))


def _polynomial(x: jax.Array, coefficients: Sequence[float], *, fused: bool = False) -> jax.Array:
    total: Any = coefficients[0]
    for coefficient in coefficients[1:]:
        total = (total * x if fused else _apart(total * x)) + coefficient
    return total


def _erfc(x: jax.Array) -> jax.Array:
    """Computes `lax.erfc`, which Mosaic GPU doesn't lower."""
    size, square = jnp.abs(x), x * x
    inverse = 1.0 / square
    tail = jnp.where(size < 2.0, _polynomial(inverse, _ERFC_BELOW_2), _polynomial(inverse, _ERFC_ABOVE_2))
    tail = jnp.where(-square < _UNDERFLOW, 0.0, jnp.exp(-square) * (1.0 / size) * tail)
    return jnp.where(size < 1.0, 1.0 - _apart(x * _polynomial(square, _ERF)), jnp.where(x < 0.0, 2.0 - tail, tail))


def _tanh(x: jax.Array) -> jax.Array:
    """Computes `lax.tanh`, for which Mosaic GPU takes CUDA's: the distance from -1 decides the bits of GELU."""
    inside = jnp.where(x >= _TANH_LIMIT, _TANH_LIMIT, jnp.where(x <= -_TANH_LIMIT, -_TANH_LIMIT, x))
    square = inside * inside
    quotient = inside * _polynomial(square, _TANH_ABOVE, fused=True) / _polynomial(square, _TANH_BELOW, fused=True)
    return jnp.where(jnp.abs(x) < 0.0004, inside, quotient)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    inner = float(np.float32(np.sqrt(2 / np.pi))) * (x + _apart(0.044715 * (x * x * x)))
    return x * (0.5 * (1.0 + _tanh(inner)))


_FUNCTIONS: dict[str, activations.Function] = {
    **activations.FUNCTIONS,
    "gelu_tanh": _gelu_tanh,
    "gelu": lambda x: 0.5 * x * _erfc(-x * float(np.sqrt(np.float32(0.5)))),
    # Before JAX 0.12 Mosaic GPU doesn't lower functions with derivatives of their own, such as `jax.nn.relu`.
    "relu2": lambda x: jnp.square(jnp.maximum(x, 0.0)),
}

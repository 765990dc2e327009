"""Muon on any array library: momentum, Newton-Schulz iteration of whole matrices, and the learning rate of a shape.

The formulas match `torch.optim.Muon` and, with `bias_correction`, `optax.contrib.muon` (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982). A step has three parts:

    momentum = momentum + (gradient - momentum) (1 - beta)           `adamw.update` by `momentum_coefficients`
    direction = orthogonalize(gradient a + momentum b)               of each whole matrix; a and b from `adamw.blend`
    weight = weight (1 - lr weight_decay) - lr ratio direction       `adamw.update` by `coefficients`

The first and last part are steps of AdamW with other constants, so its kernels do them, and they are equal in NumPy, PyTorch
and the kernels. Sums in matrix products depend on the library, the device and the shape, so directions agree to rounding only.
A backend computes each matrix whole, in one layout, so that no mesh changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from .adamw import Coefficients
from .bits import Array

RATIOS = {"original": None, "match_rms_adamw": 0.2}
"""torch's names of the ratios between a matrix's learning rate and its group's, with the `rms` of `ratio`."""

DTYPES = ("bfloat16", "float32")
"""Names of the dtypes that `orthogonalize` computes in."""


class Settings(NamedTuple):
    """Settings of a direction.

    Attributes:
        momentum: decay of the momentum, beta.
        nesterov: whether the direction looks one step ahead.
        bias_correction: whether gradient and momentum are blended as if the momentum had not started at 0, as optax does.
        ns_coefficients: a, b, c of the iteration x <- a x + (b x x^T + c (x x^T)^2) x.
        ns_steps: number of iterations.
        eps: least Frobenius norm by which a matrix is divided.
        ns_dtype: dtype of the iteration: "bfloat16", or "float32".
    """

    momentum: Any = 0.95
    nesterov: bool = True
    bias_correction: bool = False
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    eps: Any = 1e-7
    ns_dtype: str = "bfloat16"


def check_settings(settings: Settings) -> None:
    """Raises ValueError for invalid settings. Arrays are not checked."""
    momentum, _, _, coefficients, steps, eps, dtype = settings
    if not (0 <= float(momentum) < 1 if isinstance(momentum, Real) else hasattr(momentum, "dtype")):
        raise ValueError(f"momentum must be a number of at least 0 and below 1, got {momentum!r}")
    if len(coefficients) != 3 or not all(isinstance(one, Real) for one in coefficients):
        raise ValueError(f"ns_coefficients must be three numbers, got {coefficients!r}")
    if not (isinstance(steps, int) and 1 <= steps < 100):
        raise ValueError(f"ns_steps must be an integer of 1 to 99, got {steps!r}")
    if not (float(eps) > 0 if isinstance(eps, Real) else hasattr(eps, "dtype")):
        raise ValueError(f"eps must be above 0, got {eps!r}")
    if dtype not in DTYPES:
        raise ValueError(f"ns_dtype must be {' or '.join(map(repr, DTYPES))}, got {dtype!r}")


def ratio(rows: int, columns: int, rms: float | None) -> float:
    """Returns the ratio between the learning rate of a matrix [rows, columns], [out, in], and its group's.

    With `rms` the direction gets this root mean square, as Moonlight does: rms sqrt(max(rows, columns)). For 0.2, AdamW's
    learning rates and weight decay can be reused. None is Jordan's sqrt(max(1, rows / columns)).
    """
    if rms is not None:
        return rms * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def coefficients(lr: Any, weight_decay: Any, ratio: float) -> Coefficients:
    """Returns the constants with which `adamw.update` adds a direction, given as its gradient, to the weight.

    Both of its moments must be 0: the first becomes the direction, the second stays 0, and the denominator is 1.
    """
    return Coefficients(
        decay=1 - lr * weight_decay, l2=0.0, weight1=1.0, beta2=0.0, weight2=0.0, unbias2=0.0, eps=1.0, rate=-lr * ratio
    )


def momentum_coefficients(settings: Settings) -> Coefficients:
    """Returns the constants with which `adamw.update` updates a momentum, given as its first moment.

    Weight and second moment must be 0: the second stays 0, and the weight becomes the momentum before it is rounded.
    """
    return Coefficients(
        decay=1.0, l2=0.0, weight1=1 - settings.momentum, beta2=0.0, weight2=0.0, unbias2=0.0, eps=1.0, rate=1.0
    )


def blended(momentum: Array, gradient: Array, factors: tuple[Any, Any]) -> Array:
    """Returns the direction before it is orthogonalized, float32; `factors` is of `adamw.blend`."""
    return gradient * factors[0] + momentum * factors[1]


def _addmm(x: Array, a: Array, b: Array, *, beta: float, alpha: float) -> Array:
    xp = array_namespace(x)
    x32, a32, b32 = (xp.astype(one, xp.float32) for one in (x, a, b))
    return xp.astype(x32 * beta + (a32 @ b32) * alpha, x.dtype)


def orthogonalize(x: Array, settings: Settings, addmm: Callable[..., Array] = _addmm) -> Array:
    """Returns about U V^T of the matrix x = U S V^T; singular values are about 0.7 to 1.2.

    Args:
        x: [rows, columns] in `ns_dtype`. The smaller side is multiplied by itself, so tall matrices are transposed.
        settings: the iteration.
        addmm: (x, a, b, beta=, alpha=) -> x beta + (a @ b) alpha, rounded once to x's dtype.
    """
    xp = array_namespace(x)
    tall = x.shape[0] > x.shape[1]
    wide = x.T if tall else x
    values = xp.astype(wide, xp.float32)
    norm = xp.sqrt(xp.sum(values * values))
    wide = xp.astype(values / xp.where(norm < settings.eps, xp.full_like(norm, settings.eps), norm), x.dtype)
    a, b, c = settings.ns_coefficients
    for _ in range(settings.ns_steps):
        gram = wide @ wide.T
        wide = addmm(wide, addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a, alpha=1.0)
    return wide.T if tall else wide


def cost(rows: int, columns: int) -> int:
    """Returns the multiplications of one iteration, by which work is divided among ranks."""
    small, large = min(rows, columns), max(rows, columns)
    return small * small * (2 * large + small)

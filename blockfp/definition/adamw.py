"""AdamW and Adam on any array library: the update, its coefficients, and moments in bfloat16 or FP8.

The formulas match `torch.optim.AdamW` and `torch.optim.Adam` (Kingma, Ba 2015; Loshchilov, Hutter 2019). Every operation is a
single fp32 operation, so NumPy, eager torch and the kernels (kernels/include/blockfp/adamw.h) agree bit for bit. XLA would fuse
products and sums, and divides inexactly on a GPU; JAX's face prevents it (`Operations`) and computes a traced step's constants
in float64, as Python does, so moments and masters agree too.

Moments can be stored in bfloat16, or in FP8 in blocks of 1x128 along the last axis (`MOMENT_FORMAT`). Rounding to nearest would
not work: a step changes a second moment by about 0.1%, but codes are 0.4 to 12% apart, so a moment could rise and never fall.
Low-precision moments are rounded stochastically with two random bytes per element. One byte would lose changes below 1/512 of a
spacing, and with beta2 = 0.9999 a step changes a second moment by less.

FP8 stores the square root of the second moment, which halves the exponent range. A block covers about 34 binades below its
largest second moment; smaller nonzero values are raised to the smallest code, because the update divides by them. Scales are
powers of two, so values that were stored once can be stored again unchanged, even if other values of the block change: a state
saved as fp32 values resumes bit for bit. Blocks start at the parameter's first column and never span rows, so sharding rows
changes nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, NamedTuple

from array_api_compat import array_namespace, is_torch_array

from ..formats import Format
from . import bits, numerics
from .bits import Array
from .layout import Materialize, as_stored
from .numerics import Origin
from .rounding import WIDE, Key, fold_in

Moments = Literal["float32", "bfloat16", "fp8"]
"""Storage types of the moments."""

MOMENT_FORMAT = Format.parse("fp8_e4m3_1x128")
"""Format of FP8 moments: E4M3, 1x128 blocks, power-of-two scales in fp32."""

WEIGHT, FIRST, SECOND = 2, 3, 4
"""Numbers that `rounding_key` folds into the key for the weight and the two moments."""


class Coefficients(NamedTuple):
    """Constants of a step: numbers, or arrays with one element per parameter.

    Attributes:
        decay: 1 - lr * weight_decay for AdamW, 1 for Adam.
        l2: weight_decay for Adam, 0 for AdamW.
        weight1: 1 - beta1.
        beta2: beta2.
        weight2: 1 - beta2.
        unbias2: 1 / sqrt(1 - beta2^step).
        eps: eps.
        rate: -lr / (1 - beta1^step).
        unscale: factor for the gradient, applied first: the inverse of the loss scale.
        skip: nonzero if a gradient is not finite and the step must change nothing.
    """

    decay: Any
    l2: Any
    weight1: Any
    beta2: Any
    weight2: Any
    unbias2: Any
    eps: Any
    rate: Any
    unscale: Any = 1.0
    skip: Any = 0.0


def coefficients(
    step: Any, lr: Any, betas: tuple[Any, Any], eps: Any, weight_decay: Any, *, decoupled: bool = True
) -> Coefficients:
    """Returns the constants of step number `step`, which starts at 1.

    Each argument is a number or an array; betas given as arrays must not be 0. `weight_decay` is AdamW's, or Adam's L2 term if
    `decoupled` is False.
    """
    bias1, bias2 = (bias(step, beta) for beta in betas)
    root = array_namespace(bias2).sqrt(bias2) if hasattr(bias2, "dtype") else math.sqrt(bias2)
    decay = 1 - lr * weight_decay if decoupled else 1.0
    l2 = 0.0 if decoupled else weight_decay
    return Coefficients(decay, l2, 1 - betas[0], betas[1], 1 - betas[1], 1 / root, eps, -lr / bias1)


def bias(step: Any, beta: Any) -> Any:
    """Returns 1 - beta^step without cancellation for beta close to 1."""
    if isinstance(beta, Real) and beta == 0:
        return 1.0
    power = step * (math.log(beta) if isinstance(beta, Real) else array_namespace(beta).log(beta))
    return -array_namespace(power).expm1(power) if hasattr(power, "dtype") else -math.expm1(power)


def blend(step: Any, beta: Any, *, nesterov: bool, bias_correction: bool) -> tuple[Any, Any]:
    """Returns the factors of gradient and first moment in the direction of step number `step`, which starts at 1.

    With `nesterov` the direction looks one step ahead (Dozat 2016). `bias_correction` divides by what is missing since the
    moment started at 0.
    """
    now = bias(step, beta) if bias_correction else 1.0
    if not nesterov:
        return 0.0, 1.0 / now
    after = bias(step + 1, beta) if bias_correction else 1.0
    return (1 - beta) / now, beta / after


def check_settings(lr: Any, betas: tuple[float, float], eps: float, weight_decay: float, moments: str) -> None:
    """Raises ValueError for invalid settings. Values of arrays are not checked."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (float(value) >= 0 if isinstance(value, Real) else hasattr(value, "dtype")):
            raise ValueError(f"{name} must be 0 or more, got {value!r}")
    if len(betas) != 2 or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers, each at least 0 and below 1, got {betas}")
    if moments not in Moments.__args__:
        raise ValueError(f"moments must be one of {', '.join(map(repr, Moments.__args__))}, got {moments!r}")


def _square_root(x: Array) -> Array:
    """Computes the IEEE square root. torch's CPU kernel can be off in the last place in fp32, so it computes in float64."""
    xp = array_namespace(x)
    if is_torch_array(x) and x.device.type == "cpu":
        return xp.astype(xp.sqrt(xp.astype(x, xp.float64)), xp.float32)
    return xp.sqrt(x)


class Operations(NamedTuple):
    """The operations of a step that a compiler may round otherwise than IEEE 754.

    Attributes:
        unfused: marks a product that must be rounded before it is added.
        divide, square_root: rounded to the nearest float32.
    """

    unfused: Callable[[Array], Array] = lambda product: product
    divide: Callable[[Array, Array], Array] = operator.truediv
    square_root: Callable[[Array], Array] = _square_root


_PLAIN = Operations()


def stands_still(c: Coefficients) -> Any:
    """Returns whether a step can't change the weight (lr 0); then codes must be kept, because requantizing could change
    them."""
    return (c.rate == 0) & (c.decay == 1)


def update(
    weight: Array,
    first: Array,
    second: Array,
    gradient: Array,
    c: Coefficients,
    *,
    ahead: tuple[Any, Any] | None = None,
    eps_root: Any = 0.0,
    operations: Operations = _PLAIN,
) -> tuple[Array, Array, Array]:
    """Computes a step and returns (weight, first moment, second moment), unchanged if the step is skipped.

    Args:
        weight, first, second, gradient: float32, of one shape.
        c: coefficients; arrays must broadcast with the weight.
        ahead: Nesterov's rates of gradient and first moment, instead of the first moment's rate alone.
        eps_root: added to the unbiased second moment under the root.
        operations: how the library rounds.
    """
    unfused, divide, square_root = operations
    before = (weight, first, second)
    gradient = gradient * c.unscale
    if not isinstance(c.l2, Real) or c.l2 != 0:
        gradient = gradient + unfused(weight * c.l2)
    first = first + unfused((gradient - first) * c.weight1)
    second = unfused(second * c.beta2) + unfused((gradient * c.weight2) * gradient)
    if isinstance(eps_root, Real) and eps_root == 0:
        root = unfused(square_root(second) * c.unbias2)
    else:
        root = square_root(unfused(second * (c.unbias2 * c.unbias2)) + eps_root)
    along = first * c.rate if ahead is None else unfused(gradient * ahead[0]) + unfused(first * ahead[1])
    moved = unfused(weight * c.decay) + divide(along, root + c.eps)
    after = (_unless(stands_still(c), weight, moved), first, second)
    weight, first, second = (_unless(c.skip != 0, old, new) for old, new in zip(before, after, strict=True))
    return weight, first, second


def _unless(condition: Any, old: Array, new: Array) -> Array:
    if isinstance(condition, bool):
        return old if condition else new
    return array_namespace(old).where(condition, old, new)


def rounding_key(key: Key, step: int | Array, parameter: int | Array, what: int | Array) -> tuple[int, int] | Array:
    """Derives the key of one rounding: folds in the step, then the parameter's number, then WEIGHT, FIRST or SECOND.

    `key` is the optimizer's key, equal on all ranks; if it is an array, the other arguments are 0-d integer arrays. `step`
    counts from 1, `parameter` is the position among the optimizer's parameters.
    """
    return fold_in(fold_in(fold_in(key, step), parameter), what)


def store_fp8(
    moment: Array,
    *,
    second: bool,
    key: Key | None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    materialize: Materialize = as_stored,
    square_root: Callable[[Array], Array] = _square_root,
) -> tuple[Array, Array]:
    """Returns codes (uint8) and scales (float32) of a moment in FP8.

    Args:
        moment: float32 [..., rows, columns].
        second: whether this is the second moment, which is stored as its square root.
        key: from `rounding_key`; None rounds to nearest, which reproduces previously stored values.
        origin: (row, column) of the first element in the unsharded matrix; the column must be on a block boundary.
        shape: (rows, columns) of the unsharded matrix; by default it ends where `moment` ends.
        materialize: see `layout.Materialize`.
        square_root: see `Operations`.
    """
    xp = array_namespace(moment)
    x = square_root(moment) if second else moment
    place = {"origin": origin, "shape": shape, "materialize": materialize}
    codes, scales, _ = numerics.quantize(x, MOMENT_FORMAT, key=key, nominal="float32", width=WIDE, **place)
    if second:
        codes = xp.where((codes == 0) & (x > 0), xp.ones_like(codes), codes)
    return codes, scales


def load_fp8(codes: Array, scales: Array, *, second: bool, origin: Origin = (0, 0)) -> Array:
    """Returns the float32 moment from the codes and scales of `store_fp8`."""
    x = numerics.dequantize(codes, scales, None, MOMENT_FORMAT, "float32", columns=codes.shape[-1], origin=origin)
    return x * x if second else x


def round_to_bfloat16(x: Array, key: Key, *, origin: Origin = (0, 0), shape: tuple[int, int] | None = None) -> Array:
    """Rounds x stochastically to bfloat16: floor(|x| / ulp + (2 u + 1) / 2^17) ulp, at most the largest finite value.

    Args:
        x: float32 [..., rows, columns].
        key: from `rounding_key`; u is the 16-bit random number at the element's global index (`rounding.random_bytes`).
        origin, shape: position in the unsharded matrix, as for `quantize`.
    """
    xp = array_namespace(x)
    pattern = bits.from_float(x)
    magnitude = pattern & bits.MAGNITUDE
    random = numerics.element_bytes(pattern, key, origin, shape, width=WIDE)
    # bfloat16 drops the low 16 bits of the fp32 pattern, so a carry out of them rounds up. Adding u + 1/2 or u is the same.
    rounded = bits.at_most((magnitude + random) >> 16, 0x7F7F) << 16
    rounded = xp.where(magnitude >= bits.INFINITY, magnitude, rounded)
    return bits.to_float(rounded | (pattern & bits.SIGN), "bfloat16")

"""AdamW and Adam, written once over an array namespace: the update, its constants, and moments in fewer bits.

The formulas are those of `torch.optim.AdamW` and `torch.optim.Adam` (Kingma, Ba 2015; Loshchilov, Hutter 2019), as single
fp32 operations, so that NumPy, eager torch and the kernels (kernels/include/blockfp/adamw.h) agree bit for bit. (XLA fuses
products and sums, and may differ in the last place.)

Moments may be kept in bfloat16, or in FP8 in blocks of 1x128 along the last axis (`MOMENT_FORMAT`). Rounding to nearest would
not do there: a second moment changes by 0.1% a step, which is lost below a spacing of 0.4 to 12%, so that it could rise
and never fall. Moments in fewer bits are rounded stochastically instead, with two random bytes an element: one would lose what
is below 1/512 of a spacing, as a step of a second moment is where beta2 is 0.9999. FP8 keeps the square root of the second
moment, which takes half the exponent range: a block reaches from its largest second moment down to 2^-34 of it, and what is
smaller but not zero counts as that much, for an update is divided by it. Scales are powers of two: a value that was stored once
is stored again unchanged, whatever its neighbours have become, so a state saved as fp32 values goes on bit for bit. Blocks
are counted from the parameter's first column and rows share none, so sharding rows changes nothing.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, NamedTuple

from array_api_compat import array_namespace, is_torch_array

from ..formats import Format
from . import bits, numerics
from .bits import Array
from .numerics import Origin
from .rounding import WIDE, Key, fold_in

Moments = Literal["float32", "bfloat16", "fp8"]
"""The storage of moments."""

MOMENT_FORMAT = Format.parse("fp8_e4m3_1x128")
"""The blocks of FP8 moments: E4M3, 1x128, power-of-two scales in fp32."""

WEIGHT, FIRST, SECOND = 2, 3, 4
"""The numbers that `rounding_key` folds into the key for the weight and both moments."""


class Coefficients(NamedTuple):
    """A step's constants, each one number, or an array of one for each of several parameters.

    Attributes:
        decay: 1 - lr * weight_decay for AdamW, 1 for Adam.
        l2: weight_decay for Adam, 0 for AdamW.
        weight1: 1 - beta1.
        beta2: beta2.
        weight2: 1 - beta2.
        unbias2: 1 / sqrt(1 - beta2^step).
        eps: eps.
        rate: -lr / (1 - beta1^step).
        unscale: the gradient is multiplied with it first: one over the loss's scale.
        skip: not 0 where nothing at all may change, because a gradient is not finite.
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
    """The constants of step number `step`.

    Args:
        step: 1 for the first step; a number or an array.
        lr: the learning rate; a number or an array.
        betas: decay of the first and the second moment; numbers, or arrays that aren't 0.
        eps: added to the square root of the unbiased second moment.
        weight_decay: AdamW's, which is multiplied with lr, or Adam's L2 term.
        decoupled: AdamW if True, else Adam.
    """
    bias1, bias2 = (_bias(step, beta) for beta in betas)
    root = array_namespace(bias2).sqrt(bias2) if hasattr(bias2, "dtype") else math.sqrt(bias2)
    decay = 1 - lr * weight_decay if decoupled else 1.0
    l2 = 0.0 if decoupled else weight_decay
    return Coefficients(decay, l2, 1 - betas[0], betas[1], 1 - betas[1], 1 / root, eps, -lr / bias1)


def _bias(step: Any, beta: Any) -> Any:
    """1 - beta^step, without cancellation where beta is close to 1."""
    if isinstance(beta, Real) and beta == 0:
        return 1.0
    power = step * (math.log(beta) if isinstance(beta, Real) else array_namespace(beta).log(beta))
    return -array_namespace(power).expm1(power) if hasattr(power, "dtype") else -math.expm1(power)


def check_settings(lr: Any, betas: tuple[float, float], eps: float, weight_decay: float, moments: str) -> None:
    """Raises ValueError unless these settings mean something; numbers that are arrays are not looked at."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (float(value) >= 0 if isinstance(value, Real) else hasattr(value, "dtype")):
            raise ValueError(f"{name} must be 0 or more, got {value!r}")
    if len(betas) != 2 or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers, each at least 0 and below 1, got {betas}")
    if moments not in Moments.__args__:
        raise ValueError(f"moments must be one of {', '.join(map(repr, Moments.__args__))}, got {moments!r}")


def stands_still(c: Coefficients) -> Any:
    """Tells whether the step moves no weight, whatever the gradient is (lr 0).

    Nothing is written to the weight then: requantizing the values of codes would change them."""
    return (c.rate == 0) & (c.decay == 1)


def update(weight: Array, first: Array, second: Array, gradient: Array, c: Coefficients) -> tuple[Array, Array, Array]:
    """Takes a step; returns (weight, first moment, second moment), the old ones where the step is skipped.

    Args:
        weight, first, second, gradient: float32, of one shape.
        c: constants of the step; arrays among them must broadcast with the weight.
    """
    before = (weight, first, second)
    gradient = gradient * c.unscale
    if not isinstance(c.l2, Real) or c.l2 != 0:
        gradient = gradient + weight * c.l2
    first = first + (gradient - first) * c.weight1
    second = second * c.beta2 + (gradient * c.weight2) * gradient
    denominator = _square_root(second) * c.unbias2 + c.eps
    moved = weight * c.decay + (first * c.rate) / denominator
    after = (_unless(stands_still(c), weight, moved), first, second)
    weight, first, second = (_unless(c.skip != 0, old, new) for old, new in zip(before, after, strict=True))
    return weight, first, second


def _square_root(x: Array) -> Array:
    """IEEE's square root. Torch's on a CPU is now and then off in the last place; taken in float64 it is right."""
    xp = array_namespace(x)
    if is_torch_array(x) and x.device.type == "cpu":
        return xp.astype(xp.sqrt(xp.astype(x, xp.float64)), xp.float32)
    return xp.sqrt(x)


def _unless(condition: Any, old: Array, new: Array) -> Array:
    if isinstance(condition, bool):
        return old if condition else new
    return array_namespace(old).where(condition, old, new)


def rounding_key(key: Key, step: int | Array, parameter: int | Array, what: int | Array) -> tuple[int, int] | Array:
    """The key of one rounding: fold_in of the step, then of the parameter's number, then of WEIGHT, FIRST or SECOND.

    Args:
        key: the optimizer's key; equal on all ranks. An array where one of the others is: those are then 0-d integer arrays.
        step: number of the step, from 1.
        parameter: position of the parameter among all that the optimizer has.
        what: WEIGHT, FIRST or SECOND.
    """
    return fold_in(fold_in(fold_in(key, step), parameter), what)


def store_fp8(
    moment: Array, *, second: bool, key: Key | None, origin: Origin = (0, 0), shape: tuple[int, int] | None = None
) -> tuple[Array, Array]:
    """Codes (uint8) and scales (float32) of a moment in FP8.

    Args:
        moment: float32 [..., rows, columns].
        second: whether it is the second moment, of which the square root is stored.
        key: of `rounding_key`; None rounds to nearest, which keeps values that were stored before as well.
        origin: (row, column) of the first element in the unsharded matrix; the column must lie on a block boundary.
        shape: (rows, columns) of the unsharded matrix; by default it ends where `moment` ends.
    """
    xp = array_namespace(moment)
    x = _square_root(moment) if second else moment
    place = {"origin": origin, "shape": shape}
    codes, scales, _ = numerics.quantize(x, MOMENT_FORMAT, key=key, nominal="float32", width=WIDE, **place)
    if second:
        codes = xp.where((codes == 0) & (x > 0), xp.ones_like(codes), codes)
    return codes, scales


def load_fp8(codes: Array, scales: Array, *, second: bool, origin: Origin = (0, 0)) -> Array:
    """The float32 moment of codes and scales of `store_fp8`."""
    x = numerics.dequantize(codes, scales, None, MOMENT_FORMAT, "float32", columns=codes.shape[-1], origin=origin)
    return x * x if second else x


def round_to_bfloat16(x: Array, key: Key, *, origin: Origin = (0, 0), shape: tuple[int, int] | None = None) -> Array:
    """Rounds x stochastically to bfloat16: floor(|x| / ulp + (2 u + 1) / 2^17) ulp, at most the largest finite value.

    Args:
        x: float32 [..., rows, columns].
        key: of `rounding_key`; u are the two random bytes of the element's global index (`rounding.random_bytes`).
        origin, shape: where x lies in the unsharded matrix, as for `quantize`.
    """
    xp = array_namespace(x)
    pattern = bits.from_float(x)
    magnitude = pattern & bits.MAGNITUDE
    random = numerics.element_bytes(pattern, key, origin, shape, width=WIDE)
    # bfloat16 cuts 16 bits off fp32's pattern: a carry out of them is the step up. (The half of u + 1/2 never decides.)
    rounded = bits.at_most((magnitude + random) >> 16, 0x7F7F) << 16
    rounded = xp.where(magnitude >= bits.INFINITY, magnitude, rounded)
    return bits.to_float(rounded | (pattern & bits.SIGN), "bfloat16")

"""Exact sums of floating-point numbers in integers wider than int32, and the IEEE operations that follow from them.

A wide integer is a list of int32 arrays, its *limbs*, lowest first: the value is the sum of limb[i] * 2^(24 i). `carried` limbs
lie in 0 .. 2^24 - 1, except the last one, which keeps the sign. `bits` explains the rules that int32 arithmetic obeys here.
"""

from __future__ import annotations

from collections.abc import Sequence

from array_api_compat import array_namespace

from . import bits
from .bits import Array

_BITS = 24
_MASK = (1 << _BITS) - 1

Wide = list[Array]


def shifted(x: Array, places: Array, limbs: int) -> Wide:
    """Returns floor(x * 2^places) modulo 2^(24 limbs), for int32 x in 0 .. 2^24 - 1 and any int32 places."""
    out = []
    for limb in range(limbs):
        left = places - _BITS * limb
        up, down = _clipped(left), _clipped(-left)
        out.append(((x << up) >> down) & _MASK)
    return out


def _clipped(places: Array) -> Array:
    return bits.at_most(bits.at_least(places, 0), _BITS)


def lost(x: Array, places: Array) -> Array:
    """Returns 1 if x * 2^places isn't an integer, else 0, for x as in `shifted`."""
    xp = array_namespace(x)
    return xp.astype((x & ((xp.ones_like(x) << _clipped(-places)) - 1)) != 0, xp.int32)


def carried(x: Sequence[Array]) -> Wide:
    """Returns the same integer with limbs in 0 .. 2^24 - 1, except the last one."""
    out, carry = [], 0
    for limb in x[:-1]:
        limb = limb + carry
        out.append(limb & _MASK)
        carry = limb >> _BITS
    return [*out, x[-1] + carry]


def magnitude(x: Sequence[Array]) -> tuple[Array, Wide]:
    """Returns (x < 0, |x|), whose last limb must fit in 24 bits."""
    xp = array_namespace(x[0])
    negative = carried(x)[-1] < 0
    return negative, carried([xp.where(negative, -limb, limb) for limb in x])


def leading(x: Wide) -> tuple[Array, Array]:
    """Returns (significand, position) of a non-negative carried integer whose last limb fits in 24 bits.

    The significand is int32 with leading bit 25, and its last bit is 1 if any bit below it was; it is zero for zero. `position`
    is that of x's leading bit.
    """
    xp = array_namespace(x[0])
    position = xp.zeros_like(x[0])
    for index, limb in enumerate(x):
        # Conversion to fp32 is exact below 2^24.
        own = (xp.astype(limb, xp.float32).view(xp.int32) >> 23) + (_BITS * index - 127)
        position = xp.where(limb > 0, own, position)
    top, rest = xp.zeros_like(x[0]), xp.zeros_like(x[0])
    for index, limb in enumerate(x):
        left = 25 - position + _BITS * index
        up, down = bits.at_most(bits.at_least(left, 0), 25), _clipped(-left)
        # A limb that would leave the 26 bits at the top is zero.
        top = top | ((limb << up) >> down)
        rest = rest | (limb & ((xp.ones_like(limb) << down) - 1))
    return top | xp.astype(rest != 0, xp.int32), position


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Returns the fp32 bits of the IEEE a * b + c, rounded once to nearest even, for any fp32 bits; NaN is canonical.

    a * b is `multiply_add(a, b, -0)`, and a + c is `multiply_add(a, 1, c)`, each with IEEE's sign of zero.
    """
    xp = array_namespace(a)
    (digits_a, exponent_a), (digits_b, exponent_b), (digits_c, exponent_c) = (_digits(x & bits.MAGNITUDE) for x in (a, b, c))
    factor_signs, sign_c = (a ^ b) < 0, c < 0
    # 24 x 24 bits in two limbs, from halves of 12 bits.
    (high_a, low_a), (high_b, low_b) = ((x >> 12, x & 0xFFF) for x in (digits_a, digits_b))
    middle = high_a * low_b + low_a * high_b
    low = low_a * low_b + ((middle & 0xFFF) << 12)
    low, high = low & _MASK, high_a * high_b + (middle >> 12) + (low >> _BITS)
    # The larger leading bit goes to position 70 or 69. Bits below position 0 decide only the direction of rounding.
    exponent = exponent_a + exponent_b
    top = xp.where(exponent + 1 > exponent_c, exponent + 1, exponent_c)
    places, places_c = exponent - top + 24, exponent_c - top + 47
    limbs = 3
    product = [x + y for x, y in zip(shifted(low, places, limbs), shifted(high, places + _BITS, limbs), strict=True)]
    product[0] = product[0] | lost(low, places) | lost(high, places + _BITS)
    addend = shifted(digits_c, places_c, limbs)
    addend[0] = addend[0] | lost(digits_c, places_c)
    total = [xp.where(factor_signs, -x, x) + xp.where(sign_c, -y, y) for x, y in zip(product, addend, strict=True)]
    negative, total = magnitude(total)
    significand, position = leading(total)
    zero = significand == 0
    result = bits.fp32(xp.where(zero, 1 << 25, significand), bits.at_least(top - 70 + position, -1000), 25)
    sign = xp.where(zero, factor_signs & sign_c, negative)
    result = xp.where(zero, 0, result) | (xp.astype(sign, xp.int32) << 31)
    return _special(result, a, b, c)


def _digits(x: Array) -> tuple[Array, Array]:
    """Splits fp32 magnitudes like `bits.split`, but gives zero the significand 0."""
    significand, exponent = bits.split(x)
    return array_namespace(x).where(x == 0, 0, significand), bits.at_most(exponent, 127)


def _special(result: Array, a: Array, b: Array, c: Array) -> Array:
    """Replaces the results of infinite operands and NaN."""
    xp = array_namespace(result)
    left, right, addend = (x & bits.MAGNITUDE for x in (a, b, c))
    infinite = (left == bits.INFINITY) | (right == bits.INFINITY)
    opposed = infinite & (addend == bits.INFINITY) & ((a ^ b ^ c) < 0)
    nan = (infinite & ((left == 0) | (right == 0))) | opposed
    for x in (left, right, addend):
        nan = nan | (x > bits.INFINITY)
    result = xp.where(addend == bits.INFINITY, c, result)
    result = xp.where(infinite, ((a ^ b) & bits.SIGN) | bits.INFINITY, result)
    return xp.where(nan, bits.NAN, result)

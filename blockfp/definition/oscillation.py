"""Oscillation of quantized weights: how it is counted, and OsciReset, which ends it. Written once over an array namespace.

A master weight near the edge between two codes is carried over it and back by small steps, and its code flips each time. Two
measures of that are in use:

- the frequency of flips (Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training", arXiv 2203.11086): a
  change of the code against the direction of its last change is a flip, and a running mean of flips is their frequency;
- the ratio of the path of the quantized weight to that of its master over a window of steps (TetraJet-v2, arXiv 2510.27527):
  where it is large, the weight's value moves far more than what it is made from.

OsciReset sets the master of such a weight to the quantized weight's value, the centre of its bin, from where small steps no
longer reach an edge.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from ..formats import ElementFormat
from .bits import Array


class OsciReset(NamedTuple):
    """Settings of OsciReset; the defaults are those of TetraJet-v2's published runs.

    Of each `period` steps after step `start` the first `window` are measured. Behind the last of these, masters are reset whose
    quantized weight's path is at least `threshold` times their own.

    Attributes:
        period: steps from one window to the next.
        window: steps of a window, at most `period`.
        threshold: the least ratio of the paths.
        start: steps before the first period (the published runs take about half of all steps).
    """

    period: int = 200
    window: int = 50
    threshold: float = 8.0
    start: int = 0


def check_settings(settings: Any) -> OsciReset:
    """Returns settings as an `OsciReset`, which may be given as a tuple.

    Raises:
        TypeError: they are none.
        ValueError: a setting that means nothing.
    """
    if not isinstance(settings, tuple | list) or len(settings) != len(OsciReset._fields):
        raise TypeError(f"osci_reset must be None or an OsciReset, got {settings!r}")
    made = OsciReset(*settings)
    for name, least in (("period", 1), ("window", 1), ("start", 0)):
        value = getattr(made, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"osci_reset: {name} must be an integer from {least}, got {value!r}")
    if made.window > made.period:
        raise ValueError(f"osci_reset: window must be at most period, {made.period}, got {made.window}")
    if not isinstance(made.threshold, Real) or not 0 < made.threshold < float("inf"):
        raise ValueError(f"osci_reset: threshold must be a finite number above 0, got {made.threshold!r}")
    return made


def place(step: Any, settings: OsciReset) -> Any:
    """Returns the number of a step in its period: 1 begins a window, `window` ends it; 0 or less before the first.

    Args:
        step: its number, from 1; an integer, or an array of integers.
        settings: those of OsciReset.
    """
    after = step - settings.start
    if isinstance(after, int):
        return (after - 1) % settings.period + 1 if after > 0 else after
    xp = array_namespace(after)
    return xp.where(after > 0, (after - 1) % settings.period + 1, after)


def lengthen(path: Array, before: Array, after: Array, begins: Any) -> Array:
    """Returns a path's length after a step: that before it and |after - before|; 0 where a window begins.

    Args:
        path, before, after: float32, of one shape: the length, and values before and behind the step.
        begins: whether the step is a window's first.
    """
    xp = array_namespace(path)
    travelled = xp.abs(after - before)
    if isinstance(begins, bool):
        return travelled if begins else path + travelled
    return xp.where(begins, travelled, path + travelled)


def oscillates(master_path: Array, quantized_path: Array, threshold: float) -> Array:
    """Returns which weights are reset: their master moved, and the quantized weight at least `threshold` times as far."""
    return (master_path > 0) & (quantized_path >= master_path * threshold)


def ordinals(codes: Array, element: ElementFormat) -> Array:
    """Returns the places of codes in the order of their values, int32: 0 for zero of either sign, neighbours differ by 1.

    Args:
        codes: unpacked, one a byte.
        element: what they are codes of.
    """
    xp = array_namespace(codes)
    code, sign = xp.astype(codes, xp.int32), 1 << (element.bits - 1)
    if element.signed == "complement":
        return code - 2 * (code & sign)
    magnitude = code & (sign - 1)
    return xp.where((code & sign) != 0, -magnitude, magnitude)


def flips(before: Array, now: Array, direction: Array) -> tuple[Array, Array]:
    """Tells which codes flipped in a step.

    Args:
        before, now: `ordinals` before and behind it.
        direction: the direction of each code's last change: 1, -1, or 0 where it hasn't changed yet.

    Returns:
        Which flipped: they changed against that direction; and the new directions, of the dtype of the old.
    """
    xp = array_namespace(now)
    moved = xp.astype(xp.sign(now - before), direction.dtype)
    return (moved != 0) & (moved == -direction), xp.where(moved != 0, moved, direction)


def frequency(before: Array, flipped: Array, momentum: float) -> Array:
    """Returns the running mean of flips: momentum * flipped + (1 - momentum) * before, float32."""
    xp = array_namespace(before)
    return xp.astype(flipped, xp.float32) * momentum + before * (1 - momentum)

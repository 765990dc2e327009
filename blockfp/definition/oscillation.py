"""Oscillation of quantized weights: two measures, and OsciReset, which stops it. Runs on any array library.

Small steps can move a master weight back and forth across the edge between two codes, flipping its code each time. Two measures
are in use:

- The frequency of flips (Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training", arXiv 2203.11086). A flip
  is a code change against the direction of the code's last change; the frequency is the running mean of flips.
- The ratio of the quantized weight's path to its master's path over a window of steps (TetraJet-v2, arXiv 2510.27527). A large
  ratio means that the quantized value moves far more than its master.

OsciReset sets such a master to the quantized value, the centre of its bin, where small steps no longer reach an edge.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from ..formats import ElementFormat
from .bits import Array


class OsciReset(NamedTuple):
    """Settings of OsciReset; the defaults are from TetraJet-v2's published runs.

    After step `start`, the first `window` steps of each `period` are measured. After the last one, OsciReset resets each master
    whose quantized weight's path is at least `threshold` times as long as its own.

    Attributes:
        period: steps from one window to the next.
        window: steps of a window, at most `period`.
        threshold: the smallest ratio of paths that is reset.
        start: steps before the first period (the published runs use about half of all steps).
    """

    period: int = 200
    window: int = 50
    threshold: float = 8.0
    start: int = 0


def check_settings(settings: Any) -> OsciReset:
    """Returns settings as an `OsciReset`; they may be a tuple. Raises TypeError for other types, ValueError for invalid
    values."""
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
    """Returns a step's number in its period: 1 starts the window and `window` ends it; 0 or less before the first period.

    `step` counts from 1; it is an integer or an integer array.
    """
    after = step - settings.start
    if isinstance(after, int):
        return (after - 1) % settings.period + 1 if after > 0 else after
    xp = array_namespace(after)
    return xp.where(after > 0, (after - 1) % settings.period + 1, after)


def lengthen(path: Array, before: Array, after: Array, begins: Any) -> Array:
    """Adds |after - before| to a path's length, or returns it alone if this step `begins` a window. Arrays are float32."""
    xp = array_namespace(path)
    travelled = xp.abs(after - before)
    if isinstance(begins, bool):
        return travelled if begins else path + travelled
    return xp.where(begins, travelled, path + travelled)


def oscillates(master_path: Array, quantized_path: Array, threshold: float) -> Array:
    """Returns which weights to reset: the master moved, and the quantized weight at least `threshold` times as far."""
    return (master_path > 0) & (quantized_path >= master_path * threshold)


def ordinals(codes: Array, element: ElementFormat) -> Array:
    """Returns the rank of each unpacked code in the order of values, int32: 0 for both zeros, neighbours differ by 1."""
    xp = array_namespace(codes)
    code, sign = xp.astype(codes, xp.int32), 1 << (element.bits - 1)
    if element.signed == "complement":
        return code - 2 * (code & sign)
    magnitude = code & (sign - 1)
    return xp.where((code & sign) != 0, -magnitude, magnitude)


def flips(before: Array, now: Array, direction: Array) -> tuple[Array, Array]:
    """Returns which codes flipped in a step, and the new directions.

    `before` and `now` are `ordinals`. `direction` is the sign of each code's last change, 0 if it never changed. A flip is a
    change against it.
    """
    xp = array_namespace(now)
    moved = xp.astype(xp.sign(now - before), direction.dtype)
    return (moved != 0) & (moved == -direction), xp.where(moved != 0, moved, direction)


def frequency(before: Array, flipped: Array, momentum: float) -> Array:
    """Returns the running mean of flips, momentum * flipped + (1 - momentum) * before, float32."""
    xp = array_namespace(before)
    return xp.astype(flipped, xp.float32) * momentum + before * (1 - momentum)

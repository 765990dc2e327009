"""Who takes a quantized array's leaves: of a few callers it is known that others than codes and scales are right for them."""

from __future__ import annotations

import sys

EQUINOX_FILE = ("equinox._serialisation", None)
"""Equinox on its way to or from a file, which has leaves and no names."""

OPTAX_ZEROS = ("optax.tree_utils._tree_math", "tree_zeros_like")
"""optax making moments or sums of gradients, which are arrays of the shape that was quantized."""

_KNOWN = (EQUINOX_FILE, OPTAX_ZEROS)


def known() -> tuple[str, str | None] | None:
    """Which of these flattens the array whose own flatten calls this; None for any other."""
    frame = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith("jax._src.tree"):
        frame = frame.f_back
    if frame is None:
        return None
    for caller in _KNOWN:
        if module == caller[0] and caller[1] in (None, frame.f_code.co_name):
            return caller
    return None

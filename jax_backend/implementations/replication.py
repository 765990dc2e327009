"""Mesh axes inside shard_map: this rank's place on them, and the sums of cotangents of what several ranks hold alike.

Under `shard_map(check_vma=True)`, its default, JAX keeps account of the mesh axes that a value varies over, and a cotangent
must vary over no more of them than its primal: that says what to sum. With `check_vma=False` nothing is known, and the axes
that the layer was told about are summed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

Axes = frozenset[str]


def axis_index(name: str) -> jax.Array:
    """Computes `lax.axis_index`; raises ValueError where the axis isn't one of the shard_map around."""
    try:
        return lax.axis_index(name)
    except NameError as error:
        manual = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "none"
        raise ValueError(
            f"mesh axis {name!r} is unknown here: call this inside jax.shard_map over a mesh that has it (axes here: {manual})"
        ) from error


def max_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Largest integer over mesh axes."""
    return lax.pmax(x, tuple(axes))


def varying(x: Any) -> Axes:
    """The mesh axes that a value varies over, as far as JAX keeps account."""
    return frozenset(jax.typeof(x).mat.varying)


def vary(x: jax.Array, over: Axes) -> jax.Array:
    """Tells JAX that x varies over these mesh axes, which it doesn't know of a kernel's results."""
    missing = tuple(sorted(over - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def sum_like(cotangent: jax.Array, primal: Axes | None, axes: Iterable[str]) -> jax.Array:
    """Sums ranks' cotangents of a primal that varies over `primal`; over `axes` where JAX keeps no account."""
    over = _excess(cotangent, primal, tuple(axes))
    return lax.psum(cotangent, over) if over else cotangent


def max_like(cotangent: jax.Array, primal: Axes | None) -> jax.Array:
    """The largest of ranks' non-negative cotangents, where JAX wants one that doesn't vary; elsewhere itself."""
    over = _excess(cotangent, primal, ())
    return max_over(cotangent.view("int32"), over).view("float32") if over else cotangent


def _excess(cotangent: jax.Array, primal: Axes | None, axes: tuple[str, ...]) -> tuple[str, ...]:
    if axes and not varying(axis_index(axes[0])):
        return axes
    return tuple(sorted(varying(cotangent) - (primal or frozenset())))


@jax.tree_util.register_static
@dataclass(frozen=True)
class VaryingAxes:
    """The mesh axes that the primals of a linear layer vary over; kept for its backward."""

    x: Axes | None
    carrier: Axes | None
    bias: Axes | None
    state: Axes | None

    @classmethod
    def of(cls, x, carrier, bias, state) -> VaryingAxes:
        """The types of a call's arguments; None stays None."""
        history = None if state is None else state.gradient_amax_history
        return cls(*(None if a is None else varying(a) for a in (x, carrier, bias, history)))

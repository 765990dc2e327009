"""Which implementation carries an operation out."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """An implementation, and whether the caller asked for it; a static argument of the jitted operations."""

    name: str
    asked: bool

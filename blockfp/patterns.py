"""Patterns of layers' paths: the mappings that say which layers of a model get which recipe.

A pattern is a regular expression that is looked for in a path (`re.search`), as in transformers' and PEFT's configurations. The
first that is found counts, in the mapping's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def check(patterns: Mapping[str, object]) -> None:
    """Raises unless all keys are patterns.

    Raises:
        TypeError: one is no string.
        ValueError: one is no regular expression.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"recipe: patterns of layers' names must be strings, got {type(pattern).__name__}: {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"recipe: {pattern!r} is no regular expression of layers' names: {error}") from None


def lookup(patterns: Mapping[str, T], path: str) -> T | None:
    """Returns the value of the first pattern that is found in a path; None where none is."""
    check(patterns)
    return next((value for pattern, value in patterns.items() if re.search(pattern, path)), None)


def check_used(patterns: Mapping[str, object], paths: Iterable[str]) -> None:
    """Raises ValueError where a pattern is found in none of a model's paths, being misspelt, or never counts."""
    paths = list(paths)
    check(patterns)
    behind = list(patterns)[list(patterns).index("") + 1 :] if "" in patterns else []
    if behind:
        raise ValueError(f"recipe: the pattern {behind[0]!r} stands behind '', which is found in every path: put '' last")
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            known = ", ".join(map(repr, paths[:4])) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            raise ValueError(f"recipe: the pattern {pattern!r} is found in no layer that could be converted; there are {known}")


def exactly(path: str) -> str:
    """Returns the pattern of this path alone."""
    return f"^{re.escape(path)}$"


def ends(blocks: str, count: int, start: int, end: int) -> list[str]:
    r"""Returns the patterns of the first `start` and the last `end` of `count` blocks, such as "^layers\.0\.".

    Args:
        blocks: path of the list of blocks, such as "model.layers".
        count: how many it has.
        start, end: how many at either end.

    Raises:
        TypeError: a number is no integer.
        ValueError: it is negative, or there are fewer blocks.
    """
    for name, value in (("count", count), ("start", start), ("end", end)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
        if not 0 <= value <= count:
            raise ValueError(f"{name} must be in 0..count, got {value} of {count} blocks")
    return [rf"^{re.escape(blocks)}\.{i}\." for i in range(count) if i < start or i >= count - end]

"""Patterns of layers' paths, the mappings that say which layers of a model get which recipe, and filters, functions that do.

A pattern is a regular expression that is looked for in a path (`re.search`), as in transformers' and PEFT's configurations. The
first that is found counts, in the mapping's order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
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


PATHS = {"path", "fqn", "name", "fullname", "full_name", "qualname", "key", "module_name", "layer_name", "module_path", "n"}
MODULES = {"module", "mod", "layer", "submodule", "child", "leaf", "param", "parameter", "array", "value", "linear", "m"}
"""Names that functions give to a layer's path, and to the layer; a leaf of a tree is one too."""


def takes_filter(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function that takes filter_fn name it where it is called with `filter=`."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if "filter" in options:
            raise TypeError(f"{function.__name__}() takes filter_fn=, a function of path and layer, and no filter=")
        return function(*args, **options)

    return call


def path_first(filter_fn: Callable[..., Any]) -> Callable[[str, Any], Any]:
    """Returns a filter as a function of path and layer: torchao's take layer and path, which their parameters' names say.

    Where the names say neither, it is taken to be one of path and layer.
    """
    reversed_order = _says(filter_fn) == "module"
    return (lambda path, layer: filter_fn(layer, path)) if reversed_order else filter_fn


def select(filter_fn: Callable[..., Any] | None, named: Sequence[tuple[str, Any]]) -> list[bool]:
    """Asks a filter about layers, each by its path: see `path_first`. None takes all.

    Raises:
        TypeError: it is no function; or its parameters' names don't say which is the path, it takes every layer as (path,
            layer), and tells them apart as (layer, path): one that is written for layer and path then compares a layer with
            paths, which is never equal.
    """
    if filter_fn is None:
        return [True] * len(named)
    if not callable(filter_fn):
        raise TypeError(f"filter_fn must be a function of a layer's path and of the layer, got {filter_fn!r}")
    function, answers = path_first(filter_fn), []
    for path, layer in named:
        try:
            answers.append(bool(function(path, layer)))
        except Exception as error:
            order = "layer and path" if function is not filter_fn else "path and layer"
            error.add_note(f"filter_fn, called with {order}, raised this for {path!r}")
            raise
    if all(answers) and _says(filter_fn) is None and _tells_apart(filter_fn, named):
        raise TypeError(
            "filter_fn is called with path and layer, and takes every layer; called with layer and path, as torchao does, it "
            "would leave some: name its parameters (path, layer), or (module, fqn)"
        )
    return answers


def _says(filter_fn: Callable[..., Any]) -> str | None:
    """Returns "path" or "module", whichever a filter's parameters say that its first one is; None where they don't."""
    try:
        first, second, *_ = inspect.signature(filter_fn).parameters.values()
    except (TypeError, ValueError):
        return None
    found = [_role(first), {"path": "module", "module": "path", None: None}[_role(second)]]
    known = {role for role in found if role is not None}
    return known.pop() if len(known) == 1 else None


def _role(parameter: inspect.Parameter) -> str | None:
    if parameter.annotation in (str, "str") or parameter.name in PATHS:
        return "path"
    return "module" if parameter.name in MODULES else None


def _tells_apart(filter_fn: Callable[..., Any], named: Sequence[tuple[str, Any]]) -> bool:
    """Returns whether a filter, asked the other way around, answers of some layers in one way and of others in another."""
    try:
        return len({bool(filter_fn(layer, path)) for path, layer in named}) > 1
    except Exception:
        return False

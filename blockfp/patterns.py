"""Selection of layers by path: mappings from regular expressions to recipes, and filter functions.

A pattern matches if `re.search` finds it in a path, as in the configurations of transformers and PEFT. The first match in the
mapping's order wins.
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
    """Raises TypeError for a key that is not a string and ValueError for an invalid regular expression."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"recipe: patterns of layers' names must be strings, got {type(pattern).__name__}: {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"recipe: {pattern!r} is not a regular expression for layer names: {error}") from None


def lookup(patterns: Mapping[str, T], path: str) -> T | None:
    """Returns the value of the first pattern found in `path`, or None."""
    check(patterns)
    return next((value for pattern, value in patterns.items() if re.search(pattern, path)), None)


def check_used(patterns: Mapping[str, object], paths: Iterable[str]) -> None:
    """Raises ValueError for a pattern that matches none of a model's paths, or that can't win because it follows ""."""
    paths = list(paths)
    check(patterns)
    behind = list(patterns)[list(patterns).index("") + 1 :] if "" in patterns else []
    if behind:
        raise ValueError(f"recipe: the pattern {behind[0]!r} follows '', which matches every path: put '' last")
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            known = ", ".join(map(repr, paths[:4])) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            raise ValueError(f"recipe: the pattern {pattern!r} matches no convertible layer; paths are {known}")


def exactly(path: str) -> str:
    """Returns the pattern that matches only this path."""
    return f"^{re.escape(path)}$"


def ends(blocks: str, count: int, start: int, end: int) -> list[str]:
    r"""Returns patterns for the first `start` and the last `end` of `count` blocks, such as "^layers\.0\.".

    `blocks` is the path of the list of blocks, such as "model.layers". Raises TypeError for numbers that are not integers and
    ValueError for numbers outside 0..count.
    """
    for name, value in (("count", count), ("start", start), ("end", end)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
        if not 0 <= value <= count:
            raise ValueError(f"{name} must be in 0..count, got {value} of {count} blocks")
    return [rf"^{re.escape(blocks)}\.{i}\." for i in range(count) if i < start or i >= count - end]


PATHS = {"path", "fqn", "name", "fullname", "full_name", "qualname", "key", "module_name", "layer_name", "module_path", "n"}
MODULES = {"module", "mod", "layer", "submodule", "child", "leaf", "param", "parameter", "array", "value", "linear", "m"}
"""Usual parameter names for a layer's path (`PATHS`) and for the layer or the leaf of a tree (`MODULES`)."""


def takes_filter(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that takes `filter_fn`, so that calling it with `filter=` raises an error that names `filter_fn`."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if "filter" in options:
            raise TypeError(f"{function.__name__}() takes filter_fn=, a function of path and layer, and no filter=")
        return function(*args, **options)

    return call


def path_first(filter_fn: Callable[..., Any]) -> Callable[[str, Any], Any]:
    """Returns a filter that is called with (path, layer).

    torchao's filters take (layer, path); parameter names or annotations tell which order a filter uses. Without a hint it is
    called with (path, layer).
    """
    reversed_order = _says(filter_fn) == "module"
    return (lambda path, layer: filter_fn(layer, path)) if reversed_order else filter_fn


def select(filter_fn: Callable[..., Any] | None, named: Sequence[tuple[str, Any]]) -> list[bool]:
    """Calls a filter for each (path, layer) and returns its answers; None selects every layer.

    Raises TypeError if `filter_fn` is not callable. Also raises TypeError if the parameter names are ambiguous and the filter
    accepts every layer as (path, layer) but not as (layer, path): a filter in torchao's order would compare a layer with
    strings, which are never equal.
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
    """Returns "path" or "module", the role of the filter's first parameter by its name or annotation; None if unclear."""
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
    """Returns whether the filter, called as (layer, path), accepts some layers and rejects others."""
    try:
        return len({bool(filter_fn(layer, path)) for path, layer in named}) > 1
    except Exception:
        return False

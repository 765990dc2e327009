"""DTensor without its import, which takes as long as half of torch's own: `when_imported` runs code once a program has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_DTENSOR = "torch.distributed.tensor"

_waiting: list[Callable[[Any], None]] = []


def when_imported(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Calls a function with the module `torch.distributed.tensor`: now if it is imported, else right after its import."""
    if _DTENSOR in sys.modules:
        function(import_module(_DTENSOR))
    else:
        if not _waiting:
            sys.meta_path.insert(0, _Finder())
        _waiting.append(function)
    return function


class _Finder(MetaPathFinder):
    """Finds the module by the other finders, and calls what waits for it after its code has run."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _DTENSOR:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                while _waiting:
                    _waiting.pop(0)(module)

            spec.loader.exec_module = execute_and_call
        return spec

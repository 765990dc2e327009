"""Loads a compiled library once per process, or records why it can't be loaded."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import switch
from .switch import once


class _WithoutTorch:
    """An import finder that hides PyTorch from one thread while that thread imports another package.

    A None in `sys.modules` would hide it from all threads.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("hidden from what is imported here", name=name)


def import_tvm_ffi(module: str = "tvm_ffi") -> Any:
    """Imports TVM FFI, or one of its modules, without PyTorch, which it would import if installed.

    PyTorch takes a second and hundreds of megabytes, and a CUDA build loads its own cuDNN and NCCL into a JAX program. Tensors
    of a PyTorch that is imported later still pass through TVM FFI, by DLPack. Only torch dtypes as arguments and
    `tvm_ffi.use_torch_stream`, which blockfp doesn't use, need PyTorch imported first.
    """
    if "tvm_ffi" in sys.modules or "torch" in sys.modules:
        return importlib.import_module(module)
    try:
        with _WithoutTorch():
            return importlib.import_module(module)
    except ImportError:
        # This version needs PyTorch, or TVM FFI is missing; the second import raises the right error.
        return importlib.import_module(module)


class NothingToRunOn(Exception):
    """Raised if a library isn't needed on this machine, so that nobody is warned that it is missing."""


class Library:
    """Loads a library at the first call that needs it, in one thread, and looks up its functions once.

    Attributes:
        loaded: namespace of the functions and `path`; None before loading or if loading failed.
        why_not: why loading failed; "" before loading or after success.
    """

    def __init__(self, kind: str, find: Callable[[], Path], functions: Sequence[str], *, loud: bool = False):
        """`kind` is the name in messages, `functions` the names to look up; `loud` warns if loading fails.

        `find` returns the path and raises OSError or RuntimeError if there is none, or `NothingToRunOn`.
        """
        self.kind = kind
        self.loaded: Any = None
        self.why_not = ""
        self._find, self._functions, self._loud = find, functions, loud
        self._load = once(self._load_first)

    def available(self) -> bool:
        """Returns whether kernels run: their functions are loaded (now, if necessary) and `switch` allows them."""
        return switch.kernels_allowed() and (self.loaded or self._load()) is not None

    def get(self) -> Any:
        """Returns the library's functions; raises RuntimeError with the reason if it can't be loaded."""
        found = self.loaded or self._load()
        if found is None:
            raise RuntimeError(self.missing())
        return found

    def missing(self, why: str | None = None) -> str:
        """Returns a line that says why the definition runs: `switch`, or else `why`, by default `why_not`."""
        why = (self.why_not if why is None else why) if switch.kernels_allowed() else switch.WHY_NOT
        return f"no {self.kind}: {why}; the definition runs instead, with the same bits"

    def _load_first(self) -> Any:
        try:
            path = self._find()
            module = import_tvm_ffi().load_module(str(path))
            self.loaded = SimpleNamespace(path=path, **{name: getattr(module, name) for name in self._functions})
        except NothingToRunOn as why:
            self.why_not = str(why)
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            self.why_not = f"{type(error).__name__}: {error}"
            if self._loud:
                warnings.warn(self.missing(), RuntimeWarning, stacklevel=4)
        return self.loaded


def installed(name: str) -> Path | None:
    """Returns the path of a library of this package, next to this file or where an editable install puts it, or None."""
    beside = Path(__file__).with_name(name)
    if beside.is_file():
        return beside
    from importlib import metadata

    try:
        elsewhere = Path(str(metadata.distribution("blockfp").locate_file(f"blockfp/kernels/{name}")))
    except metadata.PackageNotFoundError:
        return None
    return elsewhere if elsewhere.is_file() else None

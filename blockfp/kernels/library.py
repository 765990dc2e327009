"""Loading a compiled library: once in a process, or the reason why not."""

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
from .once import once


class _WithoutTorch:
    """A finder of modules that hides PyTorch from one thread, while that imports another package.

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
    """Imports TVM FFI, or a module of it, without PyTorch, which it would import first where that is installed.

    That takes a second and hundreds of megabytes, and a CUDA build brings its own cuDNN and NCCL into a JAX program. Tensors of
    a PyTorch that is imported later go through TVM FFI all the same, by DLPack. Its dtypes as arguments and
    `tvm_ffi.use_torch_stream`, which blockfp doesn't call, want it imported first.
    """
    if "tvm_ffi" in sys.modules or "torch" in sys.modules:
        return importlib.import_module(module)
    try:
        with _WithoutTorch():
            return importlib.import_module(module)
    except ImportError:
        # A version that can't do without it; or none at all, which this says.
        return importlib.import_module(module)


class NothingToRunOn(Exception):
    """Says that a library isn't wanted here, so that nobody is warned that it is missing."""


class Library:
    """Loads a library at the first call that needs it, in one thread, and looks its functions up once.

    Attributes:
        loaded: the functions by name, and `path`; None before they are loaded, and where they can't be.
        why_not: the reason why they can't be; "" where they are loaded or nobody has asked yet.
    """

    def __init__(self, kind: str, find: Callable[[], Path], functions: Sequence[str], *, loud: bool = False):
        """
        Args:
            kind: what messages call it.
            find: returns the path; raises OSError or RuntimeError where there is none, or `NothingToRunOn`.
            functions: names of the functions.
            loud: warns where it can't be loaded.
        """
        self.kind = kind
        self.loaded: Any = None
        self.why_not = ""
        self._find, self._functions, self._loud = find, functions, loud
        self._load = once(self._load_first)

    def available(self) -> bool:
        """Tells whether kernels run: the functions can be called, and `switch` lets them. Loads them the first time."""
        return switch.kernels_allowed() and (self.loaded or self._load()) is not None

    def get(self) -> Any:
        """The library's functions, for callers that bring their own arrays.

        Raises:
            RuntimeError: there are none; the message says why.
        """
        found = self.loaded or self._load()
        if found is None:
            raise RuntimeError(self.missing())
        return found

    def missing(self, why: str | None = None) -> str:
        """A line for people that says why the definition runs: `switch`, else `why`, by default `why_not`."""
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
    """The path of a library of this package: beside this file, or where an editable install puts it; None without one."""
    beside = Path(__file__).with_name(name)
    if beside.is_file():
        return beside
    from importlib import metadata

    try:
        elsewhere = Path(str(metadata.distribution("blockfp").locate_file(f"blockfp/kernels/{name}")))
    except metadata.PackageNotFoundError:
        return None
    return elsewhere if elsewhere.is_file() else None

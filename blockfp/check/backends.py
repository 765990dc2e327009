"""The backends of `blockfp check`: built-in ones, if installed, and those that users name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..definition.matrix_units import Summation
from ..definition.numerics import Quantized
from ..definition.products import Operand
from ..errors import BadBackend
from ..formats import Format
from ..kernels import native
from .crosscheck import Backend, Definition


class Kernels:
    """The CPU kernels on NumPy arrays."""

    name = "kernels"

    @property
    def version(self) -> str:
        return native.status()

    def quantize(self, x: np.ndarray, format: Format) -> Quantized:
        return native.quantize(x, format)

    def dequantize(self, q: Quantized, format: Format, dtype: str, columns: int) -> np.ndarray:
        return native.dequantize(*q, format, dtype, columns=columns)

    @property
    def summations(self) -> tuple[str, ...]:
        return native.summations()

    def product(self, a: Operand, b: Operand, summation: Summation, **options: Any) -> np.ndarray:
        return native.product(a, b, summation, **options)


def _kernels() -> Backend:
    if not native.available():
        raise ImportError(native.status())
    return Kernels()


def find(library: str, module: str, name: str) -> Any:
    """Imports a name from a backend; raises ImportError if its library is not installed."""
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"{library} is not installed: pip install 'blockfp[{library}]'")
    return getattr(importlib.import_module(f"blockfp.{module}"), name)


def installed(library: str, adapter: str, name: str) -> Callable[[], Backend]:
    """Returns a function that creates a library's backend."""
    return lambda: find(library, adapter, name)()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "numpy": Definition,
    "kernels": _kernels,
    "jax": installed("jax", "jax_backend.check", "JaxBackend"),
    "jax-xla": installed("jax", "jax_backend.check", "JaxXla"),
    "jax-pallas": installed("jax", "jax_backend.check", "JaxPallas"),
    "torch": installed("torch", "torch_backend.check", "TorchBackend"),
    "torch-cuda": installed("torch", "torch_backend.check", "TorchCuda"),
    "torch-compiled": installed("torch", "torch_backend.check", "TorchCompiled"),
    "torch-definition": installed("torch", "torch_backend.check", "TorchDefinition"),
}
"""Constructors of all backends by name; they raise ImportError if unavailable. The first is the reference."""

WHERE_NAMED = ("jax-pallas", "torch-compiled")
"""Backends that only run if named, because they take seconds per format and shape."""


def load(names: list[str] | None) -> list[Backend]:
    """Returns the named backends, reference first; by default all available ones except `WHERE_NAMED`.

    Args:
        names: names in `BACKENDS`, "all" (those available), or "package.module:attribute" for the user's own: an object with
            the interface `crosscheck.Backend`, or a class or function that returns one. The current folder is searched too. If
            all are the user's own, they are compared with "numpy".

    Raises:
        BadBackend: a name is unknown or unavailable, is not a backend, fails to initialize, or occurs twice.
    """
    if names and all(":" in name for name in names):
        names = [next(iter(BACKENDS)), *names]
    listed = [name for name in BACKENDS if name not in WHERE_NAMED]
    asked = {name for name in names or () if name != "all"}
    if names:
        listed = [one for name in names for one in (BACKENDS if name == "all" else (name,))]
    found: list[Backend] = []
    for name in dict.fromkeys(listed):
        try:
            found.append(_own(name) if ":" in name else _known(name))
        except ImportError as error:
            if name in asked:
                raise BadBackend(f"--backend {name}: unavailable: {error}") from error
            continue
        except BadBackend:
            raise
        except Exception as error:
            raise BadBackend(f"backend {name!r} can't be made: {type(error).__name__}: {error}") from error
        if found[-1].name in [backend.name for backend in found[:-1]]:
            raise BadBackend(f"--backend {name}: another backend is also named {found[-1].name!r}: reports need distinct names")
    return found


def _known(name: str) -> Backend:
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise BadBackend(f"--backend {name}: must be one of {known}, all, or package.module:attribute of your own")
    return BACKENDS[name]()


def _own(name: str) -> Backend:
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module) if module else None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadBackend(f"--backend {name}: {module or 'a backend without a module'} has no attribute {attribute!r}")
        found = getattr(found, part)
    if callable(found) and (isinstance(found, type) or not hasattr(found, "quantize")):
        found = found()
    strings = {part: isinstance(getattr(found, part, None), str) for part in ("name", "version")}
    methods = {part: callable(getattr(found, part, None)) for part in ("quantize", "dequantize")}
    for part, there in (strings | methods).items():
        if not there:
            what = "a string" if part in strings else "a method"
            raise BadBackend(
                f"--backend {name}: {type(found).__name__}.{part} must be {what}: see blockfp.check.crosscheck.Backend"
            )
    return cast(Backend, found)

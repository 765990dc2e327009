"""The CUDA kernel library, loaded on first use and only where a CUDA device is.

`pip install` builds it where asked (`-Ccmake.define.BLOCKFP_CUDA=ON`); otherwise, where nvcc is, the first use builds it into
a cache whose key is the sources and the flags. Where there is a device and no library, a warning says why, once: the
definition's bits are the same, but it is many times slower.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from . import switch
from .cuda_build import device_count, find_or_build, where

_NO_DEVICE = "no CUDA device is here"

_library: Any = None
_why_not = ""
_loading = threading.Lock()


def available() -> bool:
    """Whether the CUDA library is there, a device to run it, and `switch` allows it; loads (and may build) it the first time."""
    return switch.kernels_allowed() and _load() is not None


def status() -> str:
    """One line: which library runs or would run, or why there is none. It loads and builds nothing."""
    if not switch.kernels_allowed():
        return _missing(switch.WHY_NOT)
    if _library is not None:
        return str(_library.path)
    if not _why_not and device_count() > 0:
        try:
            path = where()
        except (OSError, RuntimeError) as error:
            return _missing(f"{type(error).__name__}: {error}")
        return str(path) if path.is_file() else f"not built yet: their first use builds {path}"
    return _missing(_why_not or _NO_DEVICE)


def _missing(why: str) -> str:
    return f"no CUDA kernels: {why}; the definition runs instead, with the same bits"


class _Library:
    """The library's functions, looked up once; kernels/cuda/exports.cu says what they take."""

    def __init__(self, path):
        import tvm_ffi

        module = tvm_ffi.load_module(str(path))
        self.path = path
        self.amax = module.amax
        self.amax_blocks = module.amax_blocks
        self.quantize = module.quantize
        self.encode = module.encode
        self.dequantize = module.dequantize
        self.product = module.product
        self.block_product = module.block_product
        self.cublas_version = module.cublas_version
        self.transpose = module.transpose
        self.interleave = module.interleave
        self.fold_keys = module.fold_keys
        self.adamw = module.adamw


def _load() -> Any:
    if _library is None and not _why_not:
        with _loading:
            if _library is None and not _why_not:
                _load_first()
    return _library


def _load_first() -> None:
    global _library, _why_not
    if device_count() == 0:
        _why_not = _NO_DEVICE
        return
    try:
        _library = _Library(find_or_build())
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        _why_not = f"{type(error).__name__}: {error}"
        warnings.warn(status(), RuntimeWarning, stacklevel=2)


def library() -> Any:
    """The library's functions, for callers that bring their own arrays.

    Raises:
        RuntimeError: there is none; the message says why.
    """
    found = _library or _load()
    if found is None:
        raise RuntimeError(status())
    return found

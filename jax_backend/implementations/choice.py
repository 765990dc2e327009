"""Choice of a backend: XLA, the CPU or CUDA library by TVM FFI, or Pallas; all give the same bits.

By default an operation uses the first of `ffi`, `pallas` and `xla` that this machine supports. If the caller names a backend
that can't run, an error gives the reason.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

from blockfp.formats import Format
from blockfp.kernels import switch

from . import cuda
from .backend import Backend
from .cpu import CpuLibrary
from .cuda import CudaLibrary
from .pallas.backend import Pallas
from .xla import XLA, Xla

NAMES = ("ffi", "pallas", "xla")
"""Names of backends in order of preference."""

# By whether the caller named it. One instance each, because backends are static arguments of jitted functions.
_XLA = {False: XLA, True: Xla(asked=True)}
_CPU, _CUDA, _PALLAS = ({asked: kind(asked=asked) for asked in (False, True)} for kind in (CpuLibrary, CudaLibrary, Pallas))


def choose(asked: str | None, operation: str, *, format: Format, **options: Any) -> Backend:
    """Returns the backend for an operation.

    Args:
        asked: one of `NAMES`, or None for the first one that this machine supports.
        operation: the name of a method of `Backend`.
        format: the format.
        options: the method's static arguments, and `stochastic` for stochastic rounding.

    Raises:
        ValueError: `asked` is not in `NAMES`, or has no kernel for this operation.
        RuntimeError: `asked` can't run on this machine.
    """
    if asked is not None:
        if asked not in NAMES:
            raise ValueError(f"implementation must be None or one of {', '.join(NAMES)}, got {asked!r}")
        why = missing(asked)
        if why is not None:
            raise RuntimeError(f"implementation={asked!r} can't run here: {why}; use implementation='xla'")
        backend = _backend(asked, asked=True)
        why = backend.refusal(operation, format=format, **options)
        if why is not None:
            raise ValueError(f"implementation={asked!r} can't do this: {why}; use implementation='xla'")
        return backend
    if not has_gpu():
        # Kernels can't run in a shard_map that leaves some axes to XLA, which partitions the device's own program over them.
        mesh = jax.sharding.get_abstract_mesh()
        partly_manual = mesh.manual_axes and not mesh.are_all_axes_manual
        return _CPU[False] if missing("ffi") is None and not partly_manual else XLA
    if would_be_partitioned():
        return XLA
    there = (_backend(name, asked=False) for name in NAMES if missing(name) is None)
    return next(backend for backend in there if backend.refusal(operation, format=format, **options) is None)


def _backend(name: str, *, asked: bool) -> Backend:
    if name == "ffi":
        return (_CUDA if has_gpu() else _CPU)[asked]
    return (_PALLAS if name == "pallas" else _XLA)[asked]


# Compiled programs contain the choice.
switch.when_turned(jax.clear_caches)


@switch.memo
def missing(name: str) -> str | None:
    """Returns why a backend can't run on this machine, or None."""
    if name != "xla" and not switch.kernels_allowed():
        return switch.WHY_NOT
    return _backend(name, asked=False).missing()


def missing_product(version: int) -> str | None:
    """Returns why the CUDA library isn't used for a product of codes and scales, or None; see `missing_cublas`."""
    return "XLA may have to split the product over devices" if would_be_partitioned() else missing_cublas(version)


def missing_cublas(version: int) -> str | None:
    """Returns why the CUDA library can't multiply codes and scales, or None.

    `version` is the minimum cuBLASLt version (120900 for CUDA 12.9), or 0 if the library's own kernel is used.
    """
    if not has_gpu():
        return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
    why = missing("ffi")
    if why is not None or version == 0:
        return why
    found = cuda.cublas_version()
    if found == 0:
        return "neither libcublasLt.so.13 nor libcublasLt.so.12 was found"
    return None if found >= version else f"cuBLASLt is {found}, and {version} or later is needed"


@cache
def has_gpu() -> bool:
    """Returns whether JAX runs on a GPU."""
    return jax.default_backend() == "gpu"


def would_be_partitioned() -> bool:
    """Returns whether XLA may have to partition the operation over devices, which only works with the definition.

    Inside shard_map each device runs its own program, so kernels can run there.
    """
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().are_all_axes_manual

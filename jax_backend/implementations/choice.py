"""The choice of a backend: XLA, the CPU or CUDA library through TVM FFI, or Pallas kernels, all with the same bits.

Unless the caller names a backend, an operation takes the first of `ffi`, `pallas` and `xla` that this machine has for it. A
backend that is named and can't run raises and says why.
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
"""The names of backends, in the order in which they are chosen."""

# By whether the caller named it: a static argument of jitted functions, so there is one of each.
_XLA = {False: XLA, True: Xla(asked=True)}
_CPU, _CUDA, _PALLAS = ({asked: kind(asked=asked) for asked in (False, True)} for kind in (CpuLibrary, CudaLibrary, Pallas))


def choose(asked: str | None, operation: str, *, format: Format, **options: Any) -> Backend:
    """Picks the backend of an operation.

    Args:
        asked: one of `NAMES`, or None for the first that this machine has.
        operation: the name of a method of `Backend`.
        format: the format.
        options: `stochastic`, True for stochastic rounding, and the static arguments of the method.

    Raises:
        ValueError: `asked` is none of `NAMES`, or has no kernel for this.
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
        # Inside a shard_map that leaves some axes to XLA, which splits a device's own program over those, kernels can't run.
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


# A compiled program holds what was chosen.
switch.when_turned(jax.clear_caches)


@switch.memo
def missing(name: str) -> str | None:
    """Returns the reason why a backend can't run on this machine, or None."""
    if name != "xla" and not switch.kernels_allowed():
        return switch.WHY_NOT
    return _backend(name, asked=False).missing()


def missing_product(version: int) -> str | None:
    """Returns the reason why the CUDA library doesn't get a product of codes and scales here, or None; see `missing_cublas`."""
    return "XLA may have to split the product over devices" if would_be_partitioned() else missing_cublas(version)


def missing_cublas(version: int) -> str | None:
    """Returns the reason why the CUDA library can't multiply codes and scales, or None.

    Args:
        version: the least cuBLASLt that will do, as it counts: 120900 is that of CUDA 12.9; 0 where the library's own
            kernel will.
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
    """Returns True where JAX runs on a GPU."""
    return jax.default_backend() == "gpu"


def would_be_partitioned() -> bool:
    """Returns True where XLA may have to split the operation over devices, which it can do with the definition alone.

    Inside shard_map each device has its own program, so kernels are welcome there.
    """
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().are_all_axes_manual

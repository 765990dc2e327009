"""Who carries an operation out: XLA from the definition, the CPU or CUDA library through TVM FFI, or Pallas kernels.

All give the same bits. Without being asked for one, an operation takes the first of `ffi`, `pallas` and `xla` that is there
for it; an implementation that is asked for and can't run raises and says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import jax
from jax import lax

from blockfp.definition import numerics
from blockfp.formats import Format
from blockfp.kernels import switch

from . import definition, explicit
from .choice import Choice

NAMES = ("ffi", "pallas", "xla")
"""The implementations, in the order in which they are chosen."""


def choose(
    asked: str | None,
    operation: str,
    format: Format,
    *,
    stochastic: bool = False,
    rotate: bool = False,
    eps: float = 0.0,
    origin: tuple[int, int] = (0, 0),
) -> Choice:
    """The implementation that will run.

    Args:
        asked: one of `NAMES`, or None for the first that is there.
        operation: "quantize", "columnwise", "both", "dequantize" or "amax".
        format: the format.
        stochastic: whether the rounding is.
        rotate: whether the operation begins with the random Hadamard transform.
        eps: what amaxes are lifted to.
        origin: (row, column) of the first element in the unsharded matrix.

    Raises:
        ValueError: `asked` is none of `NAMES`, or has no kernel for this.
        RuntimeError: `asked` can't run on this machine.
    """
    if asked is not None:
        if asked not in NAMES:
            raise ValueError(f"implementation must be None or one of {', '.join(NAMES)}, got {asked!r}")
        missing = _missing(asked)
        if missing is not None:
            raise RuntimeError(f"implementation={asked!r} can't run here: {missing}; use implementation='xla'")
        refused = _refused(asked, operation, format, stochastic, rotate, eps, origin)
        if refused is not None:
            raise ValueError(f"implementation={asked!r} can't do this: {refused}; use implementation='xla'")
        return Choice(asked, True)
    if not _has_gpu():
        return Choice("ffi" if _missing("ffi") is None and not _partly_manual() else "xla", False)
    if _would_be_partitioned():
        return Choice("xla", False)
    there = (
        n for n in NAMES if _missing(n) is None and _refused(n, operation, format, stochastic, rotate, eps, origin) is None
    )
    return Choice(next(there), False)


def _run(choice: Choice, kernel: Callable, definition: Callable, *operands):
    """Results of `kernel(*operands)` on CUDA devices, of `definition` where it is chosen or the program is for another."""
    if choice.name == "xla":
        return definition(*operands)
    kernel = _varying_like(definition, kernel)
    if choice.asked:
        return kernel(*operands)
    return lax.platform_dependent(*operands, cuda=kernel, default=definition)


def _varying_like(definition: Callable, kernel: Callable) -> Callable:
    """The kernel, whose results vary over the same mesh axes as the definition's inside shard_map."""
    from .replication import vary, varying

    def run(*operands):
        results = kernel(*operands)
        if not any(map(varying, jax.tree.leaves(operands))):
            return results
        types = jax.make_jaxpr(definition)(*operands).out_avals
        leaves, structure = jax.tree.flatten(results)
        return structure.unflatten(vary(x, t.mat.varying) for x, t in zip(leaves, types, strict=True))

    return run


def _on_cpu(choice: Choice) -> bool:
    """Whether the CPU library is what was chosen."""
    return choice.name == "ffi" and not _has_gpu()


def amax(choice: Choice, x: jax.Array, format: Format) -> numerics.Amax:
    """`numerics.amax` by the chosen implementation."""
    return explicit.run(choice, lambda choice, x: _amax(choice, x, format), lambda: explicit.of_amax(x, format), x)


def _amax(choice: Choice, x: jax.Array, format: Format) -> numerics.Amax:
    if _on_cpu(choice):
        from . import cpu

        return cpu.amax(x, format, asked=choice.asked)

    def kernel(x):
        if choice.name == "ffi":
            from .ffi import tensor_amax
        else:
            from .pallas.arrays import tensor_amax
        return numerics.Amax(tensor_amax(x).reshape((1,) * x.ndim), None, None)

    return _run(choice, kernel, lambda x: numerics.amax(x, format), x)


def quantize(
    choice: Choice,
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None,
    format: Format,
    eps: float,
    nominal: str | None,
) -> numerics.Quantized:
    """`numerics.quantize` by the chosen implementation; `amax` as for `ops.quantize`."""

    def run(choice, x, key, amax):
        return _quantize(choice, x, key, amax, format, eps, nominal)

    return explicit.run(choice, run, lambda: explicit.of_quantized(x, format), x, key, amax)


def _quantize(choice: Choice, x, key, amax, format: Format, eps: float, nominal: str | None) -> numerics.Quantized:
    if _on_cpu(choice):
        from . import cpu

        return cpu.quantize(x, key, amax, format, eps, nominal, asked=choice.asked)

    def kernel(x, key, amax):
        if choice.name == "ffi":
            from . import ffi

            return ffi.quantize(x, format, key=key, amax=amax, eps=eps, nominal=nominal)
        from .pallas import arrays

        if amax is None and nominal is None:
            return arrays.quantize_batched(x, format)
        return arrays.quantize(x, format, nominal, amax=amax)

    return _run(choice, kernel, lambda x, key, amax: definition.quantize(x, key, amax, format, eps, nominal), x, key, amax)


def quantize_columnwise(
    choice: Choice,
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None,
    format: Format,
    eps: float,
    rotated: bool,
) -> numerics.Quantized:
    """`quantize` of x.mT by the chosen implementation, rotated first where `rotated` says so."""

    def run(choice, x, key, amax):
        return _quantize_columnwise(choice, x, key, amax, format, eps, rotated)

    return explicit.run(choice, run, lambda: explicit.of_quantized(x, format, transposed=True), x, key, amax)


def _quantize_columnwise(choice: Choice, x, key, amax, format: Format, eps: float, rotated: bool) -> numerics.Quantized:
    if _on_cpu(choice):
        from . import cpu

        return cpu.quantize(x, key, amax, format, eps, None, asked=choice.asked, transposed=True, rotated=rotated)

    def kernel(x, key, amax):
        if choice.name == "ffi":
            from . import ffi

            return ffi.quantize_columnwise(x, format, key=key, amax=amax, eps=eps, rotated=rotated)
        from .pallas import arrays

        return arrays.columnwise_quantize(x, format, rows=False, amax=amax)[1]

    def define(x, key, amax):
        return definition.quantize_columnwise(x, key, amax, format, eps, rotated)

    return _run(choice, kernel, define, x, key, amax)


def quantize_both(
    choice: Choice,
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None,
    format: Format,
    eps: float,
    rotated: bool,
) -> tuple[numerics.Quantized, numerics.Quantized]:
    """`quantize` and `quantize_columnwise` by the chosen implementation; a key has two words for each."""

    def run(choice, x, key, amax):
        return _quantize_both(choice, x, key, amax, format, eps, rotated)

    def specs():
        return explicit.of_quantized(x, format), explicit.of_quantized(x, format, transposed=True)

    return explicit.run(choice, run, specs, x, key, amax)


def _quantize_both(
    choice: Choice, x, key, amax, format: Format, eps: float, rotated: bool
) -> tuple[numerics.Quantized, numerics.Quantized]:
    if _on_cpu(choice):
        from . import cpu

        return cpu.quantize_both(x, key, amax, format, eps, rotated, asked=choice.asked)

    def kernel(x, key, amax):
        if choice.name == "ffi":
            from . import ffi

            return ffi.quantize_both(x, format, key=key, amax=amax, eps=eps, rotated=rotated)
        from .pallas import arrays

        return arrays.columnwise_quantize(x, format, rows=True, amax=amax)

    def define(x, key, amax):
        return definition.quantize_both(x, key, amax, format, eps, rotated)

    return _run(choice, kernel, define, x, key, amax)


def dequantize(
    choice: Choice, codes, scales, tensor_scale, format: Format, dtype: str, columns: int, origin: tuple[int, int]
) -> jax.Array:
    """`numerics.dequantize` by the chosen implementation."""

    def run(choice, codes, scales, tensor_scale):
        return _dequantize(choice, codes, scales, tensor_scale, format, dtype, columns, origin)

    return explicit.run(choice, run, lambda: explicit.of_values(codes, columns), codes, scales, tensor_scale)


def _dequantize(
    choice: Choice, codes, scales, tensor_scale, format: Format, dtype: str, columns: int, origin: tuple[int, int]
) -> jax.Array:
    if _on_cpu(choice):
        from . import cpu

        return cpu.dequantize(codes, scales, tensor_scale, format, dtype, columns, origin, asked=choice.asked)

    def define(codes, scales, tensor_scale):
        return definition.dequantize(codes, scales, tensor_scale, format, dtype, columns, origin)

    def kernel(codes, scales, tensor_scale):
        if choice.name == "ffi":
            from . import ffi

            return ffi.dequantize(codes, scales, tensor_scale, format, dtype, columns=columns, origin=origin)
        from .pallas import arrays

        return arrays.dequantize_batched(codes, scales, tensor_scale, format, dtype, columns)

    return _run(choice, kernel, define, codes, scales, tensor_scale)


def transpose(codes: jax.Array, scales: jax.Array, format: Format, columns: int) -> tuple[jax.Array, jax.Array]:
    """`numerics.transpose`."""

    def run(choice, codes, scales):
        return numerics.transpose(codes, scales, format, columns=columns)

    return explicit.run(
        Choice("xla", False), run, lambda: explicit.of_transposed(codes, scales, format, columns), codes, scales
    )


def _refused(
    name: str, operation: str, format: Format, stochastic: bool, rotate: bool, eps: float, origin: tuple[int, int]
) -> str | None:
    """Why an implementation that is there doesn't do this, or None."""
    if name != "xla" and operation == "amax" and _has_gpu():
        return None if format.per_tensor else "the kernels look for the amax of a whole tensor"
    if name != "pallas":
        return None
    if eps:
        return f"the Pallas kernels lift no amax, and eps is {eps}"
    if rotate:
        return "the Pallas kernels don't rotate"
    if any(o % b for o, b in zip(origin, format.block or (1, 1), strict=True)):
        return f"the Pallas kernels begin with whole blocks, and origin {origin} lies inside one of {format}"
    if stochastic:
        return "the Pallas kernels round to nearest"
    from .pallas import arrays

    return arrays.refusal(operation, format)


# A compiled program holds what was chosen.
switch.when_turned(jax.clear_caches)


@switch.cached
def _missing(name: str) -> str | None:
    """What an implementation lacks on this machine, or None."""
    if name == "xla":
        return None
    if not switch.kernels_allowed():
        return switch.WHY_NOT
    if name == "ffi" and jax.default_backend() == "cpu":
        from . import cpu

        return cpu.missing()
    if not _has_gpu():
        return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
    if name == "ffi":
        if importlib.util.find_spec("jax_tvm_ffi") is None:
            return "the package jax-tvm-ffi is not installed"
        from blockfp.kernels import cuda_library

        return None if cuda_library.available() else cuda_library.status()
    capability = float(getattr(jax.devices()[0], "compute_capability", 0))
    if capability < 9:
        return f"Mosaic GPU needs compute capability 9.0 or above, and this device has {capability}"
    try:
        from .pallas import arrays  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def missing_product(version: int) -> str | None:
    """Why a product of codes and scales is not given to cuBLASLt here, or None where it is; see `missing_cublas`."""
    return "XLA may have to split the product over devices" if _would_be_partitioned() else missing_cublas(version)


def missing_cublas(version: int) -> str | None:
    """Why the CUDA library has no cuBLASLt to multiply codes and scales with, or None where it has.

    Args:
        version: the least that will do, as cuBLASLt counts: 120900 is that of CUDA 12.9.
    """
    if not _has_gpu():
        return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
    missing = _missing("ffi")
    if missing is not None:
        return missing
    from . import ffi

    found = ffi.cublas_version()
    if found == 0:
        return "neither libcublasLt.so.13 nor libcublasLt.so.12 was found"
    return None if found >= version else f"cuBLASLt is {found}, and {version} or later is needed"


@cache
def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _would_be_partitioned() -> bool:
    """Whether XLA may have to split the operation over devices, which it can do with the definition alone.

    Inside shard_map each device has its own program, so kernels are welcome there.
    """
    return jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().are_all_axes_manual


def _partly_manual() -> bool:
    """Whether this is inside a shard_map that leaves some axes to XLA, which splits a device's own program over those."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and not mesh.are_all_axes_manual

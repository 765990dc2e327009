"""The CPU backend: the kernel library that NumPy and PyTorch run, in jitted programs through jax-tvm-ffi.

Its operations are one primitive, because the executor is known only when a program is lowered. On a CPU that is the library.
The definition stands in for it where XLA splits the program over several devices, where the program is exported (it must not
need the library then) and on other devices. kernels/cpu/array_exports.cc documents the arguments of the library's functions.
An absent array is passed as one without elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from blockfp.definition import bits
from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format
from blockfp.kernels import calls, native
from blockfp.kernels.switch import once

from .backend import Backend, keys_of_both, missing_library
from .explicit import vary, varying
from .jax_internals import runs_compiled
from .xla import XLA

# Programs in a persistent cache call the library by these names, so functions that take something else need others.
_TARGET = "blockfp_cpu_{}_1"


@once
def _register(operation: str) -> str:
    """Registers a function of the library with XLA and returns its name there."""
    import jax_tvm_ffi

    target, function = _TARGET.format(operation), f"{operation}_arrays"
    arguments = ["args", "rets", *(f"attrs.{attribute}" for attribute in calls.SIGNATURES[function][1])]
    jax_tvm_ffi.register_ffi_target(target, getattr(native.library(), function), arguments, platform="cpu")
    return target


@dataclass(frozen=True)
class _Call:
    """The static arguments of an operation on one tensor of `ndim` axes."""

    operation: str
    ndim: int
    format: Format
    asked: bool
    eps: float = 0.0
    nominal: str = "float32"
    columnwise: bool = False
    rotate: bool = False
    dtype: str = "float32"
    columns: int = 0
    origin: tuple[int, int] = (0, 0)

    def described(self, first) -> calls.Call:
        """The call of the library for one tensor, from its first operand."""
        format, shape = self.format, first.shape[first.ndim - self.ndim :]
        if self.operation == "amax":
            return calls.amax_arrays(shape, format)
        if self.operation == "dequantize":
            return calls.dequantize((*shape[:-1], self.columns), self.dtype, format, self.origin, "dequantize_arrays")
        options = {"transposed": self.columnwise, "rotated": self.rotate}
        return calls.quantize_arrays(shape, self.nominal, format, self.eps, **options)

    def results(self, first) -> list[tuple[tuple[int, ...], Any]]:
        """The (shape, dtype) of each result for one tensor, from its first operand."""
        return [(array[0], jnp.dtype(array[1])) for array in self.described(first).arrays.values() if array is not None]

    def define(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the definition's results of one tensor."""
        format, given = self.format, [x if x.size or i == 0 else None for i, x in enumerate(operands)]
        if self.operation == "dequantize":
            codes, scales, tensor_scale = operands
            tensor_scale = tensor_scale.reshape(()) if format.scale.two_level else None
            place = {"dtype": self.dtype, "columns": self.columns, "origin": self.origin}
            return [XLA.dequantize(codes, scales, tensor_scale, format=format, **place)]
        if self.operation == "amax":
            # Without `members`, which `arrays.sharded` computes apart, of blocks that are cut.
            found = XLA.amax(operands[0], format=format)[:3]
        else:
            x, amax, key = operands[0], given[1], given[2]
            if self.columnwise:
                found = XLA.quantize_columnwise(x, key, amax, format=format, eps=self.eps, rotate=self.rotate)
            else:
                found = XLA.quantize(x, key, amax, format=format, eps=self.eps, nominal=self.nominal)
        shapes = self.results(operands[0])
        return [jnp.zeros(s, d) if part is None else part for part, (s, d) in zip(found, shapes, strict=True)]


_operation_p = Primitive("blockfp_cpu")
_operation_p.multiple_results = True


def _own_axes(call: _Call) -> tuple[int, ...]:
    """The number of trailing axes of each operand that belong to one tensor; those before them are vmap's."""
    if call.operation == "amax":
        return (call.ndim,)
    return (call.ndim, call.ndim, 1) if call.operation == "dequantize" else (call.ndim, 1, 1)


def _stack_of(shapes, call: _Call) -> tuple[int, ...]:
    """The lengths of vmap's axes."""
    leading = [shape[: len(shape) - own] for shape, own in zip(shapes, _own_axes(call), strict=True)]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*leading, strict=True))


@_operation_p.def_abstract_eval
def _abstract(*operands, call: _Call):
    stack = _stack_of([x.shape for x in operands], call)
    return [ShapedArray((*stack, *shape), dtype) for shape, dtype in call.results(operands[0])]


runs_compiled(_operation_p)


def _batched(operands, axes, *, call: _Call):
    moved = [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)
    ]
    results = _operation_p.bind(*moved, call=call)
    return results, [0] * len(results)


batching.primitive_batchers[_operation_p] = _batched


def _stacked(call: _Call):
    """Returns the definition for a stack of tensors."""

    def run(*operands):
        own = _own_axes(call)
        if operands[0].ndim == own[0]:
            return call.define(*operands)
        size = _stack_of([x.shape for x in operands], call)[0]
        mapped = [x.shape[0] == size for x in operands]
        operands = [x if is_mapped else x[0] for x, is_mapped in zip(operands, mapped, strict=True)]
        return jax.vmap(run, in_axes=[0 if is_mapped else None for is_mapped in mapped])(*operands)

    return run


def _lower_definition(context, *operands, call: _Call):
    return mlir.lower_fun(_stacked(call), multiple_results=True)(context, *operands)


def library_may_run(context) -> bool:
    """Returns whether a program may call the library: it isn't exported, and XLA doesn't split it over devices."""
    exported = context.module_context.lowering_parameters.for_export
    return not exported and _on_one_device(context.module_context.axis_context)


def _lower(context, *operands, call: _Call):
    if not call.asked and not library_may_run(context):
        return _lower_definition(context, *operands, call=call)
    return lower_to_library(call.operation, context, operands, call.described(context.avals_in[0]))


def lower_to_library(operation: str, context, operands, described: calls.Call):
    """Lowers an operation to the library's function for arrays."""
    attributes = {name: np.int64(value) for name, value in described.numbers.items()}
    return jax.ffi.ffi_lowering(_register(operation))(context, *operands, **attributes)


def _on_one_device(axes) -> bool:
    """Returns True for a program of one device, or the part of one inside a shard_map over all axes."""
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices == 1
    return isinstance(axes, mlir.SPMDAxisContext) and axes.manual_axes == frozenset(axes.mesh.axis_names)


mlir.register_lowering(_operation_p, _lower_definition)
mlir.register_lowering(_operation_p, _lower, platform="cpu")


def _or_absent(x: jax.Array | None, dtype) -> jax.Array:
    return jnp.zeros((0,), dtype) if x is None else x


def _varying(*arrays: jax.Array | None) -> frozenset[str]:
    """The mesh axes that a function of these arrays varies over."""
    return frozenset().union(*(varying(x) for x in arrays if x is not None))


class CpuLibrary(Backend):
    """The CPU kernel library."""

    name = "ffi"

    def missing(self) -> str | None:
        return missing_library("cpu", native)

    def amax(self, x, *, format: Format) -> Amax:
        call = _Call("amax", x.ndim, format, self.asked)
        blocks, nan, tensor = (vary(part, varying(x)) for part in _operation_p.bind(x, call=call))
        return Amax(blocks, None if format.element.has_nan else nan, tensor if format.scale.two_level else None)

    def quantize(self, x, key, amax, *, format: Format, eps: float = 0.0, nominal: str | None = None) -> Quantized:
        call = _Call("quantize", x.ndim, format, self.asked, eps, nominal or bits.dtype_name(x))
        return _quantize(call, x, key, amax)

    def quantize_columnwise(self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False) -> Quantized:
        call = _Call("quantize", x.ndim, format, self.asked, eps, bits.dtype_name(x), columnwise=True, rotate=rotate)
        return _quantize(call, x, key, amax)

    def quantize_both(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        row_key, column_key = keys_of_both(key)
        if amax is None and not rotate and format.has_tensor_scale:
            found = self.amax(x, format=format)
            amax = found.tensor if format.scale.two_level else found.blocks
        row = self.quantize(x, row_key, amax, format=format, eps=eps)
        return row, self.quantize_columnwise(x, column_key, amax, format=format, eps=eps, rotate=rotate)

    def dequantize(
        self, codes, scales, tensor_scale, *, format: Format, dtype: str, columns: int, origin: tuple[int, int] = (0, 0)
    ) -> jax.Array:
        call = _Call("dequantize", codes.ndim, format, self.asked, dtype=dtype, columns=columns, origin=origin)
        given = _or_absent(None if tensor_scale is None else tensor_scale.reshape(1), jnp.float32)
        (values,) = _operation_p.bind(codes, scales, given, call=call)
        return vary(values, _varying(codes, scales, tensor_scale))


def _quantize(call: _Call, x: jax.Array, key: jax.Array | None, amax: jax.Array | None) -> Quantized:
    given = _or_absent(None if amax is None else amax.reshape(1), jnp.int32)
    codes, scales, tensor_scale = _operation_p.bind(x, given, _or_absent(key, jnp.uint32), call=call)
    format, of_tensor = call.format, _varying(x if amax is None else amax)
    codes = vary(codes, _varying(x, key, amax))
    scales = vary(scales, of_tensor if format.per_tensor else _varying(x, amax))
    return Quantized(codes, scales, vary(tensor_scale, of_tensor) if format.scale.two_level else None)

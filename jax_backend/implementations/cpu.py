"""The CPU kernel library in JAX, through jax-tvm-ffi: the kernels that NumPy and PyTorch run, in jitted programs.

Each operation is a primitive, because who carries it out is known only when a program is lowered. On a CPU that is the
library; the definition, which XLA compiles, stands in for it where XLA splits the program over several devices, where it is
exported (an exported program must not need the library) and on other devices. kernels/cpu/array_exports.cc says what the
library's functions take. An array that is absent is one without elements.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from blockfp.definition import bits, layout, numerics
from blockfp.definition.numerics import Amax, Quantized
from blockfp.formats import Format
from blockfp.kernels import native, switch
from blockfp.kernels.format_numbers import format_numbers, largest_multiplier
from blockfp.kernels.once import once

from . import definition
from .replication import vary, varying

_FORMAT = ("element", "block_rows", "block_columns", "rule")
_ATTRIBUTES = {
    "amax": ("ndim", *_FORMAT),
    "quantize": ("ndim", *_FORMAT, "largest_bits", "eps_bits", "transposed", "rotated"),
    "dequantize": ("ndim", *_FORMAT, "row", "column"),
}
# Programs in a persistent cache call the library by these names, so functions that take something else need others.
_TARGET = "blockfp_cpu_{}_1"


@switch.cached
def missing() -> str | None:
    """Why the library can't run in JAX's programs, or None."""
    if importlib.util.find_spec("jax_tvm_ffi") is None:
        return "the package jax-tvm-ffi is not installed"
    return None if native.available() else native.status()


@once
def _register(operation: str) -> str:
    """Makes a function of the library known to XLA, under the name returned."""
    import jax_tvm_ffi

    target = _TARGET.format(operation)
    arguments = ["args", "rets", *(f"attrs.{attribute}" for attribute in _ATTRIBUTES[operation])]
    jax_tvm_ffi.register_ffi_target(target, getattr(native.library(), f"{operation}_arrays"), arguments, platform="cpu")
    return target


@dataclass(frozen=True)
class _Call:
    """What is static about an operation on one tensor of `ndim` axes."""

    operation: str
    ndim: int
    format: Format
    asked: bool
    eps: float = 0.0
    nominal: str = "float32"
    transposed: bool = False
    rotated: bool = False
    dtype: str = "float32"
    columns: int = 0
    origin: tuple[int, int] = (0, 0)

    def attributes(self) -> dict[str, np.int64]:
        values: dict[str, int] = {"ndim": self.ndim, **dict(zip(_FORMAT, format_numbers(self.format), strict=True))}
        if self.operation == "quantize":
            values["largest_bits"] = largest_multiplier(self.format, self.eps, self.nominal)
            values["eps_bits"] = bits.constant_bits(self.eps)
            values |= {"transposed": self.transposed, "rotated": self.rotated}
        elif self.operation == "dequantize":
            values |= {"row": self.origin[0], "column": self.origin[1]}
        return {name: np.int64(value) for name, value in values.items()}

    def results(self, first) -> list[tuple[tuple[int, ...], Any]]:
        """(shape, dtype) of each result, of one tensor whose first operand this is."""
        format, shape = self.format, first.shape[first.ndim - self.ndim :]
        two_level = format.scale.two_level
        if self.operation == "dequantize":
            return [((*shape[:-1], self.columns), jnp.dtype(self.dtype))]
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        scales = layout.scales_shape(shape, format)
        if self.operation == "amax":
            nan = (0,) * self.ndim if format.element.has_nan else scales
            return [(scales, jnp.int32), (nan, jnp.int32), (() if two_level else (0,), jnp.int32)]
        return [
            (layout.codes_shape(shape, format), jnp.uint8),
            (scales, jnp.dtype(format.scale.dtype)),
            (() if two_level else (0,), jnp.float32),
        ]

    def define(self, *operands: jax.Array) -> list[jax.Array]:
        """The definition's results of one tensor."""
        format, given = self.format, [x if x.size or i == 0 else None for i, x in enumerate(operands)]
        if self.operation == "dequantize":
            codes, scales, tensor_scale = operands
            tensor_scale = tensor_scale.reshape(()) if format.scale.two_level else None
            values = definition.dequantize(codes, scales, tensor_scale, format, self.dtype, self.columns, self.origin)
            return [values]
        if self.operation == "amax":
            found = numerics.amax(operands[0], format)
        else:
            x, amax, key = operands[0], given[1], given[2]
            if self.transposed:
                found = definition.quantize_columnwise(x, key, amax, format, self.eps, self.rotated)
            else:
                found = definition.quantize(x, key, amax, format, self.eps, self.nominal)
        shapes = self.results(operands[0])
        return [jnp.zeros(s, d) if part is None else part for part, (s, d) in zip(found, shapes, strict=True)]


_carry_out = Primitive("blockfp_cpu")
_carry_out.multiple_results = True


def _own_axes(call: _Call) -> tuple[int, ...]:
    """How many axes of each operand are one tensor's own; those before them are vmap's."""
    if call.operation == "amax":
        return (call.ndim,)
    return (call.ndim, call.ndim, 1) if call.operation == "dequantize" else (call.ndim, 1, 1)


def _stack_of(shapes, call: _Call) -> tuple[int, ...]:
    """Lengths of vmap's axes."""
    leading = [shape[: len(shape) - own] for shape, own in zip(shapes, _own_axes(call), strict=True)]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*leading, strict=True))


@_carry_out.def_abstract_eval
def _abstract(*operands, call: _Call):
    stack = _stack_of([x.shape for x in operands], call)
    return [ShapedArray((*stack, *shape), dtype) for shape, dtype in call.results(operands[0])]


@_carry_out.def_impl
def _eager(*operands, call: _Call):
    # Under jax.disable_jit.
    with jax.disable_jit(False):
        return jax.jit(lambda *operands: _carry_out.bind(*operands, call=call))(*operands)


def _batched(operands, axes, *, call: _Call):
    moved = [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)
    ]
    results = _carry_out.bind(*moved, call=call)
    return results, [0] * len(results)


batching.primitive_batchers[_carry_out] = _batched


def _stacked(call: _Call):
    """The definition of a stack of tensors."""

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


def _lower(context, *operands, call: _Call):
    exported = context.module_context.lowering_parameters.for_export
    if not call.asked and (exported or not _on_one_device(context.module_context.axis_context)):
        return _lower_definition(context, *operands, call=call)
    return jax.ffi.ffi_lowering(_register(call.operation))(context, *operands, **call.attributes())


def _on_one_device(axes) -> bool:
    """Whether a program, or the part of one that is inside shard_map, is one device's."""
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices == 1
    return isinstance(axes, mlir.SPMDAxisContext) and axes.manual_axes == frozenset(axes.mesh.axis_names)


mlir.register_lowering(_carry_out, _lower_definition)
mlir.register_lowering(_carry_out, _lower, platform="cpu")


def _absent(dtype) -> jax.Array:
    return jnp.zeros((0,), dtype)


def _over(*arrays: jax.Array | None) -> frozenset[str]:
    """The mesh axes that what is made of these arrays varies over."""
    return frozenset().union(*(varying(x) for x in arrays if x is not None))


def amax(x: jax.Array, format: Format, *, asked: bool) -> Amax:
    """`numerics.amax`."""
    blocks, nan, tensor = (vary(part, varying(x)) for part in _carry_out.bind(x, call=_Call("amax", x.ndim, format, asked)))
    return Amax(blocks, None if format.element.has_nan else nan, tensor if format.scale.two_level else None)


def quantize(
    x: jax.Array,
    key: jax.Array | None,
    amax: jax.Array | None,
    format: Format,
    eps: float,
    nominal: str | None,
    *,
    asked: bool,
    transposed: bool = False,
    rotated: bool = False,
) -> Quantized:
    """`numerics.quantize` of x, or of x.mT, rotated first where `rotated` says so; `amax` as for `ops.quantize`."""
    call = _Call(
        "quantize",
        x.ndim,
        format,
        asked,
        eps=eps,
        nominal=nominal or bits.dtype_name(x),
        transposed=transposed,
        rotated=rotated,
    )
    operands = (
        x,
        _absent(jnp.int32) if amax is None else amax.reshape(1),
        _absent(jnp.uint32) if key is None else key,
    )
    codes, scales, tensor_scale = _carry_out.bind(*operands, call=call)
    whole = _over(x if amax is None else amax)
    codes = vary(codes, _over(x, key, amax))
    scales = vary(scales, whole if format.per_tensor else _over(x, amax))
    return Quantized(codes, scales, vary(tensor_scale, whole) if format.scale.two_level else None)


def quantize_both(
    x: jax.Array, key: jax.Array | None, given: jax.Array | None, format: Format, eps: float, rotated: bool, *, asked: bool
) -> tuple[Quantized, Quantized]:
    """`quantize` of x and of x.mT; a key has two words for each."""
    keys = (None, None) if key is None else (key[:2], key[2:])
    if given is None and not rotated and (format.per_tensor or format.scale.two_level):
        found = amax(x, format, asked=asked)
        given = found.tensor if format.scale.two_level else found.blocks
    row = quantize(x, keys[0], given, format, eps, None, asked=asked)
    return row, quantize(x, keys[1], given, format, eps, None, asked=asked, transposed=True, rotated=rotated)


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    tensor_scale: jax.Array | None,
    format: Format,
    dtype: str,
    columns: int,
    origin: tuple[int, int],
    *,
    asked: bool,
) -> jax.Array:
    """`numerics.dequantize`."""
    call = _Call("dequantize", codes.ndim, format, asked, dtype=dtype, columns=columns, origin=origin)
    given = _absent(jnp.float32) if tensor_scale is None else tensor_scale.reshape(1)
    (values,) = _carry_out.bind(codes, scales, given, call=call)
    return vary(values, _over(codes, scales, tensor_scale))

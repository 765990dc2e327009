"""The CUDA backend: the kernel library that PyTorch runs, in jitted programs through jax-tvm-ffi.

kernels/cuda/exports.cu and products/product_exports.cu document the arguments. An absent array is one without elements.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition import bits, layout
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rotation import rotate as rotated
from blockfp.formats import Format
from blockfp.kernels import cuda_library
from blockfp.kernels.format_numbers import format_numbers, largest_multiplier
from blockfp.kernels.once import once

from .backend import Backend, amax_of_tensor, keys_of_both, missing_library, refusal_of_amax

_FORMAT = ("element", "block_rows", "block_columns", "rule")
_QUANTIZE = (*_FORMAT, "measure", "eps_bits", "largest_bits", "rotate_t", "row", "column", "rows", "columns")
_DEQUANTIZE = (*_FORMAT, "row", "column")
_PRODUCT = ("a_element", "b_element", "a_block_rows", "b_block_rows", "fast")

# What cuBLAS recommends on Hopper.
_WORKSPACE = 32 * 2**20


_ATTRIBUTES = {"amax": (), "quantize": _QUANTIZE, "dequantize": _DEQUANTIZE, "product": _PRODUCT}


@once
def _register(name: str) -> str:
    """Registers a function of the library with XLA and returns its name there."""
    import jax_tvm_ffi

    arguments = ["args", "rets", *(f"attrs.{attribute}" for attribute in _ATTRIBUTES[name])]
    # cuBLAS's first call makes a handle, which may not happen inside a capture.
    capturable = name != "product"
    function = getattr(cuda_library.library(), name)
    jax_tvm_ffi.register_ffi_target(f"blockfp_{name}", function, arguments, platform="gpu", allow_cuda_graph=capturable)
    return f"blockfp_{name}"


def _call(name: str, out, *arrays: jax.Array, **attributes: int):
    values = {key: np.int64(value) for key, value in attributes.items()}
    return jax.ffi.ffi_call(_register(name), out, vmap_method="sequential")(*arrays, **values)


def _absent(dtype) -> jax.Array:
    return jnp.zeros((0,), dtype)


def _tensor_amax(x: jax.Array, *, rotate: bool = False) -> jax.Array:
    """int32 [1]: fp32 bits of the largest magnitude of x, NaN ignored; with `rotate` [2], that of rotate(x.mT) second."""
    return _call("amax", jax.ShapeDtypeStruct((2 if rotate else 1,), jnp.int32), x)


class CudaLibrary(Backend):
    """The CUDA kernel library."""

    name = "ffi"
    platform = "cuda"

    def missing(self) -> str | None:
        return missing_library("gpu", cuda_library)

    def refusal(self, operation: str, *, format: Format, **options: Any) -> str | None:
        return refusal_of_amax(operation, format)

    def amax(self, x, *, format: Format) -> Amax:
        return amax_of_tensor(_tensor_amax(x), x)

    def quantize(self, x, key, amax, *, format: Format, eps: float = 0.0, nominal: str | None = None) -> Quantized:
        return _quantize(x, format, key, amax, eps, nominal, rows=True)[0]  # pyright: ignore[reportReturnType]

    def quantize_columnwise(self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False) -> Quantized:
        if rotate and not _rotates(format):
            return self.quantize(rotated(x.mT), key, amax, format=format, eps=eps)
        return _quantize(x, format, key, amax, eps, None, columns=True, rotate=rotate)[1]  # pyright: ignore[reportReturnType]

    def quantize_both(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        if rotate and not _rotates(format):
            row_key, column_key = keys_of_both(key)
            row = self.quantize(x, row_key, amax, format=format, eps=eps)
            return row, self.quantize(rotated(x.mT), column_key, amax, format=format, eps=eps)
        return _quantize(x, format, key, amax, eps, None, rows=True, columns=True, rotate=rotate)  # pyright: ignore[reportReturnType]

    def dequantize(
        self, codes, scales, tensor_scale, *, format: Format, dtype: str, columns: int, origin: tuple[int, int] = (0, 0)
    ) -> jax.Array:
        return _call(
            "dequantize",
            jax.ShapeDtypeStruct((*codes.shape[:-1], columns), jnp.dtype(dtype)),
            codes,
            scales,
            _absent(jnp.float32) if tensor_scale is None else tensor_scale.reshape(1),
            **dict(zip(_FORMAT, format_numbers(format), strict=True)),
            row=origin[0],
            column=origin[1],
        )


def _rotates(format: Format) -> bool:
    """Returns True for a format whose kernels rotate; for the others XLA does."""
    return format.scale.two_level and not format.square


def _quantize(
    x, format, key, amax, eps, nominal, *, rows=False, columns=False, rotate=False
) -> tuple[Quantized | None, Quantized | None]:
    two_level = format.scale.two_level
    if amax is None and (format.per_tensor or two_level):
        amax = _tensor_amax(x, rotate=rotate)
    m, n = x.shape[-2:]
    swapped = (*x.shape[:-2], n, m)

    def outputs(shape, wanted: bool):
        scales = jnp.dtype(format.scale.dtype)
        if not wanted:
            return [jax.ShapeDtypeStruct((0,), jnp.uint8), jax.ShapeDtypeStruct((0,), scales)]
        return [
            jax.ShapeDtypeStruct(layout.codes_shape(shape, format), jnp.uint8),
            jax.ShapeDtypeStruct(layout.scales_shape(shape, format), scales),
        ]

    # A rotated direction has a tensor amax and scale of its own.
    directions = 2 if rotate else 1
    codes, scales, tensor_scale, codes_t, scales_t = _call(
        "quantize",
        [
            *outputs(x.shape, rows),
            jax.ShapeDtypeStruct((directions if two_level else 0,), jnp.float32),
            *outputs(swapped, columns),
        ],
        x,
        _absent(jnp.int32) if amax is None else amax.reshape(directions),
        _absent(jnp.int32),
        _absent(jnp.uint32) if key is None else key,
        **dict(zip(_FORMAT, format_numbers(format), strict=True)),
        measure=0,
        eps_bits=bits.constant_bits(eps),
        largest_bits=largest_multiplier(format, eps, nominal or bits.dtype_name(x)),
        rotate_t=rotate,
        row=0,
        column=0,
        rows=0,
        columns=0,
    )
    whole = (tensor_scale[0], tensor_scale[-1]) if two_level else (None, None)
    return (
        Quantized(codes, scales, whole[0]) if rows else None,
        Quantized(codes_t, scales_t, whole[1]) if columns else None,
    )


@cache
def cublas_version() -> int:
    """The version of the cuBLASLt that the library finds, such as 130100; 0 where there is none."""
    return int(cuda_library.library().cublas_version())


def cublas_product(a: Quantized, a_format: Format, b: Quantized, b_format: Format, dtype, *, fast: bool) -> jax.Array:
    """Multiplies a @ b^T by cuBLASLt: FP8 with a scale per tensor, or in blocks of 1x128 and 128x128."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), dtype)
    numbers = [format_numbers(format) for format in (a_format, b_format)]
    out, _ = _call(
        "product",
        [jax.ShapeDtypeStruct((m, n), jnp.dtype(dtype)), jax.ShapeDtypeStruct((_WORKSPACE,), jnp.uint8)],
        a.codes,
        b.codes,
        _product_scales(a.scales, a_format),
        _product_scales(b.scales, b_format),
        a_element=numbers[0][0],
        b_element=numbers[1][0],
        a_block_rows=numbers[0][1],
        b_block_rows=numbers[1][1],
        fast=fast,
    )
    return out


def _product_scales(scales: jax.Array, format: Format) -> jax.Array:
    """Lays out scales for cuBLASLt: of 1x128 with the rows side by side, of 128x128 filled up to four blocks along k."""
    if format.per_tensor:
        return scales.reshape(1)
    return scales.mT if format.block == (1, 128) else layout.pad_scales(scales, 1, 4)

"""The CUDA backend: the kernel library that PyTorch runs, in jitted programs through jax-tvm-ffi.

kernels/cuda/exports.cu and products/product_exports.cu document the arguments. An absent array is one without elements.
"""

from __future__ import annotations

import importlib.util
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
from blockfp.kernels.products import plan

from .backend import Backend, amax_of_tensor, keys_of_both, refusal_of_amax

_FORMAT = ("element", "block_rows", "block_columns", "rule")
_QUANTIZE = (*_FORMAT, "measure", "eps_bits", "largest_bits", "rotate_t", "row", "column", "rows", "columns")
_DEQUANTIZE = (*_FORMAT, "row", "column")
_PRODUCT = (
    *("a_element", "a_block_rows", "b_element", "b_block_rows", "a_ordered", "b_ordered"),
    *("own", "tile", "fast", "accumulate"),
)
_ATTRIBUTES = {"amax": (), "quantize": _QUANTIZE, "dequantize": _DEQUANTIZE, "product": _PRODUCT, "product_by_cublas": _PRODUCT}
_ATTRIBUTES["align"] = ("element", "block_rows", "columns")


@once
def _register(name: str) -> str:
    """Registers a function of the library with XLA and returns its name there."""
    import jax_tvm_ffi

    arguments = ["args", "rets", *(f"attrs.{attribute}" for attribute in _ATTRIBUTES[name])]
    # cuBLAS's first call makes a handle, which may not happen inside a capture.
    capturable = name != "product_by_cublas"
    function = getattr(cuda_library.library(), name.removesuffix("_by_cublas"))
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
        if jax.default_backend() != "gpu":
            return f"it needs a CUDA device, and JAX runs on {jax.default_backend()}"
        if importlib.util.find_spec("jax_tvm_ffi") is None:
            return "the package jax-tvm-ffi is not installed"
        return None if cuda_library.available() else cuda_library.status()

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


def product(
    a: Quantized,
    a_format: Format,
    b: Quantized,
    b_format: Format,
    dtype,
    *,
    capability: tuple[int, int],
    fast: bool,
    ordered: bool = False,
    bands: bool = False,
) -> jax.Array:
    """Multiplies a @ b^T, of FP8 with a scale per tensor or in blocks of 1x128 and 128x128; see `kernels.products`.

    `ordered` says that scales of 1x128 lie [blocks, rows filled up to fours], as `align` writes them;
    `bands` is that of `kernels.products.plan`.
    """
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), dtype)
    version, name = cublas_version(), jnp.dtype(dtype).name
    options = {"cublas": version, "dtype": name, "fast": fast, "ordered": (ordered, ordered), "bands": bands}
    chosen = plan(a_format, b_format, m, n, k, capability=capability, **options)
    out, _ = _call(
        "product" if chosen.own else "product_by_cublas",
        [jax.ShapeDtypeStruct((m, n), jnp.dtype(dtype)), jax.ShapeDtypeStruct((chosen.workspace,), jnp.uint8)],
        a.codes,
        b.codes,
        a.scales.reshape(1) if a_format.per_tensor else a.scales,
        b.scales.reshape(1) if b_format.per_tensor else b.scales,
        _absent(jnp.int32),
        _absent(jnp.float32),
        **dict(zip(_PRODUCT, chosen.numbers, strict=True)),
    )
    return out


def align(x: Quantized, format: Format, columns: int) -> Quantized:
    """The codes and scales of an MX matrix, shifted to one scale for 128 elements (`definition.alignment`).

    Codes are [rows, columns filled up to a multiple of 16 with zeros], scales as `product` takes them `ordered`.
    """
    rows, numbers = x.codes.shape[0], format_numbers(format)
    codes, scales = _call(
        "align",
        [
            jax.ShapeDtypeStruct((rows, -(-columns // 16) * 16), jnp.uint8),
            jax.ShapeDtypeStruct((-(-columns // 128), -(-rows // 4) * 4), jnp.float32),
        ],
        x.codes,
        x.scales,
        element=numbers[0],
        block_rows=numbers[1],
        columns=columns,
    )
    return Quantized(codes, scales, None)

"""The CUDA backend: the kernel library that PyTorch runs, in jitted programs through jax-tvm-ffi.

kernels/cuda/exports.cu and products/product_exports.cu document the arguments. An absent array is one without elements.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition import bits, groups, layout
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rotation import rotate as rotated
from blockfp.definition.views import DTYPES
from blockfp.formats import Format
from blockfp.kernels import cuda_library
from blockfp.kernels.format_numbers import cuda_rotates, format_numbers, largest_multiplier
from blockfp.kernels.once import once
from blockfp.kernels.products import plan, plan_values

from .backend import Backend, amax_of_tensor, keys_of_both, missing_library, refusal_of_amax

_FORMAT = ("element", "block_rows", "block_columns", "rule")
_QUANTIZE = (*_FORMAT, "measure", "eps_bits", "largest_bits", "rotate_t", "mark", "row", "column", "rows", "columns")
_DEQUANTIZE = (*_FORMAT, "row", "column")
_PRODUCT = (
    *("a_element", "a_block_rows", "b_element", "b_block_rows", "a_ordered", "b_ordered"),
    *("own", "tile", "fast", "accumulate"),
)
_QUANTIZE_GROUPS = ("groups", "rows_keyed", "columns_keyed", *_FORMAT, "measure", "eps_bits", "largest_bits", "rotate_t")
_ATTRIBUTES = {
    "amax": (),
    "quantize": _QUANTIZE,
    "dequantize": _DEQUANTIZE,
    "product": _PRODUCT,
    "product_by_cublas": _PRODUCT,
    "align": ("element", "block_rows", "columns", "turned"),
    "transpose": ("bits", "rows", "columns"),
    "group_rows": ("tokens",),
    "quantize_groups": _QUANTIZE_GROUPS,
}


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


def _readable(bias: jax.Array | None) -> jax.Array | None:
    """A bias in a dtype that the library reads."""
    return bias if bias is None or jnp.dtype(bias.dtype).name in DTYPES else bias.astype(jnp.float32)


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
        if format.per_row and operation.startswith("quantize"):
            return f"the CUDA library finds no scale for each row in one pass, of {format}"
        if format.scale.four_over_six and not format.square and operation in ("quantize_columnwise", "quantize_both"):
            return f"the CUDA library chooses between two scales of a block along the rows alone, of {format}"
        return refusal_of_amax(operation, format)

    def amax(self, x, *, format: Format) -> Amax:
        return amax_of_tensor(_tensor_amax(x), x)

    def quantize(self, x, key, amax, *, format: Format, eps: float = 0.0, nominal: str | None = None) -> Quantized:
        return _quantize(x, format, key, amax, eps, nominal, rows=True)[0]  # pyright: ignore[reportReturnType]

    def quantize_columnwise(self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False) -> Quantized:
        if rotate and not cuda_rotates(format):
            return self.quantize(rotated(x.mT), key, amax, format=format, eps=eps)
        return _quantize(x, format, key, amax, eps, None, columns=True, rotate=rotate)[1]  # pyright: ignore[reportReturnType]

    def quantize_both(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False
    ) -> tuple[Quantized, Quantized]:
        if rotate and not cuda_rotates(format):
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
        shapes = (layout.codes_shape(shape, format), layout.scales_shape(shape, format), (1 if two_level else 0,))
        dtypes = (jnp.uint8, scales, jnp.float32)
        return [jax.ShapeDtypeStruct(s if wanted else (0,), dtype) for s, dtype in zip(shapes, dtypes, strict=True)]

    # A rotated direction has a tensor amax and scale of its own.
    codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t = _call(
        "quantize",
        [*outputs(x.shape, rows), *outputs(swapped, columns)],
        x,
        _absent(jnp.int32) if amax is None else amax.reshape(2 if rotate else 1),
        _absent(jnp.int32),
        _absent(jnp.uint32) if key is None else key,
        **dict(zip(_FORMAT, format_numbers(format), strict=True)),
        measure=0,
        eps_bits=bits.constant_bits(eps),
        largest_bits=largest_multiplier(format, eps, nominal or bits.dtype_name(x)),
        rotate_t=rotate,
        mark=False,
        row=0,
        column=0,
        rows=0,
        columns=0,
    )
    return (
        Quantized(codes, scales, tensor_scale[0] if two_level else None) if rows else None,
        Quantized(codes_t, scales_t, tensor_scale_t[0] if two_level else None) if columns else None,
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
    bias: jax.Array | None = None,
    capability: tuple[int, int],
    fast: bool,
    ordered: bool = False,
    bands: bool = False,
) -> jax.Array:
    """Multiplies a @ b^T + bias, of FP8 with a scale per tensor, per row or in blocks of 1x128 and 128x128.

    `kernels.products` says which kernel it is. The bias [n], if there is one, is added to the sums in fp32.

    `ordered` says that scales of 1x128 lie [blocks, rows filled up to fours], as `align` writes them;
    `bands` is that of `kernels.products.plan`.
    """
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), dtype) + (0 if bias is None else bias.astype(dtype))
    version, name, bias = cublas_version(), jnp.dtype(dtype).name, _readable(bias)
    options = {"cublas": version, "fast": fast, "ordered": (ordered, ordered), "bands": bands, "capability": capability}
    kinds = {"dtype": name, "bias": None if bias is None else jnp.dtype(bias.dtype).name}
    chosen = plan(a_format, b_format, m, n, k, **kinds, **options)
    if not chosen.adds_bias:
        assert bias is not None
        options = {"capability": capability, "fast": fast, "ordered": ordered, "bands": bands}
        return (product(a, a_format, b, b_format, jnp.float32, **options) + bias.astype(jnp.float32)).astype(dtype)
    out, _ = _call(
        "product" if chosen.own else "product_by_cublas",
        [jax.ShapeDtypeStruct((m, n), jnp.dtype(dtype)), jax.ShapeDtypeStruct((chosen.workspace,), jnp.uint8)],
        a.codes,
        b.codes,
        a.scales.reshape(1) if a_format.per_tensor else a.scales,
        b.scales.reshape(1) if b_format.per_tensor else b.scales,
        _absent(jnp.int32),
        _absent(jnp.float32) if bias is None else bias,
        **dict(zip(_PRODUCT, chosen.numbers, strict=True)),
    )
    return out


def align(x: Quantized, format: Format, columns: int, *, turned: bool = False) -> Quantized:
    """The codes and scales of MX matrices, shifted to one scale for 128 elements (`definition.alignment`).

    Codes are [.., rows, columns filled up to a multiple of 16 with zeros], scales as `product` takes them `ordered`; those
    of the transposed matrices if `turned`, of blocks of 32x32.
    """
    (*leading, rows, _), numbers = x.codes.shape, format_numbers(format)
    lines, length = (columns, rows) if turned else (rows, columns)
    codes, scales = _call(
        "align",
        [
            jax.ShapeDtypeStruct((*leading, lines, -(-length // 16) * 16), jnp.uint8),
            jax.ShapeDtypeStruct((*leading, -(-length // 128), -(-lines // 4) * 4), jnp.float32),
        ],
        x.codes,
        x.scales,
        element=numbers[0],
        block_rows=numbers[1],
        columns=columns,
        turned=turned,
    )
    return Quantized(codes, scales, None)


def transpose(codes: jax.Array, format: Format, columns: int) -> jax.Array:
    """Packed codes [.., columns, bytes] of the transposed matrices of codes [.., rows, bytes] with so many columns."""
    *leading, rows, _ = codes.shape
    width = format.element.bits
    out = jax.ShapeDtypeStruct((*leading, columns, layout.packed_columns(rows, width)), jnp.uint8)
    return _call("transpose", out, codes, bits=width, rows=rows, columns=columns)


def group_rows(ends: jax.Array, tokens: int) -> jax.Array:
    """int32: where the groups that end at these rows lie, as `quantize_groups` wants to know it."""
    count = groups.words_for(tokens, ends.shape[0])
    return _call("group_rows", jax.ShapeDtypeStruct((count,), jnp.int32), ends, tokens=tokens)


def quantize_groups(
    x: jax.Array,
    words: jax.Array,
    keys: jax.Array | None,
    multiplier: jax.Array | None,
    *,
    format: Format,
    count: int,
    eps: float,
    rows: bool,
    columns: bool,
    keyed: tuple[bool, bool] = (False, False),
    rotate: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes groups of rows along the rows and the columns; groups that hold an Inf get NaN scales.

    Args:
        x: [tokens, features].
        words: of `group_rows`.
        keys: uint32 [groups, 2, 2] of stochastic rounding, those of the columns second; or None.
        multiplier: of delayed scaling, float32 (), or None.
        format: with one scale for each group, or in blocks of one row.
        count: of the groups.
        eps: see `numerics.quantize`.
        rows, columns: which directions to make.
        keyed: which of both round stochastically.
        rotate: the random Hadamard transform of the columns.

    Returns:
        The parts of both directions as `blockfp.definition.groups` says; None for one that isn't asked for.
    """
    two_level, no_scale = format.scale.two_level, jax.ShapeDtypeStruct((0,), jnp.float32)

    def outputs(wanted: bool, columnwise: bool):
        found = groups.shapes(x.shape, count, format, columnwise=columnwise)
        codes, scales = (jax.ShapeDtypeStruct(shape if wanted else (0,), jnp.dtype(dtype)) for shape, dtype in found[:2])
        # A tensor scale is written for both directions, whichever is asked for.
        return [codes, scales, jax.ShapeDtypeStruct((count,), jnp.float32) if two_level else no_scale]

    def word(wanted: bool, each: int = 1):
        return jax.ShapeDtypeStruct((count * each if wanted else 0,), jnp.int32)

    delayed = multiplier is not None
    # What the call measures on its way: amaxes, unless a multiplier stands instead, then `recorded` and `overflows`.
    found = [
        *([] if delayed else [word(format.has_tensor_scale, 2 if rotate else 1)]),
        word(delayed),
        word(not format.has_tensor_scale),
    ]
    made = _call(
        "quantize_groups",
        [*found, *outputs(rows, False), *outputs(columns, True)],
        x,
        words,
        _absent(jnp.uint32) if keys is None else keys,
        *([multiplier.reshape(1)] if multiplier is not None else []),
        groups=count,
        rows_keyed=keyed[0],
        columns_keyed=keyed[1],
        **dict(zip(_FORMAT, format_numbers(format), strict=True)),
        measure=format.has_tensor_scale and not delayed,
        eps_bits=bits.constant_bits(eps),
        largest_bits=largest_multiplier(format, eps, bits.dtype_name(x)),
        rotate_t=rotate,
    )[len(found) :]

    def parts(codes, scales, tensor_scale):
        return Quantized(codes, scales, tensor_scale if two_level else None)

    return parts(*made[:3]) if rows else None, parts(*made[3:]) if columns else None


def multiply_groups(
    a: tuple[jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array],
    formats: tuple[Format, Format] | None,
    ends: jax.Array,
    dtype,
    *,
    bias: jax.Array | None = None,
    capability: tuple[int, int],
    along_k: bool = False,
    fast: bool = False,
    ordered: bool = False,
    bands: bool = False,
) -> jax.Array:
    """Multiplies FP8 codes, or bfloat16, of groups of rows or columns by the library's own kernel; it finds them on the device.

    Args:
        a, b: (codes, scales): [tokens, k], as `quantize_groups` gives them, and [groups, n, k] as they are stored, or with one
            scale float32 [groups] or [1]. `along_k`: [m, columns] and [n, columns] as `quantize_groups` gives them.
        formats: of both; None for values in bfloat16, with one scale.
        ends: int32 [groups], the ends of groups among the rows, whether these are contracted or not.
        dtype: of the result.
        bias: [groups, n], added to the sums in fp32; or None. Of groups of rows only.
        capability: of the device.
        along_k: contracts each group's rows.
        fast: whether sums of products with one scale may keep fewer bits.
        ordered, bands: as for `product`, of b.

    Returns:
        [tokens, n], of which rows past the last end mean nothing; or [groups, m, n], zeros for groups without rows.
    """
    (m, k), (*_, n, _), groups = a[0].shape, b[0].shape, ends.shape[0]
    shape = (groups, m, n) if along_k else (m, n)
    if 0 in (*shape, k, groups):
        of_row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(m), side="right"), groups - 1)
        return jnp.zeros(shape, dtype) if bias is None or not groups else bias.astype(dtype)[of_row]
    bias = _readable(bias)
    if formats is None:
        chosen = plan_values(m, n, k, matrices=1 if along_k else groups)
    else:
        in_order = (formats[0].block == (1, 128), (ordered or along_k) and formats[1].block == (1, 128))
        chosen = plan(
            *formats, m, n, k, capability=capability, cublas=0, dtype=jnp.dtype(dtype).name, groups=groups, along_k=along_k,
            ordered=in_order, bands=bands, fast=fast,
        )  # fmt: skip
    out, _ = _call(
        "product",
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), jax.ShapeDtypeStruct((chosen.workspace,), jnp.uint8)],
        a[0],
        b[0],
        a[1],
        b[1],
        ends,
        _absent(jnp.float32) if bias is None else bias,
        **dict(zip(_PRODUCT, chosen.numbers, strict=True)),
    )
    return out

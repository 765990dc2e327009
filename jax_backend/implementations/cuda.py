"""The CUDA backend: the kernel library that PyTorch runs, in jitted programs through jax-tvm-ffi.

kernels/cuda/exports.cu and products/product_exports.cu document the arguments. An absent array is one without elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from blockfp.definition import bits
from blockfp.definition.groups import words_for
from blockfp.definition.layout import DTYPES
from blockfp.definition.numerics import Amax, Quantized
from blockfp.definition.rotation import rotate as rotated
from blockfp.formats import Format
from blockfp.kernels import calls, cuda_library
from blockfp.kernels.calls import PARTS, PARTS_T, STORED_T, Call
from blockfp.kernels.operand_cast import OperandCast, cuda_rotates
from blockfp.kernels.products import Plan, plan, plan_values
from blockfp.kernels.switch import once

from .backend import Backend, amax_of_tensor, keys_of_both, missing_library, refusal_of_amax


@once
def _register(name: str) -> str:
    """Registers a function of the library with XLA and returns its name there."""
    import jax_tvm_ffi

    own = name.removesuffix("_by_cublas")
    arguments = ["args", "rets", *(f"attrs.{attribute}" for attribute in calls.SIGNATURES[own][1])]
    # cuBLAS's first call makes a handle, which may not happen inside a capture.
    capturable, function = name == own, getattr(cuda_library.library(), own)
    jax_tvm_ffi.register_ffi_target(f"blockfp_{name}", function, arguments, platform="gpu", allow_cuda_graph=capturable)
    return f"blockfp_{name}"


def _call(name: str, out, *arrays: jax.Array, **attributes: int):
    values = {key: np.int64(value) for key, value in attributes.items()}
    return jax.ffi.ffi_call(_register(name), out, vmap_method="sequential")(*arrays, **values)


def _carry_out(
    call: Call, *inputs: jax.Array | None, name: str | None = None, **given: jax.Array | None
) -> dict[str, jax.Array]:
    """Makes a call of the library; returns its arrays from the first new one on. Those before are given or absent."""
    names, made = list(call.arrays), list(call.arrays.values())
    first = next(i for i, array in enumerate(made) if array is not None)
    before = [*inputs, *(given.get(name) for name in names[:first])]
    arrays = [jnp.zeros((0,), jnp.uint8) if x is None else x for x in before]
    out = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in (each or ((0,), "uint8") for each in made[first:])]
    return dict(zip(names[first:], _call(name or call.function, out, *arrays, **call.numbers), strict=True))


def _parts(found: dict[str, jax.Array], format: Format | None, names: Sequence[str] = PARTS) -> Quantized | None:
    """The parts of a direction; None of one without a format."""
    if format is None:
        return None
    return Quantized(found[names[0]], found[names[1]], found[names[2]] if format.scale.two_level else None)


def _readable(bias: jax.Array | None) -> jax.Array | None:
    """A bias in a dtype that the library reads."""
    return bias if bias is None or jnp.dtype(bias.dtype).name in DTYPES else bias.astype(jnp.float32)


class CudaLibrary(Backend):
    """The CUDA kernel library."""

    name = "ffi"
    platform = "cuda"
    marks = True

    def missing(self) -> str | None:
        return missing_library("gpu", cuda_library)

    def refusal(self, operation: str, *, format: Format, **options: Any) -> str | None:
        if format.scale.four_over_six and not format.square and operation in ("quantize_columnwise", "quantize_both"):
            return f"the CUDA library chooses between two scales of a block along the rows alone, of {format}"
        return refusal_of_amax(operation, format)

    def amax(self, x, *, format: Format) -> Amax:
        return amax_of_tensor(_call("amax", jax.ShapeDtypeStruct((1,), jnp.int32), x), x)

    def quantize(
        self, x, key, amax, *, format: Format, eps: float = 0.0, nominal: str | None = None, mark: bool = False
    ) -> Quantized:
        made = _quantize(x, OperandCast(format, eps=eps), key, amax, nominal, mark=mark)
        return made[0]  # pyright: ignore[reportReturnType]

    def quantize_columnwise(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False, mark: bool = False
    ) -> Quantized:
        if rotate and not cuda_rotates(format):
            return self.quantize(rotated(x.mT), key, amax, format=format, eps=eps, mark=mark)
        cast = OperandCast(None, format, rotate=rotate, eps=eps)
        return _quantize(x, cast, key, amax, mark=mark)[1]  # pyright: ignore[reportReturnType]

    def quantize_both(
        self, x, key, amax, *, format: Format, eps: float = 0.0, rotate: bool = False, mark: bool = False
    ) -> tuple[Quantized, Quantized]:
        if rotate and not cuda_rotates(format):
            row_key, column_key = keys_of_both(key)
            row = self.quantize(x, row_key, amax, format=format, eps=eps, mark=mark)
            return row, self.quantize(rotated(x.mT), column_key, amax, format=format, eps=eps, mark=mark)
        cast = OperandCast(format, format, rotate=rotate, eps=eps)
        return _quantize(x, cast, key, amax, mark=mark)  # pyright: ignore[reportReturnType]

    def dequantize(
        self, codes, scales, tensor_scale, *, format: Format, dtype: str, columns: int, origin: tuple[int, int] = (0, 0)
    ) -> jax.Array:
        call = calls.dequantize((*codes.shape[:-1], columns), dtype, format, tuple(origin))
        scale = None if tensor_scale is None else tensor_scale.reshape(1)
        return _carry_out(call, codes, scales, tensor_scale=scale)["out"]


def _quantize(
    x, cast: OperandCast, key, amax, nominal: str | None = None, *, mark: bool
) -> tuple[Quantized | None, Quantized | None]:
    if amax is not None and amax.dtype == jnp.float32:
        cast, amax = cast._replace(given="multiplier"), amax.reshape(1)
    elif amax is not None:
        cast, amax = cast._replace(given="amax"), amax.reshape(2 if cast.rotates else 1)
    call = calls.quantize(x.shape, nominal or bits.dtype_name(x), cast, mark=mark)
    found = _carry_out(call, x, amax=amax, key=key)
    return _parts(found, cast.row), _parts(found, cast.column, PARTS_T)


def quantize_made(
    inputs: tuple[Any, ...], cast: OperandCast, scale: jax.Array | None, function: str, first: int
) -> tuple[Quantized | None, Quantized | None, jax.Array | None]:
    """Quantizes what `function` makes of inputs, such as gate and up; a direction that is asked for aligned comes so.

    Delayed scaling's `scale` is float32 (), 0 before its first update; with one, the third result is the amax, float32 ().
    """
    call = calls.quantize(inputs[0].shape, bits.dtype_name(inputs[0]), cast, function, first=first)
    found = _carry_out(call, *inputs, amax=None if scale is None else scale.reshape(1))
    stored = call.arrays.get(STORED_T[0]) is not None
    amax = None if scale is None else found["recorded"].reshape(()).view(jnp.float32)
    return _parts(found, cast.row), _parts(found, cast.column, STORED_T if stored else PARTS_T), amax


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
    exact_order: bool = False,
) -> jax.Array:
    """Multiplies a @ b^T + bias by the kernel that `kernels.products` says; the bias [n] is added to the sums in fp32.

    `ordered` says that scales of 1x128 are as `align` writes them; `bands` and `exact_order` are those of
    `kernels.products.plan`.
    """
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if 0 in (m, n, k):
        return jnp.zeros((m, n), dtype) + (0 if bias is None else bias.astype(dtype))
    version, name, bias = cublas_version(), jnp.dtype(dtype).name, _readable(bias)
    options = {"cublas": version, "fast": fast, "ordered": (ordered, ordered), "bands": bands, "capability": capability}
    kinds = {"dtype": name, "bias": None if bias is None else jnp.dtype(bias.dtype).name}
    chosen = plan(a_format, b_format, m, n, k, **kinds, **options, exact_order=exact_order)
    if not chosen.adds_bias:
        assert bias is not None
        options = {"capability": capability, "fast": fast, "ordered": ordered, "bands": bands}
        return (product(a, a_format, b, b_format, jnp.float32, **options) + bias.astype(jnp.float32)).astype(dtype)
    scales = (q.scales.reshape(1) if f.per_tensor else q.scales for q, f in ((a, a_format), (b, b_format)))
    return _multiply((m, n), dtype, chosen, a.codes, b.codes, *scales, bias=bias)


def product_of_values(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, dtype, *, bias: jax.Array | None = None
) -> jax.Array:
    """Multiplies a @ b^T of bfloat16, with a scale each, float32 [1], by the library's own kernel."""
    (m, k), n = a.shape, b.shape[0]
    return _multiply((m, n), dtype, plan_values(m, n, k), a, b, a_scale, b_scale, bias=_readable(bias))


def _multiply(shape, dtype, chosen: Plan, *operands: jax.Array, **given: jax.Array | None) -> jax.Array:
    made = {"out": (shape, jnp.dtype(dtype).name), "workspace": ((chosen.workspace,), "uint8")}
    call = calls.describe("product", made, None, **dict(zip(calls.SIGNATURES["product"][1], chosen.numbers, strict=True)))
    return _carry_out(call, *operands, name="product" if chosen.own else "product_by_cublas", **given)["out"]


def align(x: Quantized, format: Format, columns: int, *, turned: bool = False) -> Quantized:
    """Shifts MX codes to one scale for 128 elements (`calls.laid_parts`); `turned`: those of the transposed matrices."""
    found = _carry_out(calls.align((*x.codes.shape[:-1], columns), format, turned), x.codes, x.scales)
    return Quantized(found["out"], found["out_scales"], None)


def transpose(codes: jax.Array, format: Format, columns: int) -> jax.Array:
    """Packed codes [.., columns, bytes] of the transposed matrices of codes [.., rows, bytes] with so many columns."""
    return _carry_out(calls.transpose((*codes.shape[:-1], columns), format), codes)["out"]


def group_rows(ends: jax.Array, tokens: int) -> jax.Array:
    """int32: where the groups that end at these rows lie, as `quantize_groups` wants to know it."""
    words = ((words_for(tokens, ends.shape[0]),), "int32")
    return _carry_out(calls.describe("group_rows", {"words": words}, tokens=tokens), ends)["words"]


def quantize_groups(
    x: jax.Array,
    words: jax.Array,
    keys: jax.Array | None,
    multiplier: jax.Array | None,
    cast: OperandCast,
    count: int,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes `count` groups of rows along the rows and the columns; groups that hold an Inf get NaN scales.

    `words` are of `group_rows`, keys uint32 [groups, 2, 2], a multiplier float32 (). The parts are those of
    `definition.groups`.
    """
    scale = None if multiplier is None else multiplier.reshape(1)
    found = _carry_out(calls.quantize_groups(x.shape, bits.dtype_name(x), cast, count), x, words, keys=keys, amax=scale)
    return _parts(found, cast.row), _parts(found, cast.column, PARTS_T)


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
    """Multiplies (codes, scales) of groups, or bfloat16 where `formats` is None, by the library's own kernel.

    a is [tokens, k], b [groups, n, k], the result [tokens, n], of which rows past the last end mean nothing. `along_k`
    contracts each group's rows: [m, columns] and [n, columns] give [groups, m, n]. bias is [groups, n]; `ordered` and `bands`
    are as for `product`.
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
    return _multiply(shape, dtype, chosen, a[0], b[0], a[1], b[1], ends=ends, bias=bias)

"""Products of quantized operands, run by the core's table (`kernels.routes`): on codes, or dequantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from blockfp.definition import alignment, layout, numerics
from blockfp.definition.numerics import Quantized
from blockfp.definition.products import Operand
from blockfp.definition.recipe import Exact
from blockfp.formats import Format
from blockfp.kernels import exact_order
from blockfp.kernels.products import BLOCK_SCALES, TENSOR_SCALES
from blockfp.kernels.routes import HOPPER, Route, exact_in_bfloat16, route

from ..arrays import sharded
from ..arrays.array import QuantizedArray
from ..arrays.identity import view_codes, view_scales
from ..implementations import choice, cuda, explicit
from ..implementations.product import finish
from ..implementations.product import product as multiply_in_order
from . import partitioned


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("format", "columns", "dtype"))
@dataclass(frozen=True)
class Aligned:
    """MX codes [lines, columns] that were aligned as they were quantized (`blockfp.definition.alignment`).

    Attributes:
        codes: uint8 [lines, columns rounded up to 16].
        scales: float32 [ceil(columns / 128), lines rounded up to 4].
        format: the MX format.
        columns: length of the lines.
        dtype: dtype of the original.
    """

    codes: jax.Array
    scales: jax.Array
    format: Format
    columns: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """[lines, columns]."""
        return self.codes.shape[0], self.columns

    def unpadded(self) -> Operand:
        """Returns codes [lines, columns] and scales [lines, blocks], as the definition has them."""
        codes, scales = self.codes[:, : self.columns], self.scales[:, : self.codes.shape[0]].T
        return Operand(codes, scales, alignment.aligned_format(self.format))

    def dequantize(self, dtype: Any) -> jax.Array:
        """Returns the values in `dtype`."""
        x = self.unpadded()
        assert x.format is not None
        return numerics.dequantize(x.codes, x.scales, None, x.format, jnp.dtype(dtype).name, columns=self.columns)


def align(parts: Quantized, format: Format, columns: int) -> Quantized:
    """Returns the codes and scales of an `Aligned`, by the definition."""
    codes, scales, _ = alignment.align(parts.codes, parts.scales, format, columns=columns)
    codes = jnp.pad(codes, ((0, 0), (0, -columns % 16)))
    return Quantized(codes, jnp.pad(scales.T, ((0, 0), (0, -scales.shape[0] % 4))), None)


Matrix = jax.Array | QuantizedArray
Side = Matrix | Aligned
"""A side of a product."""


def computed_once(y: jax.Array) -> jax.Array:
    """Returns a product in such a way that XLA computes it once.

    XLA:GPU writes a product that a scan stacks straight into the stack, and makes a second one for whatever else reads it.
    """
    return lax.optimization_barrier(y) if choice.has_gpu() else y


def aligns(own: Format | None, other: Format | None, *, exact: Exact) -> bool:
    """Returns whether the product of these formats aligns its operands on this machine, so that casts should."""
    if own is None or other is None or "exact" in exact or choice.missing_product(0) is not None:
        return False
    return route(own, other, platform="cuda", capability=capability()).mode == "aligned"


def product(a: Side, b: Side, dtype, *, bias: jax.Array | None = None, fast: bool, exact: Exact = "") -> jax.Array:
    """Computes a @ b^T + bias, [m, n]: fp32 sums plus the bias, rounded once.

    Args:
        a: [m, k].
        b: [n, k].
        dtype: dtype of the result.
        bias: [n], or None.
        fast: whether matrix units may accumulate in reduced precision; only affects products of FP8 codes.
        exact: the recipe's `exactness`.
    """

    if "order" in exact:
        return ordered_product(a, b, dtype, bias, exact)
    # Shards that begin inside a block have offsets known only at run time, which matrix units don't support.
    a, b = (x.dequantize("float32") if isinstance(x, QuantizedArray) and not sharded.aligned(x) else x for x in (a, b))

    def on(platform, capability=None):
        def run(a, b, bias=None):
            sizes = {"m": a.shape[-2], "n": b.shape[-2], "k": b.shape[-1]}
            chosen = route(
                format_of(a), format_of(b), platform=platform, capability=capability, exact="exact" in exact, **sizes
            )
            return _MODES[chosen.mode](a, b, bias, dtype, chosen, fast)

        return run

    if not choice.has_gpu():
        run = on("cpu")
        if not partitioned.applies(a, b):
            return run(a, b, bias)
        if bias is not None:
            return _rounded(product(a, b, jnp.float32, fast=fast, exact=exact), bias, dtype)
        assert isinstance(a, QuantizedArray)
        assert isinstance(b, QuantizedArray)
        return partitioned.split_product(a, b, run)
    return lax.platform_dependent(a, b, bias, cuda=on("cuda", capability()), default=on("cpu"))


def least_cublas(version: int) -> int:
    """Returns the first cuBLASLt version for a kind of product; 0 if the library's own kernel runs."""
    return 0 if choice.has_gpu() and capability() == HOPPER else version


def capability() -> tuple[int, int]:
    """Returns the compute capability of JAX's first GPU."""
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return int(major), int(minor)


def format_of(x: Side) -> Format | None:
    """Returns the format of an operand; None in high precision."""
    return x.format if isinstance(x, QuantizedArray | Aligned) else None


def _contract(a: jax.Array, b: jax.Array, dtype=jnp.float32, precision=None) -> jax.Array:
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)


def _rounded(sums: jax.Array, bias: jax.Array | None, dtype) -> jax.Array:
    """Adds the bias to sums and rounds."""
    return (sums if bias is None else sums + bias.astype(sums.dtype)[None]).astype(dtype)


def _multiplied(a: jax.Array, b: jax.Array, bias: jax.Array | None, dtype, precision=None) -> jax.Array:
    """Multiplies with fp32 sums, rounded once to `dtype`; matrix units round if it is the operands' dtype."""
    rounds = bias is None and a.dtype == b.dtype == dtype
    return _rounded(_contract(a, b, dtype if rounds else jnp.float32, precision), bias, dtype)


def _plain(a: jax.Array, b: jax.Array, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    return _multiplied(a, b, bias, dtype)


def _per_tensor(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    # XLA would write the product in fp32 and read it again to scale it.
    if choice.missing_product(least_cublas(TENSOR_SCALES)) is None:
        return _by_library(a, b, bias, dtype, fast)
    codes = (view_codes(x.codes, x.columns, x.format) for x in (a, b))
    # XLA:GPU lets cuBLAS accumulate fast unless the precision is above the default.
    out = _contract(*codes, precision=lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST)
    return _rounded(out * a.scales.reshape(()) * b.scales.reshape(()), bias, dtype)


def _block(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    """Multiplies FP8 in blocks of 128, which XLA doesn't support."""
    missing = choice.missing_product(least_cublas(BLOCK_SCALES))
    if missing is None:
        # Fast accumulation is not available.
        return _by_library(a, b, bias, dtype, False)
    working = "bfloat16" if exact_in_bfloat16(a.format) and exact_in_bfloat16(b.format) else "float32"
    return _dequantized(a, b, bias, dtype, Route("dequantize", working, False, missing), fast)


def _aligned(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    """Multiplies MX codes aligned to one power of two per 128 elements of k."""
    missing = choice.missing_product(0)
    if missing is None:
        return _by_library(a, b, bias, dtype, False, aligned=True)
    return _dequantized(a, b, bias, dtype, Route("dequantize", "bfloat16", False, missing), fast)


def _by_library(
    a: QuantizedArray, b: QuantizedArray, bias, dtype, fast: bool, *, aligned: bool = False, exact_order: bool = False
) -> jax.Array:
    over = (explicit.varying(leaf) for leaf in jax.tree.leaves((a, b, bias)))
    parts = [Quantized(x.codes, x.scales, None) for x in (a, b)]
    operands = [(part, x.format) for part, x in zip(parts, (a, b), strict=True)]
    bands = aligned and b.format.square
    if aligned and 0 not in (*a.shape, *b.shape):
        operands = [
            (part if isinstance(x, Aligned) else cuda.align(part, x.format, x.columns), alignment.aligned_format(x.format))
            for part, x in zip(parts, (a, b), strict=True)
        ]
    options = {"capability": capability(), "fast": fast, "ordered": aligned, "bands": bands, "exact_order": exact_order}
    out = cuda.product(*operands[0], *operands[1], dtype, bias=bias, **options)
    return explicit.vary(out, frozenset().union(*over))


def ordered_product(a: Side, b: Side, dtype, bias: jax.Array | None, exact: Exact) -> jax.Array:
    """Computes `product` with one order of sums on every device (`kernels.exact_order`)."""
    cut = any(isinstance(x, QuantizedArray) and not sharded.aligned(x) for x in (a, b))
    chosen = exact_order.route_in_order(format_of(a), format_of(b), a.dtype.name, b.dtype.name, exact=exact, cut=cut)
    codes = exact_order.on_codes(chosen)

    def on_gpu(a: Any, b: Any, bias):
        if codes:
            return _by_library(a, b, bias, dtype, False, aligned=chosen.mode == "aligned", exact_order=True)
        (left, left_scale), (right, right_scale) = (_values(x, "bfloat16", True) for x in (a, b))
        left_scale, right_scale = (jnp.ones(1) if x is None else x.reshape(1) for x in (left_scale, right_scale))
        over = frozenset().union(*(explicit.varying(leaf) for leaf in jax.tree.leaves((a, b, bias))))
        return explicit.vary(cuda.product_of_values(left, right, left_scale, right_scale, dtype, bias=bias), over)

    def on_cpu(a, b, bias, dtype=dtype):
        left, right = (
            _operand(x, chosen.mode == "aligned") if codes else Operand(*_values(x, "bfloat16", True)) for x in (a, b)
        )
        return multiply_in_order(left, right, exact_order.summation_of(chosen), dtype=jnp.dtype(dtype).name, bias=bias)

    if not a.shape[0] or not b.shape[0] or not a.shape[1]:
        return _rounded(jnp.zeros((a.shape[0], b.shape[0]), jnp.float32), bias, dtype)
    if choice.has_gpu():
        check_order_on_device()
        return lax.platform_dependent(a, b, bias, cuda=on_gpu, default=on_cpu)
    if partitioned.applies(a, b):
        assert isinstance(a, QuantizedArray)
        assert isinstance(b, QuantizedArray)
        given = dtype if bias is None else jnp.float32
        y = partitioned.split_product(a, b, lambda a, b: on_cpu(a, b, None, given), whole_k=True)
        return y if bias is None else finish(y, bias, jnp.dtype(dtype).name)
    return on_cpu(a, b, bias)


def check_order_on_device() -> None:
    """Raises ValueError unless JAX's device sums in the defined order."""
    if choice.has_gpu():
        exact_order.check_device(capability(), choice.missing_product(0))


def _operand(x: Side, aligned: bool) -> Operand:
    """Returns codes and scales as matrix units take them."""
    if isinstance(x, Aligned):
        return x.unpadded()
    assert isinstance(x, QuantizedArray)
    if not aligned:
        return Operand(x.codes, x.scales, x.format)
    codes, scales, _ = alignment.align(x.codes, x.scales, x.format, columns=x.columns)
    return Operand(codes, scales, alignment.aligned_format(x.format))


def _scaled(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    """Multiplies in Blackwell's MX and NVFP4 modes."""
    codes, scales = zip(*(_as_scaled(x) for x in (a, b)), strict=True)
    out = jax.nn.scaled_matmul(*codes, *scales, preferred_element_type=jnp.float32)[0]
    for x in (a, b):
        out = out if x.tensor_scale is None else out * x.tensor_scale
    return _rounded(out, bias, dtype)


def _as_scaled(x: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Converts codes and scales to the layout of `jax.nn.scaled_matmul`: one scale per row and block of columns."""
    codes, scales = view_codes(x.codes, x.columns, x.format), view_scales(x.scales, x.format)
    block_rows = x.format.block[0] if x.format.block else 1
    if block_rows > 1:
        scales = layout.repeat_scales(scales, block_rows, x.codes.shape[-2])
    return codes[None], scales[None]


def _dequantized(a: Side, b: Side, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    # A high-precision operand must not be rounded to the dtype that suffices for the quantized one.
    plain = {x.dtype.name for x in (a, b) if format_of(x) is None}
    working = "bfloat16" if chosen.dtype == "bfloat16" and plain <= {"bfloat16"} else "float32"
    values, factors = zip(*(_values(x, working, chosen.scale_product) for x in (a, b)), strict=True)
    # In fp32, a GPU's default precision would round operands to TF32.
    precision = lax.Precision.HIGHEST if working == "float32" else None
    factors = [factor for factor in factors if factor is not None]
    if not factors:
        return _multiplied(values[0], values[1], bias, dtype, precision)
    out = _contract(*values, precision=precision)
    for factor in factors:
        out = out * factor
    return _rounded(out, bias, dtype)


def _values(x: Side, dtype: str, apart: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns (values, factor): with `apart`, the factor is the tensor scale, to be multiplied after the product."""
    if isinstance(x, Aligned):
        return x.dequantize(dtype), None
    if not isinstance(x, QuantizedArray):
        return x.astype(dtype), None
    if not apart or not x.format.has_tensor_scale:
        return x.dequantize(dtype), None
    if x.format.per_tensor:
        return x.replace(scales=jnp.ones_like(x.scales)).dequantize(dtype), x.scales.reshape(())
    return x.replace(tensor_scale=jnp.ones((), jnp.float32)).dequantize(dtype), x.tensor_scale


_MODES = {
    "plain": _plain,
    "tensor": _per_tensor,
    "block": _block,
    "mx": _scaled,
    "nvfp4": _scaled,
    "aligned": _aligned,
    "dequantize": _dequantized,
}

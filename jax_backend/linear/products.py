"""Products of quantized operands, run as the core's table says (`kernels.routes`): on codes, or dequantized."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from blockfp.definition import alignment, layout
from blockfp.definition.numerics import Quantized
from blockfp.kernels.products import BLOCK_SCALES, TENSOR_SCALES
from blockfp.kernels.routes import HOPPER, Route, exact_in_bfloat16, route

from ..arrays import sharded
from ..arrays.array import QuantizedArray
from ..arrays.identity import view_codes, view_scales
from ..implementations import choice, cuda, explicit
from . import partitioned

Matrix = jax.Array | QuantizedArray


def product(a: Matrix, b: Matrix, dtype, *, bias: jax.Array | None = None, fast: bool, exact: bool = False) -> jax.Array:
    """Multiplies a @ b^T + bias, of shape [m, n]: sums in fp32, to which the bias is added before they are rounded once.

    Args:
        a: [m, k].
        b: [n, k].
        dtype: of the result.
        bias: [n], or None.
        fast: whether the matrix units may accumulate in reduced precision; it matters for products of FP8 codes only.
        exact: whether the values of both operands must be multiplied as they are (`Recipe.exact_products`).
    """

    # Where a shard begins inside a block is known only at run time, which no matrix unit takes.
    a, b = (x.dequantize("float32") if isinstance(x, QuantizedArray) and not sharded.aligned(x) else x for x in (a, b))

    def on(platform, capability=None):
        def run(a, b, bias=None):
            sizes = {"m": a.shape[-2], "n": b.shape[-2], "k": b.shape[-1]}
            chosen = route(_format(a), _format(b), platform=platform, capability=capability, exact=exact, **sizes)
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
    """The first cuBLASLt that will do for products that are in it from `version` on; 0 where the library's own kernel runs."""
    return 0 if choice.has_gpu() and capability() == HOPPER else version


def capability() -> tuple[int, int]:
    """The compute capability of JAX's first GPU."""
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return int(major), int(minor)


def _format(x: Matrix):
    return x.format if isinstance(x, QuantizedArray) else None


def _contract(a: jax.Array, b: jax.Array, dtype=jnp.float32, precision=None) -> jax.Array:
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)


def _rounded(sums: jax.Array, bias: jax.Array | None, dtype) -> jax.Array:
    """Adds the bias to sums, and rounds them."""
    return (sums if bias is None else sums + bias.astype(sums.dtype)[None]).astype(dtype)


def _multiplied(a: jax.Array, b: jax.Array, bias: jax.Array | None, dtype, precision=None) -> jax.Array:
    """Multiplies with sums in fp32, rounded once to `dtype`: by the matrix units, where it is the operands' own."""
    rounds = bias is None and a.dtype == b.dtype == dtype
    return _rounded(_contract(a, b, dtype if rounds else jnp.float32, precision), bias, dtype)


def _plain(a: jax.Array, b: jax.Array, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    return _multiplied(a, b, bias, dtype)


def _per_tensor(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    # XLA would write the product in fp32 and read it again to scale it.
    if choice.missing_product(least_cublas(TENSOR_SCALES)) is None:
        return _by_library(a, b, bias, dtype, fast)
    codes = (view_codes(x.codes, x.columns, x.format) for x in (a, b))
    # XLA:GPU hands fast accumulation to cuBLAS unless the precision is above the default.
    out = _contract(*codes, precision=lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST)
    return _rounded(out * a.scales.reshape(()) * b.scales.reshape(()), bias, dtype)


def _block(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    """Multiplies FP8 blocks of 128, which XLA has no product for."""
    missing = choice.missing_product(least_cublas(BLOCK_SCALES))
    if missing is None:
        # Fast accumulation is not offered.
        return _by_library(a, b, bias, dtype, False)
    working = "bfloat16" if exact_in_bfloat16(a.format) and exact_in_bfloat16(b.format) else "float32"
    return _dequantized(a, b, bias, dtype, Route("dequantize", working, False, missing), fast)


def _aligned(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    """Multiplies MX codes shifted to one power of two for each 128 of k."""
    missing = choice.missing_product(0)
    if missing is None:
        return _by_library(a, b, bias, dtype, False, aligned=True)
    return _dequantized(a, b, bias, dtype, Route("dequantize", "bfloat16", False, missing), fast)


def _by_library(a: QuantizedArray, b: QuantizedArray, bias, dtype, fast: bool, *, aligned: bool = False) -> jax.Array:
    over = (explicit.varying(leaf) for leaf in jax.tree.leaves((a, b, bias)))
    operands = [(Quantized(x.codes, x.scales, None), x.format) for x in (a, b)]
    bands = aligned and b.format.square
    if aligned and 0 not in (*a.shape, *b.shape):
        operands = [(cuda.align(x, f, a.columns), alignment.aligned_format(f)) for x, f in operands]
    options = {"capability": capability(), "fast": fast, "ordered": aligned, "bands": bands}
    out = cuda.product(*operands[0], *operands[1], dtype, bias=bias, **options)
    return explicit.vary(out, frozenset().union(*over))


def _scaled(a: QuantizedArray, b: QuantizedArray, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    """Multiplies in Blackwell's MX and NVFP4 modes."""
    codes, scales = zip(*(_as_scaled(x) for x in (a, b)), strict=True)
    out = jax.nn.scaled_matmul(*codes, *scales, preferred_element_type=jnp.float32)[0]
    for x in (a, b):
        out = out if x.tensor_scale is None else out * x.tensor_scale
    return _rounded(out, bias, dtype)


def _as_scaled(x: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Lays codes and scales out for `jax.nn.scaled_matmul`: one scale for each row and block of columns."""
    codes, scales = view_codes(x.codes, x.columns, x.format), view_scales(x.scales, x.format)
    block_rows = x.format.block[0] if x.format.block else 1
    if block_rows > 1:
        scales = layout.repeat_scales(scales, block_rows, x.codes.shape[-2])
    return codes[None], scales[None]


def _dequantized(a: Matrix, b: Matrix, bias, dtype, chosen: Route, fast: bool) -> jax.Array:
    # High precision beside a quantized operand must not be rounded to what that operand is exact in.
    plain = {x.dtype.name for x in (a, b) if not isinstance(x, QuantizedArray)}
    working = "bfloat16" if chosen.dtype == "bfloat16" and plain <= {"bfloat16"} else "float32"
    values, factors = zip(*(_values(x, working, chosen.scale_product) for x in (a, b)), strict=True)
    # In fp32 the default precision of a GPU would round operands to TF32.
    precision = lax.Precision.HIGHEST if working == "float32" else None
    factors = [factor for factor in factors if factor is not None]
    if not factors:
        return _multiplied(values[0], values[1], bias, dtype, precision)
    out = _contract(*values, precision=precision)
    for factor in factors:
        out = out * factor
    return _rounded(out, bias, dtype)


def _values(x: Matrix, dtype: str, apart: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns (values, factor of the product): the factor is the scale of the whole tensor, where that is to stay `apart`."""
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

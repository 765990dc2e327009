"""Products with defined bits: a primitive that the CPU library runs on CPUs, and the definition elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from blockfp.definition import bits, matrix_units, products, wide
from blockfp.definition.matrix_units import Summation
from blockfp.definition.products import Operand, Side
from blockfp.kernels import calls, native

from .cpu import library_may_run, lower_to_library
from .explicit import on_device, vary, varying
from .jax_internals import runs_compiled


@dataclass(frozen=True)
class _Call:
    """What is static: the kinds of a and b, whether their scales multiply parts of k, and the sums."""

    kinds: tuple[str, str]
    of_parts: tuple[bool, bool]
    summation: Summation

    def sides(self, a, b, a_scales, b_scales, a_powers, b_powers) -> tuple[Side, Side]:
        """The operands, of which one pair of scales has elements that count."""
        scales = (a_scales, b_scales) if self.summation.scale_block is None else (a_powers, b_powers)
        fields = zip((a, b), self.kinds, scales, self.of_parts, strict=True)
        left, right = (Side(*each) for each in fields)
        return left, right


_product_p = Primitive("blockfp_product")


@_product_p.def_abstract_eval
def _abstract(a, b, *_, call: _Call):
    return ShapedArray((a.shape[0], b.shape[0]), jnp.dtype("float32"))


runs_compiled(_product_p)


def _define(*operands, call: _Call) -> jax.Array:
    bias, addend = (x if x.size else None for x in operands[6:])
    total = products.multiply(*call.sides(*operands[:6]), call.summation, bias, addend)
    return bits.to_float(total, "float32")


def _batched(operands, axes, *, call: _Call):
    # Matrices are as large as the work between them.
    stacked, same = [i for i, axis in enumerate(axes) if axis is not None], list(operands)

    def one(each):
        for i, x in zip(stacked, each, strict=True):
            same[i] = x
        return _product_p.bind(*same, call=call)

    return lax.map(one, [jnp.moveaxis(operands[i], axes[i], 0) for i in stacked]), 0


batching.primitive_batchers[_product_p] = _batched


def _lower(context, *operands, call: _Call):
    if not native.available() or not calls.sums_here(call.summation) or not library_may_run(context):
        return _lower_definition(context, *operands, call=call)
    described = calls.product_arrays(*call.sides(*context.avals_in[:6]), call.summation)
    return lower_to_library("product", context, operands, described)


_lower_definition = mlir.lower_fun(_define, multiple_results=False)
mlir.register_lowering(_product_p, _lower_definition)
mlir.register_lowering(_product_p, _lower, platform="cpu")


def product(
    a: Operand,
    b: Operand,
    summation: Summation | str,
    *,
    dtype: str = "float32",
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
) -> jax.Array:
    """Multiplies arrays of two axes with the bits of a matrix unit; see `blockfp.definition.products.product`."""
    summation = matrix_units.named(summation)
    left, right = products.sides(a, b, summation)
    given = calls.product_inputs(
        left, right, summation, bias, addend, one=jnp.ones((1, 1), jnp.float32), absent=jnp.zeros((0,), jnp.float32)
    )
    call = _Call((left.kind, right.kind), (left.of_parts, right.of_parts), summation)
    out = vary(_product_p.bind(*given, call=call), frozenset().union(*map(varying, given)))
    return out if dtype == "float32" else finish(out, None, dtype)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds b to float32 as IEEE 754 says; on CPUs XLA takes subnormal numbers for zeros."""

    def by_device(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b.astype(a.dtype)

    def in_integers(a: jax.Array, b: jax.Array) -> jax.Array:
        one = jnp.full(a.shape, bits.ONE, jnp.int32)
        return bits.to_float(wide.multiply_add(bits.from_float(a), one, bits.from_float(b)), "float32")

    return on_device(by_device, in_integers, a, b)


def finish(sums: jax.Array, bias: jax.Array | None, dtype: str) -> jax.Array:
    """Adds a bias [n] or [1, n] to float32 sums [m, n] and rounds once."""
    sums = sums if bias is None else add(sums, jnp.broadcast_to(bias, sums.shape))
    # XLA would leave out a conversion if another one follows.
    return bits.to_float(bits.from_float(sums), dtype)

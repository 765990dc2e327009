"""Products in programs that XLA partitions over devices: codes and scales are communicated, not values.

With Auto axes, only XLA knows the operands' shardings, and for a weight that must be gathered it would gather the multiplied
values. So the product, including dequantization, is one operation with its own partitioning (`custom_partitioning`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from blockfp.formats import Format

from ..arrays.array import QuantizedArray
from ..implementations import explicit
from ..implementations.jax_internals import spec_of


def applies(a: Any, b: Any) -> bool:
    """Returns whether XLA will partition this product's program and both operands are quantized matrices.

    Untraced operands run operation by operation on their shardings.
    """
    if not all(isinstance(x, QuantizedArray) and x.codes.ndim == 2 and x.sharding is None for x in (a, b)):
        return False
    mesh = jax.typeof(b.codes).sharding.mesh
    return isinstance(b.codes, Tracer) and mesh.size > 1 and len(mesh.auto_axes) == len(mesh.axis_names)


def split_product(a: QuantizedArray, b: QuantizedArray, local: Callable[..., jax.Array], *, whole_k: bool = False) -> jax.Array:
    """Computes local(a, b), a product a [m, k] @ b [n, k]^T, from each device's shards of the operands.

    With `whole_k` each device gets all of k, so that no sum is divided.
    """
    formats, dtypes, columns = (a.format, b.format), (a.dtype, b.dtype), a.columns

    def multiply(leaves, k: int) -> jax.Array:
        operands = []
        for i, format in enumerate(formats):
            codes, scales, tensor_scale = leaves[3 * i : 3 * i + 3]
            of_tensor = tensor_scale.reshape(()) if format.scale.two_level else None
            operands.append(QuantizedArray(codes, scales, of_tensor, format, k, dtypes[i]))
        return local(*operands)

    def whole(*leaves):
        return multiply(leaves, columns)

    def partition(mesh, arguments, result):
        operands = [(x.shape[0], *spec_of(x.sharding, mesh, 2)) for x in (arguments[0], arguments[3])]
        split = _Split.of(mesh, operands, columns, formats, whole_k)

        def part(*leaves):
            y = multiply(leaves, columns // split.parts)
            return lax.psum(y, split.summed) if split.summed else y

        specs = [spec for rows, format in zip(split.rows, formats, strict=True) for spec in split.operand(rows, format)]
        placed = tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, part, NamedSharding(mesh, PartitionSpec(*split.rows)), placed

    def propagate(mesh, arguments, result):
        return NamedSharding(mesh, PartitionSpec(spec_of(arguments[0].sharding, mesh, 2)[0], None))

    partitioned = custom_partitioning(whole)
    rule = "m a0, a1 a2, a3, n b0, b1 b2, b3 -> m n"
    rules = {"infer_sharding_from_operands": propagate, "sharding_rule": rule, "decode_shardings": False}
    partitioned.def_partition(partition=partition, **rules)
    leaves = []
    for x in (a, b):
        leaves += [x.codes, x.scales, jnp.ones((1,)) if x.tensor_scale is None else x.tensor_scale.reshape(1)]
    leaves = [x.astype(jnp.float32) if i % 3 == 2 else x for i, x in enumerate(leaves)]
    # As a jaxpr, so that JAX sees that lowering it needs the devices.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    return _multiply.bind(*leaves, whole=whole, split=jax.make_jaxpr(partitioned)(*shapes))


_multiply = Primitive("blockfp_product")


@_multiply.def_abstract_eval
def _abstract(*leaves, whole, split):
    (y,) = split.out_avals
    return ShapedArray(y.shape, y.dtype)


@_multiply.def_impl
def _eager(*leaves, whole, split):
    return whole(*leaves)


def _batched(leaves, axes, *, whole, split):
    return jax.vmap(whole, in_axes=tuple(axes))(*leaves), 0


def _lower(context, *leaves, whole, split):
    # An exported program can't call back.
    if context.module_context.lowering_parameters.for_export:
        return mlir.lower_fun(whole, multiple_results=False)(context, *leaves)
    return mlir.lower_fun(lambda *leaves: jaxpr_as_fun(split)(*leaves)[0], multiple_results=False)(context, *leaves)


batching.primitive_batchers[_multiply] = _batched
mlir.register_lowering(_multiply, _lower)


@dataclass(frozen=True)
class _Split:
    """The partitioning of a product: mesh axes of m and n, and of k, over which partial products are summed."""

    rows: tuple[Any, Any]
    k: Any
    summed: tuple[str, ...]
    parts: int

    @classmethod
    def of(cls, mesh, operands, columns: int, formats, whole_k: bool) -> _Split:
        """Partitions operands (rows, mesh axes of rows, of k): keeps a cut of k that both share, and drops axes of n
        used by m."""
        sizes = dict(mesh.shape)
        (m, am, ak), (n, bn, bk) = operands
        k = ak if ak == bk and not whole_k and all(_even(columns, 1, ak, format, sizes) for format in formats) else None
        summed = explicit.axis_names(k)
        am = explicit.without(am, set(summed))
        am = am if _even(m, 0, am, formats[0], sizes) else None
        bn = explicit.without(bn, {*summed, *explicit.axis_names(am)})
        bn = bn if _even(n, 0, bn, formats[1], sizes) else None
        return cls((am, bn), k, summed, math.prod(sizes[name] for name in summed))

    def operand(self, rows, format: Format) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Returns the specs of an operand's codes, scales and tensor scale."""
        codes = PartitionSpec(rows, self.k)
        return codes, PartitionSpec() if format.per_tensor else codes, PartitionSpec()


def _even(size: int, dim: int, entry: Any, format: Format, sizes: dict[str, int]) -> bool:
    """Returns whether an axis can be cut into whole blocks and whole bytes."""
    ranks = math.prod(sizes[name] for name in explicit.axis_names(entry))
    block = (format.block or (1, 1))[dim]
    return ranks == 1 or size % (ranks * (math.lcm(block, 4) if dim else block)) == 0

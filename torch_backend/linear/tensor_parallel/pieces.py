"""Computes products of a sharded layer in a fixed number of pieces, so that every mesh gives the same bits.

A library may sum a product's terms in another order if operands have other lengths. So the sharded axis is divided into
`Parallel.splits` pieces, whatever the number of ranks. Each piece is a separate product, whose operands have the same layout on
every mesh. With `Recipe.exact_order`, only contracted axes are divided:

            forward             dgrad               wgrad
    column  pieces of columns   terms of pieces     pieces of rows
    row     terms of pieces     pieces of columns   pieces of columns

Terms are fp32. A fixed tree adds them, over a rank's own pieces and then over the ranks, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from blockfp.definition import layout
from blockfp.definition.recipe import Exact
from blockfp.formats import WHOLE_ROW, Format
from blockfp.recipes import Product

from ...ops.product.products import Matrix, multiply
from ...quantized_tensor.sharding import from_local, mesh_of, to_local
from ...quantized_tensor.tensor import QuantizedTensor
from ...sharded.reduce_scatter import tree_sum
from .parallel import Parallel

Axis = Literal["rows", "columns", "contracted"]

_AXES: dict[tuple[str, Product], Axis] = {
    ("column", "forward"): "columns",
    ("column", "dgrad"): "contracted",
    ("column", "wgrad"): "rows",
    ("row", "forward"): "contracted",
    ("row", "dgrad"): "columns",
    ("row", "wgrad"): "columns",
}
"""The sharded axis of each product."""


def check_eager() -> None:
    """Raises NotImplementedError while a compiler traces."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("a layer with splits is not compiled: compilers join what is computed in pieces")


def multiply_pieces(
    name: Product,
    a: Matrix,
    b: Matrix,
    size: Sequence[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    parallel: Parallel,
    *,
    fast_accum: bool,
    exact: Exact,
) -> Tensor:
    """Computes a product of `multiply` piece by piece; arguments are as there, `parallel` has `splits`.

    Returns `dtype`, or, if ranks hold terms of the product, this rank's sum in float32.
    """
    assert parallel.splits is not None
    axis, count = _AXES[parallel.style, name], parallel.splits // parallel.ranks
    a, b = _parts(a), _parts(b)
    (n, k), options = size, {"fast_accum": fast_accum, "exact": exact}
    if axis == "contracted":
        lengths = _piece(k, count)
        terms = []
        for i in range(count):
            left, right = (_cut(x, 1, i, lengths) for x in (a, b))
            if "order" not in exact:
                # A product with one order takes bfloat16, and gives float32.
                left, right = _wide(left), _wide(right)
            terms.append(multiply(left, right, (n, lengths), None, torch.float32, **options))
        return tree_sum(torch.stack(terms))
    if "order" in exact:
        # An element's bits depend on its own row and column alone.
        return multiply(a, b, size, bias, dtype, **options)
    if axis == "rows":
        length = _piece(_rows(a), count)
        return torch.cat([multiply(_cut(a, 0, i, length), _whole(b), (n, k), None, dtype, **options) for i in range(count)])
    length = _piece(n, count)
    biases = [None] * count if bias is None else bias.split(length)
    pieces = [multiply(_whole(a), _cut(b, 0, i, length), (length, k), own, dtype, **options) for i, own in enumerate(biases)]
    return torch.cat(pieces, 1)


def in_pieces(function: Callable[[Tensor], Tensor], x: Tensor, parallel: Parallel | None) -> Tensor:
    """Applies a function to each piece of x [.., features of this rank] if the layer before or after it has pieces.

    Each piece, and the gradient of its result, is contiguous, so the function computes the same on every mesh.
    """
    if parallel is None or parallel.splits is None:
        return function(x)
    check_eager()
    mesh, placements = mesh_of(x), getattr(x, "placements", ())
    pieces = _Divided.apply(to_local(x), parallel.splits // parallel.ranks)
    return from_local(_Joined.apply(*map(function, pieces)), mesh, placements)


def sum_of_rows(x: Tensor, parallel: Parallel) -> Tensor:
    """Returns the sum over the rows of x [rows, columns], by pieces of columns if the layer is column-parallel."""
    assert parallel.splits is not None
    count = parallel.splits // parallel.ranks if parallel.style == "column" else 1
    return torch.cat([piece.contiguous().sum(0) for piece in x.chunk(count, 1)])


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(piece.clone(memory_format=torch.contiguous_format) for piece in x.chunk(count, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return torch.cat(gradients, -1), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *pieces: Tensor) -> Tensor:
        ctx.count = len(pieces)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return tuple(piece.clone(memory_format=torch.contiguous_format) for piece in gradient.chunk(ctx.count, -1))


def _piece(length: int, count: int) -> int:
    assert length % count == 0, "`check_pieces` sees to it"
    return length // count


def _parts(x: Matrix) -> Matrix:
    """Returns a matrix with codes and scales as parts, if its part was a `QuantizedTensor`."""
    if not x.is_one_tensor:
        return x
    weight: Any = x.parts[0]
    assert isinstance(weight, QuantizedTensor)
    parts = [weight.codes, weight.scales] + ([] if weight.tensor_scale is None else [weight.tensor_scale])
    return x._replace(parts=parts)


def _rows(x: Matrix) -> int:
    return x.parts[0].shape[0]


def _whole(x: Matrix) -> Matrix:
    """Copies values that aren't contiguous, since a piece's are."""
    return x if x.format is not None else x._replace(parts=[x.parts[0].contiguous()])


def _wide(x: Matrix) -> Matrix:
    """Converts values on a CPU to float32, so that it doesn't round the terms to their dtype."""
    return x if x.format is not None or x.parts[0].is_cuda else x._replace(parts=[x.parts[0].float()])


def _cut(x: Matrix, dim: int, index: int, length: int) -> Matrix:
    """Returns piece `index` of a matrix [size, contracted] along an axis; pieces begin and end at block boundaries."""
    dim = 1 - dim if x.transposed else dim
    codes, first = x.parts[0], index * length
    if x.format is None:
        return x._replace(parts=[codes.narrow(dim, first, length).contiguous()])
    scales, *tensor_scale = x.parts[1:]
    codes = codes.narrow(dim, *(_packed(x.format, at) if dim else at for at in (first, length)))
    block = x.format.block
    if block is not None and block[dim] != WHOLE_ROW:
        scales = scales.narrow(dim, first // block[dim], length // block[dim])
    return x._replace(parts=[codes.contiguous(), scales.contiguous(), *tensor_scale], origin=(0, 0))


def _packed(format: Format, columns: int) -> int:
    return layout.packed_columns(columns, format.element.bits)

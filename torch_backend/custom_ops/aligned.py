"""Products of MX operands on FP8 matrix units that have no scale for 32 elements: codes are shifted to one for 128 first.

`definition.alignment` says to what. The shifted codes are one product's, and freed with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockfp.definition import alignment
from blockfp.formats import Format
from blockfp.kernels.cuda_library import library
from blockfp.kernels.format_numbers import format_numbers

from . import cuda


class Aligned(NamedTuple):
    """One side of a product, as the library's own product takes it.

    Attributes:
        codes: FP8, uint8 [rows, k filled up to a multiple of 16 with zeros].
        scales: float32 [ceil(k / 128), rows filled up to a multiple of 4].
    """

    codes: Tensor
    scales: Tensor


def align(codes: Tensor, scales: Tensor, format: Format, columns: int) -> Aligned:
    """Shifts the codes of an MX matrix on a CUDA device, bit for bit as `alignment.align`.

    Args:
        codes: uint8 [rows, bytes].
        scales: uint8 E8M0.
        format: MXFP8, MXFP6 or MXFP4.
        columns: contracted length, k.
    """
    cuda.check_beside(codes, "codes", scales=scales)
    rows = codes.shape[0]
    out = codes.new_empty((rows, -(-columns // 16) * 16))
    powers = codes.new_empty((-(-columns // 128), -(-rows // 4) * 4), dtype=torch.float32)
    element, block_rows = format_numbers(format)[:2]
    library().align(codes.contiguous(), scales.contiguous(), out, powers, element, block_rows, columns)
    return Aligned(out, powers)


def multiply(
    a: tuple[Tensor, Tensor, Format],
    b: tuple[Tensor, Tensor, Format],
    columns: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies a @ b^T + bias on a CUDA device, [m, n].

    Args:
        a, b: codes, scales and format of [m, columns] and [n, columns].
        columns: contracted length.
        bias: [n], or None.
        dtype: of the result.
    """
    left, right = (align(codes, scales, format, columns) for codes, scales, format in (a, b))
    elements = (format_numbers(alignment.aligned_format(format))[0] for _, _, format in (a, b))
    out = a[0].new_empty((a[0].shape[0], b[0].shape[0]), dtype=dtype)
    bias = None if bias is None else bias.contiguous()
    # Each row of either side has its own scales.
    library().block_product(left.codes, right.codes, left.scales, right.scales, None, bias, out, *elements, 1, False)
    return out

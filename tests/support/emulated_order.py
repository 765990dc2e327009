"""The CUDA library's own product with its defined order of sums, which `definition.products` carries out."""

import torch

from blockfp.definition import products
from blockfp.definition.products import Operand
from blockfp.formats import Format

_ELEMENTS = {0: "e4m3", 1: "e5m2"}
VALUES = 6

calls = []
"""Summations of the products since the list was emptied."""


def _operand(codes, scales, element, block_rows, ordered):
    if element == VALUES:
        return Operand(codes, scales)
    rows, k = codes.shape
    if block_rows == 0:
        return Operand(codes, scales.reshape(1, 1), Format.parse(f"fp8_{_ELEMENTS[element]}"))
    of_rows = scales.mT if ordered else scales
    if block_rows in (32, 128):
        of_rows = of_rows.repeat_interleave(block_rows, 0) if not ordered else of_rows[torch.arange(rows) // 32 * 32]
    of_rows = of_rows[:rows].contiguous()
    kind = "1x128" if of_rows.shape[1] > 1 or k <= 128 else "row"
    return Operand(codes, of_rows, Format.parse(f"fp8_{_ELEMENTS[element]}_1x128_fp32" if kind == "1x128" else "fp8_e4m3_row"))


def product(
    a, b, a_scales, b_scales, ends, bias, out, workspace, a_element, a_block_rows, b_element, b_block_rows, a_ordered,
    b_ordered, own, tile, fast, accumulate,
):  # fmt: skip
    """`product` of kernels/cuda/products/product_exports.cu, for single products by the own kernel."""
    assert ends is None
    assert (own, fast, accumulate) == (1, 0, 0), "only the own kernel has a defined order, and not where it keeps fewer bits"
    left = _operand(a, a_scales, a_element, a_block_rows, a_ordered)
    right = _operand(b, b_scales, b_element, b_block_rows, b_ordered)
    summation = "hopper_bf16" if a_element == VALUES else "hopper_fp8"
    calls.append(summation)
    name = str(out.dtype).removeprefix("torch.")
    out.copy_(products.product(left, right, summation, dtype=name, bias=None if bias is None or not bias.numel() else bias))

"""The CUDA library's own product with its defined order of sums, which `definition.products` carries out."""

import torch

from blockfp.definition import groups, products
from blockfp.definition.products import Operand
from blockfp.formats import Format

_ELEMENTS = {0: "e4m3", 1: "e5m2"}
VALUES = 6

calls = []
"""Summations of the products since the list was emptied."""


def _operand(codes, scales, element, block_rows, ordered, number, rows, columns):
    """What a product of one group, or of none, reads of a matrix: these rows and columns of it."""
    if element == VALUES or block_rows == 0:
        of_group = scales.reshape(-1)[number % scales.numel()].reshape(1, 1)
        codes = codes[number] if codes.ndim == 3 else codes
        format = None if element == VALUES else Format.parse(f"fp8_{_ELEMENTS[element]}")
        return Operand(codes[rows, columns].contiguous(), of_group, format)
    if codes.ndim == 3:
        codes, scales = codes[number], scales[number]
    of_rows = scales.mT if ordered else scales
    count, k = codes.shape
    if block_rows in (32, 128):
        of_rows = of_rows.repeat_interleave(block_rows, 0) if not ordered else of_rows[torch.arange(count) // 32 * 32]
    kind = "1x128" if of_rows.shape[1] > 1 or k <= 128 else "row"
    of_rows = of_rows[:count][rows]
    if columns != slice(None):
        of_rows = of_rows[:, columns.start // 128 : columns.stop // 128]
    return Operand(
        codes[rows, columns].contiguous(),
        of_rows.contiguous(),
        Format.parse(f"fp8_{_ELEMENTS[element]}_1x128_fp32" if kind == "1x128" else "fp8_e4m3_row"),
    )


def product(
    a, b, a_scales, b_scales, ends, bias, out, workspace, a_element, a_block_rows, b_element, b_block_rows, a_ordered,
    b_ordered, own, tile, fast, accumulate,
):  # fmt: skip
    """`product` of kernels/cuda/products/product_exports.cu by the own kernel."""
    assert (own, fast, accumulate) == (1, 0, 0), "only the own kernel has a defined order, and not where it keeps fewer bits"
    summation = "hopper_bf16" if a_element == VALUES else "hopper_fp8"
    calls.append(summation)
    name, every = str(out.dtype).removeprefix("torch."), slice(None)
    where = [groups.Group(0, len(a), 0, 0)] if ends is None else groups.groups_of(ends.tolist(), 2**31 - 1)
    for group in where:
        along_k = out.ndim == 3
        columns = slice(group.first_column, group.end_column) if along_k else every
        rows = slice(group.begin, group.end) if ends is not None and not along_k else every
        to = out[group.number] if along_k else out[rows]
        if ends is not None and not group.rows:
            to.zero_()
            continue
        left = _operand(a, a_scales, a_element, a_block_rows, a_ordered, group.number, rows, columns)
        right = _operand(b, b_scales, b_element, b_block_rows, b_ordered, group.number, every, columns)
        own = None if bias is None or not bias.numel() else bias.reshape(-1, bias.shape[-1])[group.number]
        to.copy_(products.product(left, right, summation, dtype=name, bias=own))

"""Plans calls of the CUDA library's `product`: its own kernel or cuBLASLt, whichever measured faster, and their scratch memory.

kernels/cuda/products/product_exports.cu documents the function. The own kernel needs compute capability 9.0 and takes all pairs
of FP8 formats with one scale per tensor, per row or per block of 128, of any lengths. cuBLASLt takes fewer.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..formats import Format
from .calls import format_numbers
from .product_table import MEASURED
from .routes import HOPPER

TENSOR_SCALES, BLOCK_SCALES = 120000, 120900
"""First cuBLASLt versions that multiply FP8 with a scale per tensor, and with scales per block."""

_CUBLAS_WORKSPACE = 32 * 2**20  # cuBLAS's recommendation for Hopper
_OWN_CHOOSES_TILE = -1
_VALUES = 6
"""Number of bfloat16 among the elements: `Values` in kernels/cuda/products/gemm.h."""


class Plan(NamedTuple):
    """How one product runs.

    Attributes:
        own: True for the library's own kernel, False for cuBLASLt.
        workspace: bytes of scratch memory.
        adds_bias: whether the call adds the bias; otherwise the caller must.
        numbers: the arguments of `product` after its arrays.
    """

    own: bool
    workspace: int
    adds_bias: bool
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan(
    a: Format,
    b: Format,
    m: int,
    n: int,
    k: int,
    *,
    capability: tuple[int, int],
    cublas: int,
    dtype: str,
    bias: str | None = None,
    groups: int = 0,
    along_k: bool = False,
    ordered: tuple[bool, bool] = (False, False),
    bands: bool = False,
    fast: bool = False,
    accumulate: bool = False,
    exact_order: bool = False,
) -> Plan:
    """Plans a @ b^T of FP8 codes.

    Args:
        a, b: FP8 formats with one scale per tensor, per row, or per block of 1x128 or 128x128.
        m, n, k: lengths: a is [m, k] and b [n, k].
        capability: the device's compute capability.
        cublas: cuBLASLt's version, such as 130100; 0 without cuBLASLt.
        dtype, bias: dtype names of the result and of the bias; None without a bias.
        groups: number of groups; 0 for a single product.
        along_k: whether groups divide the columns of a and b. Otherwise they divide the rows of a, and b is [groups, n, k].
        ordered: which of a's and b's 1x128 scales are already in the product's order.
        bands: whether b's 1x128 scales are ordered and equal within every 32 rows, as in aligned MX weights of 32x32 blocks;
            the own kernel is faster then.
        fast: whether sums may keep fewer bits; sums over blocks never do.
        accumulate: whether to add to the result's contents.
        exact_order: whether to add in the defined order (`kernels.exact_order`), which the own kernel has; not `fast` then.

    Raises:
        ValueError: neither kernel takes the product.
    """
    fast = fast and a.per_tensor and b.per_tensor and not exact_order
    refused = _refusal(a, b, m, n, k, cublas, groups)
    adds_bias = bias is None or (bias == dtype and dtype != "float32")
    if capability != HOPPER and refused:
        raise ValueError(
            f"no kernel of compute capability {capability} multiplies {a} by {b} with m, n, k = {m}, {n}, {k}: {refused}"
        )
    must = exact_order or bands or bool(refused) or not adds_bias
    own = capability == HOPPER and (must or _own_is_faster(a, b, m, n, k, fast))
    matrices = groups if groups and not along_k else 1
    pieces = _own_pieces if own else _cublas_pieces
    workspace = sum(_piece(size) for size in pieces(a, b, m, n, k, matrices, ordered)) + (0 if own else _CUBLAS_WORKSPACE)
    kinds = [number for format in (a, b) for number in format_numbers(format)[:2]]
    kinds[3] = 32 if bands else kinds[3]
    numbers = (*kinds, *ordered, own, _OWN_CHOOSES_TILE, fast, accumulate)
    return Plan(own, workspace, own or adds_bias, tuple(int(number) for number in numbers))


@lru_cache(maxsize=4096)
def plan_values(m: int, n: int, k: int, *, matrices: int = 1) -> Plan:
    """Plans a @ b^T of bfloat16, with a scale per operand or group, by the own kernel on compute capability 9.0.

    a is [m, k] and b [n, k]; `matrices` is the number of b stored.
    """
    copied = [2 * m * _fill(k, 8), 2 * matrices * n * _fill(k, 8)] if k % 8 else []
    numbers = (_VALUES, 0, _VALUES, 0, False, False, True, _OWN_CHOOSES_TILE, False, False)
    return Plan(True, sum(_piece(size) for size in copied), True, tuple(int(number) for number in numbers))


def _refusal(a: Format, b: Format, m: int, n: int, k: int, cublas: int, groups: int) -> str:
    """Returns why cuBLASLt can't run a product; "" if it can."""
    blocks = not (a.per_tensor and b.per_tensor)
    needed = BLOCK_SCALES if blocks else TENSOR_SCALES
    if cublas < needed:
        return f"cuBLASLt is {cublas or 'not found'}, and {needed} or later is needed"
    if groups:
        return "it has no groups"
    if a.per_row or b.per_row:
        return "it takes no scale for each row"
    elements = {a.element.name, b.element.name}
    if elements == {"e5m2"} or (blocks and elements != {"e4m3"}):
        return "it takes E4M3 by E4M3, and with one scale E4M3 by E5M2"
    if a.per_tensor != b.per_tensor or (blocks and a.square and b.square):
        return "of blocks it takes 1x128 by 1x128 and by 128x128"
    if n % 16 or k % 16 or (blocks and m % 4):
        return "it takes n and k that are multiples of 16, and in blocks m that is one of 4"
    return ""


def _own_is_faster(a: Format, b: Format, m: int, n: int, k: int, fast: bool) -> bool:
    """Compares speeds at the nearest measured shape."""
    if a.per_tensor and b.per_tensor:
        kind = "tensor fast" if fast else "tensor"
    else:
        kind = "squares" if a.square or b.square else "rows"
    nearest = min(MEASURED[kind], key=lambda row: sum(math.log2(x / y) ** 2 for x, y in zip((m, n, k), row, strict=False)))
    return nearest[3] >= nearest[4]


def _fill(x: int, to: int) -> int:
    return -(-x // to) * to


def _piece(size: int) -> int:
    return _fill(size, 256)


def _in_order(format: Format, rows: int, k: int) -> int:
    """Returns the bytes of an operand's scales in the product's order; a per-tensor or per-row scale takes one row."""
    return 4 * _fill(rows, 4) * (1 if format.per_tensor or format.per_row else -(-k // 128))


def _own_pieces(a: Format, b: Format, m: int, n: int, k: int, matrices: int, ordered: tuple[bool, bool]) -> list[int]:
    pieces = [m * _fill(k, 16), matrices * n * _fill(k, 16)] if k % 16 else []
    if a.per_tensor and b.per_tensor:
        return pieces
    if not ordered[0]:
        pieces.append(_in_order(a, m, k))
    if not ordered[1] and not (b.square and not b.per_tensor):
        pieces.append(matrices * _in_order(b, n, k))
    return pieces


def _cublas_pieces(a: Format, b: Format, m: int, n: int, k: int, matrices: int, ordered: tuple[bool, bool]) -> list[int]:
    pieces = []
    for format, rows, done in ((a, m, ordered[0]), (b, n, ordered[1])):
        if format.per_tensor or done:
            continue
        blocks = -(-k // 128)
        if not format.square:
            pieces.append(_in_order(format, rows, k))
        elif blocks % 4:
            pieces.append(4 * -(-rows // 128) * _fill(blocks, 4))
    return pieces

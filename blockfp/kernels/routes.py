"""Chooses the route of a product of two quantized operands from one table of formats and devices, for PyTorch and JAX.

A product contracts the last axes of its operands, a [.., m, k] and b [.., n, k]; their scales run along these axes too. If the
device's matrix units multiply the two formats, they take codes and scales directly. Otherwise operands are dequantized and
multiplied in a dtype that represents every value exactly. One mode may change an operand: "aligned" shifts MX codes to one
power of two per 128 elements, which is exact except for codes far below the largest of those 128 (`definition.alignment` has
the bound). A caller that needs exact operands says so and gets bfloat16.

The CUDA library runs FP8 products with one scale per tensor, per row or per block of 128, and aligned products
(`kernels.products` chooses the kernel): any lengths on Hopper, cuBLASLt's lengths elsewhere. MX and NVFP4 products run on
Blackwell through `torch.nn.functional.scaled_mm`, as documented; they are untested.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from ..formats import FORMATS, WHOLE_ROW, Format, block_name
from .operand_cast import cuda_rotates

Mode = Literal["tensor", "block", "mx", "nvfp4", "aligned", "dequantize", "plain"]
Platform = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Route:
    """How one product runs.

    Attributes:
        mode: "tensor" (one scale per tensor), "block" (1x128, 128x128, rows), "mx" (E8M0 scales of 32), "nvfp4": matrix units
            take codes and scales. "aligned": they take codes shifted to one power of two per 128 of k. "dequantize": operands
            are dequantized, then multiplied. "plain": neither operand is quantized.
        dtype: in mode "dequantize", the dtype of the dequantized operands, "bfloat16" or "float32"; else None.
        scale_product: in mode "dequantize", whether tensor scales multiply the product instead of the operands, which are then
            exact in `dtype`. The product must be fp32 until then.
        reason: the reason, for tables and messages.
    """

    mode: Mode
    dtype: Literal["bfloat16", "float32"] | None
    scale_product: bool
    reason: str


@dataclass(frozen=True)
class Rule:
    """A row of the table of products that run on codes and scales.

    Attributes:
        mode: see `Route`.
        capabilities: major compute capabilities of devices with this mode.
        elements: pairs of element names.
        blocks: pairs of block shapes; None is the whole tensor.
        scales: names of scale formats.
        multiples: required divisors of m, n and k.
    """

    mode: Mode
    capabilities: tuple[int, ...]
    elements: frozenset[tuple[str, str]]
    blocks: frozenset[tuple[tuple[int, int] | None, tuple[int, int] | None]]
    scales: frozenset[str]
    multiples: tuple[int, int, int]

    @property
    def of_library(self) -> bool:
        """True for products of the CUDA library, False for products of `scaled_mm`."""
        return self.mode in ("tensor", "block", "aligned")


_T = TypeVar("_T")


def _pairs(sides: Iterable[_T]) -> frozenset[tuple[_T, _T]]:
    """Returns all pairs of two sides."""
    sides = tuple(sides)
    return frozenset((a, b) for a in sides for b in sides)


# cuBLAS has no kernel for two E5M2 operands; the library's own kernel does.
_FP8 = frozenset({("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")})
_ALL_FP8 = _FP8 | {("e5m2", "e5m2")}
_ROW, _SQUARE, _WHOLE = (1, 128), (128, 128), (1, WHOLE_ROW)
_FP32 = frozenset({"fp32", "pow2"})
_MX = _pairs(((1, 32), (32, 32)))
_E8M0 = frozenset({"e8m0_ceil", "e8m0_floor"})
_ALIGNED = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")

RULES: tuple[Rule, ...] = (
    Rule("tensor", (9,), _ALL_FP8, frozenset({(None, None)}), _FP32, (1, 1, 1)),
    Rule("tensor", (10,), _FP8, frozenset({(None, None)}), _FP32, (1, 16, 16)),
    Rule("block", (9,), _ALL_FP8, _pairs((None, _ROW, _SQUARE)) - {(None, None)}, _FP32, (1, 1, 1)),
    Rule("block", (9,), _ALL_FP8, _pairs((None, _WHOLE)) - {(None, None)}, _FP32, (1, 1, 1)),
    Rule("mx", (10,), _FP8, _MX, _E8M0, (1, 16, 32)),
    Rule("aligned", (9,), _pairs(_ALIGNED), _MX, _E8M0, (1, 1, 1)),
    Rule(
        "nvfp4",
        (10,),
        frozenset({("e2m1", "e2m1")}),
        _pairs(((1, 16), (16, 16))),
        frozenset(format.scale.name for format in FORMATS if format.scale.two_level),
        (1, 16, 32),
    ),
)
"""Products that run on codes and scales; all others are dequantized."""

_DEVICES = {9: "Hopper (9.x)", 10: "Blackwell (10.x)"}

HOPPER = (9, 0)
RUN, COMPILED = (HOPPER,), ((8, 0), (8, 9), (10, 0), (12, 0))
"""Compute capabilities on which the CUDA library has run, and for which it has only been compiled."""


def route(
    a: Format | str | None,
    b: Format | str | None,
    *,
    platform: Platform,
    capability: tuple[int, int] | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    in_order: bool = True,
    library: bool = True,
    exact: bool = False,
) -> Route:
    """Returns the route of a @ b^T for a [.., m, k] and b [.., n, k].

    Args:
        a, b: the operands' formats or their names; None for high precision.
        platform: "cpu" or "cuda".
        capability: compute capability of a CUDA device, such as (9, 0).
        m, n, k: lengths; None assumes that they fit.
        in_order: whether both operands' scales run along k and their blocks begin at the operands' corners. False for shards
            that begin inside a block, and for weights in 1-D blocks that are contracted along their rows.
        library: whether the CUDA library, which runs "tensor", "block" and "aligned", is available.
        exact: whether operands must be multiplied with unchanged values, which "aligned" doesn't guarantee.

    Raises:
        ValueError: an unknown format or platform, or "cuda" without a capability.
    """
    a, b = (None if format is None else Format.parse(format) for format in (a, b))
    if platform not in ("cpu", "cuda"):
        raise ValueError(f"platform must be 'cpu' or 'cuda', got {platform!r}")
    if platform == "cuda" and capability is None:
        raise ValueError("platform = 'cuda' needs a capability, such as (9, 0)")
    if a is None and b is None:
        return Route("plain", None, False, "neither operand is quantized")
    why = "one operand is in high precision" if a is None or b is None else "no matrix unit takes these codes and scales"
    if not in_order:
        why = "blocks lie across the operands or are cut"
    elif platform == "cuda" and capability is not None and a is not None and b is not None:
        rule = _rule(a, b, capability[0])
        if rule is not None and rule.of_library and not library:
            why = "the CUDA library, which multiplies them, is missing"
        elif rule is not None and rule.mode == "aligned" and exact:
            why = "exact products are asked for"
        elif rule is not None:
            misfit = [f"{name} = {size}" for name, size in _misfits(rule, m, n, k)]
            if not misfit:
                # Aligned codes are padded to multiples of 128.
                slower = _what_costs(n, 0 if rule.mode == "aligned" else k) if rule.of_library else ""
                return Route(rule.mode, None, False, f"{_DEVICES[capability[0]]} multiplies {_kinds(a, b)}{slower}")
            units = " and ".join(f"{size} for {name}" for name, size in zip("mnk", rule.multiples, strict=True) if size > 1)
            why = f"{' and '.join(misfit)}: the matrix units want multiples of {units}"
    return _dequantized(a, b, platform, why)


@lru_cache(maxsize=4096)
def group_mode(a: Format | None, b: Format | None, exact: bool) -> Mode | None:
    """The mode in which Hopper multiplies codes of groups; None where it doesn't."""
    if a is None or b is None or a.per_tensor != b.per_tensor:
        # A scale for each group and one for each block don't go together.
        return None
    mode = route(a, b, platform="cuda", capability=HOPPER, exact=exact).mode
    return mode if mode in ("tensor", "block", "aligned") else None


def why_groups_apart(format: Format | None, what: str, *, kept: bool = False, rotate: bool = False) -> str | None:
    """Says why groups of "row"s or "column"s are not cast all at once; with `kept` why their codes are not multiplied so."""
    if format is None:
        return None
    if format.per_row:
        return f"a scale for each {what}, {format}"
    if format.block is not None and format.block[0] > 1:
        return f"{what}s in square blocks, {format}"
    if format.scale.four_over_six and not kept:
        return f"{what}s whose blocks choose between two scales, {format}"
    return f"rotated {what}s, {format}" if rotate and not cuda_rotates(format) else None


def _rule(a: Format, b: Format, major: int) -> Rule | None:
    for rule in RULES:
        if (
            major in rule.capabilities
            and (a.element.name, b.element.name) in rule.elements
            and (a.block, b.block) in rule.blocks
            and {a.scale.name, b.scale.name} <= rule.scales
        ):
            return rule
    return None


def _misfits(rule: Rule, *sizes: int | None) -> list[tuple[str, int]]:
    named = zip("mnk", sizes, rule.multiples, strict=True)
    return [(name, size) for name, size, unit in named if size is not None and size % unit]


def _what_costs(n: int | None, k: int | None) -> str:
    """Describes lengths that make a product slower than nearby lengths."""
    costs = []
    if k is not None and k % 16:
        costs.append(f"k = {k} is no multiple of 16: codes are copied first, to rows that are")
    if n is not None and n % 8:
        costs.append(f"n = {n} is no multiple of 8: the result is written in smaller pieces")
    return "; ".join(["", *costs])


def _dequantized(a: Format | None, b: Format | None, platform: Platform, why: str) -> Route:
    if platform == "cpu":
        return Route("dequantize", "float32", False, f"{why}; CPUs multiply float32, in which every value is exact")
    inexact = [str(format) for format in (a, b) if format is not None and not exact_in_bfloat16(format)]
    if inexact:
        return Route("dequantize", "float32", False, f"{why}; values of {' and '.join(inexact)} are exact in float32 only")
    scaled = any(format is not None and format.has_tensor_scale for format in (a, b))
    beside = ", scales of whole tensors aside," if scaled else ""
    return Route("dequantize", "bfloat16", scaled, f"{why}; every value{beside} is exact in bfloat16")


def exact_in_bfloat16(format: Format) -> bool:
    """Returns whether bfloat16's 8 significant bits represent every code times its block scale (a tensor scale is left out).

    A power-of-two scale adds no bits; an E4M3 scale adds 4. (MX magnitudes below 2^-133, in blocks with an amax below 2^-117,
    leave bfloat16's range and round to its subnormals.)
    """
    bits = format.element.mantissa_bits + 1
    if format.per_tensor or format.scale.power_of_two:
        return bits <= 8
    return format.scale.two_level and bits + 4 <= 8


def _kinds(a: Format, b: Format) -> str:
    def kind(format: Format) -> str:
        return f"{format.element.name.upper()} {block_name(format.block)}"

    return f"{kind(a)} by {kind(b)}"


def table() -> list[tuple[str, str, str]]:
    """Returns the table as lines of (device, operands, method) for people."""
    lines = []
    for major, device in _DEVICES.items():
        for rule in RULES:
            if major not in rule.capabilities:
                continue
            elements = sorted({element.upper() for pair in rule.elements for element in pair})
            pairs = sorted(rule.blocks, key=str)
            blocks = ", ".join(f"{block_name(x)} by {block_name(y)}" for x, y in pairs)
            units = ", ".join(f"{name} % {size} = 0" for name, size in zip("mnk", rule.multiples, strict=True) if size > 1)
            how = "blockfp's kernel or cuBLASLt" if rule.of_library else "scaled_mm"
            how += ", codes shifted to a scale for 128 unless exact_products" if rule.mode == "aligned" else ""
            lines.append((device, f"{'/'.join(elements)} {blocks}", f"{how} ({rule.mode}){', ' if units else ''}{units}"))
    run, compiled = (", ".join(f"{major}.{minor}" for major, minor in some) for some in (RUN, COMPILED))
    lines.append(("any CUDA device", f"casts, compute capability {run}", "the CUDA library's kernels"))
    lines.append(("any CUDA device", f"casts, compute capability {compiled}", "the same, compiled and never run there"))
    lines.append(("any CUDA device", "4-over-6 (nvfp4_4over6..) in blocks of 16x1", "the definition, in array operations"))
    lines.append(("any CUDA device", "others, values exact in bfloat16", "dequantize to bfloat16, matmul"))
    how = "dequantize to bfloat16, torch's grouped_mm; in JAX blockfp's kernel, on Hopper"
    lines.append(("any CUDA device", "the same of experts, where Hopper has no codes", how))
    lines.append(("any CUDA device", "FP8 blocks and rows with fp32 scales", "dequantize to float32, matmul"))
    lines.append(("CPU", "all", "dequantize to float32, matmul"))
    return lines

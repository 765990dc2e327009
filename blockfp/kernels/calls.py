"""Describes each call of the kernel libraries once, for all that make it: NumPy, PyTorch and JAX.

A call takes inputs, then arrays, then numbers. kernels/cuda/**/*exports.cu and kernels/cpu/*exports.cc say what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ..definition import bits, checks, groups, layout
from ..definition.matrix_units import SUMMATIONS, Summation
from ..definition.products import Side
from ..formats import Format
from .operand_cast import OperandCast

# The numbers of kernels/include/blockfp/elements.h, scales.h and dtypes.h.
ELEMENTS = {name: index for index, name in enumerate(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8"))}
_FOUR_OVER_SIX = ("e4m3_4over6", "e4m3_4over6_448", "e4m3_4over6_mse", "e4m3_4over6_448_mse")
_RULES = ("fp32", "pow2", "e8m0_ceil", "e8m0_floor", "e4m3", "e4m3_guarded", *_FOUR_OVER_SIX)
RULES = {name: index for index, name in enumerate(_RULES)}
DTYPE_NUMBERS = {name: index for index, name in enumerate(bits.FLOAT_DTYPES)}

ACTIVATIONS = {name: index for index, name in enumerate(("silu", "gelu_tanh", "gelu", "relu2"))}
"""Activations before a layer, as the CUDA library numbers them (`Activation` of kernels/cuda/arguments.h)."""
_FORMAT = ("element", "block_rows", "block_columns", "rule")
_LIMITS = ("measure", "eps_bits", "largest_bits", "rotate_t")
_ORDERED = ("rows_ordered", "columns_ordered")
_PLACE = ("row", "column", "rows", "columns")
PARTS = ("codes", "scales", "tensor_scale")
PARTS_T = ("codes_t", "scales_t", "tensor_scale_t")
_ALIGNED = ("codes", "scales", "codes_t", "scales_t")
STORED_T = ("stored_t", "stored_scales_t")

SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "amax": (("out",), ()),
    "amax_blocks": (("blocks", "nan", "tensor"), (*_FORMAT, "row", "column")),
    "quantize": (("key", "amax", "recorded", *PARTS, *PARTS_T), (*_FORMAT, *_LIMITS, *_ORDERED, "mark", *_PLACE)),
    "quantize_gated": (("amax", "recorded", *PARTS, *PARTS_T), ("activation", *_FORMAT, *_LIMITS, *_ORDERED)),
    "quantize_groups": (
        ("keys", "amax", "recorded", "overflows", *PARTS, *PARTS_T),
        ("groups", "rows_keyed", "columns_keyed", *_FORMAT, *_LIMITS),
    ),
    "quantize_aligned": (("recorded", *_ALIGNED, *STORED_T), _FORMAT),
    "quantize_gated_aligned": (("recorded", *_ALIGNED), ("activation", *_FORMAT)),
    "quantize_gradient": (("amax", "recorded", *PARTS, *PARTS_T), ("activation", "result", *_FORMAT, *_LIMITS, *_ORDERED)),
    "quantize_groups_aligned": (("overflows", *_ALIGNED, *STORED_T), ("groups", *_FORMAT)),
    "encode": (("blocks", "nan", "amax", "key", *PARTS), (*_FORMAT, "eps_bits", "largest_bits", *_PLACE)),
    "requantize": (("blocks", "nan", "amax", "key", *PARTS, "kept_tensor_scale"), (*_FORMAT, *_PLACE)),
    "dequantize": (("tensor_scale", "out"), (*_FORMAT, "row", "column")),
    "align": (("out", "out_scales"), ("element", "block_rows", "columns", "turned")),
    "transpose": (("out",), ("bits", "rows", "columns")),
    "group_rows": (("words",), ("tokens",)),
    "product": (
        ("ends", "bias", "out", "workspace"),
        (
            *("a_element", "a_block_rows", "b_element", "b_block_rows", "a_ordered", "b_ordered"),
            *("own", "tile", "fast", "accumulate"),
        ),
    ),
    "cpu.amax": (("blocks", "nan", "tensor"), ("dtype", *_FORMAT, "row", "column")),
    "cpu.quantize": (
        (*PARTS, "given_blocks", "given_nan", "given_tensor", "given_members"),
        ("dtype", *_FORMAT, "largest", "eps", "keeps", "random", "key0", "key1", *_PLACE),
    ),
    "cpu.dequantize": (("tensor_scale", "out"), ("dtype", *_FORMAT, "row", "column")),
    "amax_arrays": (("blocks", "nan", "tensor"), ("ndim", *_FORMAT)),
    "quantize_arrays": (
        ("amax", "key", *PARTS),
        ("ndim", *_FORMAT, "largest_bits", "eps_bits", "transposed", "rotated"),
    ),
    "dequantize_arrays": (("out",), ("ndim", *_FORMAT, "row", "column")),
    "product_arrays": (
        ("out",),
        ("a_element", "b_element", "length", "fraction", "mantissa", "floor", "promotion", "of_parts"),
    ),
}
"""The names of arrays behind the inputs, and of numbers, of each function. "cpu." stands before those that the CPU library
has under the name of one of the CUDA library."""

Array = tuple[tuple[int, ...], str]
"""Shape and dtype."""


class Call(NamedTuple):
    """A call, but for its inputs.

    Attributes:
        function: its name.
        arrays: by name, in order: those that the caller makes. None stands for one that comes from elsewhere or is absent.
        numbers: the last arguments, by name, in order.
    """

    function: str
    arrays: dict[str, Array | None]
    numbers: dict[str, Any]


@cache
def format_numbers(format: Format) -> tuple[int, int, int, int]:
    """The format as the libraries take it: element, block rows, block columns (0, 0 for the whole tensor), scale rule."""
    rows, columns = format.block or (0, 0)
    return ELEMENTS[format.element.name], rows, columns, RULES[format.scale.name]


def largest_multiplier(format: Format, eps: float, nominal: str) -> int:
    """fp32 bits that replace an infinite multiplier; raises what `checks.check_limits` does. `nominal` names a dtype."""
    checks.check_limits(format, eps, nominal)
    return bits.LARGEST_FINITE[nominal] if format.scale.dtype == "float32" else bits.FP32_MAX


def describe(function: str, made: Mapping[str, Array], format: Format | None = None, **numbers: Any) -> Call:
    """Puts arrays and numbers in a function's order."""
    names, numbered = SIGNATURES[function]
    if format is not None:
        numbers |= zip(_FORMAT, format_numbers(format), strict=True)
    return Call(function, {name: made.get(name) for name in names}, {name: numbers[name] for name in numbered})


def _named(names: Sequence[str], parts: Sequence[Array]) -> dict[str, Array]:
    return dict(zip(names, parts, strict=False))


@lru_cache(maxsize=4096)
def amax(
    shape: tuple[int, ...],
    format: Format,
    origin: tuple[int, int] = (0, 0),
    function: str = "amax_blocks",
    dtype: str = "float32",
) -> Call:
    """Describes the amaxes of the blocks of an array; "cpu.amax" is told its dtype. On a GPU one amax is a function's own."""
    grid = (layout.scales_shape(shape, format, origin), "int32")
    if format.block is None and function == "amax_blocks":
        return describe("amax", {"out": grid})
    made = {"blocks": grid} | ({} if format.element.has_nan else {"nan": grid})
    made |= {"tensor": ((), "int32")} if format.scale.two_level else {}
    return describe(function, made, format, dtype=DTYPE_NUMBERS[dtype], row=origin[0], column=origin[1])


@lru_cache(maxsize=4096)
def dequantize(
    shape: tuple[int, ...], dtype: str, format: Format, origin: tuple[int, int] = (0, 0), function: str = "dequantize"
) -> Call:
    """Describes how codes and scales become values of this shape."""
    place = {"row": origin[0], "column": origin[1], "dtype": DTYPE_NUMBERS[dtype], "ndim": len(shape)}
    return describe(function, {"out": (shape, dtype)}, format, **place)


# ---- the CUDA library


@lru_cache(maxsize=4096)
def quantize(
    shape: tuple[int, ...],
    dtype: str,
    cast: OperandCast,
    function: str = "quantize",
    *,
    mark: bool = True,
    origin: tuple[int, int] = (0, 0),
    whole: tuple[int, int] | None = None,
    first: int = 0,
    result: int = 0,
) -> Call:
    """Describes the cast of an operand [.., rows, columns] of a dtype, in one format, along one axis or both.

    With `mark` scales of an operand that holds an Inf become NaN. `function` is "quantize" or that of what a kernel makes,
    whose own numbers are `first` and, of a gradient, `result`. `origin` and `whole` are `origin` and `shape` of
    `numerics.quantize`.
    """
    format, turned, made = cast.format, (*shape[:-2], shape[-1], shape[-2]), {}
    numbers: dict[str, Any] = {"activation": first, "result": result}
    if cast.one_pass(stored=function == "quantize") and 0 not in shape:
        made |= {} if cast.row is None else _named(_ALIGNED, laid_parts(shape, format))
        if cast.column is not None:
            own = _named(_ALIGNED[2:], laid_parts(turned, format))
            made |= own if cast.laid[1] else _named(STORED_T, layout.parts(turned, format))
        return describe(f"{function}_aligned", made | {"recorded": ((1,), "int32")}, format, **numbers)
    # MX is aligned behind this call.
    ordered = [laid and not format.scale.e8m0 for laid in cast.laid]
    if cast.row is not None:
        made |= _named(PARTS, laid_parts(shape, format) if ordered[0] else layout.parts(shape, format, origin))
    if cast.column is not None:
        made |= _named(PARTS_T, laid_parts(turned, format) if ordered[1] else layout.parts(turned, format, origin[::-1]))
    if cast.measures:
        made["amax"] = ((2 if cast.rotates else 1,), "int32")
    if format.per_row:
        # Scratch, for each row and column that has codes.
        made["amax"] = ((sum(math.prod(made[name][0][:-1]) for name in ("codes", "codes_t") if name in made),), "int32")
    if cast.given in ("multiplier", "scale") or (mark and not format.has_tensor_scale):
        made["recorded"] = ((1,), "int32")
    numbers |= dict(zip((*_PLACE, *_ORDERED), (*origin, *(whole or (0, 0)), *ordered), strict=True), mark=mark)
    return describe(function, made, format, **numbers, **_limits(cast, dtype))


def _limits(cast: OperandCast, dtype: str) -> dict[str, int]:
    eps, largest = bits.constant_bits(cast.eps), largest_multiplier(cast.format, cast.eps, dtype)
    return dict(zip(_LIMITS, (cast.measures or cast.given == "scale", eps, largest, cast.rotates), strict=True))


@lru_cache(maxsize=4096)
def quantize_groups(shape: tuple[int, int], dtype: str, cast: OperandCast, count: int) -> Call:
    """Describes the cast of `count` groups of rows; see `definition.groups`."""
    format, words = cast.format, ((count,), "int32")
    by_row, by_column = (groups.shapes(shape, count, format, columnwise=columnwise) for columnwise in (False, True))
    numbers = {"groups": count, "rows_keyed": cast.random[0], "columns_keyed": cast.random[1]}
    if cast.one_pass() and 0 not in shape:
        made = {"overflows": words} | ({} if cast.row is None else _named(_ALIGNED, laid_parts(shape, format)))
        if cast.column is not None:
            own = laid_parts((shape[1], groups.columns_for(shape[0], count)), format)
            made |= _named(_ALIGNED[2:], own) if cast.laid[1] else _named(STORED_T, by_column)
        return describe("quantize_groups_aligned", made, format, **numbers)
    # A tensor scale is written for both directions, whichever is asked for.
    made = _named(PARTS, by_row if cast.row is not None else by_row[:0]) | _named(PARTS_T, by_column if cast.column else [])
    if format.scale.two_level:
        made |= {"tensor_scale": by_row[2], "tensor_scale_t": by_column[2]}
    if cast.given is not None:
        made["recorded"] = words
    elif cast.measures:
        made["amax"] = ((count, 2) if cast.rotates else (count,), "int32")
    if not format.has_tensor_scale:
        made["overflows"] = words
    return describe("quantize_groups", made, format, **numbers, **_limits(cast, dtype))


def laid_parts(shape: Sequence[int], format: Format) -> tuple[Array, Array]:
    """Codes and scales of matrices [.., lines, length] as the library's products read them, scales block by block.

    MX comes aligned: FP8 codes in rows filled up to 16, a scale for 128. Others are FP8 in blocks of 1x128 or of rows.
    """
    *leading, lines, length = shape
    block, width = format.block or (0, 0), length
    if format.scale.e8m0:
        block, width = (1, 128), -(-length // 16) * 16
    return ((*leading, lines, width), "uint8"), ((*leading, -(-length // block[1]), -(-lines // 4) * 4), "float32")


@lru_cache(maxsize=4096)
def align(shape: tuple[int, ...], format: Format, turned: bool = False) -> Call:
    """Describes how MX codes of matrices [.., rows, columns] get one scale for 128 elements; `turned`: of the transposed."""
    *leading, rows, columns = shape
    made = laid_parts((*leading, columns, rows) if turned else shape, format)
    return describe("align", _named(("out", "out_scales"), made), format, columns=columns, turned=turned)


def transpose(shape: Sequence[int], format: Format) -> Call:
    """Describes how packed codes of matrices [.., rows, columns] become those of the transposed."""
    *leading, rows, columns = shape
    codes = layout.codes_shape((*leading, columns, rows), format)
    return describe("transpose", {"out": (codes, "uint8")}, bits=format.element.bits, rows=rows, columns=columns)


@lru_cache(maxsize=4096)
def encode(
    function: str,
    shape: tuple[int, ...],
    dtype: str,
    format: Format,
    eps: float = 0.0,
    origin: tuple[int, int] = (0, 0),
    whole: tuple[int, int] | None = None,
) -> Call:
    """Describes a cast by amaxes that were measured before: "encode" with new scales, "requantize" with such as go on."""
    made = _named(PARTS, layout.parts(shape, format, origin))
    numbers = {"eps_bits": bits.constant_bits(eps), "largest_bits": largest_multiplier(format, eps, dtype)}
    place = dict(zip(_PLACE, (*origin, *(whole or (0, 0))), strict=True))
    return describe(function, made, format, **numbers, **place)


# ---- the CPU library


@lru_cache(maxsize=4096)
def cpu_quantize(
    shape: tuple[int, ...],
    dtype: str,
    format: Format,
    eps: float = 0.0,
    nominal: str | None = None,
    origin: tuple[int, int] = (0, 0),
    whole: tuple[int, int] | None = None,
    *,
    keeps: bool = False,
) -> Call:
    """Describes a cast to nearest; with `keeps` by scales that go on from those they were. A key's numbers are 0."""
    made = _named(PARTS, layout.parts(shape, format, origin))
    largest = bits.FP32_MAX if keeps else largest_multiplier(format, eps, nominal or dtype)
    index = whole or (origin[0] + shape[-2], origin[1] + shape[-1])
    numbers = {"dtype": DTYPE_NUMBERS[dtype], "largest": largest, "eps": eps, "keeps": keeps, "random": 0, "key0": 0, "key1": 0}
    return describe("cpu.quantize", made, format, **numbers, **dict(zip(_PLACE, (*origin, *index), strict=True)))


# ---- the CPU library, for programs whose arguments are all arrays. An absent one has no elements.


def amax_arrays(shape: tuple[int, ...], format: Format) -> Call:
    """Describes the amaxes of the blocks of an array."""
    grid = layout.scales_shape(shape, format)
    found = (grid, (0,) * len(shape) if format.element.has_nan else grid, () if format.scale.two_level else (0,))
    made = _named(("blocks", "nan", "tensor"), [(one, "int32") for one in found])
    return describe("amax_arrays", made, format, ndim=len(shape))


def quantize_arrays(
    shape: tuple[int, ...], dtype: str, format: Format, eps: float, *, transposed: bool = False, rotated: bool = False
) -> Call:
    """Describes how an array is quantized, or with `transposed` its last two axes swapped, and with `rotated` rotated then."""
    shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    made = {"tensor_scale": ((0,), "float32")} | _named(PARTS, layout.parts(shape, format))
    numbers = {"largest_bits": largest_multiplier(format, eps, dtype), "eps_bits": bits.constant_bits(eps)}
    return describe(
        "quantize_arrays", made, format, ndim=len(shape), transposed=int(transposed), rotated=int(rotated), **numbers
    )


_FACTORS = ELEMENTS | {"bfloat16": 6, "float16": 7}
"""Numbers of what a product multiplies: kernels/cpu/product.cc."""


def sums_here(summation: Summation) -> bool:
    """Returns whether the CPU library has a summation. It has no fused multiply-adds in order and no units of FP4 alone."""
    return summation.fraction is not None and summation.group == 1


SUMS_HERE = tuple(name for name, one in SUMMATIONS.items() if sums_here(one))
"""Names of the summations of the CPU library."""


def product_inputs(a: Side, b: Side, summation: Summation, bias: Any, addend: Any, *, one: Any, absent: Any) -> list[Any]:
    """Returns the inputs of `product_arrays` in its order. `one` is float32 [1, 1], `absent` has no elements."""
    inner = summation.scale_block is not None
    scales = (one, one, a.scales, b.scales) if inner else (a.scales, b.scales, absent, absent)
    others = (absent if x is None else bits.to_float(bits.from_float(x), "float32") for x in (bias, addend))
    return [a.codes, b.codes, *scales, *others]


def product_arrays(a: Side, b: Side, summation: Summation) -> Call:
    """Describes a @ b^T with defined bits, of [m, k] and [n, k]; raises ValueError for a summation of the definition alone."""
    if not sums_here(summation):
        raise ValueError(f"the CPU library doesn't have {summation}, but {', '.join(SUMS_HERE)}; definition.products has all")
    fields = {name: getattr(summation, name) for name in ("length", "fraction", "mantissa", "floor")}
    numbers = {"a_element": _FACTORS[a.kind], "b_element": _FACTORS[b.kind], "promotion": summation.promotion or 0}
    made = {"out": ((a.codes.shape[0], b.codes.shape[0]), "float32")}
    return describe("product_arrays", made, **numbers, **fields, of_parts=int(a.of_parts or b.of_parts))

"""Element formats, scale formats, and the named formats that combine them.

A `Format` is an immutable value identified by its name: `Format.parse(name)` returns the single instance of that name, and
copying or unpickling returns the same instance. A format can therefore be a static argument in JAX, a constant in
torch.compile, and a dictionary key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ElementFormat:
    """A signed element: a float of `exponent_bits` and `mantissa_bits`, or a fixed-point integer.

    The magnitude code of a float is its exponent field followed by its mantissa field. INT8 has a magnitude code with one
    exponent bit (value = code / 64) and is stored in two's complement.

    Attributes:
        name: the field's name, such as "e4m3".
        bits: bits per code: 8, 6 or 4.
        exponent_bits: bits of the exponent field.
        mantissa_bits: bits of the mantissa field.
        bias: exponent bias; the smallest normal exponent is `1 - bias`.
        emax: exponent of the largest finite value.
        max: largest finite value.
        max_code: magnitude code of `max`.
        nan_code: code written for NaN.
        has_nan: whether `nan_code` decodes to NaN; if not, the block's scale is written as NaN.
        signed: "magnitude" (sign bit above the magnitude code) or "complement" (two's complement, no negative zero).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max: float
    max_code: int
    nan_code: int
    has_nan: bool
    signed: Literal["magnitude", "complement"] = "magnitude"

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value; subnormals keep the spacing of this exponent."""
        return 1 - self.bias

    @property
    def native_dtype(self) -> str:
        """Name of the matching dtype in ml_dtypes, JAX and PyTorch; int8 elements are 64 times the values."""
        if self.signed == "complement":
            return self.name
        # The suffix "fn" means finite: no infinities, at most a NaN. Only E5M2 has infinities.
        return f"float{self.bits}_{self.name}" + ("" if self.name == "e5m2" else "fn")

    @property
    def packed(self) -> bool:
        """Whether several codes share a byte."""
        return self.bits < 8

    @property
    def codes_per_group(self) -> int:
        """Smallest number of codes that fills whole bytes: 1 at 8 bits, 4 at 6 bits, 2 at 4 bits."""
        return {8: 1, 6: 4, 4: 2}[self.bits]

    def __str__(self) -> str:
        return self.name


E4M3 = ElementFormat("e4m3", 8, 4, 3, bias=7, emax=8, max=448.0, max_code=0x7E, nan_code=0x7F, has_nan=True)
E5M2 = ElementFormat("e5m2", 8, 5, 2, bias=15, emax=15, max=57344.0, max_code=0x7B, nan_code=0x7F, has_nan=True)
E3M2 = ElementFormat("e3m2", 6, 3, 2, bias=3, emax=4, max=28.0, max_code=31, nan_code=31, has_nan=False)
E2M3 = ElementFormat("e2m3", 6, 2, 3, bias=1, emax=2, max=7.5, max_code=31, nan_code=31, has_nan=False)
E2M1 = ElementFormat("e2m1", 4, 2, 1, bias=1, emax=2, max=6.0, max_code=7, nan_code=7, has_nan=False)
INT8 = ElementFormat(
    "int8", 8, 1, 6, bias=1, emax=0, max=127 / 64, max_code=127, nan_code=127, has_nan=False, signed="complement"
)

ELEMENTS = {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1, INT8)}


@dataclass(frozen=True)
class ScaleFormat:
    """How a block's scale is stored and computed from the block's amax.

    Attributes:
        name: "fp32", "pow2" (fp32 with a zero mantissa), "e8m0_ceil", "e8m0_floor", or "e4m3" (below one fp32 scale per
            tensor). "e4m3_guarded" leaves room so that nothing saturates; "e4m3_4over6" tries two scales per block and keeps
            the better one, with suffix "_448" for the bound and "_mse" for squared errors.
        dtype: name of the storage dtype, "float32" or "uint8".
        nan_code: the stored byte that means NaN, or None for fp32 scales.
        bound: for two levels of scales, the block scale of a block that contains the tensor's amax; else None.
        guard: the fraction of the element's `max` to which a block's amax is mapped. 16/17 is enough to avoid saturation,
            because rounding to nearest reduces an E4M3 scale to no less than 16/17 of its value.
        four_over_six: whether the block's elements choose its scale: of the scales that map the amax to 6 and to 4, the one
            with the smaller error.
        squared_errors: whether 4-over-6 sums squared errors instead of absolute errors.
    """

    name: str
    dtype: Literal["float32", "uint8"]
    nan_code: int | None
    bound: float | None = None
    guard: float = 1.0
    four_over_six: bool = False
    squared_errors: bool = False

    @property
    def native_dtype(self) -> str:
        """Name of the matching dtype in ml_dtypes, JAX and PyTorch."""
        if self.dtype == "float32":
            return self.dtype
        return "float8_e4m3fn" if self.two_level else "float8_e8m0fnu"

    @property
    def e8m0(self) -> bool:
        """Whether scales are MX scales: bytes that hold an exponent."""
        return self.name in ("e8m0_ceil", "e8m0_floor")

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        return self.e8m0 or self.name == "pow2"

    @property
    def two_level(self) -> bool:
        """Whether one fp32 scale per tensor multiplies the block scales."""
        return self.bound is not None

    def __str__(self) -> str:
        return self.name


FP32_SCALE = ScaleFormat("fp32", "float32", None)
POW2_SCALE = ScaleFormat("pow2", "float32", None)
E8M0_CEIL = ScaleFormat("e8m0_ceil", "uint8", 0xFF)
E8M0_FLOOR = ScaleFormat("e8m0_floor", "uint8", 0xFF)
E4M3_SCALE = ScaleFormat("e4m3", "uint8", 0x7F, bound=448.0)
E4M3_GUARDED = ScaleFormat("e4m3_guarded", "uint8", 0x7F, bound=448.0, guard=16 / 17)
# A bound of 256 leaves room for the alternative scale, which is 1.5 times as large; 448 gives the scales of plain NVFP4.
E4M3_FOUR_OVER_SIX = tuple(
    ScaleFormat(f"e4m3_4over6{bounded}{error}", "uint8", 0x7F, bound, four_over_six=True, squared_errors=error == "_mse")
    for error in ("", "_mse")
    for bounded, bound in (("", 256.0), ("_448", 448.0))
)


WHOLE_ROW = 1 << 30
"""Columns of a block that is a whole row. No row may be longer, so a row is always one block, even if it is sharded."""


def block_name(block: tuple[int, int] | None) -> str:
    """Returns a block shape in words: "per tensor", "per row", or for example "1x128"."""
    if block is None:
        return "per tensor"
    return "per row" if block[1] == WHOLE_ROW else f"{block[0]}x{block[1]}"


# Written out for type checkers, which then know a misspelt name; a test compares it with `NAMES`.
# fmt: off
FormatName = Literal[
    "fp8_e4m3", "fp8_e4m3_pow2", "fp8_e4m3_row", "fp8_e4m3_row_pow2", "fp8_e4m3_1x128", "fp8_e4m3_1x128_fp32",
    "fp8_e4m3_128x128", "fp8_e4m3_128x128_fp32", "fp8_e5m2", "fp8_e5m2_pow2", "fp8_e5m2_row", "fp8_e5m2_row_pow2",
    "fp8_e5m2_1x128", "fp8_e5m2_1x128_fp32", "fp8_e5m2_128x128", "fp8_e5m2_128x128_fp32", "mxfp8_e4m3", "mxfp8_e4m3_floor",
    "mxfp8_e4m3_32x32", "mxfp8_e4m3_32x32_floor", "mxfp8_e5m2", "mxfp8_e5m2_floor", "mxfp8_e5m2_32x32",
    "mxfp8_e5m2_32x32_floor", "mxfp6_e3m2", "mxfp6_e3m2_floor", "mxfp6_e3m2_32x32", "mxfp6_e3m2_32x32_floor", "mxfp6_e2m3",
    "mxfp6_e2m3_floor", "mxfp6_e2m3_32x32", "mxfp6_e2m3_32x32_floor", "mxfp4_e2m1", "mxfp4_e2m1_floor", "mxfp4_e2m1_32x32",
    "mxfp4_e2m1_32x32_floor", "mxint8", "mxint8_floor", "mxint8_32x32", "mxint8_32x32_floor", "nvfp4", "nvfp4_16x16",
    "nvfp4_4over6", "nvfp4_4over6_16x16", "nvfp4_4over6_448", "nvfp4_4over6_448_16x16", "nvfp4_4over6_mse",
    "nvfp4_4over6_mse_16x16", "nvfp4_4over6_448_mse", "nvfp4_4over6_448_mse_16x16", "nvfp4_guarded",
]
# fmt: on
"""The name of a format, as an annotation. `Format.parse` turns any other string into a format, or raises."""

_FORMATS: dict[str, Format] = {}
"""The single instance of each name, in order of creation."""


class _Known:
    """Attributes derived from a format's fields. They are computed once because every call reads them."""

    per_tensor: bool
    per_row: bool
    has_tensor_scale: bool
    square: bool


@dataclass(frozen=True, eq=False, init=False)
class Format(_Known):
    """Element format, block shape and scale format of a quantized array, identified by name.

    Attributes:
        name: the identity, such as "mxfp8_e4m3_32x32".
        element: format of the codes.
        block: (rows, columns) that share a scale; None for one scale per tensor, (1, `WHOLE_ROW`) for one per row.
        scale: format of the scales.
        per_tensor: whether the whole tensor shares one scale.
        per_row: whether each row has one scale, for any length up to `WHOLE_ROW`.
        has_tensor_scale: whether one scale applies to the whole tensor, alone or above block scales.
        square: whether transposing an array just transposes its codes and scales: square blocks, or one scale per tensor.

    Get a format by `Format.parse(name)`; `blockfp.formats.NAMES` lists the names.
    """

    name: str
    element: ElementFormat = field(repr=False)
    block: tuple[int, int] | None = field(repr=False)
    scale: ScaleFormat = field(repr=False)

    # torch.compile copies frozen dataclasses by calling them with their fields.
    def __new__(cls, name: str, element: ElementFormat, block: tuple[int, int] | None, scale: ScaleFormat) -> Format:
        return _FORMATS.get(name) or super().__new__(cls)

    def __init__(self, name: str, element: ElementFormat, block: tuple[int, int] | None, scale: ScaleFormat):
        if name in _FORMATS:
            if (self.element, self.block, self.scale) != (element, block, scale):
                raise ValueError(f"format {name!r} already exists with another definition")
            return
        values = {
            "name": name,
            "element": element,
            "block": block,
            "scale": scale,
            "per_tensor": block is None,
            "per_row": block == (1, WHOLE_ROW),
            "has_tensor_scale": block is None or scale.two_level,
            "square": block is None or block[0] == block[1],
        }
        for field_name, value in values.items():
            object.__setattr__(self, field_name, value)
        _FORMATS[name] = self

    @staticmethod
    def parse(name: Format | str) -> Format:
        """Returns the format with this name; a `Format` is returned unchanged.

        Raises:
            ValueError: no format has this name; the message lists similar names.
            TypeError: `name` is neither a string nor a `Format`.
        """
        if isinstance(name, Format):
            return name
        if not isinstance(name, str):
            raise TypeError(f"format must be a Format or its name, got {type(name).__name__}: {name!r}")
        if name not in _FORMATS:
            import difflib

            near = difflib.get_close_matches(name[:100].lower(), _FORMATS, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else "see blockfp.formats.NAMES"
            raise ValueError(f"format {name!r} is not known; {hint}")
        return _FORMATS[name]

    @property
    def bytes_per_element(self) -> float:
        """Storage of a large array in bytes per element: the code plus its share of the block's scale."""
        scale_bytes = 4 if self.scale.dtype == "float32" else 1
        share = 0.0 if self.block is None else scale_bytes / (self.block[0] * self.block[1])
        return self.element.bits / 8 + share

    def __str__(self) -> str:
        return self.name

    def __reduce__(self):
        return (Format.parse, (self.name,))

    def __copy__(self) -> Format:
        return self

    def __deepcopy__(self, memo) -> Format:
        return self


def _name_formats() -> None:
    for element in (E4M3, E5M2):
        fp8 = f"fp8_{element}"
        Format(fp8, element, None, FP32_SCALE)
        Format(f"{fp8}_pow2", element, None, POW2_SCALE)
        row = (1, WHOLE_ROW)
        Format(f"{fp8}_row", element, row, FP32_SCALE)
        Format(f"{fp8}_row_pow2", element, row, POW2_SCALE)
        for block in ((1, 128), (128, 128)):
            name = f"{fp8}_{block[0]}x{block[1]}"
            Format(name, element, block, POW2_SCALE)
            Format(f"{name}_fp32", element, block, FP32_SCALE)
    for family, element in (
        ("mxfp8", E4M3),
        ("mxfp8", E5M2),
        ("mxfp6", E3M2),
        ("mxfp6", E2M3),
        ("mxfp4", E2M1),
        ("mx", INT8),
    ):
        name = "mxint8" if element is INT8 else f"{family}_{element}"
        for block, suffix in (((1, 32), ""), ((32, 32), "_32x32")):
            Format(name + suffix, element, block, E8M0_CEIL)
            Format(f"{name}{suffix}_floor", element, block, E8M0_FLOOR)
    for scale in (E4M3_SCALE, *E4M3_FOUR_OVER_SIX):
        name = scale.name.replace("e4m3", "nvfp4")
        Format(name, E2M1, (1, 16), scale)
        Format(f"{name}_16x16", E2M1, (16, 16), scale)
    Format("nvfp4_guarded", E2M1, (1, 16), E4M3_GUARDED)


_name_formats()

NAMES: tuple[str, ...] = tuple(_FORMATS)
"""Names of all formats, grouped by family."""

FORMATS: tuple[Format, ...] = tuple(_FORMATS.values())
"""All formats, in the order of `NAMES`."""

# Constants for frequently used formats; get the others by name.
FP8_E4M3 = _FORMATS["fp8_e4m3"]
FP8_E5M2 = _FORMATS["fp8_e5m2"]
FP8_ROW = _FORMATS["fp8_e4m3_row"]
FP8_BLOCK_1x128 = _FORMATS["fp8_e4m3_1x128"]
FP8_BLOCK_128x128 = _FORMATS["fp8_e4m3_128x128"]
MXFP8 = _FORMATS["mxfp8_e4m3"]
MXFP8_32x32 = _FORMATS["mxfp8_e4m3_32x32"]
MXFP6 = _FORMATS["mxfp6_e3m2"]
MXFP4 = _FORMATS["mxfp4_e2m1"]
MXINT8 = _FORMATS["mxint8"]
NVFP4 = _FORMATS["nvfp4"]
NVFP4_16x16 = _FORMATS["nvfp4_16x16"]
NVFP4_4OVER6 = _FORMATS["nvfp4_4over6"]
NVFP4_4OVER6_16x16 = _FORMATS["nvfp4_4over6_16x16"]

"""The numbers by which the kernel libraries know formats and dtypes, on the CPU and on the GPU alike."""

from __future__ import annotations

from functools import cache

from ..definition import bits, checks
from ..formats import Format

# The numbers of kernels/include/blockfp/elements.h, scales.h and dtypes.h.
ELEMENTS = {name: index for index, name in enumerate(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8"))}
_FOUR_OVER_SIX = ("e4m3_4over6", "e4m3_4over6_448", "e4m3_4over6_mse", "e4m3_4over6_448_mse")
_RULES = ("fp32", "pow2", "e8m0_ceil", "e8m0_floor", "e4m3", "e4m3_guarded", *_FOUR_OVER_SIX)
RULES = {name: index for index, name in enumerate(_RULES)}
DTYPE_NUMBERS = {name: index for index, name in enumerate(bits.FLOAT_DTYPES)}


@cache
def format_numbers(format: Format) -> tuple[int, int, int, int]:
    """The format as the libraries take it: element, block rows, block columns (0, 0 for the whole tensor), scale rule."""
    rows, columns = format.block or (0, 0)
    return ELEMENTS[format.element.name], rows, columns, RULES[format.scale.name]


def cuda_rotates(format: Format) -> bool:
    """Returns True for a format whose CUDA kernels rotate its columns; for others array operations do, before the kernel."""
    return format.scale.two_level and not format.scale.four_over_six and not format.square


def largest_multiplier(format: Format, eps: float, nominal: str) -> int:
    """fp32 bits of the value that replaces an infinite multiplier.

    Args:
        format: the format.
        eps: as for `numerics.quantize`.
        nominal: name of the dtype whose largest finite value counts.

    Raises:
        ValueError: what `checks.check_limits` refuses.
    """
    checks.check_limits(format, eps, nominal)
    return bits.LARGEST_FINITE[nominal] if format.scale.dtype == "float32" else bits.FP32_MAX

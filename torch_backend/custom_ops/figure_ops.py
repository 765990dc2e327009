"""The custom op that measures what quantization did to an operand.

blockfp::quantization_figures   (x, parts, format, rotate, origin) -> float64 [figures]
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp.check.measure import saturated
from blockfp.definition import layout
from blockfp.formats import Format

from . import kernels
from .dequantize_plans import dequantize_parts
from .library import define, fake, impl

FIGURES = ("amax", "elements", "saturated", "flushed", "signal", "noise")
"""The figures: the largest finite magnitude, counts, and the sums of squares of values and of errors."""

quantization_figures = define(
    "quantization_figures(Tensor x, Tensor[] parts, str format, bool rotate, SymInt[] origin) -> Tensor"
)


@impl(quantization_figures)
def _figures(x: Tensor, parts: list[Tensor], format: str, rotate: bool, origin: list[int]) -> Tensor:
    parsed, columns = Format.parse(format), x.shape[-1]
    element = parsed.element
    back = dequantize_parts(parts, parsed, torch.float32, columns, (origin[0], origin[1]))
    values = (kernels.rotate(x) if rotate else x).float()
    finite = values.isfinite() & back.isfinite()
    magnitude = torch.where(values.isfinite(), values.abs(), 0.0)
    cut = saturated(values, back, layout.unpack(parts[0], element.bits, columns), element)
    error = torch.where(finite, values - back, 0.0)
    figures = (
        magnitude.amax() if magnitude.numel() else magnitude.sum(),
        torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device),
        cut.sum(),
        (finite & (values != 0) & (back == 0)).sum(),
        torch.where(finite, magnitude, 0.0).double().square().sum(),
        error.double().square().sum(),
    )
    return torch.stack([figure.double() for figure in figures])


@fake(quantization_figures)
def _figures_fake(x: Tensor, parts: list[Tensor], format: str, rotate: bool, origin: list[int]) -> Tensor:
    return x.new_empty((len(FIGURES),), dtype=torch.float64)

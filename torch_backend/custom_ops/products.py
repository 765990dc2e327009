"""The custom op that multiplies two operands, quantized or not, as the core's table says (`kernels.routes`).

    blockfp::product   (a, a_format, b, b_format, n, k, bias, dtype, fast_accum, columnwise, index, origin, a_origin) -> [m, n]

a @ b^T + bias, for a [m, k] and b [n, k]. An operand is the list of its parts: codes, scales and maybe tensor_scale, or the
values alone where it has no format. `columnwise` says that b is stored the other way round, [k, n]: a weight, of which only
the rowwise codes exist, in the product that contracts its rows. What that needs is derived here and freed with the call.
`index` takes one matrix of a stack. b may also be one `QuantizedTensor`: the op table takes it apart, after dynamo has gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils.flop_counter import register_flop_formula

from blockfp.definition import layout, numerics
from blockfp.formats import Format
from blockfp.kernels import cuda_library
from blockfp.kernels.routes import Route, has_tensor_scale, route

from . import cuda, ops
from .views import view_codes, view_scales

_library = torch.library.Library("blockfp", "FRAGMENT")
_library.define(
    "product(Tensor[] a, str? a_format, Tensor[] b, str? b_format, SymInt n, SymInt k, Tensor? bias, ScalarType dtype, "
    "bool fast_accum=False, bool columnwise=False, int? index=None, SymInt[] origin=[0, 0], SymInt[] a_origin=[0, 0]) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

product = torch.ops.blockfp.product.default


class Operand(NamedTuple):
    """[size, k]: the values, or codes and scales of a format."""

    format: Format | None
    data: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None
    k: int
    origin: tuple[int, int] = (0, 0)

    @property
    def factor(self) -> Tensor:
        """The scale of the whole tensor, float32 of one element."""
        factor = self.scales if self.format is not None and self.format.per_tensor else self.tensor_scale
        assert factor is not None
        return factor

    def values(self, dtype: torch.dtype, *, factored: bool = False) -> Tensor:
        """The values in `dtype`; `factored` leaves out the scale of the whole tensor."""
        if self.format is None or self.scales is None:
            return self.data.to(dtype)
        scales, tensor_scale = self.scales, self.tensor_scale
        if factored and has_tensor_scale(self.format):
            scales = torch.ones_like(scales) if self.format.per_tensor else scales
            tensor_scale = None if tensor_scale is None else torch.ones_like(tensor_scale)
        return ops.dequantize(self.data, scales, tensor_scale, self.format.name, dtype, self.k, list(self.origin))


@lru_cache(maxsize=4096)
def route_on(device: torch.device, a: Format | None, b: Format | None, m: int, n: int, k: int, in_order: bool = True) -> Route:
    """The route of a product on a device; see `kernels.routes.route`."""
    if device.type != "cuda":
        return route(a, b, platform="cpu", in_order=in_order)
    capability = torch.cuda.get_device_capability(device)
    return route(a, b, platform="cuda", capability=capability, m=m, n=n, k=k, in_order=in_order)


@torch.library.impl(_library, "product", "CompositeExplicitAutograd")
def _product(
    a: Sequence[Tensor],
    a_format: str | None,
    b: Sequence[Tensor],
    b_format: str | None,
    n: int,
    k: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
    columnwise: bool = False,
    index: int | None = None,
    origin: Sequence[int] = (0, 0),
    a_origin: Sequence[int] = (0, 0),
) -> Tensor:
    left = _operand(a, a_format, k, (a_origin[0], a_origin[1]))
    if index is not None:
        b = [part[index if part.shape[0] > 1 else 0] if part.ndim > 2 else part for part in b]
    right = _operand(b, b_format, n if columnwise else k, (origin[0], origin[1]))
    m = left.data.shape[0]
    if 0 in (m, n, k):
        out = torch.zeros((m, n), dtype=dtype, device=left.data.device)
        return out if bias is None else out + bias
    across = columnwise and right.format is not None and not right.format.square
    chosen = route_on(left.data.device, left.format, right.format, m, n, k, not (across or _cut(right) or _cut(left)))
    if chosen.mode in ("dequantize", "plain"):
        return _dequantized(left, right, bias, dtype, chosen, columnwise)
    if columnwise:
        right = _turned(right, n, k)
    return _MODES[chosen.mode](left, right, bias, dtype, fast_accum)


def _operand(parts: Sequence[Tensor], format: str | None, k: int, origin: tuple[int, int] = (0, 0)) -> Operand:
    if format is None:
        return Operand(None, parts[0], None, None, k)
    return Operand(Format.parse(format), parts[0], parts[1], parts[2] if len(parts) > 2 else None, k, origin)


def _cut(x: Operand) -> bool:
    """Whether x begins inside a block."""
    rows, columns = (x.format and x.format.block) or (1, 1)
    return bool(x.origin[0] % rows or x.origin[1] % columns)


def _turned(b: Operand, n: int, k: int) -> Operand:
    """[n, k] of what is stored as [k, n]."""
    assert b.format is not None
    run = cuda if cuda_library.available() and b.data.is_cuda else numerics
    codes, scales = run.transpose(b.data, b.scales, b.format, columns=n)
    return b._replace(data=codes.contiguous(), scales=scales.contiguous(), k=k)


def _dequantized(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, chosen: Route, columnwise: bool) -> Tensor:
    """Values multiplied in a dtype that holds all of them; the sums are fp32."""
    working = getattr(torch, chosen.dtype) if chosen.dtype else torch.promote_types(a.data.dtype, b.data.dtype)
    for x in (a, b):
        if x.format is None:
            working = torch.promote_types(working, x.data.dtype)
    left, right = (x.values(working, factored=chosen.scale_product) for x in (a, b))
    right = right if columnwise else right.mT
    if chosen.scale_product:
        wide = working is not torch.float32
        out = torch.mm(left, right, out_dtype=torch.float32) if wide else torch.mm(left, right)
        factors = [x.factor for x in (a, b) if x.format is not None and has_tensor_scale(x.format)]
        # One factor, so that the product is read once. It is zero only where the operands' amaxes multiply to less than 1e-31.
        factor = (factors[0] if len(factors) == 1 else factors[0] * factors[1]).view(())
        if bias is None:
            return torch.mul(out, factor, out=torch.empty_like(out, dtype=dtype))
        return torch.addcmul(bias.float(), out, factor).to(dtype)
    if working is dtype or not left.is_cuda or working is torch.float32:
        out = torch.mm(left, right) if bias is None else torch.addmm(bias.to(working), left, right)
        return out.to(dtype)
    out = torch.mm(left, right, out_dtype=torch.float32)
    return (out if bias is None else out + bias).to(dtype)


def _per_tensor(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    (left, right), _ = _elements(a, b)
    # cuBLAS adds a bias of 16 bits only.
    fused = bias if bias is not None and bias.dtype is dtype and dtype is not torch.float32 else None
    # F.scaled_mm comes to the same call of cuBLAS, after a third more of the host's time.
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    out = multiply(left, right.t(), a.factor, b.factor, fused, None, dtype, fast_accum)
    return out if bias is None or fused is not None else (out + bias).to(dtype)


def _block(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    codes, formats = _elements(a, b)
    kinds, scales = [], []
    for x, format in zip((a, b), formats, strict=True):
        assert x.scales is not None
        if format.block == (1, 128):
            kinds.append(ScalingType.BlockWise1x128)
            # Strides (1, m).
            turned = cuda.transpose_words(x.scales) if cuda_library.available() else x.scales.t().contiguous()
            scales.append(turned.t())
        else:
            kinds.append(ScalingType.BlockWise128x128)
            # Padded to four blocks along k, and k first.
            scales.append(layout.pad_scales(x.scales, 1, 4).t())
    # Fast accumulation is not offered.
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kinds[0], scales[1], kinds[1], output_dtype=dtype)
    return out if bias is None else (out + bias).to(dtype)


def _elements(a: Operand, b: Operand) -> tuple[list[Tensor], list[Format]]:
    formats = [x.format for x in (a, b) if x.format is not None]
    return [view_codes(x.data, f) for x, f in zip((a, b), formats, strict=True)], formats


def _interleaved(x: Operand) -> Tensor:
    """One scale for each row and block along k, in the order of the matrix units."""
    assert x.format is not None
    assert x.format.block is not None
    assert x.scales is not None
    rows = x.data.shape[0]
    scales = layout.repeat_scales(x.scales, x.format.block[0], rows) if x.format.block[0] > 1 else x.scales
    return layout.interleave_scales(scales)


def _mx(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    codes, formats = _elements(a, b)
    scales = [view_scales(_interleaved(x), f) for x, f in zip((a, b), formats, strict=True)]
    kind, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kind, scales[1], kind, swizzle, swizzle, output_dtype=dtype)
    return out if bias is None else (out + bias).to(dtype)


def _nvfp4(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    codes, formats = _elements(a, b)
    scales = [[view_scales(_interleaved(x), f), x.tensor_scale] for x, f in zip((a, b), formats, strict=True)]
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kinds, scales[1], kinds, swizzles, swizzles, output_dtype=dtype)
    return out if bias is None else (out + bias).to(dtype)


_MODES = {"tensor": _per_tensor, "block": _block, "mx": _mx, "nvfp4": _nvfp4}


@register_flop_formula(torch.ops.blockfp.product)
def _product_flops(a, a_format, b, b_format, n, k, *_, out_shape, **__) -> int:
    """What torch's counters count of the same product in high precision."""
    return 2 * math.prod(out_shape) * k


@torch.library.register_fake("blockfp::product", lib=_library)
def _product_fake(
    a, a_format, b, b_format, n, k, bias, dtype, fast_accum=False, columnwise=False, index=None, origin=(0, 0), a_origin=(0, 0)
):
    return a[0].new_empty((a[0].shape[0], n), dtype=dtype)

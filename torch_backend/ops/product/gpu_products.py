"""Products on a GPU: the CUDA library's, of codes or of bfloat16, and those of MX and NVFP4 operands on Blackwell, by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from blockfp.definition import layout
from blockfp.formats import Format
from blockfp.kernels import cuda_library, switch
from blockfp.kernels.products import Plan, plan, plan_values

from ..library import maker, name_of, view_codes, view_scales
from .matrix import Matrix

Multiply = Callable[..., Tensor]
"""A function of both operands' parts, a bias or None, the groups' ends, and the output, which single products allocate; it
returns the output."""


@switch.memo
def on_codes(
    device: torch.device,
    a: Format,
    b: Format,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    bias: torch.dtype | None,
    **options: Any,
) -> Multiply:
    """Plans a product of codes on a CUDA device; `options` are those of `kernels.products.plan`.

    An operand is its codes and scales.
    """
    planned = plan(
        a,
        b,
        m,
        n,
        k,
        capability=torch.cuda.get_device_capability(device),
        cublas=int(cuda_library.library().cublas_version()),
        dtype=name_of(dtype),
        bias=None if bias is None else name_of(bias),
        **options,
    )
    # Grouped products pass their own `out`.
    return _carried_out(planned, device, dtype, None if options.get("groups") else (m, n))


@switch.memo
def on_values(device: torch.device, m: int, n: int, k: int, dtype: torch.dtype) -> Multiply:
    """Plans a product of bfloat16 by the library's own kernel; an operand is its values and their scale, float32 [1]."""
    return _carried_out(plan_values(m, n, k), device, dtype, (m, n))


def _carried_out(planned: Plan, device: torch.device, dtype: torch.dtype, shape: tuple[int, int] | None) -> Multiply:
    """Returns the function that runs a plan; without a shape it is given its output."""
    workspace_bytes, adds_bias, numbers = planned.workspace, planned.adds_bias, planned.numbers
    multiply = cuda_library.library().product
    new = None if shape is None else maker(shape, dtype, device)
    new_workspace = maker((workspace_bytes,), torch.uint8, device) if workspace_bytes else None

    def run(
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        bias: Tensor | None,
        ends: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            assert new is not None
            out = new()
        workspace = None if new_workspace is None else new_workspace()
        added = bias.contiguous().resolve_neg() if bias is not None and adds_bias else None
        # The library reads contiguous codes at addresses divisible by 16.
        left, left_scales, right, right_scales = a[0].contiguous(), a[1].contiguous(), b[0].contiguous(), b[1].contiguous()
        if left.data_ptr() % 16:
            left = left.clone()
        if right.data_ptr() % 16:
            right = right.clone()
        multiply(left, right, left_scales, right_scales, ends, added, out, workspace, *numbers)
        return out if bias is None or adds_bias else (out + bias).to(dtype)

    return run


# ---- Blackwell


def _elements(a: Matrix, b: Matrix) -> tuple[list[Tensor], list[Format]]:
    formats = [x.format for x in (a, b) if x.format is not None]
    return [view_codes(x.parts[0], f) for x, f in zip((a, b), formats, strict=True)], formats


def _interleaved(x: Matrix) -> Tensor:
    """Returns one scale for each row and block along k, in the matrix units' order."""
    assert x.format is not None
    assert x.format.block is not None
    codes, scales = x.parts[:2]
    if x.format.block[0] > 1:
        scales = layout.repeat_scales(scales, x.format.block[0], codes.shape[0])
    return layout.interleave_scales(scales)


def _mx(a: Matrix, b: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    codes, formats = _elements(a, b)
    scales = [view_scales(_interleaved(x), f) for x, f in zip((a, b), formats, strict=True)]
    kind, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    sums = dtype if bias is None else torch.float32
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kind, scales[1], kind, swizzle, swizzle, output_dtype=sums)
    return out if bias is None else (out + bias).to(dtype)


def _nvfp4(a: Matrix, b: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    codes, formats = _elements(a, b)
    scales = [[view_scales(_interleaved(x), f), x.factor] for x, f in zip((a, b), formats, strict=True)]
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    sums = dtype if bias is None else torch.float32
    out = F.scaled_mm(codes[0], codes[1].t(), scales[0], kinds, scales[1], kinds, swizzles, swizzles, output_dtype=sums)
    return out if bias is None else (out + bias).to(dtype)


BLACKWELL = {"mx": _mx, "nvfp4": _nvfp4}
"""Products by route mode: (a, b, bias, dtype) -> a @ b^T + bias."""

"""Products that the CUDA library carries out on a device: of codes, or of bfloat16 by its own kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels import cuda_library, switch
from blockfp.kernels.products import Plan, plan, plan_values

from ..library import maker, name_of

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

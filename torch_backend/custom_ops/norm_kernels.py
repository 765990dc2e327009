"""The CUDA library's casts of what an RMSNorm makes, which never lies in memory.

They run where the library has a kernel for the format, the dtype and the lengths, and where that gives the bits of PyTorch's
own operation: once for each length of a row, kernels and the installed PyTorch norm the same values, and are compared.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.calls import OperandCast
from blockfp.kernels.cuda_library import library

from ..torch_internals import fused_rms_norm, rms_norm_backward
from . import cuda
from .cuda_reader import Read as MadeRun
from .cuda_reader import made_reader
from .kernels import kernels_for
from .quantize_plans import kept

_agreed: dict[Any, bool] = {}
"""True where the kernels have PyTorch's bits, by device, dtype, length of a row, eps and the presence of a weight."""


_plans: dict[Any, MadeRun | None] = {}
switch.when_turned(_plans.clear)


def cast_of(
    x: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    row: Format | None,
    column: Format | None,
    multiplied: bool,
    rotate: bool,
    eps: float,
) -> MadeRun | None:
    """Returns the plan for x [.., columns] and weight, kept for all that lie alike, or None; arguments as for `plan_of`."""
    key = (id(row), id(column), x.shape, x.stride(), x.dtype, x.device, norm_eps, multiplied, rotate, eps)
    key = (*key, None if weight is None else (weight.shape, weight.stride(), weight.dtype, weight.device))
    run = _plans.get(key, key)
    if run is key:
        # Of four axes and more PyTorch looks at the strides.
        takes = x.ndim in (2, 3) and x.is_contiguous()
        run = plan_of(x.detach().flatten(0, -2), weight, norm_eps, row, column, multiplied, rotate, eps) if takes else None
        if not torch.cuda.is_current_stream_capturing():
            kept(_plans, key, run)
    # Each call asks for the addresses, and whether memory holds the negated values.
    read = all(one is None or not (one.data_ptr() % 16 or one.is_neg()) for one in (x, weight))
    return run if read else None  # pyright: ignore[reportReturnType]


def plan_of(
    x: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    row: Format | None,
    column: Format | None,
    multiplied: bool,
    rotate: bool,
    eps: float,
) -> MadeRun | None:
    """Makes the plan for matrices that lie as x does; None where the kernels don't take them.

    Args:
        x: one of them, [rows, columns].
        weight: the norm's, [columns], or None.
        norm_eps: the norm's eps.
        row, column, multiplied, rotate, eps: as for `OperandCast`, of what the norm makes.

    Returns:
        The plan, which takes x, weight, and float32 [rows] to be filled with one over the root mean square of each row.
    """
    if not _takes(x, weight):
        return None
    cast = OperandCast(row, column, "multiplier" if multiplied else None, rotate=rotate, eps=eps)
    run = made_reader(x, cast, "quantize_normed", norm_eps)
    return run if run is not None and agrees(x, weight is not None, norm_eps) else None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of x [rows, columns] by the library's kernel, and float32 [rows], one over each root mean square."""
    y, scales = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    library().rms_norm(x, weight, scales, y, eps)
    return y, scales


def _takes(x: Tensor, weight: Tensor | None) -> bool:
    """Says whether the kernels can read these."""
    if kernels_for(x) is not cuda or x.dtype not in (torch.bfloat16, torch.float16) or not x.numel():
        return False
    if x.shape[1] % 8 or not x.is_contiguous():
        return False
    return weight is None or (
        weight.dtype is x.dtype and weight.device == x.device and weight.shape == x.shape[1:] and weight.is_contiguous()
    )


def agrees(x: Tensor, weighted: bool, eps: float) -> bool:
    """Says whether the kernels' norm has the bits of PyTorch's on x's device, in its dtype and for its length of a row.

    They are compared when it is asked for the first time, which waits for the device; while a CUDA graph is captured the answer
    is False, unless it is known. A warning tells where it is no.
    """
    key = (x.device, x.dtype, x.shape[1], weighted, eps)
    known = _agreed.get(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _agreed[key] = not differing(*key)
        if not known:
            warnings.warn(
                f"blockfp's kernels of RMSNorm don't have the bits of PyTorch {torch.__version__} on {x.device} in {x.dtype} "
                f"for rows of {x.shape[1]}: there norms and casts run one after the other, which is slower",
                stacklevel=2,
            )
    return known


@torch.inference_mode(False)
@torch.enable_grad()
def differing(device: torch.device, dtype: torch.dtype, columns: int, weighted: bool, eps: float) -> dict[str, int]:
    """Counts the values in which the kernels' results differ from PyTorch's, by what is computed; empty where none does.

    Results are the norm, one over each root mean square, and the gradients that are made with these, of rows of all sizes.
    """
    rows, random = 64, torch.Generator(device).manual_seed(0)
    values, sizes, gradient = (torch.randn((rows, columns), device=device, generator=random) for _ in range(3))
    exponents = torch.linspace(-14, 8, rows, device=device)[:, None]
    x, gradient = (values * 2.0 ** (sizes + exponents)).to(dtype), gradient.to(dtype)
    if eps:
        x[0].zero_()
    x.requires_grad_()
    weight = torch.randn(columns, device=device, generator=random).to(dtype).requires_grad_() if weighted else None
    inputs = [x] if weight is None else [x, weight]
    y, scales = rms_norm(x.detach(), None if weight is None else weight.detach(), eps)
    wanted = F.rms_norm(x, [columns], weight, eps)
    gradients = torch.autograd.grad(wanted, inputs, gradient)
    ours = rms_norm_backward(gradient, x, [columns], scales[:, None], weight, [True, weighted])
    pairs = {"norm": (y, wanted), "scale of a row": (scales, fused_rms_norm(x, [columns], weight, eps)[1])}
    for name, one, other in zip(("gradient of x", "gradient of the weight"), ours, gradients, strict=False):
        if one is not None:
            pairs[name] = (one, other)
    found = {}
    for name, both in pairs.items():
        words = torch.int16 if both[0].element_size() == 2 else torch.int32
        a, b = (one.detach().flatten() for one in both)
        differs = (a.view(words) != b.view(words)) & ~(a.isnan() & b.isnan())
        if bool(differs.any()):
            found[name] = int(differs.sum())
    return found

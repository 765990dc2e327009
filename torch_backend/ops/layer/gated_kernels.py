"""The CUDA library's fused activation and cast, and activation gradients.

They run if the library supports the format, dtype and lengths, and gives the bits of PyTorch's own operations. That is tested
once per device: kernels and the installed PyTorch compute all values of a gate, and the results are compared.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from blockfp.kernels.cuda_library import library
from blockfp.kernels.operand_cast import OperandCast

from .. import cuda
from ..kernels import kernels_for
from ..quantize.cuda_reader import Read, made_reader
from .activations import ROWS, activate, gate_and_up, gradients

_agreed: dict[Any, bool] = {}
"""Whether the kernels match PyTorch, by device, dtype, activation and presence of an up."""


def plan_of(gate: Tensor, up: Tensor | None, activation: str, layout: str, cast: OperandCast) -> Read | None:
    """Plans the cast of what an activation makes of gates and ups that lie as these do; None where no kernel takes them."""
    # A gate alone is activated as fast as it is read for an amax: two kernels read no more than one after the other.
    if not _takes(gate, up, layout == "pairs") or (up is None and cast.measures):
        return None
    run = made_reader(gate, cast, ROWS[activation].number)
    return run if run is not None and agrees(gate, activation, up is not None) else None


def gradient_plan_of(
    whole: Tensor, up: Tensor | None, activation: str, layout: str, of_up: bool, cast: OperandCast
) -> Read | None:
    """Plans the cast of a gradient of `gated_ops.quantize_gradient`; None where no kernel takes it.

    `whole` is the gate as it comes, with up or without.
    """
    gate, other = gate_and_up(whole, up, layout)
    if not _takes(gate, other, layout == "pairs"):
        return None
    run = made_reader(whole, cast, ROWS[activation].number, int(of_up) if layout == "apart" else 2)
    return run if run is not None and agrees(gate, activation, other is not None) else None


def lies_aligned(gate: Tensor, up: Tensor | None) -> bool:
    """Says whether gate and up begin on multiples of 16 bytes, and hold their own values (torch's negative bit)."""
    if gate.data_ptr() % 16 or gate.is_neg():
        return False
    return up is None or not (up.data_ptr() % 16 or up.is_neg())


def made_of(gate: Tensor, up: Tensor | None, activation: str, layout: str) -> Tensor | None:
    """Returns the activation's output, computed by one launch; None if the kernels can't read the inputs."""
    pairs = layout == "pairs"
    if (
        not _takes(gate, up, pairs)
        or not lies_aligned(gate, None if pairs else up)
        or not agrees(gate, activation, up is not None)
    ):
        return None
    made = gate.new_empty(gate.shape)
    library().activation(gate.detach(), None if up is None else up.detach(), made, ROWS[activation].number)
    return made


def gradient_of(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str, layout: str) -> list[Tensor] | None:
    """Returns the gradients of gate and up, as two tensors or as one in the layout of the input; None if the kernels can't run.

    Without an up it returns None, since PyTorch's kernel is faster.
    """
    pairs = layout == "pairs"
    if (
        up is None
        or not _takes(gate, up, pairs)
        or not lies_aligned(gate, None if pairs else up)
        or not agrees(gate, activation, True)
    ):
        return None
    # Autograd's is contiguous; this spares it a call.
    if not gradient.is_contiguous() or gradient.data_ptr() % 16 or gradient.is_neg():
        gradient = in_vectors(gradient)
    rows, columns = gate.shape
    if layout == "apart":
        d_gate, d_up = results = [gate.new_empty((rows, columns)) for _ in range(2)]
    else:
        results = [gate.new_empty((rows, 2 * columns))]
        d_gate, d_up = (results[0][:, ::2], results[0][:, 1::2]) if pairs else results[0].chunk(2, -1)
    library().activation_gradient(gradient.detach(), gate.detach(), up.detach(), d_gate, d_up, ROWS[activation].number)
    return results


def in_vectors(gradient: Tensor) -> Tensor:
    """Returns a gradient that kernels can read, a copy where autograd's can't be."""
    if gradient.stride(-1) != 1 or gradient.stride(0) % 8 or gradient.data_ptr() % 16 or gradient.is_neg():
        gradient = gradient.contiguous().resolve_neg()
        if gradient.data_ptr() % 16:
            gradient = gradient.clone()
    return gradient


def _takes(gate: Tensor, up: Tensor | None, pairs: bool) -> bool:
    """Returns whether the kernels can read gate and up."""
    if kernels_for(gate) is not cuda or gate.dtype not in (torch.bfloat16, torch.float16) or not gate.numel():
        return False
    rows, columns = gate.shape
    if columns % 8:
        return False
    lines = rows > 1
    step = 2 if pairs else 1
    if gate.stride(1) != step or (lines and gate.stride(0) % 8):
        return False
    return up is None or (up.stride(1) == step and not (lines and up.stride(0) % 8))


def agrees(gate: Tensor, activation: str, gated: bool) -> bool:
    """Returns whether the kernels' activation matches PyTorch's bits for the device and dtype of `gate`; warns if it doesn't.

    The first call compares them, which waits for the device. During CUDA graph capture an unknown answer is False.
    """
    key = (gate.device, gate.dtype, activation, gated)
    known = _agreed.get(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _agreed[key] = not differing(gate.device, gate.dtype, activation, gated)
        if not known:
            warnings.warn(
                f"blockfp's kernels of {activation} don't have the bits of PyTorch {torch.__version__} on {gate.device} in "
                f"{gate.dtype}: there activations and casts run one after the other, which is slower",
                stacklevel=2,
            )
    return known


def differing(device: torch.device, dtype: torch.dtype, activation: str, gated: bool) -> dict[str, list[float]]:
    """Returns the first gates at which the kernels differ from PyTorch, by result; empty if none do.

    Compares the activation and its gradients over all values of a gate, with ups and gradients of all magnitudes.
    """
    repeats = 8
    every = torch.arange(-(1 << 15), 1 << 15, device=device, dtype=torch.int32).to(torch.int16).view(dtype)
    gate = every.repeat(repeats).view(-1, 256)
    random = torch.Generator(device).manual_seed(0)
    sizes, signs = (torch.randn((2, *gate.shape), device=device, generator=random) for _ in range(2))
    up, gradient = (signs * 2.0 ** (8 * sizes)).to(dtype)
    other = up if gated else None
    number = ROWS[activation].number
    made, d_gate, d_up = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate) if gated else None
    library().activation(gate, other, made, number)
    library().activation_gradient(gradient, gate, other, d_gate, d_up, number)
    wanted = {"activation": activate(gate, other, activation)}
    wanted["gradient of gate"], d_other = gradients(gradient, gate, other, activation)
    got = {"activation": made, "gradient of gate": d_gate}
    if gated and d_other is not None and d_up is not None:
        wanted["gradient of up"], got["gradient of up"] = d_other, d_up
    found = {}
    for name, one in got.items():
        differs = (one.view(torch.int16) != wanted[name].view(torch.int16)) & ~(one.isnan() & wanted[name].isnan())
        if bool(differs.any()):
            found[name] = gate[differs][:8].tolist()
    return found

"""`clip_grad_norm_`: clips gradients by a norm whose bits don't depend on sharding."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..quantized_tensor import agreement, sharding
from ..torch_internals import functional_collectives as collectives

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CHUNK = 1 << 22
"""Elements whose squares are in memory at once."""

_INF = 0x7F800000


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Scales gradients in place so that their total 2-norm is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, with a norm that is the same for every sharding. Squares are exact in float64. Each
    parameter's squares are summed as integers, in units set by its largest gradient, so their order doesn't matter. In a
    parameter of a million elements each square loses less than 2^-80 of the largest. The parameters' sums are added in the
    order given.

    Args:
        parameters: one or several, plain or DTensors, the same on every rank; those without a gradient are skipped.
        max_norm: largest norm that is not scaled down.
        error_if_nonfinite: raise if the norm is not finite, instead of scaling by it.

    Returns:
        The norm before clipping, float32 ().

    Raises:
        TypeError: a gradient is sparse.
        RuntimeError: the norm isn't finite and `error_if_nonfinite` is set. Gradients are unchanged.
        ValueError: ranks that share a parameter have different `max_norm`; raised on all of them. On a GPU a rank checks only
            if its own value has changed; a rank that doesn't check gets a NaN norm.

    Example:
        >>> weight = torch.zeros(4, requires_grad=True)
        >>> weight.grad = torch.full((4,), 2.0)
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(4.)
        >>> weight.grad
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    with_gradient = [p for p in ([parameters] if isinstance(parameters, Tensor) else parameters) if p.grad is not None]
    if not with_gradient:
        return torch.zeros(())
    for layout in (sharding.local_of(p.grad).layout for p in with_gradient if p.grad is not None):
        if layout is not torch.strided:
            raise TypeError(f"gradients must be dense, got layout {layout}: use sparse=False in the embedding")
    norm = _squares(with_gradient, [_own_part(parameter) for parameter in with_gradient], float(max_norm)).sum().sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite=True")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for parameter in with_gradient:
        assert parameter.grad is not None
        gradient = sharding.local_of(parameter.grad)
        gradient.mul_(scale.to(gradient.device))
    return norm.float()


def _own_part(parameter: Tensor) -> Tensor:
    """Returns this rank's shard of a gradient; one that torch left replicated or partial is redistributed."""
    assert parameter.grad is not None
    gradient, own = sharding.as_dtensor(parameter.grad), sharding.as_dtensor(parameter)
    if gradient is not None and own is not None and gradient.placements != own.placements:
        gradient = gradient.redistribute(own.device_mesh, own.placements)
    return sharding.local_of(parameter.grad if gradient is None else gradient)


def _squares(parameters: list[Tensor], gradients: list[Tensor], max_norm: float) -> Tensor:
    """Returns the sum of squares of each parameter's gradient, float64 [parameters], on the first gradient's device."""
    # Parameters with equal mesh, placements and device share their reductions.
    alike: dict[object, list[int]] = {}
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        mesh, placements = sharding.mesh_of(parameter), getattr(parameter, "placements", ())
        alike.setdefault((mesh, placements, gradient.device), []).append(i)
    found: list[Tensor] = [gradients[0]] * len(parameters)
    asks = _asks(max_norm, gradients[0].device)
    for numbers in alike.values():
        first = parameters[numbers[0]]
        largest = torch.stack([_largest(gradients[i]) for i in numbers])
        # Two more numbers check max_norm: their maxima sum to 0 only if all ranks have the same value.
        reduced = _reduced(first, torch.cat([largest, _number_of(max_norm, largest.device)]), "max")
        largest, apart = reduced[:-2], reduced[-2:].sum()
        if asks and apart.item() != 0:
            dtensor = sharding.as_dtensor(first)
            assert dtensor is not None
            groups = [dtensor.device_mesh.get_group(axis) for axis in _cut_axes(dtensor)]
            agreement.refuse_differences(groups, {"max_norm": str(max_norm)}, "it must be the same on all")
        # 2^exponent exceeds the largest magnitude.
        exponents = ((largest >> 23) - 126).to(torch.int64)
        bits = [_bits(parameters[i].numel()) for i in numbers]
        sums = torch.stack([_sums(gradients[i], e, b) for i, e, b in zip(numbers, exponents, bits, strict=True)])
        sums = _reduced(first, sums, "sum").to(torch.float64)
        for place, (i, b) in enumerate(zip(numbers, bits, strict=True)):
            total = (sums[place, 0] + sums[place, 1] * 2.0**-b) * _power(2 * exponents[place] - b)
            finite = torch.where(largest[place] > _INF, torch.nan, torch.inf)
            total = torch.where(largest[place] < _INF, total, finite.to(total.dtype))
            found[i] = torch.where(apart == 0, total, torch.nan).to(gradients[0].device)
    return torch.stack(found)


_last: list[float] = []


def _asks(max_norm: float, device: torch.device) -> bool:
    """Returns whether the host compares max_norm; on a GPU, which it must wait for, only if the value has changed."""
    if device.type == "cuda" and (_last == [max_norm] or torch.cuda.is_current_stream_capturing()):
        return False
    _last[:] = [max_norm]
    return True


@lru_cache(maxsize=16)
def _number_of(max_norm: float, device: torch.device) -> Tensor:
    return agreement.number_of(max_norm, device, torch.int32)


def _reduced(parameter: Tensor, values: Tensor, op: str) -> Tensor:
    """Reduces values ("max" or "sum") over the mesh axes that shard a parameter; the result stays on their device."""
    dtensor, device = sharding.as_dtensor(parameter), values.device
    if dtensor is None:
        return values
    mesh = dtensor.device_mesh
    # The groups of gradients that FSDP2 offloads to the CPU may support GPU tensors only.
    values = values.to(mesh.device_type)
    for axis in _cut_axes(dtensor):
        sent = collectives.all_reduce(values.contiguous(), op, mesh.get_group(axis).group_name)
        values = collectives.wait_tensor(sent)
    return values.to(device)


def _cut_axes(dtensor: DTensor) -> list[int]:
    return [axis for axis, placement in enumerate(dtensor.placements) if not placement.is_replicate()]


def _largest(gradient: Tensor) -> Tensor:
    """Returns the largest magnitude as fp32 bits, int32 (); NaN orders above Inf."""
    if gradient.numel() == 0:
        return torch.zeros((), dtype=torch.int32, device=gradient.device)
    pieces = [piece.float().abs().view(torch.int32).max() for piece in _chunks(gradient)]
    return torch.stack(pieces).max()


def _bits(elements: int) -> int:
    """Returns how many bits a square may have so that the sum of `elements` of them stays below 2^62."""
    return 62 - (max(elements, 1) - 1).bit_length()


def _sums(gradient: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """Returns the sums of the leading and the following `bits` bits of all squares, below 2^(2 * exponent): int64 [2]."""
    total = torch.zeros(2, dtype=torch.int64, device=gradient.device)
    power = _power(bits - 2 * exponent)
    for piece in _chunks(gradient):
        square = piece.to(torch.float64).square() * power
        leading = square.floor()
        rest = ((square - leading) * 2.0**bits).floor()
        total += torch.stack([leading.to(torch.int64).sum(), rest.to(torch.int64).sum()])
    return total


def _chunks(gradient: Tensor) -> tuple[Tensor, ...]:
    return gradient.reshape(-1).split(_CHUNK) if gradient.numel() else ()


def _power(exponent: Tensor) -> Tensor:
    """Returns 2^exponent exactly, as float64 built from its bits."""
    return ((exponent + 1023) << 52).view(torch.float64)

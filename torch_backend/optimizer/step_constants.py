"""The constants of a step, on the host or, for CUDA graphs, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.definition import adamw, muon
from blockfp.definition.adamw import Coefficients

from ..torch_internals import foreach_add_
from .local_parameter import LocalParameter


def coefficients(step: Any, lr: Any, settings: Any, decoupled: bool, ratio: float | None) -> Coefficients:
    """Returns the constants of a step: of AdamW or Adam, or with a ratio Muon's.

    `settings` are (betas, eps, weight_decay).
    """
    if ratio is None:
        return adamw.coefficients(step, lr, *settings, decoupled=decoupled)
    return muon.coefficients(lr, settings[-1], ratio)


def begin_on_device(
    todo: list[LocalParameter],
    steps: list[Tensor],
    lr: Any,
    settings: Any,
    decoupled: bool,
    found: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Counts the step and sets its coefficients without a device read: each parameter's are a row of a tensor."""
    alike: dict[tuple[torch.device, float | None], list[int]] = {}
    for i, step in enumerate(steps):
        alike.setdefault((step.device, todo[i].ratio), []).append(i)
    for (device, ratio), places in alike.items():
        counts = [steps[i] for i in places]
        skip = (torch.zeros((), device=device) if found is None else found.to(device) != 0).to(torch.float32)
        foreach_add_(counts, [1 - skip] * len(counts))
        step = torch.stack(counts).to(torch.float64)
        rate = lr.to(device, torch.float64) if isinstance(lr, Tensor) else lr
        c = coefficients(step, rate, settings, decoupled, ratio)
        unscale = 1.0 if scale is None else scale.to(device, torch.float64).reciprocal()
        # A skipped step may have number 0; its coefficients are never read.
        columns = [
            x.to(torch.float64).expand(len(counts)) if isinstance(x, Tensor) else torch.full_like(step, x)
            for x in c._replace(unscale=unscale, skip=skip)
        ]
        table = torch.stack(columns, dim=1).to(torch.float32)
        for i, row in zip(places, table.unbind(), strict=True):
            todo[i].coefficients, todo[i].step = row, steps[i]

"""The custom op at a layer's output in torch.export programs, which record the layer's forward but not its backward.

blockfp::without_backward   (y, x, weight, bias) -> y
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch_internals import is_exporting
from .library import define, differentiate, fake, impl

without_backward = define("without_backward(Tensor y, Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def outputs(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a layer's outputs; in a torch.export program their backward raises.

    Without this op, gradients of everything before the layer would silently be missing there, and other gradients correct.
    """
    if not is_exporting():
        return y
    wanted = any(each is not None and each.requires_grad for each in (x, weight, bias))
    return without_backward(y, x, weight, bias) if wanted else y


@impl(without_backward)
def _copied(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return y.clone()


@fake(without_backward)
def _fake(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(y)


@differentiate(without_backward)
def _refuse(ctx: Any, gradient: Tensor) -> None:
    raise NotImplementedError(
        "torch.export keeps the forward of blockfp's layers without their gradients: train the model itself, and export it "
        "afterwards; for a pipeline make torch.distributed.pipelining.PipelineStage of modules, without pipeline()"
    )

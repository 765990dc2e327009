"""Preserves layers' random steps and amaxes while pipelines infer shapes.

To learn the shapes that stages exchange, torch's schedules (2.13) run every stage once, forward and backward, on uninitialized
memory. They restore torch's random states, but not layers' buffers. No public hook exists; `tests/torch/test_parallel_gloo.py`
fails if torch changes the method.
"""

from __future__ import annotations

from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.files.names import LAYER_BUFFERS

from .scale_watch import RecipeLayer

_METHOD = "_initialize_pp_stages"


def keep_state() -> None:
    """Patches schedules to restore layers' state after inferring shapes; called when a stateful layer is made."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.pipelining import schedules

    schedule: Any = schedules._PipelineSchedule
    infer = getattr(schedule, _METHOD, None)
    if infer is None or hasattr(infer, "keeps_state"):
        return

    @wraps(infer)
    def infer_and_put_back(self: Any, stages: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(tensor, tensor.clone()) for stage in stages for tensor in _state(stage.submod)]
        try:
            return infer(self, stages, *args, **kwargs)
        finally:
            for tensor, value in before:
                tensor.copy_(value)

    infer_and_put_back.keeps_state = True  # pyright: ignore[reportAttributeAccessIssue]
    setattr(schedule, _METHOD, infer_and_put_back)


def _state(model: nn.Module) -> list[Tensor]:
    names = (*chain(*LAYER_BUFFERS), "observed")
    found = [getattr(module, name) for module in model.modules() if isinstance(module, RecipeLayer) for name in names]
    return [tensor for tensor in found if tensor is not None]

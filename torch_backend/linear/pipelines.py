"""Keeps the state of layers while pipelines try their stages out: random steps and amaxes stay as they were.

To learn the shapes that stages send each other, torch's schedules (2.13) run every stage once, forward and backward, on memory
with anything in it. They put torch's own random numbers back and know nothing of the state that layers keep in buffers. There
is no public hook around it; where torch changes the method, `tests/torch/test_parallel_gloo.py` says so.
"""

from __future__ import annotations

from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from blockfp.files.names import LAYER_BUFFERS

from .recipe_layer import RecipeLayer

_METHOD = "_initialize_pp_stages"


def keep_state() -> None:
    """Makes schedules put back what layers recorded while shapes were inferred; called when a layer with state is made."""
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

"""accelerate (1.15): `prepare`, for models whose buffers its `cpu_ram_efficient_loading` would not take.

    model, optimizer = prepare(accelerator, model, bfp.AdamW(model.parameters()))

Importing this module lets accelerate resume from checkpoints in `FULL_STATE_DICT`. All else of it needs no adapter.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ..torch_backend.modules.stateful_layer import StatefulLayer
from ..torch_backend.torch_internals import mend_broadcast

mend_broadcast()


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any) -> Any:
    """Calls `accelerator.prepare(model, *others)`; under FSDP2 with `cpu_ram_efficient_loading` buffers are taken along.

    accelerate shards what a state dict holds, parameters and buffers alike, and a buffer can't be: recipes with delayed scaling
    or stochastic rounding have some, and so have batch norms. Here they are rank 0's on all ranks, like the parameters.

    Args:
        accelerator: of any configuration.
        model: converted already.
        others: optimizers and whatever else prepare takes.

    Returns:
        What prepare does: the model, and the others behind it.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not (accelerator.is_fsdp2 and plugin is not None and plugin.cpu_ram_efficient_loading):
        return accelerator.prepare(model, *others)
    held = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    try:
        for module, name in held:
            # accelerate keeps those that no state dict shows.
            module._non_persistent_buffers_set.add(name)
        prepared = accelerator.prepare(model, *others)
    finally:
        for module, name in held:
            module._non_persistent_buffers_set.discard(name)
    for module, name in held:
        dist.broadcast(module.get_buffer(name), 0)
        if isinstance(module, StatefulLayer):
            module.mark_buffers()
    return prepared

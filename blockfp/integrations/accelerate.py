"""accelerate (1.15): `prepare` for models with buffers that `cpu_ram_efficient_loading` can't load.

    model, optimizer = prepare(accelerator, model, bfp.AdamW(model.parameters()))

Importing this module also lets accelerate resume from `FULL_STATE_DICT` checkpoints. Nothing else needs an adapter.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ..torch_backend.distributed_internals import mend_broadcast
from ..torch_backend.modules.stateful_layer import StatefulLayer

mend_broadcast()


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any) -> Any:
    """Calls `accelerator.prepare(model, *others)`, with support for buffers in FSDP2's `cpu_ram_efficient_loading`.

    accelerate shards everything in a state dict, but buffers can't be sharded. Recipes with delayed scaling or stochastic
    rounding have buffers, and so do batch norms. This function broadcasts them from rank 0, like the parameters.

    Args:
        accelerator: an Accelerator of any configuration.
        model: the converted model.
        others: optimizers and other arguments of prepare.

    Returns:
        The result of prepare: the model, followed by the others.
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
            # accelerate doesn't shard buffers that are missing in the state dict.
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

"""Selective activation checkpointing: keeps results of products and repeats casts in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..ops.groups import grouped_ops
from ..ops.product.products import product, weight_product
from ..torch_internals import TorchDispatchMode
from ..torch_internals import functional_collectives as collectives

_KEPT = {
    grouped_ops.forward,
    product,
    weight_product,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    # Collectives that finish sums. Waiting for their results again is free.
    collectives.reduce_scatter_tensor.default,
    collectives.all_reduce.default,
    collectives.all_to_all_single.default,
}


def keep_products() -> tuple[Any, Any]:
    """Returns the contexts for `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_products)`.

    The block's input and the results of products, attention and sums over ranks are kept for the backward. Norms, activation
    functions and the codes of every layer's input are recomputed. This saves a byte per element of each layer's input, at the
    cost of repeating the casts. Sequence parallelism's gathers are repeated too, since their results hold all tokens. No bit
    changes.
    """
    forward, again = create_selective_checkpoint_contexts(_policy)
    return _Apart(forward), _Apart(again)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Apart(TorchDispatchMode):
    """Splits a grouped layer's forward op for the mode below, which keeps all or none of an op's results.

    The product is kept; the parts quantized for the backward are recomputed.
    """

    def __init__(self, below: Any):
        super().__init__()
        self.below = below

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def ac_graph_id(self) -> Any:
        """The id that torch.compile assigns to the mode below."""
        return self.below.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: Any) -> None:
        self.below.ac_graph_id = number

    def __enter__(self):
        self.below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any):
        super().__exit__(*error)
        self.below.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func is grouped_ops.forward:
            return grouped_ops.forward_apart(*args, again=args[0])
        return func(*args, **(kwargs or {}))

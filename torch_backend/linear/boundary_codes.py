"""Activation checkpointing that keeps codes of the inputs of recomputed regions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from blockfp.formats import WHOLE_ROW, Format
from blockfp.sharding.placement import Sharding
from blockfp.sharding.reducing import check_reduce_format

from ..ops import dequantize_plans
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import DTYPES
from ..torch_internals import proxy_mode, saved_hooks


def keep_codes(format: Format | str) -> Callable[[], tuple[Any, Any]]:
    """Returns a `context_fn` for `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=..)`.

    The forward is unchanged. Of each positional input that requires a gradient, codes and scales are kept, and the backward
    recomputes the block from their values: half of bfloat16's bytes with MXFP8. Other inputs (masks, rotary embeddings,
    keywords) are kept as they are. Blocks run along the last axis and are counted from the whole tensor, so no mesh changes a
    code. Hooks that were there before (`save_on_cpu`, an outer checkpoint) get codes and scales.

    Args:
        format: a `Format` or its name, with blocks in one row and no scale of the tensor, such as "mxfp8_e4m3" or
            "fp8_e4m3_1x128".

    Raises:
        TypeError, ValueError: the format is unknown, or has other blocks.
        ValueError: (in the forward) a DTensor's shards cut its blocks.
        NotImplementedError: (when compiled) the checkpoint itself is compiled; compile the block inside instead.

    Example:
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=keep_codes("mxfp8_e4m3"))
    """
    format = check_reduce_format(format, "format")
    return partial(_contexts, format)


def _contexts(format: Format) -> tuple[Any, Any]:
    """torch.utils.checkpoint saves inputs between this call and the entry of the first context."""
    if not torch.is_grad_enabled():
        return nullcontext(), nullcontext()
    if proxy_mode() is not None:
        raise NotImplementedError(
            f"keep_codes({format}) in a compiled checkpoint, of which the compiler chooses what to keep: compile what is "
            "inside, checkpoint(torch.compile(block), x, use_reentrant=False, context_fn=..)"
        )
    hooks = _Hooks(partial(_pack, format), _unpack)
    hooks.push()
    return hooks, nullcontext()


class _Hooks:
    """Default hooks for saved tensors that stay from `push` until the entry of this context, also below one other pair.

    `pack(below, tensor)` gets the pair of hooks (or None) that were there before.
    """

    def __init__(self, pack: Callable[[Any, Tensor], Any], unpack: Callable[[Any], Tensor]):
        self._pack, self._unpack = pack, unpack

    def push(self) -> None:
        below = saved_hooks._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            try:
                return self._pack(below, tensor)
            except BaseException:
                # Nobody enters the context that would remove them.
                saved_hooks._pop_saved_tensors_default_hooks()
                raise

        self._own = pack
        saved_hooks._push_saved_tensors_default_hooks(pack, self._unpack)

    def __enter__(self) -> None:
        top = saved_hooks._top_saved_tensors_default_hooks(True)
        saved_hooks._pop_saved_tensors_default_hooks()
        if top[0] is self._own:
            return
        saved_hooks._pop_saved_tensors_default_hooks()
        saved_hooks._push_saved_tensors_default_hooks(*top)

    def __exit__(self, *error: Any) -> None:
        pass


def _pack(format: Format, below: Any, x: Tensor) -> Any:
    """Returns what is kept of x: itself, or its parts and how to put them together, through the hooks `below`."""
    pack = (lambda part: part) if below is None else below[0]
    local, mesh, placements = x, sharding.mesh_of(x), getattr(x, "placements", ())
    if not x.requires_grad or x.ndim < 2 or x.dtype not in DTYPES or any(each.is_partial() for each in placements):
        return below, None, pack(x), None
    if mesh is not None:
        _check_cut(format, x)
        local = sharding.local_of(x)
    if not local.numel():
        return below, None, pack(x), None
    parts = dequantize_plans.quantize(local.detach(), format.name, None)
    how = (format.name, x.dtype, local.shape[-1], mesh, placements, x.shape)
    return below, [pack(part) for part in parts], None, how


def _unpack(kept: Any) -> Tensor:
    below, parts, plain, how = kept
    unpack = (lambda part: part) if below is None else below[1]
    if parts is None:
        return unpack(plain)
    name, dtype, columns, mesh, placements, shape = how
    codes, scales = (unpack(part) for part in parts)
    local = dequantize_plans.dequantize(codes, scales, None, name, dtype, columns, [0, 0])
    return sharding.from_local(local, mesh, placements, shape)


def _check_cut(format: Format, x: Tensor) -> None:
    """Raises ValueError, on all ranks, if shards of a DTensor cut its blocks."""
    if _cuts(format, sharding.sharding_of(x)):
        raise ValueError(
            f"keep_codes({format}): x [.., {x.shape[-1]}] is sharded along its last axis inside of blocks: shard it along "
            "another one, or in multiples of a block"
        )


@lru_cache(maxsize=4096)
def _cuts(format: Format, lies: Sharding) -> bool:
    assert format.block is not None
    width = format.block[1]
    if not lies.order(len(lies.shape) - 1):
        return False
    return width == WHOLE_ROW or any(lies.region(rank).origin[1] % width for rank in range(lies.mesh.size))

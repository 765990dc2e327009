"""FSDP2's hooks around its gather, for `host`: one of two ranks, whose group sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import blockfp.torch as bfp

RANKS = 2


def cases(recipes: list[str], features: int, device: str, *, peers: bool = True) -> list[tuple[str, str, Callable[[], Any]]]:
    """Returns (kind, recipe, call) of the hooks before and after a gather: quantized weights, weights cast before it, and
    torchao's.
    """
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh(device, (RANKS,))
    found = []
    for recipe in recipes:
        for weights, kind in (("quantized", "gather"), ("high_precision", "cast and gather")):
            model = nn.Sequential(nn.Linear(features, 2 * features, bias=False, device=device, dtype=torch.bfloat16))
            bfp.convert(model, recipe, weights=weights, keep_init=False)
            found += [(f"FSDP2 {kind}: {half}", recipe, call) for half, call in _hooks(model, mesh)]
    if not peers:
        return found
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return found
    model = nn.Sequential(nn.Linear(features, 2 * features, bias=False, device=device, dtype=torch.bfloat16))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    return found + [(f"FSDP2 cast and gather: {half}", "torchao", call) for half, call in _hooks(model, mesh)]


def _hooks(model: nn.Module, mesh: DeviceMesh) -> list[tuple[str, Callable[[], Any]]]:
    fully_shard(model, mesh=mesh)
    shard: Any = next(model.parameters()).to_local()
    dtype = torch.bfloat16

    def before() -> tuple[tuple[Tensor, ...], Any]:
        with torch.no_grad():
            return shard.fsdp_pre_all_gather(mesh)

    sent, metadata = before()
    gathered = tuple(torch.cat([part] * RANKS) for part in sent)
    whole, _ = shard.fsdp_post_all_gather(gathered, metadata, dtype)
    return [("before", before), ("after", lambda: shard.fsdp_post_all_gather(gathered, metadata, dtype, out=whole))]

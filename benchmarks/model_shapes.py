"""Linear weights of released models, from their published configurations, and how meshes shard them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from blockfp.sharding.placement import Mesh, Placement, Replicate, Shard, Sharding, StridedShard

Kind = Literal["column", "row", "experts"]


@dataclass(frozen=True)
class Weight:
    """Weights of one shape.

    Attributes:
        name: name of one of them.
        shape: [out, in], or [experts, out, in].
        count: how many there are.
        kind: how tensor parallelism shards them ("column": outputs, "row": inputs), or "experts".
    """

    name: str
    shape: tuple[int, ...]
    count: int
    kind: Kind

    @property
    def parameters(self) -> int:
        """Elements of all of them together."""
        return self.count * prod(self.shape)


def _attention(layers: int, hidden: int, heads: int, kv_heads: int, head: int) -> list[Weight]:
    return [
        Weight("q_proj", (heads * head, hidden), layers, "column"),
        Weight("k_proj", (kv_heads * head, hidden), 2 * layers, "column"),
        Weight("o_proj", (hidden, heads * head), layers, "row"),
    ]


def _mlp(layers: int, hidden: int, inner: int, name: str = "mlp") -> list[Weight]:
    return [
        Weight(f"{name}.gate_proj", (inner, hidden), 2 * layers, "column"),
        Weight(f"{name}.down_proj", (hidden, inner), layers, "row"),
    ]


def _experts(layers: int, experts: int, hidden: int, inner: int) -> list[Weight]:
    return [
        Weight("experts.gate_up_proj", (experts, 2 * inner, hidden), layers, "experts"),
        Weight("experts.down_proj", (experts, hidden, inner), layers, "experts"),
    ]


MODELS: dict[str, list[Weight]] = {
    "Llama-3.1-405B": [*_attention(126, 16384, 128, 8, 128), *_mlp(126, 16384, 53248)],
    "DeepSeek-V3": [
        Weight("q_a_proj", (1536, 7168), 61, "column"),
        Weight("q_b_proj", (128 * 192, 1536), 61, "column"),
        Weight("kv_a_proj_with_mqa", (512 + 64, 7168), 61, "column"),
        Weight("kv_b_proj", (128 * 256, 512), 61, "column"),
        Weight("o_proj", (7168, 128 * 128), 61, "row"),
        *_mlp(3, 7168, 18432),
        *_mlp(58, 7168, 2048, "shared_experts"),
        *_experts(58, 256, 7168, 2048),
    ],
    "Qwen3-235B-A22B": [*_attention(94, 4096, 64, 4, 128), *_experts(94, 128, 4096, 1536)],
}
"""Embeddings, output layers, norms and routers are left out: they stay in high precision."""


@dataclass(frozen=True)
class Parallelism:
    """The number of ranks along each mesh axis.

    Attributes:
        shard: ranks over which FSDP shards a dense weight.
        replicate: copies of that (HSDP).
        tensor: ranks over which tensor parallelism shards it.
        expert: ranks among which experts are divided; FSDP shards each expert over the others.
    """

    shard: int
    replicate: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.shard * self.replicate * self.tensor

    def sharding(self, weight: Weight) -> Sharding:
        """Returns the sharding of a weight."""
        if weight.kind == "experts":
            shard = self.shard * self.tensor // self.expert
            mesh = Mesh((self.replicate, shard, self.expert), ("replicate", "fsdp", "ep"))
            return Sharding(weight.shape, mesh, (Replicate(), Shard(1), Shard(0)))
        mesh = Mesh((self.replicate, self.shard, self.tensor), ("replicate", "fsdp", "tp"))
        cut: tuple[Placement, Placement] = (Shard(0), Shard(1))
        if weight.kind == "column":
            cut = (StridedShard(0, self.tensor), Shard(0)) if self.tensor > 1 else (Shard(0), Shard(0))
        return Sharding(weight.shape, mesh, (Replicate(), *cut))

    def __str__(self) -> str:
        parts = {"HSDP": self.replicate, "FSDP": self.shard, "TP": self.tensor, "EP": self.expert}
        return " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1 or name == "FSDP")


MESHES = [
    *(Parallelism(ranks) for ranks in (8, 64, 512, 2048, 16384)),
    Parallelism(512, replicate=32),
    *(Parallelism(ranks // 8, tensor=8, expert=min(64, ranks // 8)) for ranks in (64, 512, 2048, 16384)),
]

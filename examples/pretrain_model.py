"""The model of `pretrain.py`: a Llama-like decoder over bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import byte_text
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blockfp.torch as bfp
from blockfp import recipes


@dataclass(frozen=True)
class Size:
    """Settings of a model and its training.

    Attributes:
        width, hidden, layers: features of the residual stream and of the feed-forward layers, and the number of blocks.
        context: bytes in a piece of text.
        batch: pieces in a step, over all ranks.
        rate: the highest learning rate.
        head: features of an attention head.
    """

    width: int
    hidden: int
    layers: int
    context: int
    batch: int
    rate: float
    head: int = 64


SIZES = {
    "tiny": Size(64, 128, 2, 64, 8, 4e-3, head=32),
    "1m": Size(128, 384, 5, 128, 16, 3e-3),
    "3m": Size(256, 640, 4, 256, 16, 2e-3),
    "25m": Size(512, 1408, 8, 1024, 32, 1e-3),
    "124m": Size(1024, 2688, 10, 1024, 64, 6e-4),
    "350m": Size(1280, 3328, 18, 1024, 64, 4e-4),
}
"""The models by their parameters. A byte is a token: the embedding has 256 rows, so blocks are nearly all of a model."""


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size):
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Causal attention with rotary positions, and SwiGLU, each with a norm before it and a residual."""

    def __init__(self, size: Size):
        super().__init__()
        self.head = size.head
        self.attention_norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x, cosine, sine):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(turned(q, cosine, sine), turned(k, cosine, sine), v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary positions to x [.., places, head]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)


class Transformer(nn.Module):
    """Maps bytes [batch, length] to logits of the next byte [batch, length, 256]."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(byte_text.VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, byte_text.VOCABULARY, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        steps = torch.arange(0, self.size.head, 2, device=tokens.device, dtype=torch.float32)
        angles = torch.outer(places, 10_000.0 ** (-steps / self.size.head))
        cosine, sine = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


OPTIONS = {
    "guarded": ("recipe", {"guarded": True}),
    "squared": ("recipe", {"squared_errors": True}),
    "ends": ("build", {"ends": True}),
    "master_none": ("optimizer", {"master": None}),
    "moments_fp8": ("optimizer", {"moments": "fp8"}),
    "moments_bfloat16": ("optimizer", {"moments": "bfloat16"}),
}
"""What may follow a recipe's name behind a "+": whose arguments it stands for, and which. "ends": the first and the last block
stay in bfloat16."""


def arguments_of(name: str, whose: str) -> dict[str, Any]:
    """Returns the arguments of "recipe", "build" or "optimizer" given by a run's name, RECIPE or RECIPE+OPTION+...

    Raises:
        ValueError: the option doesn't exist.
    """
    recipe, *options = name.split("+")
    found: dict[str, Any] = {"torchao": True} if (recipe, whose) == ("torchao", "build") else {}
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"run {name!r}: option {option!r} is not known; choose of {', '.join(OPTIONS)}")
        if OPTIONS[option][0] == whose:
            found |= OPTIONS[option][1]
    return found


def recipe_of(name: str) -> recipes.Recipe | None:
    """Returns the recipe of a run's name; None for bf16 and torchao. A suffix "_floor" selects OCP's rule for MX scales.

    Raises:
        ValueError: the recipe or option doesn't exist.
        TypeError: the recipe doesn't have the option.
    """
    options, name = arguments_of(name, "recipe"), name.partition("+")[0]
    if name in ("bf16", "torchao"):
        return None
    if options:
        return recipes.RECIPES[recipes.parse(name).name](**options)
    if not name.endswith("_floor"):
        return recipes.parse(name)
    recipe = recipes.parse(name.removesuffix("_floor"))
    casts = {}
    for operand in ("input", "weight", "gradient"):
        for direction in ("rowwise", "columnwise"):
            cast = recipe.cast(operand, direction)
            changed = recipes.Cast(f"{cast.format}_floor", cast.stochastic, cast.rotate)
            casts[operand if direction == "rowwise" else f"{operand}_columnwise"] = changed
    return recipe.replace(name=name, **casts)


def build(
    size: Size,
    recipe: recipes.Recipe | None,
    seed: int,
    device: torch.device,
    *,
    shard: bool,
    compiled: bool,
    ends: bool = False,
    torchao: bool = False,
) -> nn.Module:
    """Builds the model with initial weights that depend only on the seed, quantized and sharded.

    Parameters are in bfloat16, quantized or not; the optimizer keeps all masters in float32.

    Args:
        ends: keep the first and the last block in bfloat16.
        torchao: convert the blocks by torchao's `convert_to_float8_training`, with its defaults, instead of blockfp.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(size)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            outward = (2 * size.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
            nn.init.normal_(p, std=outward * (0.02 if name == "embedding.weight" else size.width**-0.5), generator=generator)
    model.to(torch.bfloat16)
    if torchao:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.blocks)
    if recipe is not None:
        if ends:
            bfp.convert(model, {"^head$": None, **recipes.ends_in_high_precision(recipe, "blocks", size.layers)})
        else:
            bfp.convert(model.blocks, recipe)
        for name, buffer in model.named_buffers():
            if name.endswith("rng_key"):
                # Alike on every rank.
                buffer.copy_(torch.randint(1 << 32, (2,), generator=generator))
    model.to(device)
    if compiled:
        # Forwards with gradients and without, in each block at worst.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * size.layers)
        for block in model.blocks:
            block.compile(fullgraph=True)
    if shard:
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def optimizer_of(model: nn.Module, rate: float, **options: Any) -> bfp.AdamW:
    """Returns an AdamW that doesn't decay norms; `options` are passed on to it."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return bfp.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, **options)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats per byte; rows: int64 [batch, context + 1]."""
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


def losses_of_rows(model: nn.Module, rows: Tensor) -> Tensor:
    """Returns the loss of each row: float32 [batch]."""
    logits = model(rows[:, :-1]).float().flatten(0, 1)
    return F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none").view(len(rows), -1).mean(1)


def operations(size: Size) -> float:
    """Returns floating-point operations per token, forward and backward: 6 per matrix weight, and attention over half the
    context.
    """
    matrices = size.layers * (4 * size.width**2 + 3 * size.width * size.hidden) + size.width * byte_text.VOCABULARY
    return 6 * matrices + 6 * size.layers * size.width * size.context


PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second, as NVIDIA states them for the SXM boards."""


def peak(device: torch.device) -> float | None:
    """Returns this device's peak, or None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((value for key, value in PEAKS.items() if key in name), None)

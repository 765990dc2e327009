"""Trains a small mixture of experts on real text in bf16, MXFP8 and FP8 blocks; losses on unseen text must agree within 1%.

    python examples/train_moe.py

A byte-level transformer whose feed-forward layers are mixtures: a router sends each byte to two of eight experts. The experts'
weights are a `bfp.GroupedLinear`: stored as codes and scales, and multiplied in the recipe's formats forward and backward. In
bf16 they are plain tensors multiplied by torch's `grouped_mm`. All runs start from the same weights and read the same text.

The program fails if a recipe's held-out loss differs from bf16's by more than 1%.
"""

from __future__ import annotations

import argparse
import time

import byte_text
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import blockfp.torch as bfp

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64
EXPERTS, CHOICES, HIDDEN = 8, 2, 128
BALANCE = 0.01
"""The weight of the load-balancing loss beside that of the text."""


class PlainGrouped(nn.Module):
    """A `bfp.GroupedLinear` computed by torch in bf16."""

    def __init__(self, experts: int, in_features: int, out_features: int):
        super().__init__()
        bound = in_features**-0.5
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features).uniform_(-bound, bound))

    def forward(self, x, counts):
        return F.grouped_mm(x, self.weight.to(x.dtype).mT, offs=counts.cumsum(0, dtype=torch.int32))


def grouped(in_features: int, out_features: int, recipe: str) -> nn.Module:
    """Returns one layer per expert, without bias; it is called with rows sorted by expert and the count of each."""
    if recipe == "bf16":
        return PlainGrouped(EXPERTS, in_features, out_features)
    return bfp.GroupedLinear(EXPERTS, in_features, out_features, bias=False, recipe=recipe)


class Mixture(nn.Module):
    """The weighted best two of eight SwiGLU layers for each token; x [tokens, width]."""

    def __init__(self, recipe: str):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = grouped(WIDTH, 2 * HIDDEN, recipe)
        self.down = grouped(HIDDEN, WIDTH, recipe)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns y, the load-balancing loss and each expert's row count. Nothing here waits for a GPU."""
        # Routers stay in float32: a token that changes its expert changes more than any rounding does.
        with torch.autocast(x.device.type, enabled=False):
            probabilities = self.router(x.float()).softmax(-1)
        weights, chosen = probabilities.topk(CHOICES)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = (chosen.flatten()[:, None] == torch.arange(EXPERTS, device=x.device)).sum(0)
        # Switch Transformer's: 1 where all experts have as many rows, more where few have most.
        balance = EXPERTS * (counts / chosen.numel() * probabilities.mean(0)).sum()

        order = chosen.flatten().argsort(stable=True)
        token = order // CHOICES
        gate, value = self.up(x.bfloat16()[token], counts).chunk(2, -1)
        y = self.down(F.silu(gate) * value, counts)
        y = torch.zeros_like(x).index_add(0, token, y.to(x.dtype) * weights.flatten()[order, None])
        return y, balance, counts


class Block(nn.Module):
    """Causal attention and a mixture of experts, each with a norm before it and a residual."""

    def __init__(self, recipe: str):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixture_norm = nn.RMSNorm(WIDTH)
        self.mixture = Mixture(recipe)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        # In float32, which takes a CPU half as long as bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            attended = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        y, balance, counts = self.mixture(self.mixture_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance, counts


class Transformer(nn.Module):
    """Maps bytes [batch, length] to logits of the next byte [batch, length, 256], and the mixtures' other results."""

    def __init__(self, recipe: str):
        super().__init__()
        self.embedding = nn.Embedding(byte_text.VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, byte_text.VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        balances, counts = [], []
        for block in self.blocks:
            x, balance, count = block(x)
            balances.append(balance)
            counts.append(count)
        return self.head(self.norm(x)), torch.stack(balances).mean(), torch.stack(counts)


def build(recipe: str, first: dict[str, Tensor], device: torch.device) -> nn.Module:
    """Builds the model with initial weights: experts and attention quantized by the recipe, the rest in float32."""
    model = Transformer(recipe)
    # Codes are made of these values. The values themselves become the optimizer's masters.
    model.load_state_dict(first)
    if recipe != "bf16":
        bfp.convert(model, recipe, filter_fn=lambda name, _: name.endswith((".qkv", ".out")))
    return model.to(device)


def losses_of(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (cross-entropy in nats per byte, load-balancing loss, rows by layer and expert); rows: [batch, context + 1]."""
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits, balance, counts = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()), balance, counts


@torch.no_grad()
def judge(model: nn.Module, rows: Tensor) -> tuple[float, float]:
    """Returns (loss on these pieces of text, share of a layer's rows that its busiest expert has)."""
    found = [losses_of(model, part) for part in rows.split(64)]
    loss = sum(loss.item() * len(part) for (loss, _, _), part in zip(found, rows.split(64), strict=True)) / len(rows)
    counts = sum(counts for _, _, counts in found)
    return loss, (counts / counts.sum(-1, keepdim=True)).max().item()


def expert_bytes(model: nn.Module) -> int:
    """Returns the stored bytes of the experts' weights."""
    weights = [layer.weight for block in model.blocks for layer in (block.mixture.up, block.mixture.down)]
    parts = [part for w in weights for part in (w.parts if isinstance(w, bfp.QuantizedTensor) else [w])]
    return sum(part.nbytes for part in parts)


def train(recipe: str, options: argparse.Namespace, first: dict[str, Tensor], progress: Progress) -> dict[str, float]:
    """Trains once and returns the measurements."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, held_out = byte_text.read_text()
    model = build(recipe, first, device)
    optimizer = bfp.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)

    def pieces(source, rows: int, **which) -> Tensor:
        return torch.from_numpy(byte_text.batch(source, rows, CONTEXT, **which)).to(device, torch.int64)

    task = progress.add_task(recipe, total=options.steps, loss=float("nan"))
    began = time.perf_counter()
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = byte_text.learning_rate(step, options.steps)
        loss, balance, _ = losses_of(model, pieces(text, options.batch, seed=options.seed, step=step))
        (loss + BALANCE * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.update(task, advance=1, loss=loss.item())
    seconds = time.perf_counter() - began
    loss, busiest = judge(model, pieces(held_out, options.held_out, seed=0, step=0))
    return {"loss": loss, "busiest": busiest, "bytes": expert_bytes(model), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=24, help="pieces of text per step")
    parser.add_argument("--held-out", type=int, default=512, help="pieces of held-out text")
    parser.add_argument(
        "--within", type=float, default=1.0, help="maximum difference of a recipe's loss from bf16's, in percent"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the pieces of text")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    plain = Transformer("bf16")
    first = plain.state_dict()
    parameters = sum(param.numel() for param in plain.parameters()) / 1e6
    print(f"{parameters:.2f} million parameters: {LAYERS} layers of {EXPERTS} experts each, {CHOICES} of them for each byte.")

    columns = ("{task.description:>10}", BarColumn(), MofNCompleteColumn(), "loss {task.fields[loss]:.3f}", TimeElapsedColumn())
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns)) as progress:
        runs = {recipe: train(recipe, options, first, progress) for recipe in ("bf16", "mxfp8", "fp8_block")}

    table, failed = Table(), []
    table.add_column("recipe")
    for column in (
        "held-out loss",
        "against bf16",
        f"within {options.within:g}%",
        "busiest expert",
        "experts' weights",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for recipe, found in runs.items():
        row = [recipe, f"{found['loss']:.4f}", "", ""]
        if recipe != "bf16":
            away = 100 * (found["loss"] / runs["bf16"]["loss"] - 1)
            # Not a number is not within anything.
            good = abs(away) <= options.within
            failed += [] if good else [recipe]
            row[2:] = f"{away:+.2f}%", "OK" if good else "NO"
        table.add_row(*row, f"{found['busiest']:.0%}", f"{found['bytes'] / 1e6:.2f} MB", f"{found['seconds']:.0f}")
    Console(width=120).print(table)
    print("Losses are in nats a byte, on modules that no step has read. The busiest of eight experts has 12% of a layer's rows")
    print("where all have as many. Weights are as they are stored between steps: float32, or codes and scales.")
    if failed:
        raise SystemExit(f"FAILED: {' and '.join(failed)}: the loss is more than {options.within:g}% away from that of bf16")


if __name__ == "__main__":
    main()

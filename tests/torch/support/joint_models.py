"""A block whose layers share casts of delayed scaling, as a known class and as one of which nothing is known, and its steps."""

import copy

import threaded
import torch
from arrays import values
from blockfp.torch_backend.modules.known_classes import KNOWN
from torch import nn

import blockfp.torch as bfp

KNOWN[__name__] = (
    bfp.SharedInput("q", "k", "v"),
    bfp.MLPParts(gate="gate", up="up", down="down", activation="silu"),
)
"""The classes of this file are those of a library that is known."""


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x, memory=None):
        query = self.q(x)
        memory = x if memory is None else memory
        return query * self.k(memory) + self.v(memory)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp, self.out = attention(), mlp(), nn.Linear(32, 32)

    def forward(self, x, memory=None):
        x = x + self.out(nn.functional.tanh(self.attention(x * 1.5, memory)))
        return x + self.mlp(nn.functional.layer_norm(x, (32,)))


class UnknownAttention(Attention):
    def forward(self, x, memory=None):
        return Attention.forward(self, x, memory)


class UnknownMLP(MLP):
    def forward(self, x):
        return MLP.forward(self, x)


UnknownAttention.__module__ = UnknownMLP.__module__ = "elsewhere"

JOINTLY, EACH = 3, 7
"""Casts of a block's inputs: of those of (q, k, v), out, (gate, up), while the activation casts down's; and of each layer's."""


def made(*, shares, weights="quantized", recipe="fp8_delayed"):
    with threaded.seeded(0):
        model = Block(*((Attention, MLP) if shares else (UnknownAttention, UnknownMLP)))
    return bfp.convert(model, recipe, weights=weights)


def state_of(model):
    """All that a model and its checkpoint hold."""
    return copy.deepcopy([model.state_dict(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}])


def step(model, optimizer, seed=0, run=None, batches=1):
    """Returns outputs, gradients and state of a step."""
    found = []
    for batch in range(batches):
        x = values((4, 8, 32), 10 * seed + batch, scale=2.0 ** (seed % 5)).requires_grad_()
        y = (model if run is None else run)(x)
        y.square().mean().backward()
        found += [y.detach(), x.grad]
    found.append(state_of(model))
    optimizer.step()
    optimizer.zero_grad()
    return [*found, state_of(model)]


def steps(model, optimizer, count=2, first=0, **options):
    return [step(model, optimizer, seed, **options) for seed in range(first, first + count)]


def adamw(model):
    return bfp.AdamW(model.parameters(), lr=1e-2)


def every_parameter(model):
    for param in model.parameters():
        param -= 0.1 * param.grad


def by_hand(model, write=every_parameter):
    """Steps that no optimizer takes."""
    found = []
    for seed in range(4):
        y = model(values((4, 32), seed, scale=2.0**seed))
        y.square().mean().backward()
        found.append((y.detach(), state_of(model)))
        with torch.no_grad():
            write(model)
        model.zero_grad()
    return found, model

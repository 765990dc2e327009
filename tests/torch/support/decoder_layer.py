"""A decoder layer as transformers' Llama has it, and its conversion, in which layers of one input share its casts."""

import torch
import torch.nn.functional as F
from torch import nn

import blockfp.torch as bfp


class Attention(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(features, features, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, features, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, features=128, hidden=256, heads=4):
        super().__init__()
        self.self_attn, self.mlp = Attention(features, heads), MLP(features, hidden)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(features), nn.RMSNorm(features)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def decoder_layer(recipe, *, shares=True, device=None, **options):
    """Returns a converted layer; without `shares` nothing is known of its classes."""
    fuse = {
        Attention: bfp.SharedInput("q_proj", "k_proj", "v_proj"),
        MLP: bfp.MLPParts(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn"),
    }
    return bfp.convert(DecoderLayer().to(device, torch.bfloat16), recipe, fuse=fuse if shares else None, **options)

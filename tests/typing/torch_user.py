"""A user's lines with the PyTorch face. mypy and pyright read them; nothing runs them (see tests/README.md)."""

from typing import assert_type

import torch
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(x)
        return y


# `convert` and `set_recipe` keep the model's own class.
model = bfp.convert(Model(), "fp8_current", filter_fn=lambda path, layer: path != "head")
assert_type(model, Model)
assert_type(model.logits(torch.ones(2, 64)), torch.Tensor)
assert_type(bfp.convert(Model(), lambda path: None if path == "head" else "nvfp4"), Model)
assert_type(bfp.convert(Model(), {"^head$": None, "": "nvfp4"}), Model)
assert_type(bfp.convert(Model(), recipes.mxfp8(exact_products=True)), Model)
assert_type(recipes.mxfp8().replace(exact_order=True), recipes.Recipe)

optimizer = bfp.AdamW(model.parameters(), lr=1e-3, moments="bfloat16", master=None)
optimizer.step()
assert_type(bfp.set_recipe(model, optimizer, "mxfp8"), Model)
assert_type(bfp.summary(model, optimizer), bfp.Summary)

q = bfp.quantize(torch.ones(64, 128), "mxfp8_e4m3_32x32")
assert_type(q, bfp.QuantizedTensor)
assert_type(q.dequantize(), torch.Tensor)
assert_type(bfp.linear(torch.ones(4, 128), q, recipe="mxfp8"), torch.Tensor)
layer = bfp.Linear(64, 256, recipe="nvfp4", weights="high_precision")
assert_type(layer.in_features, int)

# Wrong:
bfp.convert(Model(), "mxpf8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bfp.convert(model.logits, "mxfp8")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
bfp.convert(Model(), "mxfp8", weights="fp32")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bfp.AdamW(model.parameters(), moments="fp7")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bfp.AdamW(model.parameters(), master="bfloat16")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bfp.quantize(torch.ones(2, 64), "fp8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
bfp.linear(torch.ones(4, 128), q)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
bfp.Linear(64, 256, recipe="fp8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

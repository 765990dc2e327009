"""Lightning (2.6): a precision plugin for Trainer.

    Trainer(plugins=[BlockfpPrecision("mxfp8")])

Fabric needs no plugin: convert the model before `fabric.setup`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.optim import Optimizer

from blockfp.recipes import ByPath, Recipe, RecipeName

from ..torch_backend.conversion.convert import convert
from ..torch_backend.conversion.summary import summary
from ..torch_backend.modules.quantized_layer import Weights


class BlockfpPrecision(Precision):
    """Converts the model by `blockfp.torch.convert` before Lightning creates its optimizers.

    `configure_optimizers` must return a `blockfp.torch.AdamW` of the quantized parameters, or any optimizer with
    weights="high_precision". A model that already has quantized layers is unchanged. Call `convert_module` yourself if the
    converted model is needed earlier: before `fit(ckpt_path=..)`, which restores codes first, and before `fully_shard` in
    `configure_model`.

    Args:
        recipe, filter_fn, weights, keep_init: see `convert`; filter_fn gets paths in the LightningModule.
        dtype: torch.bfloat16 for autocast around each step; None for none.

    Raises:
        ValueError: the dtype is another one.
    """

    def __init__(
        self,
        recipe: Recipe | RecipeName | ByPath = "mxfp8",
        filter_fn: Callable[[str, nn.Module], bool] | None = None,
        *,
        weights: Weights = "quantized",
        keep_init: bool = True,
        dtype: torch.dtype | None = None,
    ):
        if dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype must be torch.bfloat16 or None, got {dtype}")
        self.device = "cpu"
        self.precision = "32-true" if dtype is None else "bf16-mixed"
        self.recipe: Recipe | RecipeName | ByPath = recipe
        self.filter_fn, self.dtype = filter_fn, dtype
        self.options: dict[str, Any] = {"weights": weights, "keep_init": keep_init}

    def convert_module(self, module: nn.Module) -> nn.Module:
        if summary(module).quantized:
            return module
        return convert(module, self.recipe, self.filter_fn, **self.options)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        # The model is on its device now; Lightning doesn't tell plugins which one.
        self.device = next((param.device.type for param in model.parameters()), "cpu")
        return super().connect(model, optimizers, lr_schedulers)

    def forward_context(self) -> AbstractContextManager:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)

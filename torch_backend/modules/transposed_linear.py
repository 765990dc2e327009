"""`TransposedLinear`: a linear layer whose weight lies [in, out], as that of transformers' `Conv1D`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe

from .quantized_layer import QuantizedLayer, Weights


class TransposedLinear(QuantizedLayer):
    """x @ weight + bias, with weight [in, out] stored quantized: bit for bit the `Linear` of the transposed weight.

    What `convert` makes of a `Conv1D`. The parameter keeps that layer's shape, so plain values load and save as they are, and
    nobody has to guess which way round a square matrix lies. Each product takes an exact transposed copy of the codes.

    Args:
        in_features, out_features, bias, recipe, device, dtype, weights, compute, keep_init: as for `Linear`.

    Raises:
        ValueError: the recipe stores weights in a format whose transpose isn't exact (1-D blocks).
    """

    transposed: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ):
        super().__init__(recipe, weights, compute, keep_init)
        format = self.recipe.weight.format
        if format is not None and not format.square:
            raise ValueError(
                f"recipe {self.recipe} stores weights in {format}, whose blocks have no exact transpose, and a weight "
                "[in, out] needs one: use square blocks, one scale per tensor, or a torch.nn.Linear"
            )
        self.make_parameters((in_features, out_features), bias, device, dtype)

    @classmethod
    def from_linear(
        cls,
        layer: nn.Module,
        recipe: Recipe | str,
        *,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ) -> TransposedLinear:
        """Makes a layer with the values of a `Conv1D`, which keeps its bias parameter; on its device, meta too."""
        weight = layer.get_parameter("weight")
        like: Any = {"device": "meta", "dtype": weight.dtype}
        made = cls(*weight.shape, bias=False, recipe=recipe, weights=weights, compute=compute, keep_init=keep_init, **like)
        return made.take_values(layer)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws a normal weight of standard deviation 0.02, as `Conv1D` does, a bias of zeros, and resets the buffers."""
        self.draw(lambda values: values.normal_(std=0.02), lambda values: values.zero_())

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, reads=True)

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def extra_repr(self) -> str:
        inner, outer = self.weight.shape
        return f"in_features={inner}, out_features={outer}, {super().extra_repr()}"

"""`Linear`: torch's linear layer with quantized products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe, RecipeName

from .cutting import Cutter
from .known_classes import LINEAR
from .quantized_layer import QuantizedLayer, Weights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Linear(QuantizedLayer, nn.Linear):
    """Computes x @ weight^T + bias with a quantized weight [out, in]; a recipe defines all three products (`linear`).

    It is a `torch.nn.Linear`, so code that looks for those finds it. Code that multiplies with `weight` directly, instead of
    calling the layer, gets an error, so no product is silently unquantized.

    Args:
        in_features, out_features: lengths.
        bias: whether there is a bias, [out].
        recipe: a `Recipe` or its name.
        device, dtype: of the parameters; the dtype is the weight's nominal one.
        weights, compute, keep_init: see `QuantizedLayer`.
        tp_mesh, style, sequence_parallel: shard it over a tensor-parallel mesh, as `parallelize` does.

    Delayed scaling keeps the buffers `input_amax_history`, `input_scale`, `gradient_amax_history` and `gradient_scale`, updated
    after each optimizer step. Stochastic rounding keeps `rng_key` and `step`, which the first backward of each forward
    advances.

    Raises:
        TypeError, ValueError: the recipe is invalid, or a linear layer can't run it.

    Example:
        >>> layer = Linear(1024, 4096, recipe="mxfp8", dtype=torch.bfloat16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
        tp_mesh: DeviceMesh | None = None,
        style: Literal["column", "row"] | None = None,
        sequence_parallel: bool = False,
    ):
        super().__init__(recipe, weights, compute, keep_init)
        self.in_features, self.out_features = in_features, out_features
        self.make_parameters((out_features, in_features), bias, device, dtype)
        if tp_mesh is not None:
            Cutter(tp_mesh, sequence=sequence_parallel).cut({self: style})
        elif style is not None or sequence_parallel:
            raise ValueError("style and sequence_parallel need a tp_mesh")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        recipe: Recipe | RecipeName,
        *,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ) -> Linear:
        """Returns a layer with the values of a torch layer, sharing its bias parameter; on its device, meta too."""
        lengths = linear.in_features, linear.out_features
        like: Any = {"device": "meta", "dtype": linear.weight.dtype}
        made = cls(*lengths, False, recipe=recipe, weights=weights, compute=compute, keep_init=keep_init, **like)
        return made.take_values(linear)

    def forward(self, x: Tensor) -> Tensor:
        made_of = self.made_of
        if made_of is not None and made_of.forward is not LINEAR:
            return made_of.forward(self, x)
        return self.multiply(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"


# ---- weights stored as [in, out]


class TransposedLinear(QuantizedLayer):
    """Computes x @ weight + bias with a quantized weight [in, out]; bit for bit the `Linear` of the transposed weight.

    `convert` makes it from a `Conv1D`. The parameter keeps the shape of that layer's, so plain values load and save unchanged
    and a square matrix isn't ambiguous. Each product uses an exact transposed copy of the codes.

    Args:
        in_features, out_features, bias, recipe, device, dtype, weights, compute, keep_init: as for `Linear`.

    Raises:
        ValueError: the recipe stores weights in a format without an exact transpose (1-D blocks).
    """

    transposed: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | RecipeName,
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
        recipe: Recipe | RecipeName,
        *,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ) -> TransposedLinear:
        """Returns a layer with the values of a `Conv1D`, sharing its bias parameter; on its device, meta too."""
        weight = layer.get_parameter("weight")
        like: Any = {"device": "meta", "dtype": weight.dtype}
        made = cls(*weight.shape, bias=False, recipe=recipe, weights=weights, compute=compute, keep_init=keep_init, **like)
        return made.take_values(layer)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws a normal weight of standard deviation 0.02 and a zero bias, as `Conv1D` does, and resets the buffers."""
        self.draw(lambda values: values.normal_(std=0.02), lambda values: values.zero_())

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def extra_repr(self) -> str:
        inner, outer = self.weight.shape
        return f"in_features={inner}, out_features={outer}, {super().extra_repr()}"

"""`Linear`: torch's linear layer, with quantized products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from blockfp.recipes import Compute, Recipe

from .cutting import Cutter
from .known_classes import LINEAR
from .quantized_layer import QuantizedLayer, Weights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Linear(QuantizedLayer, nn.Linear):
    """x @ weight^T + bias, with weight [out, in] stored quantized and all three products as a recipe says (`linear`).

    It is a `torch.nn.Linear`, so whatever looks for those finds it. What then multiplies with `weight` itself, and not by
    calling the layer, gets an error: no product of it is unquantized unsaid.

    Args:
        in_features, out_features: lengths.
        bias: whether there is a bias, [out].
        recipe: a `Recipe` or its name.
        device, dtype: of the parameters; the dtype is the weight's nominal one.
        weights, compute, keep_init: see `QuantizedLayer`.
        tp_mesh, style, sequence_parallel: cut it over a tensor-parallel mesh, as `parallelize` does.

    Delayed scaling keeps `input_amax_history`, `input_scale`, `gradient_amax_history` and `gradient_scale` in buffers, which
    follow each step of an optimizer. Stochastic rounding keeps `rng_key` and `step`, which the first
    backward of each forward moves on.

    Raises:
        TypeError, ValueError: a recipe that isn't one, or that a linear layer can't run.

    Example:
        >>> layer = Linear(1024, 4096, recipe="mxfp8", dtype=torch.bfloat16)
    """

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
        recipe: Recipe | str,
        *,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ) -> Linear:
        """Makes a layer with the values of torch's, which keeps its bias parameter; on its device, meta too."""
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


# ---- a weight of [in, out]


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
        return self.multiply(x)

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def extra_repr(self) -> str:
        inner, outer = self.weight.shape
        return f"in_features={inner}, out_features={outer}, {super().extra_repr()}"

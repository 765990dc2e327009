"""The base of the layers: a weight that is stored, initialized and loaded, and the buffers that a recipe needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args

import torch
from torch import Tensor, nn

from blockfp import recipes
from blockfp.files.names import LAYER_BUFFERS
from blockfp.recipes import Compute, Recipe

from ..linear.linear import LinearState, apply
from ..linear.parallel import Parallel
from ..linear.pipelines import keep_state
from ..linear.recipe_layer import RecipeLayer
from ..linear.scale_watch import note_sharded, watch
from ..quantized_tensor import sharding
from ..quantized_tensor.dtensors import from_local
from ..quantized_tensor.keys import data_rank, random_key
from ..quantized_tensor.quantize import quantize
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from ..torch_internals import mark_static_address
from ..weights.cast_weight import CastWeight
from ..weights.loading import load_high_precision_
from ..weights.module_state import InParts, keep_in_parts
from .shared_products import multiply_shared

Weights = Literal["quantized", "high_precision"]


class LayerOptions(TypedDict):
    """The keywords that all layers have, as one hands them on to another; see `Linear` and `QuantizedLayer`."""

    recipe: Recipe | str
    device: torch.device | str | None
    dtype: torch.dtype | None
    weights: Weights
    compute: Compute
    keep_init: bool


class QuantizedLayer(InParts, RecipeLayer):
    """A layer with one weight [.., out, in] and maybe a bias, a recipe, and the recipe's state in buffers.

    Attributes:
        recipe: the `Recipe`.
        weights: "quantized": the weight is stored as codes and scales. "high_precision": as values, quantized at use, or by
            FSDP2 on the shard before each gather.
        compute: "quantized", or "high_precision": products take the dequantized weight and everything else as it is.
        keep_init: whether original values are kept, on the CPU, until an optimizer takes them as its master weights.
        parallel: how a tensor-parallel group shares the layer, from `parallelize`; or None.
        stateful: whether the recipe keeps state in buffers.
        data_rank: this rank's number in the mesh that `fully_shard` got, of a layer that draws random bits; otherwise 0.
        transposed: whether the weight lies [in, out] instead.
    """

    transposed: ClassVar[bool] = False

    bias: nn.Parameter | None
    compute: Compute

    def __init__(self, recipe: Recipe | str, weights: Weights, compute: Compute, keep_init: bool):
        # Not what the next class would do: torch.nn.Linear, where a layer is one, makes parameters of its own.
        nn.Module.__init__(self)
        if weights not in get_args(Weights):
            raise ValueError(f"weights must be one of {get_args(Weights)}, got {weights!r}")
        self.recipe = recipes.parse(recipe)
        self.linear_recipe = recipes.for_linear(self.recipe, compute)
        self.weights, self.compute, self.keep_init = weights, compute, keep_init
        self.observed = None
        self.parallel: Parallel | None = None
        self.data_rank = 0
        self.register_hooks()

    def register_hooks(self) -> None:
        """Makes state dicts show and take the weight as codes, and take values for it."""
        keep_in_parts(self)
        self._announce()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Worked out again, not read: a pickle of another version may lack it.
        self.linear_recipe = recipes.for_linear(self.recipe, self.compute)
        self._announce()

    def _announce(self) -> None:
        """Registers a layer that was made, copied or unpickled with those that look after its state."""
        self.stateful = self.linear_recipe.delayed is not None or self._stochastic
        if self.linear_recipe.delayed is not None:
            watch(self)
        if self.stateful:
            keep_state()

    @property
    def _stochastic(self) -> bool:
        return self.linear_recipe.gradient.stochastic or self.linear_recipe.gradient_columnwise.stochastic

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 sets the weight so, sharded and gathered. A gathered one may be plain, and know nothing of a mesh. It does it
        # every step: layers without state don't ask.
        stateful = name == "weight" and (self._stochastic or self.linear_recipe.delayed is not None)
        mesh = sharding.mesh_of(value) if stateful else None
        if mesh is not None and self.linear_recipe.delayed is not None:
            note_sharded(self, value)
        if mesh is not None and self._buffers.get("rng_key") is not None:
            # The last axis is tensor parallelism's, if there is any; alone it says nothing of the batch.
            axes = mesh.ndim - (self.parallel is not None)
            if axes:
                self.data_rank = sharding.leading_rank(mesh, axes)
        super().__setattr__(name, value)

    def make_parameters(
        self, shape: tuple[int, ...], bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Makes weight, bias and buffers, and fills them: weight of `shape` [.., out, in], bias [.., out].

        Raises:
            ValueError: a negative length.
        """
        lengths = shape if self.transposed else reversed(shape)
        for name, length in zip(("in_features", "out_features"), lengths, strict=False):
            if length < 0:
                raise ValueError(f"{name} must be 0 or more, got {length}")
        values = torch.empty(shape, dtype=dtype, device="meta")
        self.set_weight(values)
        device = torch.empty(0, device=device).device
        if device.type != "meta":
            self.weight = nn.Parameter(torch.empty_like(self.weight, device=device))
        outputs = shape[-1:] if self.transposed else shape[:-1]
        self.bias = nn.Parameter(values.new_empty(outputs, device=device)) if bias else None
        self.set_buffers(device)
        self.reset_parameters()

    def set_weight(self, values: Tensor, *, requires_grad: bool = True) -> None:
        """Makes the weight parameter of these values; on the meta device, of their shape."""
        format = self.recipe.weight.format
        values = values.detach()
        if format is None:
            weight = values
        elif self.weights == "high_precision":
            weight = CastWeight.from_values(values, format)
        else:
            weight = quantize(values, format)
            if self.keep_init and requires_grad and not values.is_meta:
                weight.initial = values.to("cpu", copy=True)
        self.weight = nn.Parameter(weight, requires_grad)

    def take_values(self, layer: nn.Module) -> Self:
        """Takes over weight, bias (the same parameter) and mode of a layer that isn't quantized, and returns itself."""
        weight = layer.get_parameter("weight")
        self.set_weight(weight, requires_grad=weight.requires_grad)
        self.bias = layer.bias  # pyright: ignore[reportAttributeAccessIssue]
        self.set_buffers(weight.device)
        self.reset_buffers()
        return self.train(layer.training)

    def set_buffers(self, device: torch.device) -> None:
        """Makes the buffers that the recipe needs."""
        delayed, stochastic = self.linear_recipe.delayed, self._stochastic
        for operand in ("input", "gradient"):
            history = None if delayed is None else torch.zeros(delayed.history, device=device)
            self.register_buffer(f"{operand}_amax_history", history)
            self.register_buffer(f"{operand}_scale", None if delayed is None else torch.ones((), device=device))
        self.register_buffer("rng_key", torch.zeros(2, dtype=torch.int64, device=device) if stochastic else None)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device) if stochastic else None)
        self._mark_buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        state = [(name, self._buffers[name]) for name in chain(*LAYER_BUFFERS)]
        super()._apply(partial(_moved, fn), recurse)
        for name, before in state:
            after = self._buffers[name]
            if before is not None and after is not None and before.dtype != after.dtype:
                # Amaxes, scales and keys are of the recipe's dtypes, whatever the layer is cast to.
                self._buffers[name] = before.to(after.device)
        if any(before is not None and before.is_meta and not self._buffers[name].is_meta for name, before in state):  # pyright: ignore
            # Memory that nobody else may write into: initializers of other libraries know parameters alone.
            self.reset_buffers()
        # Others may be in their place now.
        self._mark_buffers()
        return self

    def _mark_buffers(self) -> None:
        """Tells compilers that buffers stay where they are, which they take for granted in modules, but not in FSDP2's.

        A CUDA graph would write into copies of them otherwise.
        """
        for buffer in self.buffers(recurse=False):
            mark_static_address(buffer)

    def state(self) -> LinearState:
        """Returns the buffers as `linear` takes them."""
        return LinearState(
            self.input_amax_history,
            self.input_scale,
            self.gradient_amax_history,
            self.gradient_scale,
            self.rng_key,
            self.step,
            0 if self.rng_key is None else data_rank(self.data_rank),
            self.observed,
        )

    def multiply(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Runs `linear` on x and this layer's parameters, as they lie.

        Raises:
            TypeError: x is no tensor.
            ValueError: a DTensor for a layer that isn't cut, or cut over another mesh.
        """
        plain = type(x) is Tensor
        if not plain and not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if self.parallel is not None:
            return multiply_shared(
                x, self.weight, self.bias, self.linear_recipe, self.parallel, state=self.state(), counts=counts
            )
        if not plain and sharding.mesh_of(x) is not None:
            raise ValueError("x is a DTensor, and the layer isn't cut: parallelize it over x's mesh, or pass x.to_local()")
        recipe, state = self.linear_recipe, self.state() if self.stateful or self.observed is not None else None
        return apply(x, self.weight, self.bias, recipe, state=state, counts=counts, transposed=self.transposed)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new values as `torch.nn.Linear` does, and resets the buffers; of sharded parameters too.

        Every rank draws the whole weight and keeps its rows, so ranks that are seeded alike get what one rank alone would.
        """
        bound = 1 / math.sqrt(self.weight.shape[-1]) if self.weight.shape[-1] else 0.0
        self.draw(*[lambda values: values.uniform_(-bound, bound)] * 2)

    def draw(self, weight: Callable[[Tensor], Tensor], bias: Callable[[Tensor], Tensor]) -> None:
        """Fills the parameters, each by a function that is given the whole one to write into, and resets the buffers."""
        for param, function in ((self.weight, weight), (self.bias, bias)):
            if param is not None:
                values = torch.empty(param.shape, dtype=param.dtype, device=sharding.local_of(param).device)
                fill(param, function(values), keep_init=self.keep_init)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Sets delayed scaling and the step to their start, and draws a new random key."""
        for buffer in (self.input_amax_history, self.gradient_amax_history, self.step):
            if buffer is not None:
                buffer.zero_()
        for buffer in (self.input_scale, self.gradient_scale):
            if buffer is not None:
                buffer.fill_(1)
        if self.rng_key is not None and not self.rng_key.is_meta:
            self.rng_key.copy_(random_key())

    def extra_repr(self) -> str:
        options = [] if self.weights == "quantized" else [f"weights={self.weights!r}"]
        options += [] if self.compute == "quantized" else [f"compute={self.compute!r}"]
        return ", ".join([f"bias={self.bias is not None}", f"recipe={self.recipe}", *options])


def fill(param: Tensor, values: Tensor, *, keep_init: bool) -> None:
    """Writes the values of a whole parameter into it, or into this rank's part of it."""
    local = sharding.local_of(param)
    if local.is_meta:
        return
    if isinstance(local, QuantizedTensor):
        load_high_precision_(param, values, keep_init=keep_init)
        return
    local.copy_(sharding.own_part(values, param))


def _moved(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies `fn` of `Module._apply` to a tensor; a cast of a quantized weight is one of its nominal dtype alone.

    Raises:
        TypeError: the dtype of a weight, quantized now or later, would be none that can be quantized.
    """
    local = sharding.local_of(tensor)
    if isinstance(local, QuantizedTensor | CastWeight):
        dtype = fn(torch.empty(0, dtype=local.dtype, device=local.device)).dtype
        if dtype not in DTYPES:
            raise TypeError(f"a weight that is quantized must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        if isinstance(local, QuantizedTensor) and dtype != local.dtype:
            local = local.with_parts(local.codes, local.scales, local.tensor_scale, dtype=dtype)
            tensor = from_local(local, sharding.mesh_of(tensor), getattr(tensor, "placements", ()), tensor.shape)
    return fn(tensor)

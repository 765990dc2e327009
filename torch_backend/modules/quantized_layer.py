"""`QuantizedLayer`: base of layers with one quantized weight, its initialization, loading and products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args

import torch
from torch import Tensor, nn

from blockfp.formats import Format
from blockfp.recipes import Compute, Recipe, RecipeName

from ..linear.linear import apply
from ..linear.shared_casts import running
from ..quantized_tensor import sharding
from ..quantized_tensor.quantize import quantize
from ..quantized_tensor.sharding import from_local
from ..quantized_tensor.tensor import DTYPES, QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.loading import load_high_precision_
from ..weights.module_state import InParts, keep_in_parts
from .shared_products import multiply_shared
from .stateful_layer import StatefulLayer

Weights = Literal["quantized", "high_precision"]


class LayerOptions(TypedDict):
    """Keywords common to all layers, for passing them on; see `Linear` and `QuantizedLayer`."""

    recipe: Recipe | RecipeName
    device: torch.device | str | None
    dtype: torch.dtype | None
    weights: Weights
    compute: Compute
    keep_init: bool


class QuantizedLayer(InParts, StatefulLayer):
    """A layer with one weight [.., out, in], an optional bias, a recipe, and the recipe's state in buffers.

    Attributes:
        weights: "quantized" stores the weight as codes and scales. "high_precision" stores values, which are quantized at use,
            or by FSDP2 on the shard before each gather.
        keep_init: keep original values, on the CPU, until an optimizer takes them as its masters.
        transposed: whether the weight is stored as [in, out].
        made_of: the class from which `convert` derived this layer's, or None.
    """

    transposed: ClassVar[bool] = False
    made_of: ClassVar[type[nn.Module] | None] = None

    bias: nn.Parameter | None
    weights: Weights

    def __init__(self, recipe: Recipe | RecipeName, weights: Weights, compute: Compute, keep_init: bool):
        StatefulLayer.__init__(self, recipe, compute)
        check_weights(weights)
        self.weights, self.keep_init = weights, keep_init
        self.register_hooks()

    def register_hooks(self) -> None:
        """Registers the hooks that show the weight as parts in state dicts and load values into it."""
        keep_in_parts(self)
        self.announce()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.note_weight(value)
            if self._parameters.get(name) is not None and isinstance(value, nn.Parameter) and value.is_leaf:
                # FSDP2 sets it four times a step, and bypasses torch's __setattr__ for plain modules in the same way.
                self._parameters[name] = value
                return
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with moving(self, fn) as applied:
            super()._apply(applied, recurse)
        return self

    def make_parameters(
        self, shape: tuple[int, ...], bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Allocates and initializes the weight of `shape` [.., out, in], the bias [.., out] and buffers.

        Raises ValueError for a negative length.
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
        """Sets the weight parameter to these values, or on the meta device to their shape."""
        self.weight = made_weight(values, self.recipe.weight.format, self.weights, self.keep_init, requires_grad=requires_grad)

    def take_values(self, layer: nn.Module) -> Self:
        """Takes the weight, the bias parameter and the training mode of an unquantized layer; returns self."""
        weight = layer.get_parameter("weight")
        self.set_weight(weight, requires_grad=weight.requires_grad)
        self.bias = layer.bias  # pyright: ignore[reportAttributeAccessIssue]
        self.set_buffers(weight.device)
        self.reset_buffers()
        return self.train(layer.training)

    def multiply(self, x: Tensor, counts: Sequence[int] | None = None, offs: Tensor | None = None) -> Tensor:
        """Returns `linear` of x and this layer's parameters.

        Raises TypeError if x is not a tensor, and ValueError for a DTensor unless the layer is sharded over its mesh.
        """
        plain = type(x) is Tensor
        if not plain and not isinstance(x, Tensor):
            leaf = "; make blockfp's layers leaves by is_leaf_module of torch.fx's Tracer" * isinstance(x, torch.fx.Proxy)
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}{leaf}")
        # Attribute access costs a Python call per parameter. Parametrizations replace the entries.
        own: Any = self._parameters
        weight = own["weight"] if "weight" in own else self.weight  # noqa: SIM401
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        if self.parallel is not None:
            return multiply_shared(
                x, weight, bias, self.linear_recipe, self.parallel, state=self.state(), counts=counts, offs=offs
            )
        if not plain and sharding.mesh_of(x) is not None:
            raise ValueError("x is a DTensor, but the layer isn't sharded: parallelize it over x's mesh, or pass x.to_local()")
        shared = running.casts
        casts = shared.of(self, x) if plain and shared is not None else None
        recipe = self.linear_recipe
        state = self.state(alone=casts is None) if self.stateful or self.observed is not None else None
        return apply(x, weight, bias, recipe, state=state, counts=counts, offs=offs, transposed=self.transposed, casts=casts)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new values as `torch.nn.Linear` does, and resets the buffers.

        Every rank draws the whole weight and keeps its rows, so equally seeded ranks get the weight of a single rank.
        """
        bound = 1 / math.sqrt(self.weight.shape[-1]) if self.weight.shape[-1] else 0.0
        self.draw(*[lambda values: values.uniform_(-bound, bound)] * 2)

    def draw(self, weight: Callable[[Tensor], Tensor], bias: Callable[[Tensor], Tensor]) -> None:
        """Fills the whole weight and bias by one function each, and resets the buffers."""
        for param, function in ((self.weight, weight), (self.bias, bias)):
            if param is not None:
                values = torch.empty(param.shape, dtype=param.dtype, device=sharding.local_of(param).device)
                fill(param, function(values), keep_init=self.keep_init)
        self.reset_buffers()

    def extra_repr(self) -> str:
        options = [] if self.weights == "quantized" else [f"weights={self.weights!r}"]
        options += [] if self.compute == "quantized" else [f"compute={self.compute!r}"]
        return ", ".join([f"bias={self.bias is not None}", f"recipe={self.recipe}", *options])


def check_weights(weights: Weights) -> None:
    """Raises ValueError for an unknown way of storing weights."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights must be one of {get_args(Weights)}, got {weights!r}")


def made_weight(
    values: Tensor, format: Format | None, weights: Weights, keep_init: bool, *, requires_grad: bool = True
) -> nn.Parameter:
    """Returns a weight parameter with these values, or on the meta device with their shape."""
    values = values.detach()
    if format is None:
        weight = values
    elif weights == "high_precision":
        weight = CastWeight.from_values(values, format)
    else:
        weight = quantize(values, format)
        if keep_init and requires_grad and not values.is_meta:
            weight.initial = values.to("cpu", copy=True)
    return nn.Parameter(weight, requires_grad)


def fill(param: Tensor, values: Tensor, *, keep_init: bool) -> None:
    """Writes a whole parameter's values into it, or this rank's shard of them."""
    local = sharding.local_of(param)
    if local.is_meta:
        return
    if isinstance(local, QuantizedTensor):
        load_high_precision_(param, values, keep_init=keep_init)
        return
    local.copy_(sharding.own_part(values, param))


@contextmanager
def moving(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Wraps `fn` for torch's `Module._apply`, and hides weights that it wouldn't change.

    torch swaps a weight even for itself, which fails while a result waits for its backward; trainers call `model.to(device)` on
    models already there. Raises RuntimeError if a weight would change in that state.
    """
    stay: dict[str, nn.Parameter | None] = {}
    applied: dict[int, Tensor] = {}
    for name, param in module._parameters.items():
        if param is None or not isinstance(sharding.local_of(param), QuantizedTensor | CastWeight):
            continue
        with torch.no_grad():
            new = moved(fn, param)
        if new is param:
            stay[name] = param
        else:
            applied[id(param)] = new
    module._parameters.update(dict.fromkeys(stay))
    try:
        yield lambda tensor: applied.pop(id(tensor)) if id(tensor) in applied else moved(fn, tensor)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise RuntimeError(
            f"{error}: something else holds this weight, such as a result of the model that waits for its backward: delete it, "
            "or compute it under torch.no_grad()"
        ) from error
    finally:
        module._parameters.update(stay)


def moved(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies `Module._apply`'s `fn` to a tensor; a cast of a quantized weight only changes its nominal dtype.

    Raises TypeError for a dtype that can't be quantized.
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

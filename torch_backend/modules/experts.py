"""`Experts`: quantized replacement for modules that store all experts' weights in their own 3-D parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from blockfp.formats import Format
from blockfp.recipes import Compute, Recipe, RecipeName

from ..experts.dispatch import Received, send
from ..experts.route import Group
from ..linear.linear import apply
from ..linear.tensor_parallel.parallel import Parallel
from ..quantized_tensor.sharding import to_local
from ..weights.module_state import InParts, RecipeState, keep_in_parts, part_properties
from .quantized_layer import Weights, check_weights, made_weight, moving
from .stateful_layer import StatefulLayer

OWN = ("biases", "transposed", "recipe", "weights", "compute", "keep_init", "parallel", "added")
"""Attributes that `from_experts` adds."""

PRODUCT = "_product"
"""Suffix, after a weight's name, of the module that holds its recipe's state."""


class GroupedProduct(RecipeState, StatefulLayer):
    """Multiplies with one weight of `Experts` and holds the recipe's state for it; the weight belongs to its owner."""

    def __init__(self, recipe: Recipe | RecipeName, compute: Compute, device: torch.device):
        StatefulLayer.__init__(self, recipe, compute)
        self.set_buffers(device)
        self.reset_buffers()
        self.announce()

    def belongs_to(self, owner: nn.Module, name: str) -> None:
        """Sets the module that owns the weight, and the parameter's name there."""
        vars(self)["owner"] = weakref.ref(owner), name

    def held_weight(self) -> Tensor | None:
        owner, name = vars(self).get("owner", (None, ""))
        module = None if owner is None else owner()
        return None if module is None else module._parameters.get(name)

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled owner calls `belongs_to` again.
        return {name: value for name, value in vars(self).items() if name != "owner"}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *, transposed: bool) -> Tensor:
        """Returns [tokens, out] for x [tokens, in], whose rows are sorted by expert.

        `weight` is [experts, out, in], or [experts, in, out] if `transposed`; `bias` is [experts, out]. `offs` holds the end of
        each expert's rows: int32 [experts], on x's device.
        """
        return apply(x, weight, bias, self.linear_recipe, state=self.state(), offs=offs, transposed=transposed)

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}"


class Experts(InParts):
    """Experts whose weights are this module's 3-D parameters; `convert` puts it in place of other libraries' modules.

    The parameters keep their names and shapes. NAME_product holds the recipe's state of weight NAME.

    Attributes:
        biases: bias name, or None, by weight name.
        transposed: whether weights are [experts, in, out].
        recipe, weights, keep_init, parallel: see `QuantizedLayer`.
        added: functions whose results `multiply` adds, by weight name; see `adding`.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """All weight names in the modules that this class replaces."""
    seams: ClassVar[tuple[str, ...]] = ("forward",)
    """Functions of those modules that this class reimplements."""

    biases: dict[str, str | None]
    transposed: bool
    recipe: Recipe
    weights: Weights
    keep_init: bool
    parallel: Parallel | None
    added: dict[str, Callable[[Tensor, Tensor], Tensor]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls).get("names", ()):
            for part, read in part_properties(name).items():
                setattr(cls, part, read)

    @classmethod
    def knows(cls, other: type[nn.Module]) -> bool:
        """Returns whether this class reimplements the forward of a class of modules."""
        raise NotImplementedError

    @classmethod
    def found_in(cls, module: nn.Module) -> tuple[dict[str, str | None], bool] | None:
        """Returns `biases` and `transposed` of a module that this class can replace; None for any other."""
        raise NotImplementedError

    @classmethod
    def from_experts(
        cls,
        layer: nn.Module,
        recipe: Recipe | RecipeName,
        *,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
    ) -> Experts:
        """Creates the replacement of a module: quantized parameters and products; the module's other attributes aren't copied.

        Raises ValueError for [experts, in, out] weights in a format without an exact transpose, and for unquantizable weights.
        """
        check_weights(weights)
        found = cls.found_in(layer)
        assert found is not None
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.biases, made.transposed = found
        made.weights, made.compute, made.keep_init, made.parallel = weights, compute, keep_init, None
        made.added = {}
        for name in made.biases:
            values = layer.get_parameter(name)
            product = GroupedProduct(recipe, compute, values.device)
            made.recipe = product.recipe
            format = product.recipe.weight.format
            if made.transposed and format is not None and not format.square:
                raise ValueError(_transpose_error(product.recipe, format, name))
            requires_grad = values.requires_grad
            weight = made_weight(values, format, weights, keep_init, requires_grad=requires_grad)
            made.register_parameter(name, weight)
            made.add_module(name + PRODUCT, product)
        return made.train(layer.training)

    def register_hooks(self) -> None:
        """Registers hooks that save weights as codes and scales in state dicts, and load those or plain values."""
        keep_in_parts(self)
        self.adopt()

    @property
    def linear_recipe(self) -> Recipe:
        """The products' recipe."""
        first, *_ = self.biases
        return self.product_of(first).linear_recipe

    def adopt(self) -> None:
        """Makes this module the owner of each product's weight."""
        for name in self.biases:
            self.product_of(name).belongs_to(self, name)

    def product_of(self, name: str) -> GroupedProduct:
        """Returns the module that multiplies with a weight."""
        found: Any = self._modules[name + PRODUCT]
        return found

    def multiply(self, name: str, x: Tensor, offs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns [tokens, out]: x [tokens, in], sorted by expert, times the weight of this name, plus its bias.

        `offs` is as for `GroupedProduct`. The weight is cast to `dtype` first; None leaves it unchanged.
        """
        bias = self.biases[name]
        weight, bias = to_local(self.get_parameter(name)), None if bias is None else to_local(self.get_parameter(bias))
        weight = weight if dtype is None else weight.to(dtype)
        y = self.product_of(name)(x, weight, bias, offs, transposed=self.transposed)
        added = self.added.get(name)
        return y if added is None else y + added(x, offs)

    @contextmanager
    def adding(self, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Within `with`, adds function(x, offs), [tokens, out], to `multiply`'s result for a weight; used by LoRA adapters."""
        self.added[name] = function
        try:
            yield
        finally:
            del self.added[name]

    def dispatched(self, x: Tensor, experts: Tensor) -> Received:
        """Sends tokens [tokens, in] to the ranks of their experts, given as indices [tokens, k]."""
        shares = self.parallel
        assert shares is not None
        *_, last = self.biases
        product = self.product_of(last)
        group = Group(shares.group, shares.ranks, shares.rank)
        return send(x, experts, shares.features, product.linear_recipe, group, product.state())

    def multiply_received(self, name: str, x: Tensor, received: Received) -> Tensor:
        """Returns [rows, out]: received rows times the weight of this name, plus its bias."""
        bias = self.biases[name]
        weight, bias = to_local(self.get_parameter(name)), None if bias is None else to_local(self.get_parameter(bias))
        weight = weight.mT if self.transposed else weight
        return received.multiply(x, weight, bias, state=self.product_of(name).state(), parallel=self.parallel)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("biases", ()):
            self.product_of(name).note_weight(value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"added": {}, **state})
        self.adopt()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with moving(self, fn) as applied:
            super()._apply(applied, recurse)
        return self

    def reset_buffers(self) -> None:
        """Resets delayed scaling and step counts, and draws new random keys."""
        for name in self.biases:
            self.product_of(name).reset_buffers()

    def extra_repr(self) -> str:
        sizes = ", ".join(f"{name}={list(self.get_parameter(name).shape)}" for name in self.biases)
        return f"{sizes}, recipe={self.recipe}"


def _transpose_error(recipe: Recipe, format: Format, name: str) -> str:
    return (
        f"recipe {recipe} stores weights in {format}, whose blocks have no exact transpose, but {name} [experts, in, "
        "out] needs one: use square blocks or one scale per tensor, or exclude the experts by filter_fn="
    )

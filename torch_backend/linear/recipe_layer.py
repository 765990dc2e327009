"""`RecipeLayer`: what delayed scaling, `observe` and pipelines know of layers, which are made above this room."""

from __future__ import annotations

from torch import Tensor, nn

from blockfp.recipes import Recipe


class RecipeLayer(nn.Module):
    """A layer with one weight whose products run by a recipe, and the recipe's state in buffers.

    Attributes:
        linear_recipe: the `Recipe` of its products (`recipes.for_linear`).
        observed: figures that `observe` gathers, or None.
        has_scales: whether the scales of delayed scaling are known to be above 0; else casts look.
        recorded: whether a forward recorded amaxes since delayed scaling's last update, as far as eager code knows.
    """

    linear_recipe: Recipe
    observed: Tensor | None
    has_scales: bool
    recorded: bool

    weight: nn.Parameter
    input_amax_history: Tensor | None
    input_scale: Tensor | None
    gradient_amax_history: Tensor | None
    gradient_scale: Tensor | None
    rng_key: Tensor | None
    step: Tensor | None

    def held_weight(self) -> Tensor | None:
        """Returns the weight as it is held now: whole, sharded or gathered."""
        return self._parameters.get("weight")

    def note_scales(self, found: bool) -> None:
        """Takes note whether the scales are above 0."""
        raise NotImplementedError

    def note_updated(self) -> None:
        """Takes note that the scales follow from all amaxes that were recorded until now."""
        raise NotImplementedError

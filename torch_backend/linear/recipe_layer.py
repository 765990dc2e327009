"""`RecipeLayer`: the interface of layers that delayed scaling, `observe` and pipelines use; `modules` implements it."""

from __future__ import annotations

from torch import Tensor, nn

from blockfp.recipes import Recipe


class RecipeLayer(nn.Module):
    """A layer with one weight, a recipe for its products, and the recipe's state in buffers.

    Attributes:
        linear_recipe: the products' `Recipe` (`recipes.for_linear`).
        observed: figures that `observe` collects, or None.
        has_scales: whether delayed scales are known to be above 0; otherwise casts check.
        recorded: whether eager code has recorded amaxes since delayed scaling's last update.
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
        """Returns the weight in its current form: whole, sharded or gathered."""
        return self._parameters.get("weight")

    def note_scales(self, found: bool) -> None:
        """Sets whether all scales are above 0."""
        raise NotImplementedError

    def note_updated(self) -> None:
        """Notes that the scales now reflect all recorded amaxes."""
        raise NotImplementedError

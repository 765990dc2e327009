"""The table that `sensitivity` returns, and plans made from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from blockfp import notebook, patterns, recipes
from blockfp.recipes import Recipe, RecipeName


@dataclass(frozen=True)
class LayerSensitivity:
    """Measurements of one layer with one recipe.

    Attributes:
        path: the layer's path.
        recipe: the recipe's name.
        parameters: number of elements of its weight.
        input, weight, gradient: SQNR in dB of the operands that the recipe casts: 10 log10(sum of squares / sum of squared
            errors); None for operands in high precision or not seen (the layer wasn't called, or there is no loss for
            gradients).
        loss_change: mean over the batches of the loss with only this layer quantized, minus the unquantized loss; None without
            one.
    """

    path: str
    recipe: str
    parameters: int
    input: float | None
    weight: float | None
    gradient: float | None
    loss_change: float | None

    @property
    def rank(self) -> float:
        """The layer's sensitivity: the loss change, or without one the summed noise-to-signal ratio of input and weight."""
        if self.loss_change is not None:
            return math.inf if math.isnan(self.loss_change) else self.loss_change
        found = [math.inf if math.isnan(one) else 10 ** (-one / 10) for one in (self.input, self.weight) if one is not None]
        return math.fsum(found)


@dataclass(frozen=True)
class Sensitivity:
    """The table of `sensitivity`.

    Attributes:
        layers: one entry per layer and recipe, in the model's order.
        loss: mean loss of the unquantized model; None without a loss.
        left: paths of modules that are quantized, or that `convert` would quantize, but aren't measured: experts, and layers
            behind a norm.
        excluded: paths of layers that the measurement's filter_fn left out; plans leave them unchanged.
    """

    layers: tuple[LayerSensitivity, ...]
    loss: float | None
    left: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def rows(self) -> list[dict]:
        """Returns the entries as dictionaries, for tables and JSON."""
        return [asdict(one) for one in self.layers]

    def of(self, recipe: Recipe | RecipeName) -> list[LayerSensitivity]:
        """Returns one recipe's entries, most sensitive layers first; equal ones keep the model's order.

        Raises:
            ValueError: the recipe wasn't measured.
        """
        name = recipes.parse(recipe).name if not isinstance(recipe, Recipe) else recipe.name
        found = [one for one in self.layers if one.recipe == name]
        if not found:
            measured = ", ".join(dict.fromkeys(one.recipe for one in self.layers))
            raise ValueError(f"recipe {name} was not measured, only {measured}")
        return sorted(found, key=lambda one: -one.rank)

    def plan(
        self,
        recipe: Recipe | RecipeName,
        *,
        keep: Recipe | RecipeName | None = None,
        layers: float | None = None,
        parameters: float | None = None,
        loss_change: float | None = None,
    ) -> dict[str, Recipe | str | None]:
        """Returns a mapping for `convert` (or `set_recipe`) that keeps the most sensitive layers in higher precision.

        Layers that the measurement's filter_fn left out are not changed. Pass exactly one of the three budgets.

        Args:
            recipe: for all other layers, experts too; must have been measured.
            keep: recipe of the layers that are kept; None for high precision.
            layers: budget: largest share of the layers that is kept, 0 to 1.
            parameters: budget: largest share of the layers' parameters. Layers are taken by sensitivity; one that no longer
                fits is skipped.
            loss_change: budget: bound on the loss's change. Layers are kept until the positive changes of the others add up to
                no more. That changes add up is an assumption: measure the converted model.

        Raises:
            TypeError: no budget, or more than one.
            ValueError: the budget is out of range, the recipe is unknown, or loss_change is given without a measured loss.
        """
        given = {"layers": layers, "parameters": parameters, "loss_change": loss_change}
        named = {name: value for name, value in given.items() if value is not None}
        if len(named) != 1:
            raise TypeError(f"plan takes one of layers, parameters and loss_change, got {', '.join(named) or 'none'}")
        ((name, budget),) = named.items()
        if not 0 <= budget <= (math.inf if name == "loss_change" else 1):
            raise ValueError(f"{name} must be 0 or more{'' if name == 'loss_change' else ' and at most 1'}, got {budget}")
        if keep is not None:
            recipes.parse(keep)
        found = self.of(recipe)
        if name == "layers":
            kept = found[: int(budget * len(found) + 1e-9)]
        elif name == "parameters":
            kept = _within(found, budget * sum(one.parameters for one in found))
        else:
            kept = _down_to(found, budget)
        excluded = {patterns.exactly(path): None for path in self.excluded}
        return {**excluded, **{patterns.exactly(one.path): keep for one in kept}, "": recipe}

    def __str__(self) -> str:
        header = ("layer", "recipe", "parameters", "input dB", "weight dB", "gradient dB", "change of loss")
        lines: list[tuple[str, ...]] = [header]
        for one in self.layers:
            figures = [_text(value, ".1f") for value in (one.input, one.weight, one.gradient)]
            lines.append((one.path, one.recipe, f"{one.parameters:,}", *figures, _text(one.loss_change, "+.3e")))
        shown = [line.rstrip() for line in notebook.columns(lines, 2)]
        if self.loss is not None:
            shown.append(f"loss of the unquantized model: {self.loss:.6g}")
        if self.left:
            shown.append(f"not measured: {', '.join(self.left)}")
        return "\n".join(shown)


def _within(found: list[LayerSensitivity], parameters: float) -> list[LayerSensitivity]:
    kept, held = [], 0
    for one in found:
        if held + one.parameters <= parameters:
            kept.append(one)
            held += one.parameters
    return kept


def _down_to(found: list[LayerSensitivity], bound: float) -> list[LayerSensitivity]:
    if any(one.loss_change is None for one in found):
        raise ValueError("loss_change needs a table that was measured with a loss; take layers= or parameters=")
    for count in range(len(found) + 1):
        if math.fsum(max(one.rank, 0.0) for one in found[count:]) <= bound:
            return found[:count]
    return found


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

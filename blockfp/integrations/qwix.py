"""qwix (0.1): a provider whose rules name recipes, so that one rule quantizes the products of a whole Flax model.

    model = qwix.quantize_model(model, BlockfpProvider([BlockfpRule(recipe="mxfp8")]))          # linen
    model = qwix.quantize_model(model, BlockfpProvider([BlockfpRule(recipe="mxfp8")]), *inputs) # nnx

Weights stay in high precision; each product quantizes its operands. Products of two activations (in attention) and convolutions
are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix

# qwix's own providers also use this module to find out which operand is a weight.
from qwix._src.utils import flax_util

from blockfp import recipes
from blockfp.recipes import Recipe, RecipeName

from ..jax_backend.linear.dot_general import dot_general
from ..jax_backend.linear.grouped import grouped_linear


@dataclass(frozen=True, kw_only=True)
class BlockfpRule(qwix.QuantizationRule):
    """A qwix rule (`module_path`, `op_names`) with the recipe of matching products; None leaves them unchanged.

    Recipes that round stochastically draw keys from the stream "stochastic_rounding", as qwix's own rules do.
    """

    recipe: Recipe | RecipeName | None = None


class BlockfpProvider(qwix.QuantizationProvider):
    """Runs matching products with a weight by `blockfp.jax.dot_general` and `grouped_linear`.

    Args:
        rules: `BlockfpRule`s; the first rule that matches an operation applies.

    Raises:
        TypeError: a rule is not a `BlockfpRule`.
        ValueError: a rule sets qwix's dtypes, names an unknown recipe, or uses delayed scaling, which needs a state.
    """

    def __init__(self, rules: Sequence[BlockfpRule]):
        super().__init__(rules)

    def _init_rule(self, rule: qwix.QuantizationRule) -> qwix.QuantizationRule:
        if not isinstance(rule, BlockfpRule):
            raise TypeError(f"rules must be BlockfpRules, got {type(rule).__name__}")
        if rule.weight_qtype is not None or rule.act_qtype is not None:
            raise ValueError(f"weight_qtype and act_qtype must be None: recipe={rule.recipe!r} determines all dtypes")
        if rule.recipe is not None and recipes.parse(rule.recipe).delayed is not None:
            raise ValueError(f"recipe = {rule.recipe!r}: delayed scaling keeps a state for each layer; take 'fp8_current'")
        return super()._init_rule(rule)

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        ours = {"jax.lax.dot_general": self.dot_general, "jax.numpy.einsum": self.einsum, "jax.lax.ragged_dot": self.ragged_dot}
        return super().get_intercept_map() | ours

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **options: Any) -> jax.Array:
        return self._multiply(self._recipe("dot_general"), lhs, rhs, dimension_numbers, *args, **options)

    def einsum(self, subscripts: str, *operands: Any, **options: Any) -> jax.Array:
        recipe = self._recipe("einsum")
        if recipe is None:
            return jnp.einsum(subscripts, *operands, **options)
        # einsum's own jit would hide which operand is a weight.
        with jax.disable_jit():
            given: Any = options | {"_dot_general": partial(self._multiply, recipe)}
            return jnp.einsum(subscripts, *operands, **given)

    def ragged_dot(self, lhs: Any, rhs: Any, group_sizes: Any, *args: Any, **options: Any) -> jax.Array:
        recipe = self._recipe("ragged_dot")
        if recipe is None:
            return jax.lax.ragged_dot(lhs, rhs, group_sizes, *args, **options)
        if any(value is not None for value in (*args, *options.values())):
            raise ValueError(
                f"ragged_dot accepts no further arguments here, got {args} {options}: the recipe determines the rest"
            )
        return grouped_linear(lhs, rhs.mT, group_sizes, recipe=recipe, key=self._key(recipe))

    def _recipe(self, operation: str) -> Recipe | None:
        rule, _ = self._get_current_rule_and_op_id(operation)
        return recipes.parse(rule.recipe) if isinstance(rule, BlockfpRule) and rule.recipe is not None else None

    def _key(self, recipe: Recipe) -> Any:
        draws = recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic
        return flax_util.make_rng("stochastic_rounding") if draws else None

    def _multiply(self, recipe: Recipe | None, lhs: Any, rhs: Any, numbers: Any, *args: Any, **options: Any) -> jax.Array:
        if recipe is not None and flax_util.find_param(rhs) is not None:
            with jax.disable_jit(False):
                return dot_general(lhs, rhs, numbers, *args, **options, recipe=recipe, key=self._key(recipe))
        if recipe is None or flax_util.find_param(lhs) is None:
            return jax.lax.dot_general(lhs, rhs, numbers, *args, **options)
        # The recipe's weight is the right operand, so swap the operands and move the result's free axes back.
        (contract, batch) = numbers
        turned = self._multiply(recipe, rhs, lhs, (contract[::-1], batch[::-1]), *args, **options)
        count, free = len(batch[0]), lhs.ndim - len(contract[0]) - len(batch[0])
        return jnp.moveaxis(turned, range(turned.ndim - free, turned.ndim), range(count, count + free))

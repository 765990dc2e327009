"""Recipes by name, by the path of a layer and by operand; a `Recipe` says how a linear layer quantizes its operands.

`definition.recipe` has the values themselves, which users import from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from . import patterns
from .definition.oscillation import OsciReset
from .definition.recipe import (
    DIRECTIONS,
    HIGH_PRECISION,
    OPERANDS,
    PRODUCTS,
    Cast,
    Compute,
    Delayed,
    Direction,
    Operand,
    Product,
    Recipe,
)
from .formats import NAMES, Format

__all__ = [
    "HIGH_PRECISION",
    "PRODUCTS",
    "RECIPES",
    "ByPath",
    "Cast",
    "CastFunction",
    "Chosen",
    "Compute",
    "Delayed",
    "Direction",
    "Operand",
    "OsciReset",
    "Product",
    "Recipe",
    "by_operand",
    "check_paths",
    "ends_in_high_precision",
    "for_linear",
    "fp8_block",
    "fp8_current",
    "fp8_delayed",
    "fp8_row",
    "mxfp4",
    "mxfp4_rotated",
    "mxfp6",
    "mxfp8",
    "nvfp4",
    "nvfp4_4over6",
    "parse",
    "qat",
    "resolve",
]

# Pickles name where users import them.
for _public in (Cast, Delayed, OsciReset, Recipe):
    _public.__module__ = __name__


def _recipe(name: str, input: str, weight: str, gradient: str, **options: Any) -> Recipe:
    casts: dict[str, Any] = {}
    for operand, format in (("input", input), ("weight", weight), ("gradient", gradient)):
        casts[operand] = casts[f"{operand}_columnwise"] = Cast(Format.parse(format))
    return Recipe(name, **(casts | options))


def fp8_delayed(*, history: int = 1024, margin: int = 0, algorithm: Literal["max", "most_recent"] = "max") -> Recipe:
    """FP8 with one scale per tensor, from the amaxes of earlier steps; E4M3, gradients E5M2."""
    return _recipe("fp8_delayed", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2", delayed=Delayed(history, margin, algorithm))


def fp8_current(*, eps: float = 0.0) -> Recipe:
    """FP8 with one scale per tensor, from its current amax; E4M3, gradients E5M2."""
    return _recipe("fp8_current", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2", eps=eps)


def fp8_block(*, eps: float = 0.0) -> Recipe:
    """E4M3 in blocks of 1x128 for activations and gradients and 128x128 for weights, power-of-two scales."""
    return _recipe("fp8_block", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128", eps=eps)


def fp8_row(*, eps: float = 0.0) -> Recipe:
    """E4M3 with a power-of-two scale for each row, in wgrad for each column; dgrad is in high precision.

    A weight is stored once, and the scales of its rows don't run along what dgrad contracts. Its values are exact in bfloat16.
    """
    row = "fp8_e4m3_row_pow2"
    recipe = _recipe("fp8_row", row, row, row, weight_columnwise=HIGH_PRECISION, eps=eps)
    return recipe.replace(gradient=HIGH_PRECISION, gradient_columnwise=recipe.gradient_columnwise)


def mxfp8(*, exact_products: bool = False) -> Recipe:
    """MXFP8 E4M3: 1x32, weights 32x32."""
    return _recipe("mxfp8", "mxfp8_e4m3", "mxfp8_e4m3_32x32", "mxfp8_e4m3", exact_products=exact_products)


def mxfp6(*, exact_products: bool = False) -> Recipe:
    """MXFP6 E3M2: 1x32, weights 32x32."""
    return _recipe("mxfp6", "mxfp6_e3m2", "mxfp6_e3m2_32x32", "mxfp6_e3m2", exact_products=exact_products)


def mxfp4(*, exact_products: bool = False) -> Recipe:
    """MXFP4: 1x32, weights 32x32, gradients MXFP6 E3M2."""
    return _recipe("mxfp4", "mxfp4_e2m1", "mxfp4_e2m1_32x32", "mxfp6_e3m2", exact_products=exact_products)


def mxfp4_rotated(*, exact_products: bool = False) -> Recipe:
    """MXFP4: 1x32, weights 32x32, stochastic gradients in MXFP4 too; both operands of the weight gradient rotated.

    Rule ceil lets nothing saturate, so rounding stochastically is unbiased as it is. (Tseng et al., "Training LLMs with MXFP4",
    2025, whose floor rule needs values scaled by 3/4.)
    """
    format = Format.parse("mxfp4_e2m1")
    return _recipe("mxfp4_rotated", "mxfp4_e2m1", "mxfp4_e2m1_32x32", "mxfp4_e2m1", exact_products=exact_products).replace(
        input_columnwise=Cast(format, rotate=True),
        gradient=Cast(format, stochastic=True),
        gradient_columnwise=Cast(format, stochastic=True, rotate=True),
    )


def nvfp4(*, guarded: bool = False) -> Recipe:
    """NVFP4: 1x16, weights 16x16, stochastic gradients; both operands of the weight gradient rotated.

    These are NVIDIA's casts (arXiv 2509.25149). A scale that is rounded down lets its block's largest elements saturate, so
    that stochastic gradients are 0.3% short, of Gaussian data.

    Args:
        guarded: gradients in `nvfp4_guarded` instead, whose scales leave room for what rounding takes (16/17, as in the
            stochastic rounding of Quartet II and of Four Over Six): nothing saturates, and they are unbiased, with a fourth
            more squared error.
    """
    format, gradient = Format.parse("nvfp4"), Format.parse("nvfp4_guarded" if guarded else "nvfp4")
    return _recipe("nvfp4", "nvfp4", "nvfp4_16x16", "nvfp4").replace(
        input_columnwise=Cast(format, rotate=True),
        gradient=Cast(gradient, stochastic=True),
        gradient_columnwise=Cast(gradient, stochastic=True, rotate=True),
    )


def nvfp4_4over6(*, squared_errors: bool = False) -> Recipe:
    """NVFP4 whose inputs and weights choose between two scales of each block (4-over-6); all else is as in `nvfp4`.

    The choice is for rounding to nearest, so gradients are stochastic NVFP4. The input of the weight gradient is rotated NVFP4:
    rotation spreads what the choice would mend, and TransformerEngine has no 4-over-6 with rotation.

    Args:
        squared_errors: choose by the mean squared error, the default of the method's authors (Cook et al.), instead of the
            mean absolute error, which is TransformerEngine's.
    """
    recipe, chosen = nvfp4(), "nvfp4_4over6_mse" if squared_errors else "nvfp4_4over6"
    return recipe.replace(
        name="nvfp4_4over6",
        input=Cast(Format.parse(chosen)),
        input_columnwise=recipe.input_columnwise,
        weight=Cast(Format.parse(f"{chosen}_16x16")),
    )


def qat(weight: Format | str, input: Format | str | None = None, *, eps: float = 0.0) -> Recipe:
    """Quantization-aware fine-tuning: the forward as a server of this format runs it, all gradients in high precision.

    The derivative of a cast is that of the identity (straight through): dgrad multiplies by the weight's dequantized codes,
    wgrad by the input as it is.

    Args:
        weight: the format in which the server keeps weights, such as "nvfp4", "mxfp4_e2m1" or "fp8_e4m3_128x128".
        input: that in which it multiplies activations; None for high precision.
        eps: see `Recipe`.

    Raises:
        TypeError, ValueError: there is no such format.
    """
    casts = [Cast(None if format is None else Format.parse(format)) for format in (weight, input)]
    if casts[0].format is None:
        raise TypeError("weight must be a Format or its name, got None")
    name = f"qat({', '.join(str(cast.format) for cast in casts if cast.format)})"
    rest = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)
    return Recipe(name, casts[1], casts[0], *rest, eps=eps)


RECIPES: dict[str, Callable[[], Recipe]] = {
    f.__name__: f
    for f in (
        *(fp8_delayed, fp8_current, fp8_block, fp8_row, mxfp8, mxfp6, mxfp4, mxfp4_rotated),
        *(nvfp4, nvfp4_4over6),
    )
}
"""The named recipes."""

# Made once: a layer's every call parses its recipe's name. A dictionary, because compilers warn of caches.
_NAMED = {name: make() for name, make in RECIPES.items()}

Chosen = Callable[[str], "Recipe | str | None"]
"""A function from a module's (or a weight's) path to a recipe, its name, or None, which leaves it in high precision."""

ByPath = Chosen | Mapping[str, "Recipe | str | None"]
"""Such a function, or a mapping of patterns of paths to the same: `{r"^layers\\.0\\.": None, "": "nvfp4"}`.

Patterns are regular expressions. The first that is found in a path counts; where none is, high precision stays.
"""

CastFunction = Callable[[str, Operand, Direction], "Cast | Format | str | None"]
"""A function from (path, operand, direction) to a cast, a format, a format's name, or None for high precision."""


def parse(recipe: Recipe | str) -> Recipe:
    """The recipe of this name with its default options; a `Recipe` is returned as it is.

    Raises:
        ValueError: no recipe has this name.
        TypeError: `recipe` is neither a string nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a Recipe or its name, got {type(recipe).__name__}: {recipe!r}")
    if recipe not in RECIPES:
        import difflib

        near = difflib.get_close_matches(recipe[:100], RECIPES, n=2)
        choose = f"did you mean {' or '.join(map(repr, near))}? Or choose" if near else "choose"
        hint = ""
        if recipe in NAMES:
            hint = f"; it is a format, for which recipes.qat({recipe!r}) fine-tunes"
        elif recipe.startswith("qat("):
            hint = "; give the Recipe that recipes.qat(..) returns"
        raise ValueError(f"recipe {recipe!r} is not known; {choose} one of {', '.join(RECIPES)}{hint}")
    return _NAMED[recipe]


def resolve(recipe: Recipe | str | ByPath, path: str) -> Recipe | None:
    """The recipe of the module at `path`, or None for one that stays as it is.

    Args:
        recipe: a `Recipe`, its name, or a function of the path or a mapping of patterns that gives one of these, or None.
        path: the module's path, such as "layers.0.mlp.up"; of JAX's trees, the weight's.

    Raises:
        TypeError, ValueError: there is no such recipe; if a function or a mapping gave it, the message names the path.
    """
    if isinstance(recipe, Mapping):
        answer = patterns.lookup(recipe, path)
    elif callable(recipe):
        answer = recipe(path)
    else:
        return parse(recipe)
    try:
        return None if answer is None else parse(answer)
    except (TypeError, ValueError) as error:
        raise type(error)(f"recipe for {path!r}: {error}") from error


def check_paths(recipe: Recipe | str | ByPath, paths: Iterable[str]) -> None:
    """Raises ValueError where a mapping has a pattern that matches none of these paths."""
    if isinstance(recipe, Mapping):
        patterns.check_used(recipe, paths)


def ends_in_high_precision(
    recipe: Recipe | str, blocks: str, count: int, *, start: int = 1, end: int = 1
) -> dict[str, Recipe | str | None]:
    """Makes a mapping by which the first and the last blocks of a model stay in high precision.

    Args:
        recipe: of all other layers.
        blocks: path of the list of blocks, such as "model.layers".
        count: how many it has.
        start, end: how many stay as they are at either end.

    Example:
        >>> list(ends_in_high_precision("nvfp4", "layers", 32, end=2).values())
        [None, None, None, 'nvfp4']

    Raises:
        TypeError, ValueError: numbers that mean nothing, or no such recipe.
    """
    parse(recipe)
    return {**dict.fromkeys(patterns.ends(blocks, count, start, end)), "": recipe}


def by_operand(casts: CastFunction) -> Chosen:
    """Makes a function of the path, which `resolve` takes, from one that gives the cast of each operand in each direction.

    Where it gives None for all of them, the module stays as it is.

    Raises:
        TypeError, ValueError: (at the call for a path) an answer is not a cast, or the casts don't make a recipe; the message
            names the path, operand and direction.

    Example:
        >>> by_operand(lambda path, operand, direction: "mxfp8_e4m3_32x32" if operand == "weight" else "mxfp8_e5m2")
    """

    def recipe(path: str) -> Recipe | None:
        found: dict[str, Cast] = {}
        for operand in OPERANDS:
            for direction in DIRECTIONS:
                answer = casts(path, operand, direction)
                try:
                    cast = answer if isinstance(answer, Cast) else Cast(None if answer is None else Format.parse(answer))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"recipe for {path!r}, {operand} {direction}: {error}") from error
                found[operand if direction == "rowwise" else f"{operand}_columnwise"] = cast
        if all(cast == HIGH_PRECISION for cast in found.values()):
            return None
        try:
            return Recipe(f"{getattr(casts, '__name__', 'recipe')}({path})", **found)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise ValueError(f"recipe for {path!r}: {error}") from error

    return recipe


def for_linear(recipe: Recipe | str, compute: Compute = "quantized") -> Recipe:
    """The recipe as a linear layer runs it: without what `compute` leaves in high precision.

    Args:
        recipe: a `Recipe` or its name.
        compute: "high_precision" multiplies the dequantized weight with inputs and gradients as they are.

    Raises:
        ValueError: the recipe asks for what a linear layer doesn't do, or `compute` is neither of the two.
        TypeError, ValueError: as `parse`.
    """
    if isinstance(recipe, str) and compute == "quantized":
        # The named ones do nothing that a linear layer doesn't, as a test holds.
        return parse(recipe)
    recipe = parse(recipe)
    if compute not in get_args(Compute):
        raise ValueError(f"compute must be 'quantized' or 'high_precision', got {compute!r}")
    for operand in ("input", "weight"):
        for direction in DIRECTIONS:
            if recipe.cast(operand, direction).stochastic:
                raise ValueError(f"recipe {recipe}: {operand} {direction} is stochastic, but only gradients are rounded so")
    for cast in (recipe.input, recipe.weight, recipe.gradient, recipe.weight_columnwise):
        if cast.rotate:
            raise ValueError(f"recipe {recipe} rotates {cast}, but only the operands of the weight gradient are rotated")
    if recipe.delayed is not None:
        for operand in ("input", "gradient"):
            casts = [recipe.cast(operand, direction) for direction in DIRECTIONS]
            if any(cast.stochastic or cast.rotate for cast in casts):
                wanted = " and ".join(map(str, casts))
                raise ValueError(f"recipe {recipe}: delayed scaling rounds the {operand} as it is to nearest, got {wanted}")
            formats = {cast.format for cast in casts} - {None}
            if len(formats) > 1 or any(not format.per_tensor for format in formats if format):
                raise ValueError(
                    f"recipe {recipe}: delayed scaling keeps one scale for the {operand}, which needs one format with one "
                    f"scale per tensor in both directions, got {', '.join(sorted(map(str, formats)))}"
                )
    if compute == "quantized":
        return recipe
    names = ("input", "input_columnwise", "gradient", "gradient_columnwise", "weight_columnwise")
    return recipe.replace(delayed=None, **dict.fromkeys(names, HIGH_PRECISION))

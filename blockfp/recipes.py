"""Recipes by name, by path of a layer and by operand. A `Recipe` says how a linear layer quantizes its operands.

The classes are defined in `definition.recipe`; users import them from here.
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
from .formats import NAMES, Format, FormatName

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
    "RecipeName",
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
    "w4a8",
]

# Pickles name the module that users import from.
for _public in (Cast, Delayed, OsciReset, Recipe):
    _public.__module__ = __name__


def _recipe(name: str, input: str, weight: str, gradient: str, **options: Any) -> Recipe:
    casts: dict[str, Any] = {}
    for operand, format in (("input", input), ("weight", weight), ("gradient", gradient)):
        casts[operand] = casts[f"{operand}_columnwise"] = Cast(Format.parse(format))
    return Recipe(name, **(casts | options))


def fp8_delayed(*, history: int = 1024, margin: int = 0, algorithm: Literal["max", "most_recent"] = "max") -> Recipe:
    """FP8 with one scale per tensor from the amaxes of earlier steps: E4M3, gradients E5M2."""
    return _recipe("fp8_delayed", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2", delayed=Delayed(history, margin, algorithm))


def fp8_current(*, eps: float = 0.0) -> Recipe:
    """FP8 with one scale per tensor from the current amax: E4M3, gradients E5M2."""
    return _recipe("fp8_current", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2", eps=eps)


def fp8_block(*, eps: float = 0.0) -> Recipe:
    """E4M3 with power-of-two scales, in 1x128 blocks for activations and gradients and 128x128 blocks for weights."""
    return _recipe("fp8_block", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128", eps=eps)


def fp8_row(*, eps: float = 0.0) -> Recipe:
    """E4M3 with a power-of-two scale per row (per column in wgrad); dgrad runs in high precision.

    A weight is stored once, with a scale for each row. Dgrad contracts the rows, so it multiplies the dequantized weight, whose
    values are exact in bfloat16.
    """
    row = "fp8_e4m3_row_pow2"
    recipe = _recipe("fp8_row", row, row, row, weight_columnwise=HIGH_PRECISION, eps=eps)
    return recipe.replace(gradient=HIGH_PRECISION, gradient_columnwise=recipe.gradient_columnwise)


def mxfp8(*, exact_products: bool = False) -> Recipe:
    """MXFP8 E4M3 in 1x32 blocks, weights in 32x32."""
    return _recipe("mxfp8", "mxfp8_e4m3", "mxfp8_e4m3_32x32", "mxfp8_e4m3", exact_products=exact_products)


def mxfp6(*, exact_products: bool = False) -> Recipe:
    """MXFP6 E3M2 in 1x32 blocks, weights in 32x32."""
    return _recipe("mxfp6", "mxfp6_e3m2", "mxfp6_e3m2_32x32", "mxfp6_e3m2", exact_products=exact_products)


def mxfp4(*, exact_products: bool = False) -> Recipe:
    """MXFP4 in 1x32 blocks, weights in 32x32; gradients in MXFP6 E3M2."""
    return _recipe("mxfp4", "mxfp4_e2m1", "mxfp4_e2m1_32x32", "mxfp6_e3m2", exact_products=exact_products)


def mxfp4_rotated(*, exact_products: bool = False) -> Recipe:
    """MXFP4 in 1x32 blocks, weights in 32x32; stochastic MXFP4 gradients; both operands of wgrad rotated.

    Stochastic rounding is unbiased without further scaling, because nothing saturates under the ceil rule. (Tseng et al.,
    "Training LLMs with MXFP4", 2025, use the floor rule and scale values by 3/4.)
    """
    format = Format.parse("mxfp4_e2m1")
    return _recipe("mxfp4_rotated", "mxfp4_e2m1", "mxfp4_e2m1_32x32", "mxfp4_e2m1", exact_products=exact_products).replace(
        input_columnwise=Cast(format, rotate=True),
        gradient=Cast(format, stochastic=True),
        gradient_columnwise=Cast(format, stochastic=True, rotate=True),
    )


def nvfp4(*, guarded: bool = False) -> Recipe:
    """NVFP4 in 1x16 blocks, weights in 16x16; stochastic gradients; both operands of wgrad rotated.

    These are NVIDIA's casts (arXiv 2509.25149). If a block's scale is rounded down, its largest elements saturate; for Gaussian
    data this makes stochastic gradients 0.3% too small.

    Args:
        guarded: quantize gradients in `nvfp4_guarded`, whose scales leave a margin of 16/17 for their rounding, as in the
            stochastic rounding of Quartet II and Four Over Six. Nothing saturates and gradients are unbiased, at 25% more
            squared error.
    """
    format, gradient = Format.parse("nvfp4"), Format.parse("nvfp4_guarded" if guarded else "nvfp4")
    return _recipe("nvfp4", "nvfp4", "nvfp4_16x16", "nvfp4").replace(
        input_columnwise=Cast(format, rotate=True),
        gradient=Cast(gradient, stochastic=True),
        gradient_columnwise=Cast(gradient, stochastic=True, rotate=True),
    )


def nvfp4_4over6(*, squared_errors: bool = False) -> Recipe:
    """NVFP4 with two candidate scales per block (4-over-6) for inputs and weights; otherwise like `nvfp4`.

    4-over-6 is meant for rounding to nearest, so gradients stay in stochastic NVFP4. The input of wgrad stays in rotated NVFP4:
    rotation already spreads outliers, and TransformerEngine has no 4-over-6 with rotation.

    Args:
        squared_errors: choose by mean squared error, the default of the method's authors (Cook et al.), instead of mean
            absolute error, TransformerEngine's choice.
    """
    recipe, chosen = nvfp4(), "nvfp4_4over6_mse" if squared_errors else "nvfp4_4over6"
    return recipe.replace(
        name="nvfp4_4over6",
        input=Cast(Format.parse(chosen)),
        input_columnwise=recipe.input_columnwise,
        weight=Cast(Format.parse(f"{chosen}_16x16")),
    )


def qat(weight: Format | FormatName, input: Format | FormatName | None = None, *, eps: float = 0.0) -> Recipe:
    """Quantization-aware fine-tuning: runs the forward pass as a server does and all gradients in high precision.

    Casts have the derivative of the identity (straight-through): dgrad multiplies by the dequantized weight, wgrad by the
    unquantized input.

    Args:
        weight: the server's format for weights, such as "nvfp4", "mxfp4_e2m1" or "fp8_e4m3_128x128".
        input: the server's format for activations; None for high precision.
        eps: see `Recipe`.

    Raises:
        TypeError, ValueError: a format is unknown, or `weight` is None.
    """
    casts = [Cast(None if format is None else Format.parse(format)) for format in (weight, input)]
    if casts[0].format is None:
        raise TypeError("weight must be a Format or its name, got None")
    name = f"qat({', '.join(str(cast.format) for cast in casts if cast.format)})"
    rest = (HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION)
    return Recipe(name, casts[1], casts[0], *rest, eps=eps)


def w4a8(*, eps: float = 0.0) -> Recipe:
    """MXFP4 weights and MXFP8 activations in 1x32 blocks, for servers of MXFP4; gradients in high precision, as in `qat`."""
    return qat("mxfp4_e2m1", "mxfp8_e4m3", eps=eps).replace(name="w4a8")


RECIPES: dict[str, Callable[[], Recipe]] = {
    f.__name__: f
    for f in (
        *(fp8_delayed, fp8_current, fp8_block, fp8_row, mxfp8, mxfp6, mxfp4, mxfp4_rotated),
        *(nvfp4, nvfp4_4over6, w4a8),
    )
}
"""The named recipes: functions that return them with default options."""

# Written out for type checkers, which then know a misspelt name; a test compares it with `RECIPES`.
# fmt: off
RecipeName = Literal[
    "fp8_delayed", "fp8_current", "fp8_block", "fp8_row", "mxfp8", "mxfp6", "mxfp4", "mxfp4_rotated", "nvfp4", "nvfp4_4over6",
    "w4a8",
]
# fmt: on
"""The name of a recipe, as an annotation. `parse` turns any other string into a recipe, or raises."""

# Parsed on every call of a layer, so made once. A dictionary instead of a cache, because compilers warn about caches.
_NAMED = {name: make() for name, make in RECIPES.items()}

Chosen = Callable[[str], "Recipe | str | None"]
"""A function from the path of a module (in JAX, of a weight) to a recipe, its name, or None for high precision."""

ByPath = Chosen | Mapping[str, "Recipe | str | None"]
"""A `Chosen` function, or a mapping from patterns of paths to recipes, such as `{r"^layers\\.0\\.": None, "": "nvfp4"}`.

Patterns are regular expressions. The first one found in a path wins; a path without a match stays in high precision.
"""

CastFunction = Callable[[str, Operand, Direction], "Cast | Format | str | None"]
"""A function from (path, operand, direction) to a cast, a format, a format's name, or None for high precision."""


def parse(recipe: Recipe | str) -> Recipe:
    """Returns the recipe with this name and default options; a `Recipe` is returned unchanged.

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

        near = difflib.get_close_matches(recipe[:100].lower(), RECIPES, n=2)
        choose = f"did you mean {' or '.join(map(repr, near))}? Or choose" if near else "choose"
        hint = ""
        if recipe in NAMES:
            hint = f"; it is a format, for which recipes.qat({recipe!r}) fine-tunes"
        elif recipe.startswith("qat("):
            hint = "; give the Recipe that recipes.qat(..) returns"
        raise ValueError(f"recipe {recipe!r} is not known; {choose} one of {', '.join(RECIPES)}{hint}")
    return _NAMED[recipe]


def resolve(recipe: Recipe | str | ByPath, path: str) -> Recipe | None:
    """Returns the recipe of the module at `path`, or None for high precision.

    Args:
        recipe: a `Recipe`, its name, a function of the path, or a mapping of patterns. Functions and mappings may give None.
        path: the module's path, such as "layers.0.mlp.up"; in a JAX tree, the weight's path.

    Raises:
        TypeError, ValueError: there is no such recipe; the message names the path if a function or mapping gave the recipe.
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
    """Raises ValueError if a mapping has a pattern that matches none of these paths."""
    if isinstance(recipe, Mapping):
        patterns.check_used(recipe, paths)


def ends_in_high_precision(
    recipe: Recipe | RecipeName, blocks: str, count: int, *, start: int = 1, end: int = 1
) -> dict[str, Recipe | str | None]:
    """Returns a mapping that keeps the first and last blocks of a model in high precision.

    Args:
        recipe: recipe of all other layers.
        blocks: path of the list of blocks, such as "model.layers".
        count: number of blocks in the list.
        start, end: number of blocks that stay in high precision at the start and at the end.

    Example:
        >>> list(ends_in_high_precision("nvfp4", "layers", 32, end=2).values())
        [None, None, None, 'nvfp4']

    Raises:
        TypeError, ValueError: a number is invalid, or there is no such recipe.
    """
    parse(recipe)
    return {**dict.fromkeys(patterns.ends(blocks, count, start, end)), "": recipe}


def by_operand(casts: CastFunction) -> Chosen:
    """Turns a function of (path, operand, direction) into a function of the path, for `resolve` and `convert`.

    If the function gives None for every operand and direction of a path, that module stays in high precision.

    Raises:
        TypeError, ValueError: (when called for a path) an answer is not a cast, or the casts don't make a recipe; the message
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
    """Returns the recipe that a linear layer runs: checked, and without the casts that `compute` disables.

    Args:
        recipe: a `Recipe` or its name.
        compute: "high_precision" multiplies the dequantized weight with unquantized inputs and gradients.

    Raises:
        ValueError: the recipe asks for something that a linear layer doesn't do, or `compute` is invalid.
        TypeError, ValueError: see `parse`.
    """
    if isinstance(recipe, str) and compute == "quantized":
        # A test checks that the named recipes pass every check below.
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
                raise ValueError(
                    f"recipe {recipe}: delayed scaling rounds the {operand} unrotated and to nearest, got {wanted}"
                )
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

"""`Recipe`: the format, rounding and rotation of each operand of a linear layer's three products.

A product contracts one axis of each operand, and scales run along this axis: rowwise along the last axis, columnwise along the
rows.

    forward   y  = x w^T    input rowwise,        weight rowwise
    dgrad     dx = g w      gradient rowwise,     weight columnwise
    wgrad     dw = g^T x    gradient columnwise,  input columnwise

A `Recipe` is a value without state: equal recipes are interchangeable. Functions take and return amax histories, scales and
random keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ..formats import Format
from .checks import check_eps

Operand = Literal["input", "weight", "gradient"]
Direction = Literal["rowwise", "columnwise"]
Product = Literal["forward", "dgrad", "wgrad"]
Compute = Literal["quantized", "high_precision"]
Exact = Literal["", "exact", "order", "exact+order"]
"""What of a product is exact: "exact" its operands (`Recipe.exact_products`), "order" its sums (`Recipe.exact_order`)."""

OPERANDS: tuple[Operand, ...] = get_args(Operand)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
_PRODUCTS: tuple[Product, ...] = get_args(Product)


@dataclass(frozen=True)
class Cast:
    """Quantization of one operand in one direction.

    Attributes:
        format: a `Format` (or its name); None keeps the operand in high precision.
        stochastic: round stochastically, with a key that the caller provides.
        rotate: apply the random Hadamard transform along the contracted axis first. Both operands of a product must agree.
    """

    format: Format | None
    stochastic: bool = False
    rotate: bool = False

    def __post_init__(self):
        if self.format is not None:
            object.__setattr__(self, "format", Format.parse(self.format))
        elif self.stochastic or self.rotate:
            raise ValueError("an operand in high precision (format None) is neither rounded stochastically nor rotated")

    def _options(self) -> list[str]:
        return [name for name in ("stochastic", "rotate") if getattr(self, name)]

    def _text(self) -> str:
        return "+".join([self.format.name if self.format else "", *self._options()])

    def __str__(self) -> str:
        return " ".join([str(self.format or "high precision"), *self._options()])


HIGH_PRECISION = Cast(None)


@dataclass(frozen=True)
class Delayed:
    """Options of delayed scaling for activations and gradients; a quantized weight always uses its current amax.

    Attributes:
        history: steps of amax history kept.
        margin: the scale is divided by 2^margin.
        algorithm: "max" of the history, or "most_recent".
    """

    history: int = 1024
    margin: int = 0
    algorithm: Literal["max", "most_recent"] = "max"

    def __post_init__(self):
        for name, value in (("history", self.history), ("margin", self.margin)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
        if self.history < 1:
            raise ValueError(f"history must be 1 or more steps, got {self.history}")
        if not -100 <= self.margin <= 100:
            raise ValueError(f"margin must be in -100..100, got {self.margin}")
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"algorithm must be 'max' or 'most_recent', got {self.algorithm!r}")


@dataclass(frozen=True)
class Recipe:
    """Casts of the three operands in both directions, and how products accumulate.

    Attributes:
        name: the recipe's name in tables and messages.
        input, weight, gradient: the rowwise casts.
        input_columnwise, weight_columnwise, gradient_columnwise: the columnwise casts.
        delayed: options of delayed scaling, or None for scales from the current amax.
        eps: lower bound of the amaxes of inputs and gradients in FP8 with fp32 scales. It doesn't apply to weights, which are
            stored without their recipe.
        fast_accum: the products that may accumulate in reduced precision on tensor cores.
        exact_products: True multiplies the exact values of codes and scales on every device. By default, Hopper's FP8 matrix
            units multiply MX codes aligned to one power of two per 128 elements, which changes an element by at most 2^-17.9 of
            the largest (docs/numerics.md). Exact MX products run in bfloat16 there, at half the speed.
        exact_order: True gives all three products defined bits: those of blockfp's own Hopper kernel, in the same order of sums
            on a GPU and on a CPU, in PyTorch and in JAX (docs/numerics.md). `fast_accum` is ignored. If inputs and weights have
            scales per block or row, a row of the result depends on that row alone. Products that neither Hopper's FP8 units nor
            bfloat16 multiply exactly raise ValueError.
        exactness: `exact_products` and `exact_order` in one word.
        text: everything except name and delayed scaling as one line; recipes with equal texts compute the same.

    `recipe.replace(gradient=Cast("fp8_e5m2"))` returns a changed copy.
    """

    name: str
    input: Cast
    weight: Cast
    gradient: Cast
    input_columnwise: Cast
    weight_columnwise: Cast
    gradient_columnwise: Cast
    delayed: Delayed | None = None
    eps: float = 0.0
    fast_accum: frozenset[Product] = frozenset({"forward"})
    exact_products: bool = False
    exact_order: bool = False
    exactness: Exact = field(init=False, repr=False, compare=False)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for operand in OPERANDS:
            for direction in DIRECTIONS:
                _check_cast(f"{operand} {direction}", self.cast(operand, direction))
        if not isinstance(self.delayed, Delayed | None):
            raise TypeError(f"delayed must be recipes.Delayed(..) or None, got {self.delayed!r}")
        check_eps(self.eps)
        if isinstance(self.fast_accum, str) or not isinstance(self.fast_accum, Iterable):
            raise TypeError(f"fast_accum must be a set of products among {_PRODUCTS}, got {self.fast_accum!r}")
        object.__setattr__(self, "fast_accum", frozenset(self.fast_accum))
        unknown = self.fast_accum - set(_PRODUCTS)
        if unknown:
            raise ValueError(f"fast_accum names products among {_PRODUCTS}, got {sorted(unknown)}")
        for name in ("exact_products", "exact_order"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_weight()
        self._check_rotations()
        casts = [self.cast(operand, direction)._text() for operand in OPERANDS for direction in DIRECTIONS]
        fast = "+".join(product for product in _PRODUCTS if product in self.fast_accum)
        exact = "+".join(name for name, asked in (("exact", self.exact_products), ("order", self.exact_order)) if asked)
        # Computed once, because compilers treat the string as a constant but would make a number symbolic.
        object.__setattr__(self, "exactness", exact)
        object.__setattr__(self, "text", ",".join([*casts, repr(self.eps), fast, exact]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A pickle of another version may lack the text.
        self.__post_init__()

    @staticmethod
    def of_text(text: str) -> Recipe:
        """Returns the recipe with this `text`, named by it and without delayed scaling."""
        *six, eps, fast, exact = text.split(",")
        casts = []
        for one in six:
            name, *options = one.split("+")
            given = dict.fromkeys(options, True)
            casts.append(Cast(Format.parse(name) if name else None, **given))
        names = [operand + way for operand in OPERANDS for way in ("", "_columnwise")]
        products: Any = frozenset(fast.split("+")) - {""}
        exactly: dict[str, Any] = {"exact_products": "exact" in exact, "exact_order": "order" in exact}
        return Recipe(text, **dict(zip(names, casts, strict=True)), eps=float(eps), fast_accum=products, **exactly)

    def _check_weight(self):
        rowwise, columnwise = self.weight.format, self.weight_columnwise.format
        if columnwise is None:
            return
        if rowwise is not None and (columnwise is not rowwise or not rowwise.square):
            raise ValueError(
                f"weight_columnwise {columnwise} can't be derived from a weight in {rowwise}: a quantized weight is stored "
                "once, and only square blocks (or one scale per tensor) have an exact transpose; use a square format for "
                "both, or weight_columnwise=Cast(None), whose dgrad multiplies by the dequantized weight"
            )

    def _check_rotations(self):
        for product, (a, b) in PRODUCTS.items():
            if self.cast(*a).rotate != self.cast(*b).rotate:
                raise ValueError(
                    f"{product} contracts {a[0]} {a[1]} with {b[0]} {b[1]}: rotate both or neither, "
                    f"got {self.cast(*a)} and {self.cast(*b)}"
                )

    def cast(self, operand: Operand, direction: Direction = "rowwise") -> Cast:
        """Returns the cast of one operand in one direction."""
        if operand not in OPERANDS or direction not in DIRECTIONS:
            known = f"{', '.join(OPERANDS)}, each {' and '.join(DIRECTIONS)}"
            raise ValueError(f"operand and direction must be of {known}, got {operand!r} and {direction!r}")
        return getattr(self, operand if direction == "rowwise" else f"{operand}_columnwise")

    def replace(self, **changes) -> Recipe:
        """Returns a copy with some fields changed.

        A given rowwise cast also becomes the columnwise cast, unless that is given too. A weight in 1-D blocks has no exact
        transpose, so its columnwise cast becomes high precision.
        """
        for operand in OPERANDS:
            if operand in changes and f"{operand}_columnwise" not in changes:
                cast = changes[operand]
                _check_cast(operand, cast)
                square = cast.format is None or cast.format.square or operand != "weight"
                changes[f"{operand}_columnwise"] = cast if square else HIGH_PRECISION
        return replace(self, **changes)

    def __str__(self) -> str:
        return self.name


def _check_cast(where: str, cast: object) -> None:
    if not isinstance(cast, Cast):
        raise TypeError(f"{where} must be a Cast, such as Cast('fp8_e5m2') or Cast(None), got {cast!r}")


PRODUCTS: dict[Product, tuple[tuple[Operand, Direction], tuple[Operand, Direction]]] = {
    "forward": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("gradient", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("gradient", "columnwise"), ("input", "columnwise")),
}
"""Operands of each product as (operand, direction)."""

"""Products with one order of sums on every device (`Recipe.exact_order`): those of the library's own Hopper kernel.

A product takes the route that it has on Hopper (`kernels.routes`). The own kernel runs it there, and a CPU sums in the same
order, by a `Summation`:

    codes        FP8 with scales per tensor, row or block of 128; aligned MX     hopper_fp8
    values       operands in bfloat16, which represents them exactly             hopper_bf16

Nothing else has a defined order: neither float32 or float16 values, nor operands that begin inside a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..definition.matrix_units import SUMMATIONS, Summation
from ..definition.recipe import PRODUCTS, Exact, Product, Recipe
from ..formats import Format
from .routes import HOPPER, Route, route

_CODES = ("tensor", "block", "aligned")


def summation_of(chosen: Route) -> Summation:
    """Returns the order of sums of a route from `route_in_order`."""
    return SUMMATIONS["hopper_fp8" if on_codes(chosen) else "hopper_bf16"]


def on_codes(chosen: Route) -> bool:
    """Returns whether a product multiplies codes; otherwise values in bfloat16."""
    return chosen.mode in _CODES


@lru_cache(maxsize=4096)
def route_in_order(
    a: Format | None,
    b: Format | None,
    a_dtype: str,
    b_dtype: str,
    *,
    exact: Exact,
    contracts_blocks: bool = True,
    cut: bool = False,
) -> Route:
    """Returns the route of a @ b^T with a defined order of sums, on Hopper and on CPUs.

    Args:
        a, b: the operands' formats; None for high precision.
        a_dtype, b_dtype: dtypes of operands in high precision; ignored for others.
        exact: the recipe's `exactness`.
        contracts_blocks: whether both operands' scales run along k. False for weights in 1-D blocks that are contracted along
            their rows.
        cut: whether an operand begins inside a block.

    Raises:
        ValueError: the product has no defined order.
    """
    if cut:
        raise ValueError(
            "exact_order: an operand begins inside a block, so it isn't multiplied as the whole is; cut it at blocks"
        )
    chosen = route(a, b, platform="cuda", capability=HOPPER, in_order=contracts_blocks, exact="exact" in exact)
    if on_codes(chosen):
        return chosen
    plain = {dtype for format, dtype in ((a, a_dtype), (b, b_dtype)) if format is None} - {"bfloat16"}
    if plain or chosen.dtype == "float32":
        what = f"{' and '.join(sorted(plain))} values" if plain else chosen.reason
        raise ValueError(
            f"exact_order: {a or a_dtype} by {b or b_dtype} has no defined order of sums ({what}); these have: FP8 by FP8 with "
            "scales per tensor, row or block of 128, MXFP8, MXFP6 and MXFP4 by each other, and operands that bfloat16 "
            "represents exactly, beside bfloat16 values"
        )
    return chosen


def check(recipe: Recipe, x_dtype: str, weight_dtype: str, products: Iterable[Product]) -> None:
    """Raises ValueError unless these products of a layer have a defined order of sums.

    Args:
        recipe: the recipe, with `exact_order`.
        x_dtype: dtype of inputs and gradients.
        weight_dtype: dtype of a weight that isn't quantized.
        products: the products that will run.
    """
    for product in products:
        a, b = (recipe.cast(*operand).format for operand in PRODUCTS[product])
        contracts_blocks = True
        if product == "dgrad" and recipe.weight.format is not None:
            # A weight is stored once.
            b, contracts_blocks = recipe.weight.format, recipe.weight.format.square
        dtypes = x_dtype, x_dtype if product == "wgrad" else weight_dtype
        try:
            route_in_order(a, b, *dtypes, exact=recipe.exactness, contracts_blocks=contracts_blocks)
        except ValueError as error:
            raise ValueError(f"{product}: {error}") from error


def check_device(capability: tuple[int, int] | None, missing: str | None) -> None:
    """Raises ValueError unless a device sums in the defined order.

    Args:
        capability: compute capability of a CUDA device; None for a CPU.
        missing: why the CUDA library can't multiply there, or None.
    """
    if capability is None or (capability == HOPPER and missing is None):
        return
    why = f"compute capability is {'.'.join(map(str, capability))}" if capability != HOPPER else missing
    raise ValueError(f"exact_order runs on CPUs, and on GPUs of compute capability 9.0 by the CUDA library; here {why}")

"""The product of rows that are sorted by expert, where the rows or the gradient of the product may be codes already.

It is a grouped layer (`linear.grouped_layer`). Codes are multiplied as they came (`ops.groups.group_operands`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockfp.recipes import Recipe

from ..linear.linear import LinearState, call_of, run_call
from ..linear.tensor_parallel.parallel import Parallel
from ..quantized_tensor.tensor import QuantizedTensor


def multiply_groups(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: LinearState,
    recipe: Recipe,
    offs: Tensor,
    *,
    counts: Sequence[int] | None,
    experts: tuple[int, int],
    parallel: Parallel | None,
) -> Tensor:
    """Returns [rows, out] for x [rows, in], values or codes, sorted by expert.

    Args:
        x: float32, float16 or bfloat16, or a `QuantizedTensor` in the recipe's format of inputs.
        weight: [own experts, out, in], values or quantized.
        bias: [own experts, out], or None.
        state: of the layer.
        recipe: from `recipes.for_linear`.
        offs: the end of each expert's rows, int32 [own experts].
        counts: the number of rows of each expert, if the host knows.
        experts: number of the first expert here, and of experts on all ranks: each has its own random keys.
        parallel: how a group shares the weight; None if it belongs to this rank alone.

    Under `torch.autocast` values and bias are cast to its dtype; codes keep theirs.

    Raises:
        TypeError: dtypes that differ.
        ValueError: codes in another format, shapes that don't fit, or no key for a recipe that rounds stochastically.
    """
    own = len(offs)
    if isinstance(x, QuantizedTensor) and x.format is not recipe.input.format:
        raise ValueError(f"x is in {x.format}, but recipe {recipe} wants {recipe.input}: dispatch it by the same recipe")
    if isinstance(weight, QuantizedTensor) and weight.format is not recipe.weight.format:
        raise ValueError(f"the weight is in {weight.format}, but recipe {recipe} wants {recipe.weight}: quantize it in that")
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[0] != own or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x must be [rows, in] and weight [experts, out, in] of the {own} experts here, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = x.dtype if isinstance(x, QuantizedTensor) else torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        weight = weight.to(dtype) if recipe.weight.format is None else weight
    elif weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        other = weight.dtype if bias is None else f"{weight.dtype}, bias {bias.dtype}"
        raise TypeError(f"x is {x.dtype}, weight {other}: cast them to one dtype")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:2])}, got {tuple(bias.shape)}")
    stochastic = recipe.gradient.stochastic or recipe.gradient_columnwise.stochastic
    wants = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if wants and stochastic and state.rng_key is None:
        raise ValueError(f"recipe {recipe} rounds gradients stochastically: pass key= to dispatch")
    with torch.autocast(x.device.type, enabled=False):
        call = call_of(x, weight, bias, recipe, state, None, True, parallel, experts=experts)
        y = run_call(x, None, weight, bias, call, state, None, counts, offs, False)
    if y.grad_fn is not None:
        y.grad_fn.takes_codes = True  # pyright: ignore[reportAttributeAccessIssue]
    return y


def takes_codes(y: Tensor) -> bool:
    """Says whether y comes straight from a product whose backward takes the gradient as codes."""
    return getattr(y.grad_fn, "takes_codes", False)

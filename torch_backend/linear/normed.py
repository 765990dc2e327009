"""`normed`: a linear layer behind an RMSNorm, whose output is cast as it is made, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.recipes import HIGH_PRECISION, Recipe

from ..custom_ops import norm_kernels
from ..custom_ops.cuda_reader import Read as MadeRun
from ..custom_ops.library import runs_now
from ..custom_ops.quantize_plans import kept
from ..torch_internals import functorch_is_active, unsafe_view, unwrap_if_dead
from .call import Call
from .gated import takes
from .linear import LinearState, call_of, check_tensors, known_by, wants_grad
from .linear_function import NO_STATE
from .norm_function import run_normed

# Calls whose arguments were checked, as `linear` keeps them.
_calls: dict[Any, Call] = {}


def cast_of(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, recipe: Recipe) -> MadeRun | None:
    """Returns the cast of what an RMSNorm makes of x for a linear layer; None where no kernel has it, or it isn't to run.

    No kernel has it where the format or a length isn't one of the kernels', and where these don't have PyTorch's bits. It isn't
    to run under autocast and modes, and in transforms of torch.func.

    Args:
        x: [.., in], on a GPU.
        norm_weight: the norm's, [in], or None.
        eps: the norm's.
        weight, recipe: as for `linear.apply`.
    """
    if not runs_now(x) or torch.is_autocast_enabled("cuda") or functorch_is_active():
        return None
    row = recipe.input
    column = recipe.input_columnwise if wants_grad(weight) and torch.is_grad_enabled() else HIGH_PRECISION
    if row.format is None or (norm_weight is not None and type(norm_weight) not in (Tensor, torch.nn.Parameter)):
        return None
    options = (recipe.delayed is not None, column.rotate, recipe.eps)
    return norm_kernels.cast_of(x, norm_weight, eps, row.format, column.format, *options)


def normed(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    cast: MadeRun,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    state: LinearState | None = None,
) -> Tensor | None:
    """Computes `linear` of the RMSNorm of x, with the bits of `torch.nn.functional.rms_norm` and `linear` one after the other.

    It isn't called while a compiler traces, which joins norms with what stands before them.

    Args:
        x, norm_weight, eps: as for `cast_of`.
        cast: what that returned.
        weight, bias, recipe, state: as for `linear.apply`.

    Returns:
        [.., out]; None where norm and cast have to run one after the other: where `observe` wants the values, and where the
        weight isn't codes or a plain tensor.
    """
    if not takes(x, None, weight, recipe, state):
        return None
    if norm_weight is not None and norm_weight.requires_grad and not x.requires_grad and torch.is_grad_enabled():
        # The layer's gradient is wanted for the norm's weight alone, which its `Call` doesn't tell.
        return None
    known = known_by(x, weight, bias, recipe, state, None, False)
    call = _calls.get(known)
    rows = x if x.ndim == 2 else x.flatten(0, 1)
    if call is None:
        check_tensors(rows, weight, bias, grouped=False, transposed=False)
        call = call_of(rows, weight, bias, recipe, state, None, False, None)
        kept(_calls, known, call)
    if not call.direct:
        return None
    tensors: tuple[Tensor | None, ...] = ()
    if state is not None:
        delayed = (state.input_amax_history, state.input_scale, state.gradient_amax_history, state.gradient_scale)
        tensors = (*(delayed if recipe.delayed else NO_STATE[:4]), state.rng_key, state.step, None)
    norm_weight = None if norm_weight is None else unwrap_if_dead(norm_weight)
    y = run_normed(unwrap_if_dead(rows), norm_weight, unwrap_if_dead(weight), bias, call, eps, cast, *tensors)
    assert isinstance(y, Tensor)
    return y if x.ndim == 2 else unsafe_view(y, [*x.shape[:-1], y.shape[-1]])

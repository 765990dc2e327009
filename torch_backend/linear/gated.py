"""`gated`: a linear layer behind an activation, whose output is cast as it is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.kernels import switch
from blockfp.recipes import Recipe

from ..custom_ops import export_ops
from ..custom_ops.quantize_plans import kept
from ..quantized_tensor.tensor import DTYPES
from ..torch_internals import FakeTensor, functorch_is_active, jit_traces, unsafe_view, unwrap_if_dead
from .call import Call
from .gated_function import GatedFunction, Gating, run_gated
from .linear import LinearState, call_of, check_tensors, known_by
from .linear_function import NO_STATE

# Calls whose arguments were checked, as `linear` keeps them.
_calls: dict[Any, Call] = {}
switch.when_turned(_calls.clear)


def takes(gate: Tensor, up: Tensor | None, weight: Tensor, recipe: Recipe, state: LinearState | None) -> bool:
    """Says whether `gated` computes what the activation and `linear` would.

    It doesn't where the values of what the activation makes are wanted (by `observe`, by operands in high precision, for the
    amax where delayed scaling has no scale yet),
    in transforms of torch.func, under torch.jit.trace, under an autocast to another dtype, or with DTensors. Nor where `linear`
    would raise.
    """
    if recipe.input.format is None or recipe.input_columnwise.format is None:
        return False
    if functorch_is_active() or jit_traces():
        return False
    if state is not None and (state.observed is not None or (state.input_scale is not None and not state.has_scales)):
        return False
    kind = gate.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not gate.dtype:
        return False
    if type(gate) is not Tensor or gate.dtype not in DTYPES or gate.dtype is not weight.dtype:
        return False
    if up is None:
        return True
    alike = type(up) is Tensor and up.dtype is gate.dtype and up.shape == gate.shape and up.device == gate.device
    return alike and up.requires_grad == gate.requires_grad


def gated(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    gating: Gating,
    *,
    state: LinearState | None = None,
) -> Tensor:
    """Computes `linear` of activation(gate), or of activation(gate) * up, with the same bits; `takes` says where.

    Args:
        gate, up: [.., features]; or the one tensor [.., 2 * features] in which both lie, and None.
        weight, bias, recipe, state: as for `linear.apply`.
        gating: the activation, and where gate and up lie.
    """
    # Not reshape: of no elements it can't infer a length.
    flat: list[Any] = [
        one if one is None or one.ndim == 2 else one.flatten(0, -2) if one.ndim > 1 else one[None] for one in (gate, up)
    ]
    known = call = None
    if not torch.compiler.is_compiling() and type(gate) is not FakeTensor:
        known = (known_by(gate, weight, bias, recipe, state, None, False), gating.layout)
        call = _calls.get(known)
    if call is None:
        width = gate.shape[-1] if gating.layout == "apart" else gate.shape[-1] // 2
        check_tensors(flat[0][:, :width], weight, bias, grouped=False, transposed=False)
        call = call_of(flat[0], weight, bias, recipe, state, None, False, None)
        if known is not None:
            kept(_calls, known, call)
    tensors: tuple[Tensor | None, ...] = ()
    if state is not None:
        delayed = (state.input_amax_history, state.input_scale, state.gradient_amax_history, state.gradient_scale)
        tensors = (*(delayed if recipe.delayed else NO_STATE[:4]), state.rng_key, state.step, None)
    run = GatedFunction.apply if call.traced else run_gated
    if not call.traced:
        flat, weight = [None if one is None else unwrap_if_dead(one) for one in flat], unwrap_if_dead(weight)
    if call.dtype is None:
        y = run(*flat, weight, bias, call, gating, *tensors)
    else:
        with torch.autocast(gate.device.type, enabled=False):
            y = run(*flat, weight, None if bias is None else bias.to(call.dtype), call, gating, *tensors)
    assert isinstance(y, Tensor)
    if call.traced:
        y = export_ops.outputs(y, flat[0], weight, bias)
    return y if gate.ndim == 2 else unsafe_view(y, [*gate.shape[:-1], y.shape[-1]])

"""Fuses an activation with the next layer's quantization when the result is identical."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blockfp.kernels.switch import once

from ..linear.linear import apply, wants_grad
from ..linear.mlp_function import OneOfMLP, apply_mlp
from ..linear.prologue import activation, casts_gradient, gradient_casts, takes
from ..linear.shared_casts import SharedCasts
from ..linear.tensor_parallel.pieces import in_pieces
from ..ops.layer.activations import Gating
from ..torch_internals import dispatch_modes, functorch_is_active, jit_traces
from .known_classes import LINEAR, Derived, DoesNotFit, SharedInput, check_own_forward, derive, forward_of, watched
from .linear import Linear
from .quantized_layer import QuantizedLayer

QUANTIZED = Linear.forward
"""The forward of quantized layers at import, before anyone patches it."""


def gated_product(layer: nn.Module, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor:
    """Returns layer(activation(gate) * up), or layer(activation(gate)); fused or not, the bits are the same.

    `layer` is of any class. gate and up are [.., features]; or gate is [.., 2 * features] with both, in `gating.layout`, and up
    is None.
    """
    found = fused_product(layer, gate, up, gating)
    if found is not None:
        return found
    if up is not None:
        return layer(activation(gate, up, gating))
    return layer(in_pieces(lambda piece: activation(piece, None, gating), gate, getattr(layer, "parallel", None)))


def fused_product(layer: Any, gate: Tensor, up: Tensor | None, gating: Gating) -> Tensor | None:
    """Like `gated_product`, with activation and cast in one op; None if the layer must be called unfused.

    That is the case if hooks observe the layer's input, if its class or forward was replaced, if it is tensor parallel, or if
    `prologue.takes` refuses.
    """
    if type(layer).forward is not QUANTIZED or layer.parallel is not None or watched(layer):
        return None
    if layer.made_of is not None and layer.made_of.forward is not LINEAR:
        return None
    state = layer.state() if layer.stateful or layer.observed is not None else None
    weight = layer.weight
    if not takes(gate, up, weight, layer.linear_recipe, state):
        return None
    return apply(gate, weight, layer.bias, layer.linear_recipe, state=state, up=up, prologue=gating)


def fused_mlp(firsts: Sequence[nn.Module], last: nn.Module, x: Tensor, gating: Gating) -> Tensor | None:
    """Like `gated_product` of what one or two layers make of x, as one function; None if the layers must be called.

    That is the case unless a kernel casts the activation's gradient for the first layers, which scale by delay
    (`prologue.casts_gradient`). A bias of theirs would need that gradient too.
    """
    if type(x) is not Tensor or x.ndim < 2 or x.layout is not torch.strided or not torch.is_grad_enabled():
        return None
    compiles = torch.compiler.is_compiling()
    layers: list[Any] = [*firsts, last]
    gated, made = len(firsts) > 1 or gating.layout != "apart", 0
    for layer in layers:
        if type(layer).forward is not QUANTIZED or layer.parallel is not None or layer.observed is not None:
            return None
        if layer.made_of is not None and layer.made_of.forward is not LINEAR:
            return None
        own, recipe = layer._parameters, layer.linear_recipe
        if layer is not last:
            # A scale of now has to be measured first, and casts in blocks are no faster.
            if recipe.delayed is None:
                return None
            key = (recipe.text, x.dtype, x.device, x.requires_grad, gating, gated)
            casts = None if compiles else gradient_casts.get(key)
            if not (casts_gradient(x, recipe, gating, gated) if casts is None else casts):
                return None
        weight, bias = own.get("weight"), own["bias"] if "bias" in own else layer.bias  # noqa: SIM401
        if weight is None or weight.shape[1] != (made if layer is last else x.shape[-1]):
            return None
        if weight.dtype is not x.dtype or weight.device != x.device:
            return None
        if bias is not None and (bias.dtype is not x.dtype or bias.device != x.device):
            return None
        if recipe.delayed is not None and not (
            layer.has_scales and (compiles or layer.known_scale is layer._buffers["input_scale"])
        ):
            return None
        if layer is last:
            if recipe.input.format is None or recipe.input_columnwise.format is None:
                return None
        else:
            outputs = weight.shape[0] // (1 if gating.layout == "apart" else 2)
            if bias is not None or not wants_grad(weight) or outputs % 8 or made not in (0, outputs):
                return None
            made = outputs
    if functorch_is_active() or jit_traces() or torch.is_autocast_enabled(x.device.type) or watched(*layers):
        return None
    if not compiles and dispatch_modes():
        return None
    found: list[OneOfMLP] = []
    readers: Any = firsts
    shared = None if compiles or len(firsts) < 2 else SharedCasts(readers)
    with NOTHING if shared is None else shared:
        for layer in layers:
            casts = None if shared is None or layer is last else shared.of(layer, x)
            state = layer.state(alone=casts is None) if layer.stateful else None
            found.append(OneOfMLP(layer._parameters["weight"], layer.linear_recipe, state, casts))
        return apply_mlp(x, found, bias, gating)


# ---- layers that read one input


NOTHING = nullcontext()


def sharing(layers: Sequence[nn.Module | None]) -> AbstractContextManager[None]:
    """Lets layers share casts within `with`, unless hooks observe one or another class or forward replaced it."""
    if torch.compiler.is_compiling():
        return NOTHING
    readers: list[QuantizedLayer] = []
    for layer in layers:
        if not isinstance(layer, QuantizedLayer) or type(layer).forward is not QUANTIZED:
            return NOTHING
        if layer.made_of is not None and layer.made_of.forward is not LINEAR:
            return NOTHING
        readers.append(layer)
    return NOTHING if watched(*readers) else SharedCasts(readers)


class SharesInput(Derived, nn.Module):
    """Base of the classes of `sharing_class`. Runs the library's own forward, `known`, within `sharing`."""

    known: ClassVar[Any]
    readers: ClassVar[tuple[str, ...]]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        forward, children = self.made_of.forward, self._modules
        others = [child for name, child in children.items() if child is not None and name not in self.readers]
        if forward is not self.known or watched(*others):
            return forward(self, *inputs, **options)
        with sharing(list(map(children.get, self.readers))):
            return forward(self, *inputs, **options)


def sharing_class(module: nn.Module, row: SharedInput) -> type[SharesInput]:
    """Returns the class that lets a module's layers share a cast.

    Raises DoesNotFit if a layer is missing or the module has its own forward.
    """
    check_own_forward(module)
    for name in row.layers:
        if not isinstance(module._modules.get(name), nn.Module):
            raise DoesNotFit(f"it has no module {name!r}")
    return _derived(type(module), row.layers)


@once
def _derived(cls: type[nn.Module], readers: tuple[str, ...]) -> type[SharesInput]:
    members = {"known": staticmethod(cls.forward), "readers": readers, "rebuild": staticmethod(_rebuild_sharing)}
    return derive(cls, "Sharing", (SharesInput,), **members, rebuilt_from=(cls, readers))


def _rebuild_sharing(cls: type[nn.Module], readers: tuple[str, ...]) -> nn.Module:
    # Another version of the library, or a patch, may have another forward.
    made: Any = cls if forward_of(cls) is None else _derived(cls, readers)
    return made.__new__(made)

"""Expert modules of other libraries that `convert` knows, with their forwards over quantized weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..experts.dispatch import combine
from ..linear.prologue import activation
from ..modules.experts import Experts
from ..modules.known_classes import TITAN_EXPERTS, TRANSFORMERS_MOE, base_named, module_of
from ..ops.layer.activations import Gating
from .gated_mlp import activation_of


class TransformersExperts(Experts):
    """Experts of transformers 5 under `use_experts_implementation`, which all share one forward.

    Weights are gate_up_proj (or up_proj) and down_proj, [experts, out, in] or [experts, in, out], with or without biases. The
    gate is the class's own. `config._experts_implementation` is ignored: it chooses among unquantized forwards.
    """

    names: ClassVar[tuple[str, ...]] = ("gate_up_proj", "up_proj", "down_proj")

    num_experts: int
    has_gate: bool
    has_post_expert_norm: bool
    act_fn: Any
    post_expert_norm: Any
    _apply_gate: Any

    @classmethod
    def knows(cls, other: type[nn.Module]) -> bool:
        # The decorator's wrapper; a class with another forward computes something else.
        return module_of(other.forward) == TRANSFORMERS_MOE

    @classmethod
    def found_in(cls, module: nn.Module) -> tuple[dict[str, str | None], bool] | None:
        if not cls.knows(type(module)):
            return None
        first = "gate_up_proj" if getattr(module, "has_gate", False) else "up_proj"
        names = (first, "down_proj")
        if not all(isinstance(module._parameters.get(name), Tensor) for name in names):
            return None
        has_bias = bool(getattr(module, "has_bias", False))
        return {name: f"{name}_bias" if has_bias else None for name in names}, bool(getattr(module, "is_transposed", False))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [tokens, hidden]: the weighted sum of each token's experts.

        hidden_states is [tokens, hidden]; top_k_index and top_k_weights are [tokens, k]. Raises ValueError if transformers has
        sharded the experts itself.
        """
        if getattr(self, "_is_expert_parallel", False):
            raise ValueError(
                "transformers has sharded these experts by its own plan (tp_plan or enable_expert_parallel), which "
                "quantized experts don't support: load the model without it"
            )
        if self.parallel is not None:
            return self._by_ranks(hidden_states, top_k_index, top_k_weights)
        tokens, k = top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)
        offs = torch.searchsorted(experts, torch.arange(self.num_experts, device=experts.device), right=True, out_int32=True)
        first, last = self.biases
        y = self.multiply(first, hidden_states[order // k], offs)
        y = self.multiply(last, self._activated(y), offs)
        if getattr(self, "has_post_expert_norm", False):  # missing in some 5.x versions
            y = self.post_expert_norm(y)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        weighted = y[back].view(tokens, k, y.shape[-1]) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _by_ranks(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        first, last = self.biases
        received = self.dispatched(hidden_states, top_k_index)
        y = self.multiply_received(first, received.tokens, received)
        y = self.multiply_received(last, self._activated(y), received)
        if getattr(self, "has_post_expert_norm", False):  # missing in some 5.x versions
            y = self.post_expert_norm(y)
        return combine(y, received, top_k_weights).to(hidden_states.dtype)

    def _activated(self, y: Tensor) -> Tensor:
        """Applies the activation between the products to [rows, gate and up] or [rows, up]."""
        gate: Any = type(self)._apply_gate
        name = activation_of(self.act_fn) if isinstance(getattr(self, "act_fn", None), nn.Module) else None
        if name is not None and not self.has_gate:
            return activation(y, None, Gating(name, "apart"))
        if name is not None and (module_of(gate), gate.__name__) == (TRANSFORMERS_MOE, "_default_apply_gate"):
            return activation(y, None, Gating(name, "halves"))
        return self._apply_gate(y) if self.has_gate else self.act_fn(y)


class TitanExperts(Experts):
    """torchtitan's `GroupedExperts`: w1, w3 and w2, [experts, out, in], multiplied in bfloat16."""

    names: ClassVar[tuple[str, ...]] = ("w1_EFD", "w3_EFD", "w2_EDF")
    seams: ClassVar[tuple[str, ...]] = ("forward", "_grouped_mm")

    @classmethod
    def knows(cls, other: Any) -> bool:
        theirs: Any = base_named(other, TITAN_EXPERTS)
        if theirs is None:
            return False
        # An overridden `_grouped_mm` computes other products, so such a class is skipped.
        return other.forward is theirs.forward and other._grouped_mm is theirs._grouped_mm

    @classmethod
    def found_in(cls, module: nn.Module) -> tuple[dict[str, str | None], bool] | None:
        if not cls.knows(type(module)):
            return None
        return dict.fromkeys(cls.names), False

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Returns [tokens, dim] for rows sorted by expert and the number of rows of each expert."""
        offs = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        x, dtype = x_RD.bfloat16(), torch.bfloat16
        gate, up = (self.multiply(name, x, offs, dtype) for name in ("w1_EFD", "w3_EFD"))
        h = activation(gate, up, Gating("silu", "apart"))
        return self.multiply("w2_EDF", h, offs, dtype).type_as(x_RD)


KINDS: tuple[type[Experts], ...] = (TransformersExperts, TitanExperts)


def experts_kind(module: nn.Module) -> type[Experts] | None:
    """Returns the class that `convert` gives a module of experts; None for any other module."""
    if isinstance(module, Experts):
        return None
    return next((kind for kind in KINDS if kind.found_in(module) is not None), None)

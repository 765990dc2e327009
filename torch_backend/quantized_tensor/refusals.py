"""Errors for operations that need a weight's values, with remedies for each kind of operation.

The user may not have called the operation: it may come from an optimizer, an average of weights, an initializer, or attention
that reads its layers' weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.dtensors import when_imported
from ..torch_internals import is_mutable

aten = torch.ops.aten

PRODUCTS = {
    getattr(packet, overload)
    for packet in (
        aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot, aten.vdot, aten.linear,
        aten.matmul, aten.convolution, aten.conv_tbc, aten._trilinear, aten._addmm_activation, aten._grouped_mm,
        aten._scaled_mm, aten._sparse_addmm, aten._sparse_mm_reduce_impl, aten.sspaddmm, aten.hspmm,
        aten._transformer_encoder_layer_fwd, aten._native_multi_head_attention,
    )
    for overload in packet.overloads()
}  # fmt: skip
"""Products with a weight, including torch's fused ones and the out= and dtype overloads."""

PRODUCTS_ADDED = {getattr(aten, name).default for name in ("addmm_", "baddbmm_", "addbmm_", "addmv_")}
"""Operations that add a product to their first argument."""

_STACKS = {aten.stack.default, aten.cat.default}

CALL_THE_LAYER = "call the layer itself, or blockfp.torch.linear(x, weight, recipe=..)"

_PEFT = "PEFT's LoRA: give blockfp.integrations.peft.register its config"

READERS_OF_LAYERS = (
    "a torch module reads the weights of its layers (torch.nn.MultiheadAttention, the fused path of "
    "torch.nn.TransformerEncoderLayer in evaluation): exclude the layers, or let blockfp.torch.convert convert "
    "the whole module",
    "a loss reads the weight of the head (TRL, Liger): leave the head out of convert: "
    "filter_fn=lambda path, layer: path != 'lm_head'",
)

_WRITERS = (
    "other optimizers, averages of weights (AveragedModel) and code that writes to weights: convert with "
    'weights="high_precision"',
    "values: blockfp.torch.load_high_precision_(parameter, values), or blockfp.torch.init_(parameter, function) for "
    "torch.nn.init's",
    f"merges of {_PEFT}",
)

_SENDERS = (
    "blockfp.torch.parallelize cuts weights over a tensor-parallel mesh (torch's parallelize_module doesn't); fully_shard "
    "shards them",
)

_STACKS_OF_WEIGHTS = (
    "torch.func.stack_module_state, averages: take blockfp.torch.high_precision_state_dict(model), or convert with "
    'weights="high_precision"',
)

_READERS = (
    "a DTensor: call it on its to_local()",
    "code that isn't your own (optimizers, averages of weights, initializers of several steps): convert with "
    'weights="high_precision", or use blockfp.torch.init_(parameter, function)',
    f"DoRA of {_PEFT}",
)

FLAT = "flatten dequantize(), or quantize the reshaped tensor"

FLATTENERS = (
    "all weights as one vector: take blockfp.torch.high_precision_state_dict(model).values()",
    'optimizers and norms of other libraries: convert with weights="high_precision"',
    "sharding: use fully_shard, not FullyShardedDataParallel",
)


def refusal(func: Any) -> NotImplementedError:
    """Returns the error for an operation that is not in the op table."""
    if func.namespace in ("c10d", "_c10d_functional"):
        values = "blockfp.torch.high_precision_state_dict(model) gathers values"
        return refused(func, "codes travel with their scales", values, _SENDERS)
    if func in PRODUCTS:
        return refused(func, "it skips the recipe", CALL_THE_LAYER, READERS_OF_LAYERS)
    if func in _STACKS:
        return refused(func, "blocks don't cross tensors", "join dequantize() results", _STACKS_OF_WEIGHTS)
    if is_mutable(func):
        steps = "use blockfp.torch.AdamW, or load_high_precision_(parameter, values)"
        return refused(func, "it writes values", steps, _WRITERS)
    return refused(func, "it needs values", "call dequantize() first", _READERS)


def jit_refusal() -> NotImplementedError:
    """Returns the error for torch.jit.trace, which would record results as constants."""
    return NotImplementedError(
        "torch.jit.trace doesn't see what blockfp computes, and would keep its results as constants. TensorBoard's "
        "add_graph, fvcore and ONNX with dynamo=False trace so, too: use torch.export or torch.compile, for FLOPs "
        "torch.utils.flop_counter; to trace, take a plain model that has loaded "
        "blockfp.torch.high_precision_state_dict(model)"
    )


def refused(func: Any, reason: str, remedy: str, hints: Sequence[str] = ()) -> NotImplementedError:
    """Returns an error of one sentence, with notes for users of other libraries, one per kind."""
    return noted(NotImplementedError(f"{func} is not defined for a QuantizedTensor: {reason}; {remedy}"), hints)


def noted(error: NotImplementedError, hints: Sequence[str]) -> NotImplementedError:
    for hint in hints:
        error.add_note(hint)
    return error


@when_imported
def _register_sharding(dtensor: Any) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(aten.dequantize.self)
    def refuse(x: Any) -> None:
        """Rejects DTensor.dequantize(), a torch method that never reaches the local tensor."""
        raise NotImplementedError(
            "a DTensor has no dequantize(): for a quantized one, to_local().dequantize() returns this rank's values, "
            "and blockfp.torch.high_precision_state_dict(model) whole weights"
        )

"""The library of blockfp's custom ops, and how an op is defined: its schema, what carries it out, and its fake.

Ops carry a format as its name. A compiled graph holds one call to each; what runs behind it gives the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from blockfp.definition import layout
from blockfp.formats import Format

from ..torch_internals import FakeTensor, dispatch_modes, pytree

# A Library with Python functions costs two thirds of `torch.library.custom_op`'s host time.
_library = torch.library.Library("blockfp", "DEF")

Register = Callable[[Callable[..., Any]], Callable[..., Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def define(schema: str) -> Any:
    """Defines an op and returns it, ready to be called."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.blockfp, name).default
    _library.impl(name, partial(_resolved, op), "Negative")
    return op


def _resolved(op: Any, *arguments: Any, **options: Any) -> Any:
    """Calls an op with tensors whose memory holds the negated values, as torch's negative bit says, as it has them elsewhere.

    Raises:
        ValueError: a compiler traces. Inductor reads memory, and takes no notice of the bit.
    """

    def resolved(tensor: Tensor) -> Tensor:
        if tensor.is_neg() and isinstance(tensor, FakeTensor):
            raise ValueError(
                "a tensor has torch's negative bit (is_neg()), as parts of conjugated complex tensors have, and compilers take "
                "the negated values that its memory holds: give compiled code resolve_neg() of it"
            )
        return tensor.resolve_neg()

    return op(*pytree.tree_map_only(Tensor, resolved, arguments), **pytree.tree_map_only(Tensor, resolved, options))


def impl(op: Any) -> Register:
    """Registers the decorated function to carry out an op, on every device."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(op.name().removeprefix("blockfp::"), function, "CompositeExplicitAutograd")
        return function

    return register


def fake(op: Any) -> Register:
    """Registers the decorated function to make an op's results without values, while a compiler traces and on meta tensors."""
    return torch.library.register_fake(op.name(), lib=_library)


def differentiate(op: Any) -> Register:
    """Registers the decorated function (ctx, *gradients) as an op's backward."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_autograd(op.name(), function, lib=_library)
        return function

    return register


def empty_parts(x: Tensor, shape: Sequence[int], format: Format, origin: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Codes, scales and, of formats with two levels, the tensor scale of an array of this shape, not filled, on x's device."""
    # Not cached: a compiler may leave lengths open.
    parts = layout.parts.__wrapped__(tuple(shape), format, origin)
    return [x.new_empty(part, dtype=getattr(torch, dtype)) for part, dtype in parts]


def is_real(tensor: Tensor) -> bool:
    """Says whether a tensor has memory of its own: it is no meta tensor, and stands for no other while a compiler traces.

    Other tensors have to go through an op, so that it is traced, or its fake runs.
    """
    return type(tensor) is Tensor and not tensor.is_meta


def runs_now(tensor: Tensor) -> bool:
    """Says whether an operation on a tensor runs at once and nobody watches: the tensor is real, and no mode is on.

    Modes are FLOP counters, selective checkpointing and tracers: they see operations that go through the dispatcher.
    """
    return type(tensor) is Tensor and not tensor.is_meta and not dispatch_modes()


def outside_graphs(function: Function) -> Function:
    """Makes a compiler leave its graph at a function, and begin another behind it."""
    disabled: Any = torch.compiler.disable(function)
    return disabled

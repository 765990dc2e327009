"""The library of blockfp's custom ops, and functions that define an op: its schema, implementation and fake.

Ops take a format by name. A compiled graph calls each op once; every implementation gives the same bits.
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
    """Defines an op and returns its callable."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.blockfp, name).default
    _library.impl(name, partial(_resolved, op), "Negative")
    return op


def _resolved(op: Any, *arguments: Any, **options: Any) -> Any:
    """Calls an op after resolving torch's negative bit, which marks tensors whose memory holds the negated values.

    Raises ValueError while a compiler traces, since Inductor ignores the bit.
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
    """Registers the decorated function as an op's implementation on every device."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(op.name().removeprefix("blockfp::"), function, "CompositeExplicitAutograd")
        return function

    return register


def fake(op: Any) -> Register:
    """Registers the decorated function as an op's fake, which returns outputs without values for tracing and meta tensors."""
    return torch.library.register_fake(op.name(), lib=_library)


def differentiate(op: Any) -> Register:
    """Registers the decorated function (ctx, *gradients) as an op's backward."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_autograd(op.name(), function, lib=_library)
        return function

    return register


def empty_parts(x: Tensor, shape: Sequence[int], format: Format, origin: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Returns uninitialized codes, scales and, in two-level formats, tensor scale of an array of this shape, on x's device."""
    # Not cached, since lengths may be symbolic.
    parts = layout.parts.__wrapped__(tuple(shape), format, origin)
    return [x.new_empty(part, dtype=getattr(torch, dtype)) for part, dtype in parts]


def is_real(tensor: Tensor) -> bool:
    """Returns whether a tensor has memory: it isn't a meta tensor, nor a compiler's stand-in.

    Other tensors must go through an op, so that it is traced or its fake runs.
    """
    return type(tensor) is Tensor and not tensor.is_meta


def runs_now(tensor: Tensor) -> bool:
    """Returns whether operations on a tensor run immediately and unobserved: the tensor is real and no dispatch mode is active.

    Modes (FLOP counters, selective checkpointing, tracers) only see operations that go through the dispatcher.
    """
    return type(tensor) is Tensor and not tensor.is_meta and not dispatch_modes()


def outside_graphs(function: Function) -> Function:
    """Makes compilers break their graph at a function."""
    disabled: Any = torch.compiler.disable(function)
    return disabled

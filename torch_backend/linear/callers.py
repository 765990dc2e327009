"""What is known of the code that calls a layer: whether hooks see the call, and which layer was called just before it.

Layers that read one tensor one after another, as query, key and value do, share its cast. The tensor itself can't tell whether
it is what it was: collectives, `.data`, NumPy, DLPack and other kernels write without moving its version. So the code that
calls the layers has to prove it. Between two calls there is nothing but loads and stores of variables, attributes, views of
what the first layer gave, and norms of it that torch or transformers wrote, in a stretch that runs once and from its beginning.
The bytecode says so, read once for each function. Everywhere else each layer casts for itself.

What a layer has cast waits in the frame that called it (`f_trace`, where Python keeps what watches a frame): another call of
the same function doesn't find it, and it goes when the frame does.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from ..custom_ops.linear_ops import Casts
from ..custom_ops.quantize_plans import kept
from ..torch_internals import MODULE_CALL, frame_above


def has_hooks(module: nn.Module) -> bool:
    """Says whether a call of a module is seen by hooks, its own or those of all modules."""
    own = (
        *(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks),
        *(hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks),
        *(hooks_of_all._global_backward_hooks, hooks_of_all._global_backward_pre_hooks),
    )
    return any(own)


def shared_casts(layer: nn.Module, x: Tensor) -> Casts | None:
    """Returns the casts of x that a layer shares with those called before and after it; None if there are none such.

    `linear.apply` calls this, for the `multiply` that the layer's `forward` calls. The layer takes what it finds there, and
    adds what it makes.
    """
    frame: FrameType | None = frame_above(4)
    for code in MODULE_CALL:
        # Hooks stand between, and so does whoever calls `forward` itself.
        if frame is None or frame.f_code is not code:
            return None
        frame = frame.f_back
    place = None if frame is None else _places_of(frame.f_code).get(frame.f_lasti)
    if frame is None or place is None:
        return None
    last: Any = frame.f_trace
    if last is not None and type(last) is not _Read:
        # A debugger may do anything between two instructions.
        return None
    names, casts = frame.f_locals, None
    if _value(names, place.layer) is layer:
        casts = {}
        if last is not None and last.place == place.before and last.input is x:
            casts = last.casts if all(_is_norm(_value(names, path)) for path in place.norms) else {}
    frame.f_trace = _Read(frame.f_lasti, x, casts) if casts is not None and place.followed else None
    if type(names) is dict:
        # Before Python 3.13 a copy that lives as long as the frame.
        names.clear()
    return casts


class _Read:
    """A layer's read of an input, kept in the frame that called it.

    Attributes:
        place: where in the frame's code the call is.
        input: the tensor.
        casts: what was made of it.
    """

    __slots__ = ("casts", "input", "place")

    def __init__(self, place: int, input: Tensor, casts: Casts):
        self.place, self.input, self.casts = place, input, casts

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Watches nothing, should somebody begin to trace the frame."""


Path = tuple[str, ...]
"""A variable, and attributes from there: ("self", "q_proj")."""


def _value(names: Mapping[str, Any], path: Path) -> Any:
    value = names.get(path[0])
    for name in path[1:]:
        value = getattr(value, name, None)
    return value


def _is_norm(module: Any) -> bool:
    """Says whether a module is a norm of torch or transformers, whose calls nobody sees."""
    cls: Any = type(module)
    if not isinstance(module, nn.Module) or "Norm" not in cls.__name__ or "forward" in vars(module) or has_hooks(module):
        return False
    return cls.forward.__module__.startswith(("torch.nn.modules.", "transformers.models."))


# ---- what bytecode says


class _Place(NamedTuple):
    """A call that may be one of a layer with one tensor.

    Attributes:
        layer: what is called.
        before: the place of the call before it, if nothing stands between that could write into a tensor.
        norms: what stands between, if it is a norm.
        followed: whether it is the one before another.
    """

    layer: Path
    before: int | None
    norms: tuple[Path, ...]
    followed: bool


_known: dict[int, tuple[CodeType, dict[int, _Place]]] = {}


def _places_of(code: CodeType) -> dict[int, _Place]:
    # By number: the hash of a code is that of all it holds.
    found = _known.get(id(code))
    if found is None:
        found = kept(_known, id(code), (code, _read(code)))
    return found[1]


_JUMPS = {*dis.hasjrel, *dis.hasjabs}

_SKIPPED = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"}

_VIEWS = {"flatten", "permute", "reshape", "transpose", "unflatten", "unsqueeze", "view"}
"""Methods of a layer's result that write nothing."""

_RESULT, _VIEW = object(), object()
"""On the stack: what a layer gave, or a view or norm of it; and a method that makes such a view."""


def _read(code: CodeType) -> dict[int, _Place]:
    """Returns the calls in a function that have another one before or behind them, by their places."""
    found: dict[int, _Place] = {}
    loops: list[range] = []
    # Paths of what was loaded, empty of constants; `_RESULT`, `_VIEW`; None for all else, and what came from elsewhere.
    stack: list[Any] = []
    before: int | None = None
    norms: list[Path] = []

    def pop(count: int) -> list[Any]:
        stack[:0] = [None] * (count - len(stack))
        values = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return values

    for one in dis.get_instructions(code):
        if one.is_jump_target:
            stack, before, norms = [], None, []
        if one.opcode in _JUMPS and one.argval < one.offset:
            loops.append(range(one.argval, one.offset))
        variables = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        match one.opname.replace("_BORROW", "").replace("_CHECK", ""):
            case name if name in _SKIPPED:
                continue
            case "LOAD_FAST" | "LOAD_FAST_LOAD_FAST" | "LOAD_DEREF":
                stack += [(variable,) for variable in variables]
            case "LOAD_CONST" | "LOAD_SMALL_INT" | "PUSH_NULL":
                stack.append(())
            case "STORE_FAST" | "STORE_FAST_STORE_FAST":
                pop(len(variables))
            case "STORE_FAST_LOAD_FAST":
                pop(1)
                stack.append((variables[-1],))
            case "LOAD_METHOD" | "LOAD_ATTR" as name:
                # One instruction since Python 3.12.
                called = name == "LOAD_METHOD" or (sys.version_info >= (3, 12) and one.arg is not None and one.arg & 1)
                (owner,) = pop(1)
                value = (*owner, one.argval) if isinstance(owner, tuple) and owner else None
                if owner is _RESULT and one.argval in _VIEWS:
                    value = _VIEW
                stack += [value] * (2 if called else 1)
            case "CALL" if one.arg is not None:
                first, second, *arguments = pop(one.arg + 2)
                # A method and its owner, or a function and nothing; which of these comes first depends on Python.
                callee = second if first == () else first if second in ((), first) else None
                stack.append(_RESULT)
                if callee is _VIEW:
                    continue
                if isinstance(callee, tuple) and len(arguments) == 1 and arguments[0] is _RESULT:
                    norms.append(callee)
                    continue
                if isinstance(callee, tuple) and len(arguments) == 1 and isinstance(arguments[0], tuple):
                    found[one.offset] = _Place(callee, before, tuple(norms), False)
                    if before is not None:
                        found[before] = found[before]._replace(followed=True)
                    before, norms = one.offset, []
                    continue
                stack[-1], before, norms = None, None, []
            case _:
                stack, before, norms = [], None, []
    once = {place: one for place, one in found.items() if not any(place in loop for loop in loops)}
    return {place: one for place, one in once.items() if one.before is not None or one.followed}

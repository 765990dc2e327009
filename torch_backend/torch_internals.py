"""PyTorch's private names of tensors, autograd, compilers and callers' frames.

Each entry says what it is for and why no public name serves. All were run in torch 2.11 and 2.13. Names of distributed training
are in `distributed_internals`; attributes of modules and hooks, and the schedules that `stateful_layer` patches, in neither.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

__all__ = ["TorchDispatchMode", "pytree", "return_and_correct_aliasing"]

# `pytree` finds tensors in nested arguments; its public name has an underscore.
# `TorchDispatchMode` sees every operation; it is documented under this private name.
# `return_and_correct_aliasing` tells autograd that a subclass's results share memory, as torch's own subclasses do.

# ---- tensor subclasses

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""Passes a subclass's operations straight to `__torch_dispatch__`, as in torch's documentation."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""Creates a tensor of a shape, dtype and device without memory; the only way to make a wrapper subclass."""

forbid_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Makes torch's own code raise when it takes the address of a tensor without memory, where DLPack would return garbage and
others would crash. torch's fake tensors use it.
"""


FakeTensor = torch._subclasses.FakeTensor
"""A tensor of a `FakeTensorMode`, with a device but no memory; used to estimate memory."""


def decomposes(func: Any) -> bool:
    """Returns whether `func.decompose` splits an operation into others."""
    return func._can_decompose()


def is_mutable(func: Any) -> bool:
    """Returns whether an operation writes into its arguments; only its private schema tells."""
    return func._schema.is_mutable


def arguments_of(func: Any, *, out: bool = False) -> list[str]:
    """Returns the names of an operation's arguments, or of its `out` arguments alone; only its private schema tells."""
    return [argument.name for argument in func._schema.arguments if argument.is_out or not out]


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of active `TorchDispatchMode`s."""


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Returns autograd's count of in-place writes to a tensor."""

saved_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
"""Has the functions of the stack of default hooks for saved tensors (.._saved_tensors_default_hooks)."""

proxy_mode = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
"""Returns the mode by which a compiler traces operations into a graph, or None."""


def uncounted(state: Tensor) -> Tensor:
    """Returns a layer's state tensor for an in-place write that compiled code hides from autograd's version counter.

    A compiled graph takes the state as an input. With a checkpoint in the graph and backend "eager", autograd saves it with the
    checkpoint's input and would reject the changed version when it recomputes.
    """
    return state.data if torch.compiler.is_compiling() and not is_exporting() else state


def keeping_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """Hides a write from autograd's version counter, as FSDP2 does when it refills saved memory."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # pyright: ignore[reportPrivateImportUsage]


# ---- autograd

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether a torch.func transform is active, in which autograd functions need a different form."""

jit_traces: Callable[[], Any] = torch._C._get_tracing_state
"""Returns torch.jit.trace's tracing state, or None. `torch.jit.is_tracing` adds a Python call."""

unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue]
"""Returns the tensor inside one that outlived its torch.func transform."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns an autograd function's `apply` for use outside of torch.func transforms and compilers.

    `Function.apply` checks for both on every call and argument: a third of a small layer's host time.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


KEEPS_RESULT = {
    *(f"{name}Backward0" for name in ("Relu", "Sigmoid", "Tanh", "Softmax", "Exp")),
    *(f"ScaledDotProduct{kind}AttentionBackward0" for kind in ("Flash", "Efficient", "Cudnn")),
    "ScaledDotProductFlashAttentionForCpuBackward0",
}
"""Autograd nodes that save their first result for the backward; a node doesn't tell what it saves."""

VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "Unsqueeze", "Alias")}
"""Autograd nodes whose result shares its input's memory."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the running backward, the only way to tell two runs through one node apart."""

DelayedError: Any = torch._C._functions.DelayedError  # pyright: ignore[reportAttributeAccessIssue]
"""A node that raises when differentiated; `once_differentiable` uses it without a message of our own."""


unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default
"""Reshapes a new tensor without making a view, as torch's own `linear` does. FSDP2 warns about views."""

# ---- operations

foreach_add_: Callable[..., None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
"""Adds to many tensors in one launch, as torch's optimizers do."""

foreach_copy_: Callable[..., None] = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
"""Copies into many tensors in one launch."""

assert_on_device: Callable[[Tensor], None] = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]
"""Fails asynchronously on the device if a bool isn't true."""

functional_collectives: Any = torch.ops._c10d_functional
"""Asynchronous collectives by group name, also in compiled code. `torch.distributed._functional_collectives` is private too,
and wraps results in a subclass.
"""


def is_exporting() -> bool:
    """Returns whether torch.export traces; torch 2.11's compiler folds `torch.compiler.is_exporting()` to True anywhere."""
    return torch.compiler._is_exporting_flag


disable_compiler: Callable[[Any], Any] = torch._compile._disable_dynamo  # pyright: ignore[reportAttributeAccessIssue]
"""Does what `torch.compiler.disable` does, and imports the compiler when the function is called first."""


def assume_constant_result(function: Any) -> Any:
    """Does what torch.compiler's decorator of this name does, without importing the compiler."""
    function._dynamo_marked_constant = True
    return function


def mark_static_address(tensor: Tensor) -> None:
    """Tells torch.compile that a tensor's address is fixed; otherwise CUDA graphs write into a copy that is lost."""
    torch._dynamo.mark_static_address(tensor, guard=False)


StopsRecomputation: type[BaseException] = torch.utils.checkpoint._StopRecomputationError
"""Ends a checkpoint's recomputation early, once everything that the backward needs is there."""

# ---- callers

frame_above: Callable[[int], FrameType] = sys._getframe
"""Returns a calling function's frame, so many levels up.

FSDP2 passes only its mesh to the pre-gather hook, so its frames must tell which parameter it is and which are gathered with it.
The five-argument hook gets the module, but requires equal sizes on all ranks, which uneven shards don't have.
"""


def local_above(frame: FrameType | None, name: str, fits: Callable[[Any], bool], *, most: int = sys.maxsize) -> Any:
    """Returns the first variable of this name that fits, in the frame and those above, at most so many; None if none does."""
    while frame is not None and most:
        found = frame.f_locals
        if name in found and fits(found[name]):
            return found[name]
        frame, most = frame.f_back, most - 1
    return None


def checkpointed_region(frame: FrameType) -> torch.fx.GraphModule | None:
    """Returns the graph that a compiled checkpoint is about to trace, from the frames above its `context_fn`.

    Only that graph tells parameters from activations: compiled code passes everything that the region reads as inputs.
    """
    return local_above(frame, "gmod", lambda value: isinstance(value, torch.fx.GraphModule))

"""All that blockfp takes of PyTorch without PyTorch's promise: its private names stand here, and nowhere else in the backend.

Each says what it is for and why no public name does. All of them were run in torch 2.11 and in 2.13.
"""

from __future__ import annotations

import gc
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["TorchDispatchMode", "pytree", "return_and_correct_aliasing"]

# `pytree` finds tensors in nested arguments; torch has none without the underscore.
# `TorchDispatchMode` sees every operation; torch documents it, and has no public name for it.
# `return_and_correct_aliasing` tells autograd that what a subclass returns shares memory, as torch's own subclasses do.

# ---- tensor subclasses

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""A subclass's `__torch_function__` that leaves everything to `__torch_dispatch__`, as torch's documentation shows it."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor without memory, of a shape, dtype and device. Only this makes a subclass that wraps others."""

forbid_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Makes torch's own code raise where it takes the address of a tensor's memory: of one without any, DLPack gives what lies
anywhere, and others crash. torch's fake tensors use it."""


FakeTensor = torch._subclasses.FakeTensor
"""A tensor of a `FakeTensorMode`: of a device, and without memory there. Estimates of memory are made with it."""


def decomposes(func: Any) -> bool:
    """Says whether `func.decompose` takes an operation apart into others. There is no public question."""
    return func._can_decompose()


def is_mutable(func: Any) -> bool:
    """Says whether an operation writes into its arguments. Its schema knows, and has no public name."""
    return func._schema.is_mutable


def outputs_of(func: Any) -> list[str]:
    """The names of the arguments that an operation writes its results into. Its schema knows, and has no public name."""
    return [argument.name for argument in func._schema.arguments if argument.is_out]


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of `TorchDispatchMode`s that are on. There is no public question."""


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Counts a tensor's writes in place, as autograd does for tensors that it has saved. There is no public name."""


def uncounted(state: Tensor) -> Tensor:
    """A tensor of a layer's state, to be written in place; in compiled code past its version, which code outside doesn't see.

    Compiled code is given the state beside the input, and where a checkpoint is in it, and the graph is run as it is (backend
    "eager"), autograd keeps it with the checkpoint's input, and refuses what was written when it makes all of that again.
    """
    return state.data if torch.compiler.is_compiling() and not torch.compiler.is_exporting() else state


def keeping_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """Lets a tensor be written without autograd counting it, as FSDP2 refills what autograd has saved; it uses the same."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # pyright: ignore[reportPrivateImportUsage]


# ---- autograd

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Says whether a transform of torch.func is under way, where autograd functions need a form of their own. It can't be asked."""

jit_traces: Callable[[], Any] = torch._C._get_tracing_state
"""Returns what torch.jit.trace records into, or None. `torch.jit.is_tracing` asks it by a call of Python's own code."""

unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue]
"""The tensor behind one that outlived its transform of torch.func."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns an autograd function's `apply` for where no transform of torch.func is under way, and no compiler traces.

    `Function.apply` asks for both, each time and of every argument: a third of what a small layer costs the host.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


KEEPS_RESULT = {
    *(f"{name}Backward0" for name in ("Relu", "Sigmoid", "Tanh", "Softmax", "Exp")),
    *(f"ScaledDotProduct{kind}AttentionBackward0" for kind in ("Flash", "Efficient", "Cudnn")),
    "ScaledDotProductFlashAttentionForCpuBackward0",
}
"""Names of autograd nodes that save their first result for their backward. A node doesn't say what it saves."""

VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "Unsqueeze", "Alias")}
"""Names of autograd nodes whose result is their input's memory."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs; two runs through one node are told apart by nothing else."""

DelayedError: Any = torch._C._functions.DelayedError  # pyright: ignore[reportAttributeAccessIssue]
"""A node that raises when it is differentiated. `once_differentiable` makes the same one, without a reason of our own."""


unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default
"""Another shape of a new tensor, which is then no view; torch's own `linear` ends in it. FSDP2 warns of views."""

# ---- operations

foreach_add_: Callable[..., None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
"""Adds to many tensors in one launch. torch's optimizers use it; there is no public name."""

foreach_copy_: Callable[..., None] = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
"""Copies into many tensors in one launch."""

assert_on_device: Callable[[Tensor], None] = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]
"""Fails on the device where a bool isn't true, with nothing waiting for it. torch has no public name for it."""

functional_collectives: Any = torch.ops._c10d_functional
"""Collectives by group name that begin now and are waited for later, also in compiled code. The public
`torch.distributed._functional_collectives` is private too, and wraps results in a subclass."""


def is_exporting() -> bool:
    """Says whether torch.export traces. torch 2.11's compiler takes `torch.compiler.is_exporting()` for True in any program."""
    return torch.compiler._is_exporting_flag


def mark_static_address(tensor: Tensor) -> None:
    """Tells torch.compile that a tensor stays where it is: else CUDA graphs write into a copy of it, and that is lost."""
    torch._dynamo.mark_static_address(tensor, guard=False)


# ---- distributed


def local_tensor(tensor: DTensor) -> Tensor:
    """The very tensor that a DTensor holds on this rank: `to_local()` gives another one, which autograd follows."""
    return tensor._local_tensor


def dtensor_like(param: Tensor, local: Tensor, whole: Tensor) -> DTensor:
    """A DTensor that lies as a parameter does, with memory that is not on the mesh's device; `from_local` would copy it there.

    FSDP2 makes such DTensors of parameters that it keeps on the CPU in this way.
    """
    kind: Any = type(param)
    spec: Any = param._spec  # pyright: ignore[reportAttributeAccessIssue]
    meta = type(spec.tensor_meta)(whole.shape, whole.stride(), whole.dtype)
    return kind(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


ddp_model: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module
"""The DistributedDataParallel model whose forward runs now. A layer inside isn't told of it in any public way."""


frame_above: Callable[[int], FrameType] = sys._getframe
"""The frame of the function that called so many functions above.

FSDP2 tells the hook before a gather its mesh alone, so its own frames are asked for which parameter it is, and which others are
gathered with it. The hook of five arguments is told the module, but FSDP2 then asks for one size on every rank, which shards of
uneven weights don't have.
"""


def _instances(kind: Any) -> list[Any]:
    """Finds all instances of a class in this process, of which torch keeps no list.

    They refer to their class. (A list of all objects, `gc.get_objects`, would hold the tuples that other threads are still
    making, which Python doesn't survive.)
    """

    def with_subclasses(kind: type) -> list[type]:
        return [kind, *(each for below in kind.__subclasses__() for each in with_subclasses(below))]

    found = gc.get_referrers(*with_subclasses(kind))
    # The type itself: what stands in for another object may do anything where it is asked for its class.
    return [thing for thing in found if issubclass(type(thing), kind)]


_ddp_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""All that were made since blockfp was imported: torch keeps no list of them, and each registers the model that it wraps."""


def _note_ddp(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Takes note of a DistributedDataParallel that registers its model."""
    if isinstance(parent, DistributedDataParallel):
        _ddp_models.add(parent)


register_module_module_registration_hook(_note_ddp)


def ddp_models() -> list[DistributedDataParallel]:
    """Returns all DistributedDataParallel models that this process has made since blockfp was imported."""
    return list(_ddp_models)


def holder_of(param: Tensor) -> str | None:
    """Says what holds a parameter beside Python, so that it can't become another tensor; None where nothing does.

    `torch.utils.swap_tensors` asks torch's private count of references, too. Where a graph alone holds the node that
    accumulates the gradient it goes on, and has later backwards through that graph raise. Whoever waits for that node's hooks
    (Horovod, DeepSpeed, Megatron) would wait for ever: a handle knows the others.
    """
    if getattr(param, "_fsdp_flattened", False):
        return "a FullyShardedDataParallel"
    # Where nobody has imported it, nobody has made one.
    zero: Any = getattr(getattr(torch.distributed, "optim", None), "ZeroRedundancyOptimizer", None)
    viewed = zero is not None and param.untyped_storage().nbytes() > param.nbytes
    if viewed and any(one is param for held in _instances(zero) for group in held.param_groups for one in group["params"]):
        # It sends the memory of several parameters at once, which would no longer hold this one.
        return "a ZeroRedundancyOptimizer with parameters_as_bucket_view=True"
    if weakref.getweakrefs(param):
        return "a weak reference (torch.compile's, say)"
    use_count: Callable[[], int] = param._use_count  # pyright: ignore[reportAttributeAccessIssue]
    if use_count() == 1:
        return None
    node = torch.autograd.graph.get_gradient_edge(param).node if param.is_leaf and param.requires_grad else None
    if use_count() == 2 and node is not None:
        handle: Any = node.register_hook(lambda *_: None)
        hooks = len(handle.hooks_dict_ref())
        handle.remove()
        return "hooks on the accumulation of its gradient (Horovod's, DeepSpeed's, Megatron's)" if hooks > 1 else None
    replicated = torch.distributed.is_available() and torch.distributed.is_initialized()
    if replicated and any(one is param for model in ddp_models() for one in model.parameters()):
        return "a DistributedDataParallel"
    return "a result of the model that waits for its backward (`del loss`), or a view of it"


def renew_ddp_buffers() -> None:
    """Makes DDP models look again which buffers they have. They count them at their start, and fail where none is left."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for model in ddp_models():
            model._assign_modules_buffers()


def fsdp_param(frame: FrameType) -> Any:
    """FSDP2's record (`FSDPParam`) of the parameter whose hook a frame calls; None where FSDP2 doesn't call."""
    param = frame.f_locals.get("self")
    return param if hasattr(param, "_module_info") else None


def gathered_together(frame: FrameType, param: Any) -> Sequence[Any]:
    """The records of all parameters that are gathered with one, found in the frames above the call of its hook."""
    found: FrameType | None = frame
    for _ in range(4):
        if found is None:
            break
        params = found.f_locals.get("fsdp_params")
        if isinstance(params, list | tuple) and any(one is param for one in params):
            return params
        found = found.f_back
    return [param]


def fsdp_name(param: Any) -> str:
    """The name of the parameter of one of FSDP2's records: in the whole model where FSDP2 knows it, else in its module."""
    return getattr(param, "_param_fqn", None) or param._module_info.param_name


def fsdp_place(param: Any) -> tuple[nn.Module, str]:
    """The module of the parameter of one of FSDP2's records, and the parameter's name in it."""
    return param._module_info.module, param._module_info.param_name


def fsdp_params(module: Any) -> list[list[Any]]:
    """FSDP2's records of the parameters that it shards for a module, by group. There is no public list of them."""
    return [list(group.fsdp_params) for group in _fsdp_groups(module)]


def fsdp_reduce_scatters(module: Any) -> list[Any]:
    """The reduce-scatters of FSDP2's groups: its own, or those of `set_custom_reduce_scatter`, which can't be asked."""
    return [group._reduce_scatter_comm for group in _fsdp_groups(module)]


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters of a module, each reduced together; torch 2.11 has one."""
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def shard_dim(param: Any) -> int:
    """The axis along which FSDP2 cuts the parameter of one of its records."""
    return param.fsdp_placement.dim


class Reduced(NamedTuple):
    """The gradients that FSDP2 reduces together.

    Attributes:
        params: its records of the parameters that have a gradient, in the order of the buffer.
        shapes: of their unsharded gradients, axis 0 padded to a multiple of the ranks.
        replicas: the group of the all-reduce that follows, of HSDP.
        divisor: what `set_gradient_divide_factor` was told.
    """

    params: Sequence[Any]
    shapes: tuple[tuple[int, ...], ...]
    replicas: Any
    divisor: float | None


def reduced_together(frame: FrameType) -> Reduced | None:
    """Finds the gradients in the buffer of a reduce-scatter by the frame that calls it; None where that isn't FSDP2's.

    `set_custom_reduce_scatter` is public. What it sets is told of one flat buffer, where only parameters with a gradient lie.
    """
    found = frame.f_locals
    if "fsdp_params" not in found or "padded_unsharded_sizes" not in found:
        return None
    shapes = tuple(tuple(size) for size in found["padded_unsharded_sizes"])
    return Reduced(found["fsdp_params"], shapes, found.get("all_reduce_group"), found.get("gradient_divide_factor"))


def fsdp_params_of(model: nn.Module) -> list[Any]:
    """FSDP2's records of all parameters of a model and of the modules in it. There is no public list of them."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [param for module in modules for group in fsdp_params(module) for param in group]


def reshard(model: nn.Module) -> None:
    """Lets go of the weights that FSDP2 holds gathered anywhere in a model, after an evaluation say."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def renew_fsdp_param(param: Any) -> None:
    """Makes FSDP2's record of a sharded parameter anew, whose local tensor has changed in what its hooks send.

    The record keeps memory for what is gathered, as long as it was the first time, and the whole weight made of it.
    """
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
    vars(param).pop("_unsharded_param", None)
    param.reset_sharded_param()


def unregistered_gloo(name: str, rank: int, world: int) -> Any:
    """A gloo group of the ranks that call this with one name, over torch's store, which torch's own list doesn't have.

    `destroy_process_group` ends every group of that list, also what a thread saves through. `new_group` makes no others, and
    the store of the default group has no public name.
    """
    c10d: Any = torch.distributed.distributed_c10d
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, c10d._get_default_store()), rank, world, c10d.default_pg_timeout)


# ---- checkpoints


def stored_at(path: str, offset: int, length: int, transforms: list[str] | None) -> Any:
    """The entry of DCP's index that says where in its files a tensor lies. DCP's reader takes only its own class."""
    # DCP is a second's import.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length, transforms)


def mend_broadcast() -> None:
    """Lets torch broadcast a state dict of codes from rank 0 with `cpu_offload=True`, as accelerate resumes from a full one.

    It moves what it has broadcast to the CPU name by name, and looks each up among the parameters: a KeyError for codes and
    scales, which blockfp's own hook broadcasts. Here all that has arrived is moved at the end.
    """
    from torch.distributed.checkpoint import state_dict

    private: Any = state_dict
    original: Callable[..., None] = private._broadcast_state_dict
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def broadcast(full: dict[str, Any], local: dict[str, Any], *others: Any, cpu_offload: bool = False, **options: Any) -> None:
        original(full, local, *others, **options)
        if cpu_offload:
            local.update({name: value.cpu() for name, value in local.items() if isinstance(value, Tensor)})

    private._broadcast_state_dict = broadcast

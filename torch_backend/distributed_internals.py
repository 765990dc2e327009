"""PyTorch's private names of DTensor, DDP, FSDP2, process groups and checkpoints.

Each entry says what it is for, as in `torch_internals`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .torch_internals import local_above

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_tensor(tensor: DTensor) -> Tensor:
    """Returns a DTensor's own local tensor; `to_local()` returns another one that autograd tracks."""
    return tensor._local_tensor


def dtensor_like(param: Tensor, local: Tensor, whole: Tensor) -> DTensor:
    """Returns a DTensor, placed like a parameter, of memory off the mesh's device, as FSDP2's CPU offload builds them."""
    kind: Any = type(param)
    spec: Any = param._spec  # pyright: ignore[reportAttributeAccessIssue]
    meta = type(spec.tensor_meta)(whole.shape, whole.stride(), whole.dtype)
    return kind(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


ddp_model: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module
"""Returns the DistributedDataParallel model whose forward is running; a layer inside has no public way to know."""


def _instances(kind: Any) -> list[Any]:
    """Returns all instances of a class, found as its referrers; `gc.get_objects` holds tuples other threads still build."""

    def with_subclasses(kind: type) -> list[type]:
        return [kind, *(each for below in kind.__subclasses__() for each in with_subclasses(below))]

    found = gc.get_referrers(*with_subclasses(kind))
    # `type()`, since a proxy may run code when asked for its `__class__`.
    return [thing for thing in found if issubclass(type(thing), kind)]


_ddp_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""All DistributedDataParallel models made since blockfp was imported; torch keeps no list."""


def _note_ddp(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Records a DistributedDataParallel when it registers its model."""
    if isinstance(parent, DistributedDataParallel):
        _ddp_models.add(parent)


register_module_module_registration_hook(_note_ddp)


def ddp_models() -> list[DistributedDataParallel]:
    """Returns all DistributedDataParallel models made since blockfp was imported."""
    return list(_ddp_models)


def holder_of(param: Tensor) -> str | None:
    """Names what else holds a parameter, so that it can't be swapped for another tensor; None if nothing does.

    `torch.utils.swap_tensors` also checks torch's private reference count. If only a graph holds the gradient's accumulation
    node, it proceeds, and later backwards through that graph raise. Whoever hooked that node (Horovod, DeepSpeed, Megatron)
    would wait for ever; a temporary handle reveals such hooks.
    """
    if getattr(param, "_fsdp_flattened", False):
        return "a FullyShardedDataParallel"
    # None exists unless the module was imported.
    zero: Any = getattr(getattr(torch.distributed, "optim", None), "ZeroRedundancyOptimizer", None)
    viewed = zero is not None and param.untyped_storage().nbytes() > param.nbytes
    if viewed and any(one is param for held in _instances(zero) for group in held.param_groups for one in group["params"]):
        # It broadcasts one buffer of several parameters, which would no longer contain this one.
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
    """Updates DDP models' lists of buffers, which they build at construction; they fail if none is left."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for model in ddp_models():
            model._assign_modules_buffers()


def fsdp_param(frame: FrameType) -> Any:
    """Returns FSDP2's record (`FSDPParam`) of the parameter whose hook this frame calls; None for other callers."""
    param = frame.f_locals.get("self")
    return param if hasattr(param, "_module_info") else None


def gathered_together(frame: FrameType, param: Any) -> Sequence[Any]:
    """Returns the records of all parameters gathered with this one, from the frames above its hook's call."""
    holds = lambda params: isinstance(params, list | tuple) and any(one is param for one in params)  # noqa: E731
    return local_above(frame, "fsdp_params", holds, most=4) or [param]


def fsdp_name(param: Any) -> str:
    """Returns a record's parameter name, in the whole model if FSDP2 knows it, else in its module."""
    return getattr(param, "_param_fqn", None) or param._module_info.param_name


def fsdp_places(param: Any) -> list[tuple[nn.Module, str]]:
    """Returns a record's module and the parameter's name in it, and those of other modules that share the parameter."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def fsdp_params(module: Any) -> list[list[Any]]:
    """Returns FSDP2's records of a module's sharded parameters, by group."""
    return [list(group.fsdp_params) for group in _fsdp_groups(module)]


def fsdp_reduce_scatters(module: Any) -> list[Any]:
    """Returns the reduce-scatters of a module's FSDP2 groups, which `set_custom_reduce_scatter` may have replaced."""
    return [group._reduce_scatter_comm for group in _fsdp_groups(module)]


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """Returns a module's FSDP2 parameter groups, each reduced together; torch 2.11 has one."""
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def shard_dim(param: Any) -> int:
    """Returns the axis along which FSDP2 shards a record's parameter."""
    return param.fsdp_placement.dim


class Reduced(NamedTuple):
    """The gradients that FSDP2 reduces together.

    Attributes:
        params, shapes: records and padded unsharded gradient shapes of the parameters with a gradient, in buffer order.
        replicas: group of HSDP's following all-reduce, or None.
        divisor: value of `set_gradient_divide_factor`, or None.
    """

    params: Sequence[Any]
    shapes: tuple[tuple[int, ...], ...]
    replicas: Any
    divisor: float | None


def reduced_together(frame: FrameType) -> Reduced | None:
    """Finds the gradients in a reduce-scatter's flat buffer from FSDP2's calling frame; None for other callers."""
    found = frame.f_locals
    if "fsdp_params" not in found or "padded_unsharded_sizes" not in found:
        return None
    shapes = tuple(tuple(size) for size in found["padded_unsharded_sizes"])
    return Reduced(found["fsdp_params"], shapes, found.get("all_reduce_group"), found.get("gradient_divide_factor"))


def fsdp_params_of(model: nn.Module) -> list[Any]:
    """Returns FSDP2's records of all parameters in a model."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [param for module in modules for group in fsdp_params(module) for param in group]


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights of all FSDP2 modules in a model."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def renew_fsdp_param(param: Any) -> None:
    """Resets FSDP2's record of a sharded parameter whose hooks now send other tensors, with its cached gather buffers."""
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
    vars(param).pop("_unsharded_param", None)
    param.reset_sharded_param()


def unregistered_gloo(name: str, rank: int, world: int) -> Any:
    """Returns a gloo group of the ranks that pass the same name, over torch's store, without registering it.

    `destroy_process_group` ends every registered group, even one in use by a saving thread, and `new_group` always registers.
    """
    c10d: Any = torch.distributed.distributed_c10d
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, c10d._get_default_store()), rank, world, c10d.default_pg_timeout)


# ---- checkpoints


def stored_at(path: str, offset: int, length: int, transforms: list[str] | None) -> Any:
    """Returns a DCP index entry for a tensor's place in a file; DCP's reader accepts only its private class."""
    # Importing DCP takes a second.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length, transforms)


def mend_broadcast() -> None:
    """Patches torch's broadcast of a state dict from rank 0 with `cpu_offload=True`, as accelerate resumes from a full one.

    torch moves entries to the CPU by name and raises KeyError for codes and scales, which aren't parameters. The patch moves
    all received entries at the end.
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

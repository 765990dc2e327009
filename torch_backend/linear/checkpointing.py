"""Activation checkpointing: keeps codes of regions' inputs (`keep_codes`), or the results of products (`keep_products`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from blockfp.formats import WHOLE_ROW, Format
from blockfp.sharding.placement import Sharding
from blockfp.sharding.reducing import check_reduce_format

from ..ops import dequantize_plans
from ..ops.groups import grouped_ops
from ..ops.product.products import product, weight_product
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import DTYPES
from ..torch_internals import TorchDispatchMode, arguments_of, checkpointed_region, frame_above, proxy_mode, saved_hooks
from ..torch_internals import functional_collectives as collectives


def keep_codes(format: Format | str) -> Callable[[], tuple[Any, Any]]:
    """Returns a `context_fn` for `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=..)`.

    The forward is unchanged. Of each positional input that requires a gradient, codes and scales are kept, and the backward
    recomputes the block from their values: half of bfloat16's bytes with MXFP8. Other inputs (parameters, masks, rotary
    embeddings, keywords) are kept as they are. Blocks run along the last axis and are counted from the whole tensor, so no mesh
    changes a code. Hooks that were there before (`save_on_cpu`, an outer checkpoint) get codes and scales.

    Compiled code that contains the checkpoint keeps the same codes. It passes keywords and tensors of a closure as positional
    inputs. If the block writes an amax of a delayed scaling, the forward computes the block twice.

    Args:
        format: a `Format` or its name, with blocks in one row and no scale of the tensor, such as "mxfp8_e4m3" or
            "fp8_e4m3_1x128".

    Raises:
        TypeError, ValueError: the format is unknown, or has other blocks.
        ValueError: (in the forward) a DTensor's shards cut its blocks.
        NotImplementedError: (when the checkpoint is compiled) the block draws random numbers, as dropout does; compile the
            block inside instead.

    Example:
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=keep_codes("mxfp8_e4m3"))
    """
    format = check_reduce_format(format, "format")
    return partial(_contexts, format)


def _contexts(format: Format) -> tuple[Any, Any]:
    """torch.utils.checkpoint saves inputs between this call and the entry of the first context."""
    if proxy_mode() is not None:
        if torch.is_grad_enabled():
            _run_on_values(format)
        return _Traced(None), _Traced(None)
    if not torch.is_grad_enabled():
        return nullcontext(), nullcontext()
    hooks = _Hooks(partial(_pack, format), _unpack)
    hooks.push()
    return hooks, nullcontext()


class _Hooks:
    """Default hooks for saved tensors that stay from `push` until the entry of this context, also below one other pair.

    `pack(below, tensor)` gets the pair of hooks (or None) that were there before.
    """

    def __init__(self, pack: Callable[[Any, Tensor], Any], unpack: Callable[[Any], Tensor]):
        self._pack, self._unpack = pack, unpack

    def push(self) -> None:
        below = saved_hooks._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            try:
                return self._pack(below, tensor)
            except BaseException:
                # Nobody enters the context that would remove them.
                saved_hooks._pop_saved_tensors_default_hooks()
                raise

        self._own = pack
        saved_hooks._push_saved_tensors_default_hooks(pack, self._unpack)

    def __enter__(self) -> None:
        top = saved_hooks._top_saved_tensors_default_hooks(True)
        saved_hooks._pop_saved_tensors_default_hooks()
        if top[0] is self._own:
            return
        saved_hooks._pop_saved_tensors_default_hooks()
        saved_hooks._push_saved_tensors_default_hooks(*top)

    def __exit__(self, *error: Any) -> None:
        pass


def _pack(format: Format, below: Any, x: Tensor) -> Any:
    """Returns what is kept of x: itself, or its parts and how to put them together, through the hooks `below`."""
    pack = (lambda part: part) if below is None else below[0]
    coded = _quantize(format, x)
    if coded is None:
        return below, None, pack(x), None
    parts, how = coded
    return below, [pack(part) for part in parts], None, how


def _unpack(kept: Any) -> Tensor:
    below, parts, plain, how = kept
    unpack = (lambda part: part) if below is None else below[1]
    if parts is None:
        return unpack(plain)
    return _dequantize([unpack(part) for part in parts], how)


def _quantize(format: Format, x: Tensor) -> tuple[list[Tensor], Any] | None:
    """Returns codes and scales of this rank's part, and what `_dequantize` needs besides; None if x is kept as it is."""
    placements = getattr(x, "placements", ())
    # Parameters stay in memory anyway.
    if isinstance(x, nn.Parameter) or not x.requires_grad or x.ndim < 2 or x.dtype not in DTYPES:
        return None
    if any(each.is_partial() for each in placements):
        return None
    local, mesh = sharding.local_of(x), sharding.mesh_of(x)
    if mesh is not None:
        _check_cut(format, x)
    if not local.numel():
        return None
    parts = dequantize_plans.quantize(local.detach(), format.name, None)
    return parts, (format.name, x.dtype, local.shape[-1], mesh, placements, x.shape)


def _dequantize(parts: list[Tensor], how: Any) -> Tensor:
    name, dtype, columns, mesh, placements, shape = how
    local = dequantize_plans.dequantize(*parts, None, name, dtype, columns, [0, 0])
    return sharding.from_local(local, mesh, placements, shape)


def _check_cut(format: Format, x: Tensor) -> None:
    """Raises ValueError, on all ranks, if shards of a DTensor cut its blocks."""
    if _cuts(format, sharding.sharding_of(x)):
        raise ValueError(
            f"keep_codes({format}): x [.., {x.shape[-1]}] is sharded along its last axis inside of blocks: shard it along "
            "another one, or in multiples of a block"
        )


@lru_cache(maxsize=4096)
def _cuts(format: Format, lies: Sharding) -> bool:
    assert format.block is not None
    width = format.block[1]
    if not lies.order(len(lies.shape) - 1):
        return False
    return width == WHOLE_ROW or any(lies.region(rank).origin[1] % width for rank in range(lies.mesh.size))


# ---- compiled checkpoints
#
# Hooks for saved tensors do nothing while a compiler traces, and it ignores what a recomputation gives to autograd functions.
# So the graph gets the region twice: without gradients on its inputs, and with gradients on their codes' values. The
# partitioner is told to keep the codes, and to compute in the backward what comes from them.


def _run_on_values(format: Format) -> None:
    """Makes the region that a compiler's checkpoint is about to trace run twice."""
    module = checkpointed_region(frame_above(2))
    if module is None:
        raise NotImplementedError(
            f"keep_codes({format}) in a checkpoint that is traced by make_fx, of which only torch.compile has the graph: trace "
            "what is inside"
        )
    if "keep_codes" in module.meta:
        return
    module.meta["keep_codes"] = True
    region = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    inputs = module.graph.find_nodes(op="placeholder")
    parameters = [isinstance(node.meta["example_value"], nn.Parameter) for node in inputs]
    for node in reversed(module.graph.nodes):
        if node.op != "placeholder":
            module.graph.erase_node(node)
    twice = lambda *inputs: _twice(format, torch.fx.Interpreter(region).run, parameters, inputs)  # noqa: E731
    module.graph.output(module.graph.call_function(twice, tuple(inputs)))


def _twice(format: Format, run: Callable[..., Any], parameters: list[bool], inputs: tuple[Any, ...]) -> Any:
    """Returns the region's outputs, whose gradients are of the region at the values of its inputs' codes."""
    with torch.no_grad(), _Traced(None, format):
        outputs = run(*inputs)
    values = list(inputs)
    for index, (x, parameter) in enumerate(zip(inputs, parameters, strict=True)):
        if isinstance(x, Tensor) and not parameter:
            with _Traced(CheckpointPolicy.MUST_SAVE):
                coded = _quantize(format, x)
            if coded is not None:
                with _Traced(CheckpointPolicy.MUST_RECOMPUTE):
                    values[index] = _Instead.apply(x, _dequantize(*coded))
    with _Traced(CheckpointPolicy.MUST_RECOMPUTE):
        again = run(*values)
    return tuple(
        _Instead.apply(one, y) if isinstance(one, Tensor) and one.requires_grad else y
        for one, y in zip(again, outputs, strict=True)
    )


class _Instead(torch.autograd.Function):
    """Another value in place of a tensor's, with that tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Traced(TorchDispatchMode):
    """Tells the partitioner of a compiled graph what to do with the operations inside.

    If `drawn` is a format, operations that draw random numbers are refused: the second run would draw others.
    """

    def __init__(self, policy: CheckpointPolicy | None, drawn: Format | None = None):
        super().__init__()
        self._policy, self._drawn = policy, drawn

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, mode = kwargs or {}, proxy_mode()
        if self._drawn is not None and _draws(func, args, kwargs):
            raise NotImplementedError(
                f"keep_codes({self._drawn}) in a compiled checkpoint: {func} would draw other random numbers in the backward: "
                "compile what is inside, checkpoint(torch.compile(block), x, use_reentrant=False, context_fn=..)"
            )
        before = 0 if mode is None else len(mode.tracer.graph.nodes)
        result = func(*args, **kwargs)
        if mode is not None:
            nodes = mode.tracer.graph.nodes
            for node in islice(reversed(nodes), len(nodes) - before):
                node.meta["recompute"] = self._policy
        return result


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether an operation draws random numbers; attention has the tag of those that do, but may have no dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip(arguments_of(func), args, strict=False)) | kwargs
    return "query" not in given or bool(given.get("dropout_p"))


# ---- results of products

_KEPT = {
    grouped_ops.forward,
    product,
    weight_product,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    # Collectives that finish sums. Waiting for their results again is free.
    collectives.reduce_scatter_tensor.default,
    collectives.all_reduce.default,
    collectives.all_to_all_single.default,
}


def keep_products() -> tuple[Any, Any]:
    """Returns the contexts for `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_products)`.

    The block's input and the results of products, attention and sums over ranks are kept for the backward. Norms, activation
    functions and the codes of every layer's input are recomputed. This saves a byte per element of each layer's input, at the
    cost of repeating the casts. Sequence parallelism's gathers are repeated too, since their results hold all tokens. No bit
    changes.
    """
    forward, again = create_selective_checkpoint_contexts(_policy_of)
    return _Apart(forward), _Apart(again)


def _policy_of(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Apart(TorchDispatchMode):
    """Splits a grouped layer's forward op for the mode below, which keeps all or none of an op's results.

    The product is kept; the parts quantized for the backward are recomputed.
    """

    def __init__(self, below: Any):
        super().__init__()
        self.below = below

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @property
    def ac_graph_id(self) -> Any:
        """The id that torch.compile assigns to the mode below."""
        return self.below.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: Any) -> None:
        self.below.ac_graph_id = number

    def __enter__(self):
        self.below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any):
        super().__exit__(*error)
        self.below.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func is grouped_ops.forward:
            return grouped_ops.forward_apart(*args, again=args[0])
        return func(*args, **(kwargs or {}))

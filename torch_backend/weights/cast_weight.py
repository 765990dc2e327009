"""`CastWeight`: a high-precision weight that FSDP2 gathers quantized.

The parameter, its shard and the optimizer's view are ordinary float32 or bfloat16 values. FSDP2's hook reduces the amaxes that
ranks share and quantizes the shard before each gather, so the gathered weight equals the quantized whole. Without a gather, the
product quantizes it (`quantized`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import blockfp
from blockfp.definition.checks import check_input
from blockfp.formats import Format, FormatName
from blockfp.sharding.placement import Mesh, Shard, Sharding, StridedShard

from ..ops.kernels import kernels_for
from ..ops.library import name_of
from ..quantized_tensor import fsdp
from ..quantized_tensor.agreement import agree_before_gather
from ..quantized_tensor.dispatch import viewing
from ..quantized_tensor.geometry import Base, Geometry
from ..quantized_tensor.identity import Wrapper
from ..quantized_tensor.refusals import CALL_THE_LAYER, PRODUCTS, PRODUCTS_ADDED, READERS_OF_LAYERS, noted
from ..quantized_tensor.sharding import place_on
from ..quantized_tensor.tensor import QuantizedTensor
from ..sharded.quantize import WeightShard, quantize_weights
from ..sharded.rank_plan import AXIS, Quantization, TensorParallelShard, weight_quantization
from ..torch_internals import (
    NO_TORCH_FUNCTION,
    arguments_of,
    decomposes,
    forbid_pointer,
    is_mutable,
    make_wrapper_subclass,
    pytree,
    return_and_correct_aliasing,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten

_KEEP_CLASS = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.empty_like.default,
    aten.new_zeros.default,
}
"""Operations that return a `CastWeight`: those that `fully_shard` calls, copies, moves and casts. Others return plain tensors.
"""

_VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.select.int,
    aten.unbind.int,
    aten.split_with_sizes.default,
}
"""View operations before a product; their matrices are `CastWeight`s too, so that the product is detected."""

_SHARE_MEMORY = {aten.detach.default, aten.alias.default, aten.view.default, aten.slice.Tensor, aten.split.Tensor, *_VIEWS}


class CastWeight(Wrapper):
    """A weight's values and the format in which it is gathered and multiplied.

    Operations act on the values. Products with another tensor raise, since the layer must quantize first.

    Attributes:
        values: the weight, a plain tensor.
        format: the format it is quantized to.
        whole: shape of the tensor that FSDP2 divides: the unsharded weight, or its tensor-parallel shard.
        cut: this rank's tensor-parallel shard, if tensor parallelism cut the weight before FSDP2; else None.
    """

    values: Tensor
    format: Format
    whole: tuple[int, ...]
    cut: TensorParallelShard | None
    # Whether the values were written in place since the layer last looked; a list shared by all aliases. torch's version
    # counter misses writes through `.data`.
    _noted: list[bool]

    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, values, format, whole, cut=None):
        return make_wrapper_subclass(cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device)

    def __init__(self, values: Tensor, format: Format, whole: tuple[int, ...], cut: TensorParallelShard | None = None):
        # No checks, since tracing passes placeholders; `from_values` checks.
        self.values = values
        self.format = format
        self.whole = whole
        self.cut = cut
        self._noted = [False]
        forbid_pointer(self)

    @classmethod
    def from_values(cls, values: Tensor, format: Format | FormatName, cut: TensorParallelShard | None = None) -> CastWeight:
        """Creates a weight from values, whole or cut by tensor parallelism, sharing their memory.

        Args:
            values: float32, float16 or bfloat16, with two or more axes. Values with torch's negative bit, whose memory holds
                the negated values, are copied.
            format: a `Format` or its name.
            cut: this rank's tensor-parallel shard, or None.

        Raises:
            TypeError, ValueError: the values can't be quantized, or the format is unknown.
        """
        check_input(values)
        return cls(values.resolve_neg(), Format.parse(format), tuple(values.shape), cut)

    def quantized(self) -> QuantizedTensor:
        """Quantizes the current values of the whole weight, without a gradient."""
        with torch.no_grad():
            codes, scales, tensor_scale = kernels_for(self.values).quantize(self.values, self.format)
        return QuantizedTensor(codes, scales, tensor_scale, self.format, self.shape[-1], self.dtype)

    @fsdp.GatherHook
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], fsdp.GatherMetadata]:
        """Quantizes this rank's rows as part of the whole and returns codes and scales to send (`fsdp.send`)."""
        agree_before_gather()
        world, rank = place_on(mesh)
        base, step = _before_gather(self.format, self.whole, self.cut, world, rank)
        gather = fsdp.weight_gather(self.format, self.shape, Geometry(None, base), world, rank)
        groups: dict[str, str] = {}
        if step.reduces:
            groups[fsdp.AXIS] = mesh.get_group().group_name
            if self.cut is not None:
                groups[AXIS] = self.cut.group
        (parts,) = quantize_weights([WeightShard(self.values, step, groups, name_of(self.dtype))])
        return fsdp.send(gather, *parts)

    fsdp_post_all_gather = QuantizedTensor.fsdp_post_all_gather

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"CastWeight({self.format}, {self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (func in PRODUCTS or func in PRODUCTS_ADDED) and _is_multiplied(func, args, kwargs):
            what = f"{func} of a weight cast at use would multiply it in high precision: {CALL_THE_LAYER}"
            raise noted(NotImplementedError(what), ("its values: weight.values", *READERS_OF_LAYERS))
        if decomposes(func):
            # Inference mode dispatches composite operations; some of their components keep the class.
            return func.decompose(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(
                f"{func} is not defined for a CastWeight: it changes a tensor's shape in place, which the weight "
                "wouldn't notice; use the out-of-place operation"
            )
        if (
            kwargs
            and any(isinstance(each, CastWeight) for each in pytree.tree_leaves(kwargs))
            and (names := arguments_of(func, out=True))
        ):
            return _written(func, args, kwargs, names)
        plain_args, plain_kwargs = pytree.tree_map_only(CastWeight, lambda weight: weight.values, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if is_mutable(func):
            _note_written(args[0])
        if func not in _KEEP_CLASS and (func not in _VIEWS or pytree.tree_leaves(result)[0].ndim < 2):
            return result
        weight: CastWeight = args[0]
        whole = weight.whole
        # FSDP2 divides the tensor that is split; a buffer no longer than the weight will hold a part of it.
        if func is aten.split.Tensor or (func is aten.new_zeros.default and not result.numel() > weight.numel()):
            whole = tuple(weight.shape)

        def keep(values: Tensor) -> Tensor:
            if func in _VIEWS:
                return shared(CastWeight(values, weight.format, tuple(values.shape)))
            # A cast module keeps its weight's class; memory of another dtype serves another purpose.
            cast = func is aten._to_copy.default and values.is_floating_point()
            kept = cast or values.dtype == weight.dtype
            return shared(CastWeight(values, weight.format, whole, weight.cut)) if kept else values

        def shared(new: CastWeight) -> CastWeight:
            if func in _SHARE_MEMORY:
                new._noted = weight._noted
            return new

        with viewing(weight):
            return return_and_correct_aliasing(func, args, kwargs, pytree.tree_map_only(Tensor, keep, result))

    def memory(self) -> Tensor:
        return self.values

    def shift(self) -> int:
        return 0

    def adopt(self, other: CastWeight) -> None:
        self.values, self.format, self.whole, self.cut = other.values, other.format, other.whole, other.cut
        _note_written(self)

    def share_memory_(self) -> CastWeight:
        """Moves the values to memory that other processes can map, as `Tensor.share_memory_` does."""
        self.values.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.values.is_shared()

    def __tensor_flatten__(self):
        return ["values"], (self.format, self.whole, self.cut)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, outer_size, outer_stride):
        return CastWeight(inner["values"], *context)

    def _stable_hash_for_caching(self) -> str:
        identity = (blockfp.__version__, self.format, self.whole, self.cut, self.dtype, tuple(self.shape), self.device)
        return " ".join(map(str, (*identity, self.requires_grad)))

    def __reduce_ex__(self, protocol):
        is_parameter = isinstance(self, torch.nn.Parameter)
        cut = None if self.cut is None else tuple(self.cut)
        return _rebuild_cast_weight, (self.values, str(self.format), self.whole, cut, self.requires_grad, is_parameter)


def _is_multiplied(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether a product multiplies a `CastWeight` with another tensor; adding to one or writing into one is allowed."""
    read = args[1:] if func in PRODUCTS_ADDED else args, {name: each for name, each in kwargs.items() if name != "out"}
    tensors = [each for each in pytree.tree_leaves(read) if isinstance(each, Tensor)]
    weights = [isinstance(each, CastWeight) for each in tensors]
    return any(weights) and not all(weights)


def _note_written(into: Any) -> None:
    for each in into if isinstance(into, (list, tuple)) else (into,):
        if isinstance(each, CastWeight):
            each._noted[0] = True


def _written(func: Any, args: tuple, kwargs: dict[str, Any], names: list[str]) -> Any:
    """Runs an operation with `out=` tensors, a weight among them.

    Results go into copies first: torch resizes outputs, but a weight keeps its shape. Raises NotImplementedError if its
    result's shape differs.
    """
    values = lambda each: each.values if isinstance(each, CastWeight) else each  # noqa: E731
    outputs = {name: kwargs[name] for name in names}
    args, others = pytree.tree_map_only(CastWeight, values, (args, {**kwargs, **dict.fromkeys(names)}))
    made = pytree.tree_map_only(Tensor, lambda each: values(each).clone(), outputs)
    result = func(*args, **{**others, **made})
    pairs = list(zip(pytree.tree_leaves(outputs), pytree.tree_leaves(made), strict=True))
    for output, one in pairs:
        if isinstance(output, CastWeight) and one.shape != output.shape:
            raise NotImplementedError(
                f"{func} is not defined for a CastWeight: its result is {tuple(one.shape)}, which would change the shape of "
                f"the weight {tuple(output.shape)} in place; take the operation that gives another tensor"
            )
    for output, one in pairs:
        if not isinstance(output, CastWeight) and one.shape != output.shape:
            output.resize_(one.shape)
        values(output).copy_(one)
        _note_written(output)
    written = tuple(outputs.values())
    return result if result is None else written[0] if len(written) == 1 else written


@lru_cache(maxsize=4096)
def _before_gather(
    format: Format, whole: tuple[int, ...], cut: TensorParallelShard | None, shards: int, rank: int
) -> tuple[Base, Quantization]:
    """Returns the tensor that FSDP2 divides, and the quantization of this rank's shard."""
    sharding = Sharding(whole, Mesh((shards,), (fsdp.AXIS,)), (Shard(0),))
    origin = (0, 0)
    if cut is not None:
        assert cut.length is not None
        shape = (*whole[: cut.dim], cut.length, *whole[cut.dim + 1 :])
        rows = StridedShard(0, cut.ranks) if cut.dim == 0 else Shard(0)
        mesh = Mesh((shards, cut.ranks), (fsdp.AXIS, AXIS))
        sharding, rank = Sharding(shape, mesh, (rows, Shard(cut.dim))), rank * cut.ranks + cut.rank
        origin = Sharding(shape, Mesh((cut.ranks,), (AXIS,)), (Shard(cut.dim),)).region(cut.rank).origin
    return Base(whole, origin), weight_quantization(format, sharding, rank)


def _rebuild_cast_weight(values, format, whole, cut, requires_grad, is_parameter):
    weight = CastWeight(values, Format.parse(format), tuple(whole), None if cut is None else TensorParallelShard(*cut))
    return torch.nn.Parameter(weight, requires_grad) if is_parameter else weight.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild_cast_weight])

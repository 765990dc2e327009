"""Shards the weights of layers, and the parameters of norms, over a tensor-parallel group.

A layer's weight on a mesh (data-parallel axes .., tp), after parallelize and then after `fully_shard`. Each local tensor is a
QuantizedTensor that knows its (row, column) origin:

    column     DTensor[tp: Shard(0)]       DTensor[dp: _StridedShard(0), tp: Shard(0)]     tp shards rows, dp shards those
    row        DTensor[tp: Shard(1)]       DTensor[dp: Shard(0), tp: Shard(1)]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockfp.formats import Format, FormatName
from blockfp.sharding import parts
from blockfp.sharding.pieces import check_pieces, check_splits
from blockfp.sharding.placement import Mesh, Shard, Sharding
from blockfp.sharding.reducing import check_reduce_format

from ..experts.dispatch import check_recipe
from ..linear.tensor_parallel.parallel import Parallel, Style
from ..quantized_tensor.geometry import Geometry
from ..quantized_tensor.sharding import mesh_of
from ..quantized_tensor.tensor import QuantizedTensor
from ..sharded.rank_plan import TensorParallelShard
from ..weights import state_dict
from ..weights.cast_weight import CastWeight
from ..weights.module_state import become, check_free, retire
from .experts import Experts
from .quantized_layer import QuantizedLayer
from .shared_products import SHARED_NORMS, SharedNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cutter:
    """Shards modules over one mesh; takes `parallelize`'s arguments and raises TypeError or ValueError for invalid ones."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        sequence: bool = False,
        sequence_dim: int = -2,
        reduce_format: Format | FormatName | None = None,
        splits: int | None = None,
    ):
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"tp_mesh must be a DeviceMesh, got {type(mesh).__name__}: init_device_mesh makes one")
        if mesh.ndim != 1:
            raise ValueError(f"tp_mesh must have one axis, got {mesh}: take one by its name, such as mesh['tp']")
        if sequence_dim not in (-2, 0):
            raise ValueError(
                f"sequence_dim must be -2, of [batch, tokens, features], or 0, of [tokens, batch, features], got {sequence_dim}"
            )
        self.reduce_format = None if reduce_format is None else check_reduce_format(reduce_format)
        if self.reduce_format is not None and not sequence:
            raise ValueError("reduce_format is for reduce-scatters: use it with sequence_parallel=True")
        self.mesh, self.sequence, self.sequence_dim = mesh, sequence, sequence_dim
        self.group, self.ranks, self.rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
        check_splits(splits, self.ranks, "tp_mesh")
        if splits is not None and sequence:
            raise ValueError(
                f"splits={splits} is not for sequence_parallel=True: gradients of norms would be sums over each rank's tokens"
            )
        self.splits = splits

    def cut(self, styles: Mapping[nn.Module, Style | None]) -> None:
        """Shards layers by their styles, and norms, whose style is None, after checking all of them.

        Raises ValueError for a missing or unsuitable style, and for a parameter that is already sharded or would be sharded in
        two ways.
        """
        # A shared parameter is sharded once.
        dims: dict[nn.Parameter, int | None] = {}
        for module, style in styles.items():
            _check(module, style)
            self._check_splits(module, style)
            for name, dim in _dims(module, style).items():
                parameter = getattr(module, name)
                self._check_parameter(parameter, dim)
                if dims.setdefault(parameter, dim) != dim:
                    raise ValueError(
                        f"style: the {name} {tuple(parameter.shape)} of a {type(module).__name__}, {style!r}, also "
                        f"belongs to a layer of another style, which would shard it along axis {dims[parameter]}: give "
                        "both the same style"
                    )
        shared = {parameter: self._shared(parameter, dim) for parameter, dim in dims.items()}
        for module, style in styles.items():
            if style is None:
                self._share(module)
            elif isinstance(module, Experts):
                self._share_experts(module)
            elif isinstance(module, QuantizedLayer):
                # torch shards such a parameter on this mesh's axis, which doesn't divide the batch.
                module.parallel, module.data_rank = self._parallel(module, style), 0
                # Ranks must reduce amaxes together, whether or not one of them has loaded scales from a checkpoint.
                module.note_scales(False)
            for name in _dims(module, style):
                setattr(module, name, shared[getattr(module, name)])
        for parameter, taken in shared.items():
            if taken is not parameter:
                retire(parameter)

    def _check_splits(self, module: nn.Module, style: Style | None) -> None:
        if self.splits is None or style is None:
            return
        weight: Any = None if isinstance(module, Experts) else module.weight
        if weight is None or weight.ndim > 2:
            raise ValueError(f"splits={self.splits} is for layers of one weight [out, in], got a {type(module).__name__}")
        assert isinstance(module, QuantizedLayer)
        check_pieces(weight.shape[_cut_dim(weight, style)], self.splits, module.linear_recipe)

    def _share_experts(self, experts: Experts) -> None:
        first, *_ = experts.biases
        features = experts.get_parameter(first).shape[0]
        experts.parallel = Parallel(self.group, self.ranks, self.rank, "experts", features)
        for name in experts.biases:
            product = experts.product_of(name)
            product.parallel, product.data_rank = experts.parallel, 0
            product.note_scales(False)

    def _share(self, norm: nn.Module) -> None:
        # Its parameters are DTensors now, which need another forward.
        become(norm, SHARED_NORMS[type(norm)])
        assert isinstance(norm, SharedNorm)
        norm.group, norm.sequence = self.group, self.sequence

    def _parallel(self, layer: QuantizedLayer, style: Style) -> Parallel:
        weight = layer.weight
        # Experts receive their tokens through dispatch instead.
        sequence = self.sequence and weight.ndim == 2
        features = weight.shape[_cut_dim(weight, style)]
        reduce_format = self.reduce_format if sequence else None
        return Parallel(
            self.group,
            self.ranks,
            self.rank,
            style,
            features,
            sequence,
            self.sequence_dim,
            reduce_format=reduce_format,
            splits=self.splits,
        )

    def _check_parameter(self, parameter: nn.Parameter, dim: int | None) -> None:
        mesh, placements = mesh_of(parameter), getattr(parameter, "placements", None)
        if mesh is not None and not (mesh == self.mesh and placements == (_placement(dim),)):
            raise ValueError(
                f"a weight is already sharded as {placements} on {mesh}, but should be ({_placement(dim)},) on "
                f"{self.mesh}: call parallelize once, and before fully_shard"
            )
        if mesh is None:
            remedy = "call parallelize first, or have it let go of the parameter"
            check_free(parameter, f"a parameter of shape {tuple(parameter.shape)}", remedy)

    def _shared(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """Makes a whole parameter a DTensor, sharded along an axis or replicated."""
        if mesh_of(parameter) is not None:
            # For example an embedding that torch has sharded and a layer shares.
            return parameter
        from torch.distributed.tensor import DTensor

        whole = parameter.detach()
        local = whole if dim is None else self._part(whole, dim)
        shared = DTensor.from_local(
            local, self.mesh, [_placement(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return nn.Parameter(shared, parameter.requires_grad)

    def _part(self, whole: Tensor, dim: int) -> Tensor:
        lies = Sharding(tuple(whole.shape), Mesh((self.ranks,), ("tp",)), (Shard(dim),)) if whole.ndim > 1 else None
        if isinstance(whole, QuantizedTensor):
            assert lies is not None
            return part_of(whole, lies, self.rank)
        if isinstance(whole, CastWeight):
            cut = TensorParallelShard(self.group, self.ranks, self.rank, dim, whole.shape[dim])
            return CastWeight.from_values(self._part(whole.values, dim), whole.format, cut)
        chunk = -(-whole.shape[dim] // self.ranks)
        first = min(self.rank * chunk, whole.shape[dim])
        return whole.narrow(dim, first, min(chunk, whole.shape[dim] - first)).clone(memory_format=torch.contiguous_format)


def _check(module: nn.Module, style: Style | None) -> None:
    """Raises ValueError unless a module can be sharded in this style and isn't sharded yet."""
    kind = type(module).__name__
    if isinstance(module, Experts):
        if style != "experts":
            raise ValueError(f"style of a {kind} must be 'experts', got {style!r}")
        if module.parallel is not None:
            raise ValueError(f"a {kind} is already sharded: call parallelize once")
        check_recipe(module.linear_recipe)
        return
    if not isinstance(module, QuantizedLayer):
        if isinstance(module, tuple(SHARED_NORMS.values())):
            raise ValueError(f"a {kind} is already sharded: call parallelize once")
        if type(module) not in SHARED_NORMS:
            raise ValueError(f"a norm must be one of {[norm.__name__ for norm in SHARED_NORMS]} to be shared, got a {kind}")
        return
    if module.transposed:
        raise ValueError(
            f"a {kind}, whose weight is [in, out], can't be sharded: use torch.nn.Linear instead, and convert that"
        )
    styles = ("column", "row", "experts") if module.weight.ndim > 2 else ("column", "row")
    if style not in styles:
        raise ValueError(f"style of a {kind} must be one of {styles}, got {style!r}")
    if module.parallel is not None:
        raise ValueError(f"a {kind} is already sharded: call parallelize once")


def _dims(module: nn.Module, style: Style | None) -> dict[str, int | None]:
    """Returns the sharded axis of each parameter of a layer or norm; None if replicated."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if style is None:
        return dict.fromkeys(names)
    if isinstance(module, Experts):
        return {name: 0 for pair in module.biases.items() for name in pair if name is not None}
    weight: Any = module.weight
    dim = _cut_dim(weight, style)
    return {name: None if name == "bias" and style == "row" else dim for name in names}


def _cut_dim(weight: Tensor, style: Style) -> int:
    return {"column": weight.ndim - 2, "row": weight.ndim - 1, "experts": 0}[style]


def _placement(dim: int | None) -> Any:
    from torch.distributed import tensor as dtensor

    return dtensor.Replicate() if dim is None else dtensor.Shard(dim)


def part_of(q: QuantizedTensor, lies: Sharding, rank: int) -> QuantizedTensor:
    """Copies one rank's shard out of a whole quantized tensor; the cut may fall inside blocks and bytes."""
    region = lies.region(rank)
    own = {
        part.name: state_dict.cut(q.format, part, getattr(q, part.name), region).clone() for part in parts.parts(q.format, lies)
    }
    initial = None if q.initial is None else q.initial[region.slices].clone()
    geometry = Geometry(region.origin, initial=initial, cut=True)
    return q.with_parts(own["codes"], own["scales"], own.get("tensor_scale"), columns=region.shape[-1], geometry=geometry)

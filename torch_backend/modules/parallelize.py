"""`parallelize`: cuts a module's weights over a tensor-parallel group.

weight of a layer on a mesh (data-parallel axes .., tp), after `parallelize` and then `fully_shard`:

column     DTensor[tp: Shard(0)]       DTensor[dp: _StridedShard(0), tp: Shard(0)]     tp cuts rows, dp cuts those again
row        DTensor[tp: Shard(1)]       DTensor[dp: Shard(0), tp: Shard(1)]
  each around a QuantizedTensor that knows the (row, column) where it begins
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from blockfp import parts
from blockfp.formats import Format
from blockfp.placement import Mesh, Shard, Sharding

from ..linear import outputs
from ..linear.parallel import Parallel
from ..quantized_tensor.geometry import Geometry
from ..quantized_tensor.sharding import mesh_of
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights import state_dict
from ..weights.cast_weight import CastWeight, Cut
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention
from .quantized_layer import QuantizedLayer
from .shared_layers import SHARED_NORMS
from .transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Style = Literal["column", "row", "experts"]
Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module,
    tp_mesh: DeviceMesh,
    style: Style | Mapping[str, Style] | None = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    reduce_format: Format | str | None = None,
) -> Module:
    """Cuts the weights of a module over a tensor-parallel mesh, in place, and makes its layers work together on it.

    Every rank must hold the same whole weights, or be on the meta device. Then `fully_shard` it on the other axes of the mesh,
    and build the optimizer.

    | module | weights | styles |
    |---|---|---|
    | `Linear` | column: rows cut; row: columns cut | "column", "row" |
    | `GroupedLinear` | the same of every expert; experts: each rank has some | "column", "row", "experts" |
    | `LayerNormLinear` | column; norm replicated | |
    | `LayerNormMLP` | up column, down row | |
    | `MultiheadAttention` | heads cut: qkv column, out row | |
    | `TransformerLayer` | those of its attention and of its MLP; norm replicated | |
    | `torch.nn.LayerNorm`, `torch.nn.RMSNorm` | replicated | |
    | any other | these inside it, and the layers that `style` names | {"*.attention.qkv": "column", ..} |

    A column's output and a row's input are cut along the last axis. With sequence parallelism a column's input and a row's
    output, and what norms act on, are cut along the tokens: codes and scales are gathered, and terms reduce-scattered.

    Args:
        module: what to cut.
        tp_mesh: a mesh of one axis, of any name; an axis of a larger mesh for `fully_shard` on the others.
        style: of a layer, or for a model a mapping from patterns of layers' paths to styles.
        sequence_parallel: whether tokens are cut outside of the pairs of column and row.
        sequence_dim: their axis, -2 of [batch, tokens, features] or 0 of [tokens, batch, features].
        reduce_format: a format in which the terms of reduce-scatters travel, see `outputs.check_reduce_format`; None sends them
            in their own dtype.

    Returns:
        The module.

    Raises:
        ValueError: a mesh of more axes, a missing or unfit style, a pattern that fits nothing, heads that the ranks don't
            divide, attention with its tokens on axis 0, or a weight that is cut already.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> parallelize(layer, mesh["tp"], sequence_parallel=True)
        >>> fully_shard(layer, mesh=mesh["dp"])
    """
    if tp_mesh.ndim != 1:
        raise ValueError(f"tp_mesh must have one axis, got {tp_mesh}: take one by its name, such as mesh['tp']")
    reduce = outputs.check_reduce_format(reduce_format)
    if reduce is not None and not sequence_parallel:
        raise ValueError("reduce_format is for reduce-scatters: use it with sequence_parallel=True")
    _Cutter(tp_mesh, sequence_parallel, sequence_dim, reduce).cut(module, style)
    return module


class _Cutter:
    """One call of `parallelize`."""

    def __init__(self, mesh: DeviceMesh, sequence: bool, sequence_dim: int, reduce_format: Format | None):
        self.mesh, self.sequence, self.sequence_dim, self.reduce_format = mesh, sequence, sequence_dim, reduce_format
        self.group, self.ranks, self.rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
        # A weight that layers share is cut once.
        self.done: dict[nn.Parameter, nn.Parameter] = {}

    def cut(self, module: nn.Module, style: Style | Mapping[str, Style] | None) -> None:
        if isinstance(module, QuantizedLayer):
            if not isinstance(style, str):
                raise ValueError(f"style must be given for a {type(module).__name__}, such as 'column' or 'row'")
            self.layer(module, style)
            return
        if isinstance(style, str):
            raise ValueError(f"style {style!r} is for a Linear or GroupedLinear, got a {type(module).__name__}")
        if not self.known(module):
            self.model(module, style or {})
        elif style:
            raise ValueError(f"a {type(module).__name__} has styles of its own, got {style}")

    def known(self, module: nn.Module) -> bool:
        """Cuts a module whose styles are its own; False for any other."""
        if isinstance(module, TransformerLayer):
            self.known(module.attention)
            self.norm(module.norm)
            self.known(module.mlp)
        elif isinstance(module, MultiheadAttention):
            heads = module.key_value_heads
            if heads % self.ranks:
                raise ValueError(f"tp_mesh: {self.ranks} ranks can't share {heads} heads of keys and values evenly")
            if self.sequence and self.sequence_dim == 0:
                raise ValueError("sequence_dim=0: attention takes [batch, tokens, features], so it must be -2")
            self.layer(module.qkv, "column")
            self.layer(module.out, "row")
        elif isinstance(module, LayerNormMLP):
            features = module.down.in_features
            if module.activation == "swiglu" and 2 * -(-features // self.ranks) != -(-2 * features // self.ranks):
                raise ValueError(f"tp_mesh: {self.ranks} ranks can't share {features} pairs of gate and value evenly")
            self.known(module.up)
            self.layer(module.down, "row")
        elif isinstance(module, LayerNormLinear):
            self.norm(module.norm)
            self.layer(module.linear, "column")
        elif type(module) in SHARED_NORMS:
            self.norm(module)
        else:
            return False
        return True

    def model(self, module: nn.Module, styles: Mapping[str, Style]) -> None:
        """The modules inside another: those that are known, and the layers that the patterns name."""
        patterns = {pattern: re.compile(translate(pattern)) for pattern in styles}
        unused, taken = set(patterns), []
        for path, inner in module.named_modules():
            if any(path.startswith(f"{outer}.") for outer in taken):
                continue
            fitting = [pattern for pattern, expression in patterns.items() if expression.match(path)]
            unused -= set(fitting)
            if isinstance(inner, QuantizedLayer):
                if fitting:
                    self.layer(inner, styles[fitting[0]])
            elif fitting:
                raise ValueError(f"style[{fitting[0]!r}] names {path!r}, a {type(inner).__name__}, which is no Linear")
            elif inner is not module and self.known(inner):
                taken.append(path)
        if unused:
            raise ValueError(f"style: no layer is named {' or '.join(sorted(map(repr, unused)))}")

    def layer(self, layer: QuantizedLayer, style: Style) -> None:
        weight = layer.weight
        grouped = isinstance(layer, GroupedLinear)
        if layer.parallel is not None:
            raise ValueError(f"a {type(layer).__name__} is cut already: call parallelize once")
        if style not in (("column", "row", "experts") if grouped else ("column", "row")):
            raise ValueError(f"style must be 'column' or 'row'{', or experts' if grouped else ''}, got {style!r}")
        dim = {"column": weight.ndim - 2, "row": weight.ndim - 1, "experts": 0}[style]
        features = weight.shape[dim]
        sequence = self.sequence and not grouped
        layer.weight = self.parameter(weight, dim)
        if layer.bias is not None:
            layer.bias = self.parameter(layer.bias, None if style == "row" else dim)
        reduce_format = self.reduce_format if sequence else None
        layer.parallel = Parallel(
            self.group, self.ranks, self.rank, style, features, sequence, self.sequence_dim, reduce_format=reduce_format
        )

    def norm(self, norm: nn.Module) -> None:
        for name, parameter in list(norm.named_parameters(recurse=False)):
            setattr(norm, name, self.parameter(parameter, None))
        # The parameters are DTensors now, and so its forward is another.
        shared: Any = norm
        shared.__class__ = SHARED_NORMS[type(norm)]
        shared.summed_over = self.group if self.sequence else None

    def parameter(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """A whole parameter as a DTensor, cut along an axis or replicated."""
        if parameter in self.done:
            return self.done[parameter]
        from torch.distributed import tensor as dtensor

        placement = dtensor.Replicate() if dim is None else dtensor.Shard(dim)
        mesh, placements = mesh_of(parameter), getattr(parameter, "placements", None)
        if mesh is not None:
            if mesh == self.mesh and placements == (placement,):
                # An embedding, say, that torch has cut, and that a layer shares.
                return parameter
            raise ValueError(
                f"a weight is cut or sharded already, as {placements} on {mesh}, and should be ({placement},) on {self.mesh}: "
                "call parallelize once, and before fully_shard"
            )
        whole = parameter.detach()
        local = whole if dim is None else self.part(whole, dim)
        shared = dtensor.DTensor.from_local(
            local, self.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        new = self.done[parameter] = nn.Parameter(shared, parameter.requires_grad)
        return new

    def part(self, whole: Tensor, dim: int) -> Tensor:
        lies = Sharding(tuple(whole.shape), Mesh((self.ranks,), ("tp",)), (Shard(dim),)) if whole.ndim > 1 else None
        if isinstance(whole, QuantizedTensor):
            assert lies is not None
            return part_of(whole, lies, self.rank)
        if isinstance(whole, CastWeight):
            cut = Cut(self.group, self.ranks, self.rank, dim, whole.shape[dim])
            return CastWeight.from_values(self.part(whole.values, dim), whole.format, cut)
        chunk = -(-whole.shape[dim] // self.ranks)
        first = min(self.rank * chunk, whole.shape[dim])
        return whole.narrow(dim, first, min(chunk, whole.shape[dim] - first)).clone(memory_format=torch.contiguous_format)


def part_of(q: QuantizedTensor, lies: Sharding, rank: int) -> QuantizedTensor:
    """What one rank holds of a whole quantized tensor, in memory of its own; rows and columns inside blocks and bytes too."""
    region = lies.region(rank)
    own = {
        part.name: state_dict.cut(q.format, part, getattr(q, part.name), region).clone() for part in parts.parts(q.format, lies)
    }
    initial = None if q.initial is None else q.initial[region.slices].clone()
    geometry = Geometry(region.origin, initial=initial)
    return q.with_parts(own["codes"], own["scales"], own.get("tensor_scale"), columns=region.shape[-1], geometry=geometry)

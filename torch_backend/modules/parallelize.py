"""`parallelize`: shards a module over a tensor-parallel group, each layer as its parent requires."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import translate
from types import NoneType
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from blockfp.formats import Format, FormatName

from ..linear.tensor_parallel.parallel import Style
from ..quantized_tensor.sharding import mesh_of
from .blocks import LayerNormLinear, LayerNormMLP, MultiheadAttention, TransformerLayer
from .cutting import Cutter
from .experts import Experts
from .quantized_layer import QuantizedLayer
from .shared_products import SHARED_NORMS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)
Styles = dict[nn.Module, Style | None]
"""Each layer's style; None for norms."""


def parallelize(
    module: Module,
    tp_mesh: DeviceMesh,
    style: Style | Mapping[str, Style] | None = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    reduce_format: Format | FormatName | None = None,
    splits: int | None = None,
) -> Module:
    """Shards a module's weights over a tensor-parallel mesh, in place, so that its layers compute together.

    Every rank must hold the same whole weights, or be on the meta device. Afterwards call `fully_shard` on the other axes of
    the mesh, and build the optimizer.

    | module | weights | styles |
    |---|---|---|
    | `Linear` | column: rows sharded; row: columns sharded | "column", "row" |
    | `GroupedLinear` | the same for every expert; experts: each rank has some | "column", "row", "experts" |
    | experts made by `convert` | each rank has some; transformers' send their tokens, as `dispatch` does | "experts" |
    | `LayerNormLinear` | column; norm replicated | |
    | `LayerNormMLP` | up column, down row | |
    | `MultiheadAttention` | heads sharded: qkv column, out row | |
    | `TransformerLayer` | its attention and MLP as above; norm replicated | |
    | `torch.nn.LayerNorm`, `torch.nn.RMSNorm` | replicated | |
    | any other | modules above inside it, and layers named by `style` | {"*.attention.qkv": "column", ..} |

    A column layer's output and a row layer's input are sharded along the last axis. With sequence parallelism, a column layer's
    input, a row layer's output and norms' inputs are sharded along the tokens: codes and scales are gathered, and terms
    reduce-scattered.

    Args:
        module: the module to shard.
        tp_mesh: a mesh of one axis with any name; an axis of a larger mesh if `fully_shard` uses the others.
        style: a layer's style, or for a model a mapping from patterns of layers' paths to styles.
        sequence_parallel: shard tokens outside of column and row pairs.
        sequence_dim: the token axis, -2 for [batch, tokens, features] or 0 for [tokens, batch, features].
        reduce_format: format in which terms of reduce-scatters are sent, see `blockfp.sharding.reducing`; None for their own
            dtype.
        splits: number of pieces, over all ranks, in which the sharded axes are computed separately: a power of two divisible by
            the number of ranks. Every such number of ranks then gives the same bits (`Reproducible`). None computes a rank's
            share at once, which is fastest.

    Returns:
        The module.

    Raises:
        TypeError: module is not a module, tp_mesh not a mesh, or style not a style or mapping.
        ValueError: the mesh has more axes; a style is missing or unsuitable; a pattern matches nothing; there is nothing to
            shard; ranks don't divide the heads; sequence_dim is invalid, or 0 with attention; a weight is sharded already,
            shared by layers of two styles, or shared with an unsharded module; sequence parallelism is used with a class
            derived from torch's norms, or on experts alone, which receive dispatched tokens; or splits don't fit the ranks,
            heads or a layer's blocks, or are used with experts, a mapping of styles or sequence parallelism. The module is
            unchanged.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> parallelize(layer, mesh["tp"], sequence_parallel=True)
        >>> fully_shard(layer, mesh=mesh["dp"])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(style, (str, Mapping, NoneType)):
        raise TypeError(f"style must be one, such as 'column', or a mapping from paths to styles, got {type(style).__name__}")
    cutter = Cutter(tp_mesh, sequence=sequence_parallel, sequence_dim=sequence_dim, reduce_format=reduce_format, splits=splits)
    if splits is not None and isinstance(style, Mapping):
        raise ValueError(
            f"splits={splits} is for a TransformerLayer, MultiheadAttention, LayerNormMLP, LayerNormLinear, for models "
            "of these and for one Linear: operations between the layers named in style may not compute in pieces"
        )
    if isinstance(module, QuantizedLayer | Experts):
        if isinstance(style, Mapping):
            raise ValueError(f"style of a {type(module).__name__} must be one, such as 'column' or 'row', got {style}")
        if sequence_parallel and (isinstance(module, Experts) or module.weight.ndim > 2):
            raise ValueError(f"sequence_parallel=True: the tokens of a {type(module).__name__} are sent to it; leave it out")
        cutter.cut({module: style})
        return module
    if isinstance(style, str):
        raise ValueError(f"style {style!r} is for a Linear or GroupedLinear, got a {type(module).__name__}")
    styles = _own_styles_and_norms(module, cutter)
    if styles is None:
        styles = _styles_inside(module, style or {}, cutter)
    elif style:
        raise ValueError(f"a {type(module).__name__} has its own styles, got {style}")
    _check_what_stays(module, styles, cutter)
    cutter.cut(styles)
    return module


def _own_styles_and_norms(module: nn.Module, cutter: Cutter) -> Styles | None:
    """Returns `_own_styles` plus None for any further norms, which a derived class may add.

    This searches the whole module, so `_own_styles` recurses only into itself.
    """
    own = _own_styles(module, cutter)
    return None if own is None else {norm: None for norm in module.modules() if type(norm) in SHARED_NORMS} | own


def _own_styles(module: nn.Module, cutter: Cutter) -> Styles | None:
    """Returns the styles of a module that defines its own; None for any other."""
    if isinstance(module, TransformerLayer):
        attention, mlp = (_own_styles(part, cutter) for part in (module.attention, module.mlp))
        if attention is None or mlp is None:
            raise ValueError(
                f"a TransformerLayer's parts must be a MultiheadAttention and a LayerNormMLP, got a "
                f"{type(module.attention).__name__} and a {type(module.mlp).__name__}: parallelize its parts one by one"
            )
        return {**attention, module.norm: None, **mlp}
    if isinstance(module, MultiheadAttention):
        heads = module.key_value_heads
        if heads % cutter.ranks:
            raise ValueError(f"tp_mesh: {cutter.ranks} ranks can't share {heads} heads of keys and values evenly")
        if heads % (cutter.splits or 1):
            raise ValueError(f"splits={cutter.splits}: {heads} heads of keys and values are not so many equal pieces")
        if cutter.sequence and cutter.sequence_dim == 0:
            raise ValueError("sequence_dim=0: attention takes [batch, tokens, features], so it must be -2")
        return {module.qkv: "column", module.out: "row"}
    if isinstance(module, LayerNormMLP):
        features, ranks = module.down.in_features, cutter.ranks
        if module.activation == "swiglu" and 2 * -(-features // ranks) != -(-2 * features // ranks):
            raise ValueError(f"tp_mesh: {ranks} ranks can't share {features} pairs of gate and value evenly")
        return {module.up.norm: None, module.up.linear: "column", module.down: "row"}
    if isinstance(module, LayerNormLinear):
        return {module.norm: None, module.linear: "column"}
    return {module: None} if type(module) in SHARED_NORMS else None


def _styles_inside(module: nn.Module, styles: Mapping[str, Style], cutter: Cutter) -> Styles:
    """Returns the styles of modules inside another: those that define their own, and layers named by patterns."""
    patterns = {pattern: re.compile(translate(pattern)) for pattern in styles}
    unused, taken = set(patterns), []
    found: Styles = {}
    for path, inner in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in taken):
            continue
        fitting = [pattern for pattern, expression in patterns.items() if expression.match(path)]
        unused -= set(fitting)
        if isinstance(inner, QuantizedLayer | Experts):
            if fitting:
                found[inner] = styles[fitting[0]]
        elif fitting:
            raise ValueError(f"style[{fitting[0]!r}] names {path!r}, a {type(inner).__name__}, which is not a Linear")
        elif inner is not module and (own := _own_styles_and_norms(inner, cutter)) is not None:
            found |= own
            taken.append(path)
    if unused:
        raise ValueError(f"style: no layer is named {' or '.join(sorted(map(repr, unused)))}")
    if not found:
        raise ValueError(
            f"module: a {type(module).__name__} has nothing to shard; name its layers in style, such as {{'*.up': 'column'}}"
        )
    return found


def _check_what_stays(model: nn.Module, styles: Styles, cutter: Cutter) -> None:
    """Raises ValueError if an unsharded module would not work next to the sharded ones."""
    cut = {parameter for module in styles for parameter in module.parameters(recurse=False)}
    for path, module in model.named_modules():
        if module in styles:
            continue
        # If torch has sharded it, the layers that share it use torch's DTensor.
        whole = {name: param for name, param in module.named_parameters(recurse=False) if mesh_of(param) is None}
        for name, parameter in whole.items():
            if parameter in cut:
                raise ValueError(
                    f"{path}.{name} is also a parameter of a sharded layer, and sharding only one would untie them: "
                    f"shard the {type(module).__name__} first, by torch's parallelize_module on the same mesh, and tie "
                    "them again"
                )
        if cutter.sequence and isinstance(module, tuple(SHARED_NORMS)) and any(p.requires_grad for p in whole.values()):
            raise ValueError(
                f"sequence_parallel=True: {path}, a {type(module).__name__}, isn't known, and its gradients would only "
                "cover each rank's own tokens: shard it first, by torch's parallelize_module and SequenceParallel()"
            )

"""`set_recipe`: changes the recipe during a run and makes new codes from the optimizer's masters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockfp import recipes
from blockfp.definition import layout
from blockfp.formats import Format
from blockfp.recipes import ByPath, Recipe, RecipeName

from ..conversion.kinds import quantized_names
from ..distributed_internals import fsdp_params_of, renew_ddp_buffers, reshard
from ..modules import model_names
from ..modules.experts import Experts
from ..modules.model_names import optimizers_in, state_of
from ..modules.quantized_layer import QuantizedLayer
from ..modules.stateful_layer import StatefulLayer
from ..quantized_tensor import agreement, sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.requantize import check_writable, requantize_
from .local_parameter import LocalParameter
from .optimizer_state import renew_master

Layer = QuantizedLayer | Experts


M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def set_recipe(model: M, optimizer: Optimizer | Iterable[Optimizer] | None, recipe: Recipe | RecipeName | ByPath) -> M:
    """Changes the recipe of a model's quantized layers in place, during a run.

    Weights are requantized from the optimizer's fp32 masters, over all shards as if unsharded: the codes are those that the new
    recipe would have given in the last step. Weights without a master (frozen, or `master=None`) are requantized from their
    original values if kept, else from their dequantized codes. Parameters stay the same objects and the optimizer's state is
    unchanged. Random keys and step counts of stochastic rounding carry over, and so do histories and scales of delayed scaling
    if the new recipe has the same; otherwise they start anew, with keys from the layers' paths.

    Call it between two steps, with the same arguments on every rank. FSDP2 reshards its gathered weights. Compiled blocks are
    recompiled; capture your own CUDA graphs again. Load an older checkpoint by `load_checkpoint(.., requantize=True)`.

    Args:
        model: with layers from `convert` or this library; sharded or not, wrapped by DDP or torch.compile or not.
        optimizer: holds the weights' masters; also as wrapped by accelerate or Lightning, several in a list or in torchtitan's
            container, or None for a model that isn't trained.
        recipe: as for `convert`; paths leave out names added by wrappers. Layers for which it gives None keep their recipe;
            layers that aren't quantized don't change.

    Returns:
        The model.

    Raises:
        TypeError: model or optimizer has the wrong type.
        ValueError: there is no quantized layer or a pattern matches none; a layer can't have the recipe; a shared weight would
            need two formats; a trained weight is not in the optimizer; a layer is sharded by tensor parallelism; weights are on
            the meta device; or ranks of a mesh got different recipes (raised on all). Nothing has changed.

    Example:
        >>> bfp.set_recipe(model, optimizer, "mxfp8")  # the last steps of a run in nvfp4
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    optimizers = [] if optimizer is None else optimizers_in(optimizer)
    plain = model_names.plain_module(model)
    named = model_names.named_modules(plain)
    layers = {path: layer for path, layer in named if isinstance(layer, Layer)}
    if not layers:
        raise ValueError("model holds no quantized layer: use convert(model, recipe) first")
    recipes.check_paths(recipe, layers)
    changes = {
        path: one for path in layers if (one := recipes.resolve(recipe, path)) is not None and one != layers[path].recipe
    }
    _agree(plain, {path: changes.get(path, layer.recipe) for path, layer in layers.items()})
    # Otherwise layers hold FSDP2's gathered weights, which aren't the optimizer's parameters.
    reshard(model)
    formats = _formats(layers, changes)
    records = {id(record.sharded_param): record for record in fsdp_params_of(model)}
    groups = [group for one in optimizers for group in one.param_groups]
    held = None if optimizer is None else {id(param) for group in groups for param in group["params"]}
    for name, param, _ in formats:
        _check_weight(name, param, held)
    _change_weights(formats, optimizers, records)
    for path, one in changes.items():
        layer = layers[path]
        for name, product in _products(layer):
            device = sharding.local_of(layer._parameters[name]).device  # pyright: ignore[reportArgumentType]
            product.change_recipe(one, device, f"{path}.{name}")
        layer.recipe = one
    renew_ddp_buffers()
    return model


def _agree(model: nn.Module, recipes: dict[str, Recipe]) -> None:
    """Compares the layers' new recipes on all ranks of the parameters' meshes."""
    meshes = [sharding.mesh_of(param) for param in model.parameters()]
    told = {f"the new recipe of {path or 'the model'}": agreement.told_recipe(recipe) for path, recipe in recipes.items()}
    for mesh in dict.fromkeys(mesh for mesh in meshes if mesh is not None):
        groups, device = agreement.groups_of(mesh), torch.device(mesh.device_type)
        agreement.agree(groups, told, device, "call set_recipe with the same recipe everywhere")


def _products(layer: Layer) -> Iterator[tuple[str, StatefulLayer]]:
    """Yields each weight's name and the layer that keeps its recipe state."""
    for name in quantized_names(layer):
        yield name, layer.product_of(name) if isinstance(layer, Experts) else layer


def _formats(layers: dict[str, Layer], changes: dict[str, Recipe]) -> list[tuple[str, Tensor, Format]]:
    """Returns (name, weight, new format) of each weight whose format changes; raises ValueError for an impossible recipe."""
    wanted: dict[int, tuple[str, Format | None]] = {}
    found: dict[int, tuple[str, Tensor, Format]] = {}
    for path, layer in layers.items():
        one = changes.get(path, layer.recipe)
        if path in changes:
            _check_layer(path, layer, one)
        for name in quantized_names(layer):
            param: Any = layer._parameters[name]
            full, format = f"{path}.{name}".lstrip("."), one.weight.format
            other, known = wanted.setdefault(id(param), (full, format))
            if known is not format:
                raise ValueError(f"{other} and {full} are one weight, and need one format, got {known} and {format}")
            local = sharding.local_of(param)
            if format is not None and isinstance(local, QuantizedTensor | CastWeight) and local.format is not format:
                found[id(param)] = (full, param, format)
    return list(found.values())


def _check_layer(path: str, layer: Layer, recipe: Recipe) -> None:
    where = f"{path!r}, with recipe {layer.recipe}," if path else f"the layer, with recipe {layer.recipe},"
    compute: Any = layer.compute
    try:
        recipes.for_linear(recipe, compute)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from error
    if layer.parallel is not None:
        raise ValueError(
            f"{where} is sharded by tensor or expert parallelism, along its recipe's blocks: save a checkpoint, and "
            "load it into a model converted by the new recipe, with requantize=True"
        )
    before, after = layer.recipe.weight.format, recipe.weight.format
    if (before is None) is not (after is None):
        kinds = ["in high precision" if format is None else f"in {format}" for format in (before, after)]
        raise ValueError(
            f"{where} has its weight {kinds[0]}, and recipe {recipe} wants it {kinds[1]}: the parameter would be another one; "
            "save a checkpoint, and load it into a model that was converted by the new recipe, with requantize=True"
        )
    if layer.transposed and after is not None and not after.square:
        raise ValueError(f"{where} has weights [in, out], which {after} has no exact transpose of: use square blocks")


def _check_weight(name: str, param: Tensor, held: set[int] | None) -> None:
    local: Any = sharding.local_of(param)
    if local.is_meta:
        raise ValueError(f"{name} is on the meta device: load the model first, or convert it by the new recipe")
    if held is not None and param.requires_grad and id(param) not in held:
        raise ValueError(f"{name} is trained, and the optimizer doesn't have it: its master is another's")
    if isinstance(local, QuantizedTensor):
        try:
            check_writable(local)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _change_weights(formats: list[tuple[str, Tensor, Format]], optimizers: list[Optimizer], records: dict[int, Any]) -> None:
    """Gives weights their new formats in place; collective if they are sharded."""
    params, values, originals = [], [], []
    for _, param, format in formats:
        local: Any = sharding.local_of(param)
        if isinstance(local, CastWeight):
            local.format = format
        else:
            initial, state = local.initial, state_of(optimizers, param)
            renew_master(LocalParameter(param), state)
            master = state.get("master")
            kept = initial if initial is None else initial.to(local.device)
            values.append(master if master is not None else local.detach().dequantize(torch.float32) if kept is None else kept)
            params.append(param)
            originals.append(None if master is not None else initial)
            local.adopt(_empty(local, format))
        if id(param) in records:
            agreement.renew(records[id(param)])
    requantize_(params, values)
    for param, initial in zip(params, originals, strict=True):
        if initial is not None:
            sharding.local_of(param).initial = initial  # pyright: ignore[reportAttributeAccessIssue]


def _empty(local: QuantizedTensor, format: Format) -> QuantizedTensor:
    """Returns a zero-filled tensor of the new format with this tensor's geometry."""
    shapes = layout.parts(tuple(local.shape), format, local.origin)
    made = [torch.zeros(shape, dtype=getattr(torch, dtype), device=local.device) for shape, dtype in shapes]
    codes, scales, *rest = made
    geometry = local.geometry.copy(initial=None)
    return QuantizedTensor(codes, scales, rest[0] if rest else None, format, local.shape[-1], local.dtype, geometry)

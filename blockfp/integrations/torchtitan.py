"""torchtitan (0.3): a model converter, and a container for blockfp's optimizers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import resolve_placements

from blockfp import recipes
from blockfp.files.names import SUFFIXES
from blockfp.recipes import Recipe

from ..torch_backend.conversion.convert import convert
from ..torch_backend.conversion.kinds import base_kind
from ..torch_backend.modules.experts import GroupedProduct
from ..torch_backend.modules.parallelize import parallelize
from ..torch_backend.modules.quantized_layer import Weights
from ..torch_backend.optimizer.adamw import Adam, AdamW
from ..torch_backend.optimizer.muon import Muon
from ..torch_backend.weights.loading import init_
from ..torch_backend.weights.module_state import become


class BlockfpConverter(ModelConfigConverter):
    """Builds a model with quantized linear layers and experts; subclasses with their own products are unchanged.

    With tensor and expert parallelism (`spmd_backend="partial_dtensor"`) weights follow the model's sharding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        recipe: Recipe | str | dict[str, Recipe | str | None] = "mxfp8"
        """One recipe for all layers, or a dictionary by patterns of their paths, as for `convert`."""
        skip: tuple[str, ...] = ("lm_head", "*.router.gate")
        """Patterns of the paths of layers that stay unquantized."""
        weights: Weights = "quantized"
        """See `blockfp.torch.Linear`; with "high_precision" use torchtitan's own optimizers."""

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replaces layers' configurations in place by configurations that convert the layers they build.

        Raises:
            ValueError: a recipe is unknown, or a pattern matches no layer.
        """
        found: Any = [*model_config.traverse(Linear.Config), *model_config.traverse(GroupedExperts.Config)]
        recipes.check_paths(self.config.recipe, [path for path, *_ in found])
        for path, layer, parent, name in found:
            recipe = recipes.resolve(self.config.recipe, path)
            if recipe is None or any(fnmatchcase(path, pattern) for pattern in self.config.skip):
                continue
            values: dict[str, Any] = {field.name: getattr(layer, field.name) for field in fields(layer)}
            if layer.param_init is not None:
                values["param_init"] = {key: partial(init_, function=each) for key, each in layer.param_init.items()}
            new = _quantized(type(layer), recipe, self.config.weights)(**values)
            _put(parent, name, new)
        for _, fused, parent, name in list(model_config.traverse(FusedQKVLinear.Config)):
            values = {field.name: getattr(fused, field.name) for field in fields(fused)}  # pyright: ignore[reportArgumentType]
            _put(parent, name, _unsplit(type(fused))(**values))
        return model_config


def _put(parent: Any, name: Any, config: Any) -> None:
    parent.__setitem__(name, config) if isinstance(parent, list) else setattr(parent, name, config)


@cache
def _quantized(config_class: Any, recipe: Recipe, weights: Weights) -> Any:
    class QuantizedConfig(config_class):
        def build(self, **options: Any) -> nn.Module:
            layer = config_class.build(self, **options)
            if base_kind(layer) is not None:
                become(layer, _cuttable(type(layer)))
                convert(layer, recipe, weights=weights)
                for product in layer.children():
                    become(product, _Product)
            return layer

    return QuantizedConfig


@cache
def _unsplit(config_class: Any) -> Any:
    @dataclass(kw_only=True, slots=True)
    class Config(config_class):
        pass

    owner = config_class._owner
    type(owner.__name__, (_Unsplit, owner), {"__module__": owner.__module__, "Config": Config})
    return Config


class _Unsplit:
    """Keeps codes of query, key and value in one piece in state dicts, where torchtitan splits values."""

    @staticmethod
    def _split_qkv_on_save(module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        if f"{prefix}wqkv.weight{SUFFIXES['codes']}" not in state_dict:
            FusedQKVLinear._split_qkv_on_save(module, state_dict, prefix, local_metadata)


@cache
def _cuttable(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Cut, cls), {"__module__": cls.__module__})


class _Product(GroupedProduct, Module):
    """The experts' product as a torchtitan module, as all submodules must be."""


class _Cut(Module):
    """Shards a quantized layer over the mesh of its sharding, where torchtitan would distribute its tensors."""

    def _distribute_states(self, parallel_dims: Any) -> None:
        config: Any = self._sharding_config
        name, param = next(self.named_parameters(recurse=False))
        layout = config.state_shardings[name]
        if (mesh := parallel_dims.resolve_mesh(layout.axes())) is None:
            return
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError(f"spmd_backend = {parallel_dims.spmd_backend!r}: quantized layers need 'partial_dtensor'")
        (placement,) = resolve_placements(layout, mesh)
        styles: Any = {Shard(0): "experts"} if isinstance(self, GroupedExperts) else {Shard(0): "column", Shard(1): "row"}
        if (style := styles.get(placement)) is None:
            raise ValueError(
                f"a {type(self).__name__} {tuple(param.shape)} can't be placed as {placement}: exclude it by skip="
            )
        after = config.out_dst_shardings if style == "row" else None
        parallelize(self, mesh, style, sequence_parallel=after is not None and resolve_placements(after, mesh) == (Shard(1),))
        # A row-parallel layer sums, or scatters, its partial results itself.
        self._sharding_config = replace(config, out_src_shardings=None) if style == "row" else config


class BlockfpOptimizers(OptimizersContainer):
    """torchtitan's container with blockfp's "AdamW", "Adam" and "Muon"."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError("implementation = 'fused_opt_states_bf16': blockfp's optimizers keep moments in fp32; try 'fused'")
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return {"AdamW": AdamW, "Adam": Adam, "Muon": Muon}.get(name) or OptimizersContainer._resolve_optimizer_factory(name)

"""transformers (5): loads quantized models from high-precision files and from quantized releases.

Importing this module registers the quantization method "blockfp" with transformers:

    from blockfp.integrations.transformers import BlockfpConfig

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BlockfpConfig("mxfp8"))

Layers are converted on the meta device. Each weight is quantized as it is read, or made from the file's own codes and scales,
so that only one high-precision weight is in memory at a time, besides the originals kept by `keep_init`. The result is an
ordinary model for `Trainer`, PEFT and `save_pretrained`, which writes codes and a config.json that `from_pretrained`
understands.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn

from blockfp import patterns, recipes
from blockfp.recipes import Cast, Compute, Delayed, Recipe

from ..torch_backend.conversion.convert import convert
from ..torch_backend.conversion.kinds import base_kind, quantized_names, router_modules, weight_names
from ..torch_backend.conversion.summary import tied_elsewhere
from ..torch_backend.distributed_internals import mend_broadcast
from ..torch_backend.modules.quantized_layer import Weights
from ..torch_backend.modules.stateful_layer import StatefulLayer
from ..torch_backend.quantized_tensor.tensor import QuantizedTensor

try:
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from .transformers_kv import KVObservation, observe_kv
    from .transformers_reading import QuantizeOnLoad, Released, released_weights, untranspose
    from .transformers_writing import save_in_layout, stream_in_layout
except ModuleNotFoundError as error:
    raise ImportError(f"{__name__} needs transformers 5 and safetensors: {error}") from error

# Trainer resumes from checkpoints of accelerate.
mend_broadcast()

__all__ = ["BlockfpConfig", "BlockfpHfQuantizer", "KVObservation", "observe_kv", "save_in_layout", "stream_in_layout"]

METHOD = "blockfp"
"""The name of the method in config.json."""

Recipes = Recipe | str | Mapping[str, Recipe | str | None]


class BlockfpConfig(QuantizationConfigMixin):
    """The `quantization_config` of a model that blockfp quantizes.

    The configuration of a loaded model describes its layers' current recipes, including changes by `set_recipe`.

    Args:
        recipe: a `Recipe`, its name, or a dictionary from patterns of layers' names to recipes or None (high precision). The
            first pattern that `re.search` finds applies; layers without a match are unchanged. Weights that the file stores
            quantized keep the file's format. (config.json has a list of pairs, because transformers sorts dictionaries.)
        modules_to_not_convert: names of layers that stay in high precision, matched as transformers does: from the start, as
            regular expressions, or by suffix. None skips the layers that `convert` skips: heads tied to embeddings.
        trainable: False freezes the quantized weights, for adapters.
        requantize: True dequantizes the file's quantized weights and quantizes them in the recipe's weight format.
        weights, compute, keep_init: see `convert`. Only high-precision files have originals to keep.

    Raises:
        TypeError, ValueError: a recipe, pattern or keyword is invalid.
    """

    quant_method: Any
    weights: Weights
    compute: Compute
    _model: Callable[[], nn.Module | None] = staticmethod(lambda: None)

    def __init__(
        self,
        recipe: Recipes | dict[str, Any] | list[Any] = "mxfp8",
        *,
        modules_to_not_convert: list[str] | None = None,
        trainable: bool = True,
        requantize: bool = False,
        weights: Weights = "quantized",
        compute: Compute = "quantized",
        keep_init: bool = True,
        **others: Any,
    ):
        if others.pop("quant_method", METHOD) != METHOD or others:
            raise TypeError(f"BlockfpConfig has no {', '.join(others) or 'quant_method but blockfp'}")
        self.quant_method = METHOD
        self.recipe = _parsed(recipe)
        self.modules_to_not_convert = modules_to_not_convert
        self.trainable, self.requantize = trainable, requantize
        self.weights, self.compute, self.keep_init = weights, compute, keep_init

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles: the current recipe, without the model."""
        return {name: value for name, value in vars(self).items() if name != "_model"} | {"recipe": self.current_recipe()}

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockfpConfig:
        copied = copy.copy(self)
        copied.modules_to_not_convert = copy.copy(self.modules_to_not_convert)
        model = self._model()
        if model is not None and id(model) in memo:  # the model itself is being copied, and the config follows the copy
            copied.follow(memo[id(model)])
        return copied

    def follow(self, model: nn.Module) -> None:
        """Makes this the configuration of a model; recipes are read from the model's layers from now on."""
        self._model = weakref.ref(model)

    def current_recipe(self) -> Recipe | dict[str, Recipe | None]:
        """Returns the recipe, or the recipe of each layer if the followed model's layers have changed."""
        model = self._model()
        if model is None:
            return self.recipe
        named = model.named_modules()
        layers: dict[str, Any] = {path.replace(".base_layer", ""): one for path, one in named if quantized_names(one)}  # PEFT's
        if all(_follows(layer.recipe, self.recipe_of(path)) for path, layer in layers.items()):
            return self.recipe
        return {patterns.exactly(path): layer.recipe for path, layer in layers.items()}

    def recipe_of(self, path: str) -> Recipe | None:
        """Returns the recipe of the layer at a path, or None for high precision."""
        return recipes.resolve(self.recipe, path)

    def leaves(self, path: str) -> bool:
        """Returns whether the layer at a path is in `modules_to_not_convert` or has no recipe."""
        return not should_convert_module(path, self.modules_to_not_convert) or self.recipe_of(path) is None

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        state = self.__getstate__()
        recipe = state["recipe"]
        # transformers sorts keys when writing, but the order of patterns matters.
        written = _written(recipe) if isinstance(recipe, Recipe) else [[name, _written(one)] for name, one in recipe.items()]
        return copy.deepcopy({**state, "recipe": written})


def _follows(recipe: Recipe, given: Recipe | None) -> bool:
    """Returns whether a layer still has its given recipe, except for the weight format, which a file may determine."""
    return given is not None and recipe == given.replace(weight=recipe.weight)


def _parsed(recipe: Any) -> Recipe | dict[str, Recipe | None]:
    if isinstance(recipe, list):
        try:
            recipe = dict(recipe)
        except (TypeError, ValueError) as error:
            raise ValueError(f"recipe {recipe!r} is not a list of (pattern, recipe) pairs: {error}") from error
    if not isinstance(recipe, Mapping):
        return recipes.parse(recipe)
    if "text" in recipe:
        return _read(recipe)
    patterns.check(recipe)
    return {
        pattern: None if one is None else _read(one) if isinstance(one, Mapping) else recipes.parse(one)
        for pattern, one in recipe.items()
    }


def _written(recipe: Recipe | None) -> str | dict[str, Any] | None:
    """Returns a recipe for JSON: just its name if that defines it."""
    if recipe is None or recipe == _named(recipe.name):
        return recipe and recipe.name
    delayed = None if recipe.delayed is None else dataclasses.asdict(recipe.delayed)
    return {"name": recipe.name, "text": recipe.text, "delayed": delayed}


def _named(name: str) -> Recipe | None:
    return recipes.parse(name) if name in recipes.RECIPES else None


def _read(written: Mapping[str, Any]) -> Recipe:
    try:
        delayed = written.get("delayed")
        options: dict[str, Any] = {"delayed": None if delayed is None else Delayed(**delayed)}
        return Recipe.of_text(written["text"]).replace(name=str(written.get("name", "recipe")), **options)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"recipe {dict(written)!r} is not what BlockfpConfig writes: {error!r}") from error


class BlockfpHfQuantizer(HfQuantizer):
    """Converts a model on the meta device and creates its weights as transformers reads them."""

    quantization_config: BlockfpConfig

    def __init__(self, quantization_config: BlockfpConfig, **options: Any):
        # transformers only reads config.json; `released_weights` looks at the tensors in the files.
        super().__init__(copy.copy(quantization_config), **{**options, "pre_quantized": False})
        self.released: Released = Released({}, {}, frozenset())
        self.hidden: dict[nn.Module, dict[int, Any]] = {}
        self.state_names: set[str] = set()

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuses device maps that would move weights to disk."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                f"device_map {device_map} puts layers on the disk, where quantized weights can't be: leave them out"
            )

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "transformers would shard the model by its own plan (tp_plan or distributed_config), which quantized "
                "weights don't support: load it unsharded, then use fully_shard, accelerate's FSDP2, or "
                "blockfp.torch.parallelize"
            )
        config = self.quantization_config
        self.released = found = released_weights(model, checkpoint_files or [])
        tied, routers = tied_elsewhere(model), router_modules(model)
        takes: set[str] = set()
        for path, module in model.named_modules():
            kind = None if module in routers else base_kind(module)
            names = () if kind is None else tuple(f"{path}.{name}" for name in weight_names(kind, module))
            if not names or config.leaves(path) or any(name in tied for name in names):
                continue
            if found.params and not found.own and not any(name in found.params for name in names):
                # The release leaves it in high precision.
                continue
            takes.add(path)
            if not config.requantize:
                there = [found.params[name] for name in names if name in found.params]
                for one in there if config.weights == "quantized" else ():
                    one.check_whole()
                untranspose(module, there)
        convert(
            model, self._recipe_of, lambda path, _: path in takes,
            weights=config.weights, compute=config.compute, keep_init=config.keep_init,
        )  # fmt: skip
        if config.modules_to_not_convert is None:
            left = [path for path, module in model.named_modules() if path not in takes and base_kind(module) is not None]
            config.modules_to_not_convert = [f"^{re.escape(path)}$" for path in left]
        self._hide_state(model)

    def _recipe_of(self, path: str) -> Recipe | None:
        recipe = self.quantization_config.recipe_of(path)
        if recipe is None or self.quantization_config.requantize:
            return recipe
        there = self.released.of_module(path)
        formats = {one.format for one in there}
        if len(formats) > 1:
            raise ValueError(
                f"{path} has weights in {', '.join(map(str, formats))}, and a layer has one format: pass requantize=True"
            )
        for format in formats:
            recipe = recipe if recipe.weight.format is format else recipe.replace(weight=Cast(format))
        return recipe

    def _hide_state(self, model: nn.Module) -> None:
        """Makes the model's state dict list plain weights, like files that know no codes, until they are loaded."""
        for path, module in model.named_modules():
            if quantized_names(module):
                self.hidden[module] = hooks = dict(module._state_dict_hooks)
                for key in hooks:
                    del module._state_dict_hooks[key]
            if isinstance(module, StatefulLayer):
                self.state_names |= {f"{path}.{name}" for name, _ in module.named_buffers(recurse=False)}

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Returns whether a parameter is quantized as it is read."""
        module, name = get_module_from_name(model, param_name)
        return name in quantized_names(module) and param_name not in self.released.params

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Returns the bytes per element, including its share of the scales."""
        return param.nbytes / param.numel() if isinstance(param, QuantizedTensor) else param.element_size()

    def get_quantize_ops(self) -> QuantizeOnLoad:
        """Returns the operation that quantizes one weight."""
        return QuantizeOnLoad(self.quantization_config, self.state_names)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Prepends the conversion of weights that files store quantized to transformers' own."""
        ours = self.released.conversion(weight_conversions, self.quantization_config, self.state_names)
        return [*([] if ours is None else [ours]), *weight_conversions]

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Does nothing: models to be sharded by a plan are refused earlier."""

    def postprocess_model(self, model: Any, **_: Any) -> None:
        """Restores the model's state dict and sets its config; afterwards it is like a model from `convert`."""
        for module, hooks in self.hidden.items():
            module._state_dict_hooks.update(hooks)
        self.hidden.clear()
        for module in model.modules():
            for name in quantized_names(module):
                module.get_parameter(name).requires_grad_(self.quantization_config.trainable)
        _set_state(model)
        for config in (model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)):
            if config is not None and hasattr(config, "quantization_config"):
                del config.quantization_config
        # Saved files will contain the weights made here.
        self.quantization_config.requantize = False
        model.config.quantization_config = self.quantization_config
        self.quantization_config.follow(model)
        # transformers would take a "quantized model"'s state dict from the quantizer, and only let adapters train it.
        model.hf_quantizer, model.is_quantized = None, False
        del model.quantization_method
        # Codes can't be converted back to the release's names and shapes; `save_in_layout` does that.
        model._weight_conversions = []

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _set_state(model: nn.Module) -> None:
    """Initializes layers' buffers that no file contained."""
    for module in model.modules():
        if not isinstance(module, StatefulLayer) or not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        weight = module.held_weight()
        module.set_buffers(next(module.parameters()).device if weight is None else weight.device)
        module.reset_buffers()


def _merging(theirs: Any) -> Any:
    """Lets a `BlockfpConfig` passed to `from_pretrained` override a release's config.json.

    transformers refuses a second configuration of another class and has no hook for it.
    """

    @wraps(theirs)
    def merge_quantization_configs(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        given = quantization_config_from_args
        if not isinstance(given, BlockfpConfig):
            return theirs(quantization_config, given)
        was = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
        if was.get("quant_method") == METHOD and given.modules_to_not_convert is None:
            given = copy.copy(given)
            given.modules_to_not_convert = was.get("modules_to_not_convert")
        return given

    return staticmethod(merge_quantization_configs)


auto.register_quantization_config(METHOD)(BlockfpConfig)
auto.register_quantizer(METHOD)(BlockfpHfQuantizer)
auto.AutoHfQuantizer.merge_quantization_configs = _merging(auto.AutoHfQuantizer.merge_quantization_configs)

"""Reads weights from files into a transformers model: already quantized ones, or quantized while reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.quantizers.quantizers_utils import get_module_from_name

from blockfp.errors import BadFile
from blockfp.files import quantized_model
from blockfp.files.contents import Weight
from blockfp.files.modelfile import open_model
from blockfp.files.names import FORMAT
from blockfp.formats import Format

from ..torch_backend.check import to_torch
from ..torch_backend.conversion.kinds import base_kind, quantized_names, weight_names
from ..torch_backend.modules.experts import Experts
from ..torch_backend.modules.quantized_layer import made_weight
from ..torch_backend.quantized_tensor import sharding
from ..torch_backend.quantized_tensor.tensor import QuantizedTensor

PATTERN = "blockfp's, by name"
"""A pattern that stands for the names of weights in files."""


@dataclass(frozen=True)
class FromFile:
    """A parameter that files store quantized, as one weight or as several that a transformers conversion combines.

    Attributes:
        name: name of the parameter.
        format: format of all its weights.
        weights: the weights by the conversion's pattern, in order.
        conversion: combines the weights; None for a single weight.
    """

    name: str
    format: Format
    weights: dict[str, list[Weight]]
    conversion: WeightConverter | None

    @property
    def all(self) -> list[Weight]:
        return [weight for weights in self.weights.values() for weight in weights]

    def quantized(self, model: Any, dtype: torch.dtype) -> QuantizedTensor:
        """Reads and combines codes and scales, after `check_whole`."""
        read = {pattern: [weight.read() for weight in weights] for pattern, weights in self.weights.items()}
        codes = self._together(read, lambda array: array.codes, model)
        first = next(iter(read.values()))[0]
        if self.format.block is None:
            scales = _tensor(first.scales).reshape((1,) * codes.ndim)
        else:
            scales = self._together(read, lambda array: array.scales, model)
        factor = None if first.tensor_scale is None else _tensor(first.tensor_scale)
        columns = first.shape[-1]
        return QuantizedTensor.from_parts(codes, scales, factor, format=self.format, columns=columns, dtype=dtype)

    def values(self, model: Any, dtype: torch.dtype) -> Tensor:
        """Reads the dequantized values, combined by transformers' conversion."""
        read = {pattern: [weight.read() for weight in weights] for pattern, weights in self.weights.items()}
        return self._together(read, lambda array: np.asarray(array.dequantize(np.float32)), model).to(dtype)

    def _together(self, read: Mapping[str, list[Any]], part: Callable[[Any], np.ndarray], model: Any) -> Tensor:
        tensors: Any = {pattern: [_tensor(part(array)) for array in arrays] for pattern, arrays in read.items()}
        if self.conversion is None:
            ((whole,),) = tensors.values()
            return whole
        known = self.conversion
        for operation in known.operations:
            tensors = operation.convert(
                tensors, source_patterns=known.source_patterns, target_patterns=known.target_patterns,
                full_layer_name=self.name, model=model, config=model.config,
            )  # fmt: skip
        (whole,) = tensors.values()
        return whole[0] if isinstance(whole, list) else whole

    def check_whole(self) -> None:
        """Raises ValueError if combined codes would not represent the values of their parts."""
        if self.conversion is None:
            return
        way = "requantize=True dequantizes them and quantizes the whole again"
        others = [op for op in self.conversion.operations if type(op) not in (MergeModulelist, Concatenate)]
        if others:
            raise ValueError(f"{self.name} is computed from {self._sources} by {others}, which codes don't support: {way}")
        scales = [weight.scales if self.format.block is None else weight.tensor_scale for weight in self.all]
        if len({scale.read().tobytes() for scale in scales if scale is not None}) > 1:
            raise ValueError(
                f"{self.name} combines {self._sources}, each with its own scale, but a parameter in {self.format} has "
                f"one: {way}"
            )
        merged = any(isinstance(operation, MergeModulelist) for operation in self.conversion.operations)
        for operation in self.conversion.operations:
            if isinstance(operation, Concatenate):
                self._check_ends(operation.dim, merged, way)

    def _check_ends(self, dim: int, merged: bool, way: str) -> None:
        """Raises ValueError if weights concatenated along an axis end inside a block."""
        sources = [weights[0] for weights in self.weights.values()] if merged else self.all
        axis = dim if dim < 0 else dim - len(sources[0].shape) - merged
        block = (self.format.block or (1, 1))[axis] if axis >= -2 else 1
        # The last weight may end inside a block, like the whole.
        lengths = [weight.shape[axis] for weight in sources[:-1] if axis >= -2]
        if any(length % block for length in lengths):
            raise ValueError(
                f"{self.name} concatenates {self._sources}, whose lengths {lengths} aren't multiples of the blocks' "
                f"{block}: {way}"
            )

    @property
    def _sources(self) -> str:
        names = [weight.name for weight in self.all]
        return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


@dataclass(frozen=True)
class Released:
    """The quantized parameters of a model's files.

    Attributes:
        params: quantized parameters by name in the model.
        names: maps each of their entries in the files to the parameter's name.
        buffers: names of all other entries in the files.
        own: whether blockfp's `save_pretrained` wrote the files.
    """

    params: dict[str, FromFile]
    names: dict[str, str]
    buffers: frozenset[str]
    own: bool = False

    @cached_property
    def _by_module(self) -> dict[str, list[FromFile]]:
        found: dict[str, list[FromFile]] = {}
        for name, one in self.params.items():
            found.setdefault(name.rpartition(".")[0], []).append(one)
        return found

    def of_module(self, path: str) -> Sequence[FromFile]:
        """Returns the quantized parameters of a module, in the order of `params`."""
        return self._by_module.get(path, ())

    def conversion(self, conversions: Sequence[Any], config: Any, state_names: set[str]) -> ReadQuantized | None:
        """Returns the conversion that loads these weights, next to transformers' own; None without any."""
        if not self.params:
            return None
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        made = ReadQuantized([PATTERN], [PATTERN], [_Nothing()], force_cpu=True)
        made.released, made.config, made.state_names = self, config, state_names
        # transformers renames before it asks.
        made.targets = {_renamed(name, renamings): param for name, param in self.names.items()}
        return made


def _renamed(name: str, renamings: Sequence[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def released_weights(model: Any, files: Iterable[str]) -> Released:
    """Finds the quantized weights in files and the model's parameters that they belong to.

    `model` is transformers', not converted; `files` belong to the checkpoint. Raises BadFile for weights in an unsupported
    quantization, and ValueError if a parameter combines weights in several formats or is a piece of one.
    """
    paths = [Path(file) for file in files]
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        return Released({}, {}, frozenset())
    held = quantized_model.contents_of(quantized_model.together(paths[0], [open_model(path) for path in paths]))
    state = dict(model.named_parameters(remove_duplicate=False))
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, dict[str, list[Weight]]] = {}
    for name in sorted(held.weights, key=dot_natural_key):
        param, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if param not in state and name in state:
            param, pattern = name, None
        if param in state:
            found.setdefault(param, {}).setdefault(pattern or "", []).append(held.weights[name])
    params = {}
    for param, weights in found.items():
        formats = {weight.format for some in weights.values() for weight in some}
        if len(formats) > 1:
            raise ValueError(f"{param} combines weights in {', '.join(map(str, formats))}, but has one format")
        conversion = by_pattern.get(next(iter(weights)))
        if conversion is not None and len(conversion.target_patterns) > 1:
            first = next(iter(weights.values()))[0]
            raise ValueError(
                f"{first.name} is quantized, and the model splits it into {', '.join(conversion.target_patterns)}: "
                "from_pretrained can't split quantized weights; blockfp dequantize writes a folder of values"
            )
        params[param] = FromFile(param, formats.pop(), weights, conversion)
    names = {entry: param for param, one in params.items() for weight in one.all for entry in weight.entries}
    own = any(f"{weight.name}{FORMAT}{weight.format}" in weight.entries for weight in held.weights.values())
    return Released(params, names, frozenset(held.others), own)


def lies_turned(module: Any, found: Sequence[FromFile]) -> bool:
    """Returns whether files store a module's experts [experts, in, out] as quantized [experts, out, in].

    They do if blocks run along rows: a weight [experts, in, out] has no such format. Square blocks allow both orders; one of
    the two matrices shows the order by its shape, and the other follows it.
    """
    if not getattr(module, "is_transposed", False):
        return False
    for one in found:
        shape = list(module.get_parameter(one.name.rpartition(".")[2]).shape)
        (first, *others), *more = one.weights.values()
        alone = not others and not more and len(first.shape) == 3
        if not one.format.square or (
            alone and list(first.shape) != shape and [shape[0], shape[2], shape[1]] == list(first.shape)
        ):
            return True
    return False


def untranspose(module: Any, found: Sequence[FromFile]) -> None:
    """Changes experts [experts, in, out] on the meta device to [experts, out, in] if files store them so."""
    if not lies_turned(module, found):
        return
    kind = base_kind(module)
    names = () if kind is None else weight_names(kind, module)
    missing = set(names) - {one.name.rpartition(".")[2] for one in found}
    if missing:
        raise ValueError(f"{found[0].name} is quantized in the file, but {', '.join(missing)} is not")
    for name in names:
        param = module.get_parameter(name)
        setattr(module, name, nn.Parameter(param.detach().mT.contiguous(), param.requires_grad))
    module.is_transposed = False


class QuantizeOnLoad(ConversionOps):
    """Quantizes a weight read by transformers in its parameter's format."""

    def __init__(self, config: Any, state_names: set[str]):
        self.config, self.state_names = config, state_names

    def convert(
        self, input_dict: dict[str, Any], *_: Any, model: Any = None, missing_keys: set[str] | None = None, **__: Any
    ) -> dict[str, Any]:
        """Returns the parameter by its name."""
        if missing_keys is not None:
            missing_keys -= self.state_names
        ((name, value),) = input_dict.items()
        return {name: _parameter(model, name, value[0] if isinstance(value, list) else value, self.config)}


class _Nothing(ConversionOps):
    """A placeholder where transformers requires an operation."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return input_dict


class ReadQuantized(WeightConverter):
    """Creates parameters from weights that files store quantized.

    transformers asks each conversion for the new name of each entry and would read the tensors itself; here names are looked
    up, and blockfp's reader provides codes and scales.
    """

    __slots__ = ("config", "released", "state_names", "targets")

    released: Released
    config: Any
    state_names: set[str]
    targets: dict[str, str]

    def __deepcopy__(self, _: Any) -> ReadQuantized:
        # transformers copies it per parameter; all copies share the same data.
        made = ReadQuantized([PATTERN], [PATTERN], [_Nothing()], force_cpu=True)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        return made

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Returns the parameter that an entry in the files belongs to."""
        target = self.targets.get(source_key)
        return (source_key, None) if target is None else (target, PATTERN)

    def add_tensor(self, *_: Any) -> None:
        """Ignores the tensor that transformers read."""

    def convert(self, layer_name: str, model: Any = None, loading_info: Any = None, **_: Any) -> dict[str, Any]:
        """Returns the parameter by its name."""
        if loading_info is not None:
            loading_info.missing_keys -= self.state_names
        try:
            return {layer_name: self._read(layer_name, model)}
        except (ValueError, BadFile) as error:
            if loading_info is None:
                raise
            from transformers.core_model_loading import SkipParameters

            loading_info.conversion_errors[layer_name] = f"{type(error).__name__}: {error}"
            raise SkipParameters from error

    def _read(self, name: str, model: Any) -> nn.Parameter:
        found = self.released.params[name]
        module, own = get_module_from_name(model, name)
        param = module.get_parameter(own)
        quantized = own in quantized_names(module)
        if quantized and not self.config.requantize and self.config.weights == "quantized":
            q = found.quantized(model, param.dtype)
            _check_shape(name, q, param)
            # transformers moves it to its device; requires_grad is set afterwards.
            return nn.Parameter(q, requires_grad=False)
        values = found.values(model, param.dtype)
        values = values.mT.contiguous() if lies_turned(module, self.released.of_module(name.rpartition(".")[0])) else values
        if quantized:
            return _parameter(model, name, values, self.config)
        _check_shape(name, values, param)
        return nn.Parameter(values, param.requires_grad)


def _parameter(model: Any, name: str, values: Tensor, config: Any) -> nn.Parameter:
    """Makes the named parameter from values."""
    module, own = get_module_from_name(model, name)
    param = module.get_parameter(own)
    if sharding.mesh_of(param) is not None:
        raise ValueError(f"{name} is already sharded over a mesh: load the model unsharded, then shard it")
    _check_shape(name, values, param)
    recipe = module.product_of(own).recipe if isinstance(module, Experts) else module.recipe
    keep = config.keep_init and config.trainable
    return made_weight(values, recipe.weight.format, config.weights, keep, requires_grad=param.requires_grad)


def _check_shape(name: str, values: Tensor, param: Tensor) -> None:
    if values.shape != param.shape:
        raise ValueError(f"{name} is {list(param.shape)} in the model and {list(values.shape)} in the file")


def _tensor(array: np.ndarray) -> Tensor:
    return to_torch(np.require(array, requirements="C"))

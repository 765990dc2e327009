"""Writes transformers models in other libraries' layouts, under the names of the model's releases."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from blockfp.definition.layout import DTYPES
from blockfp.files import modelfile
from blockfp.files.contents import Contents, Weight
from blockfp.files.layouts.known import LAYOUTS
from blockfp.files.layouts.layout import joined_by_servers, not_released, write_layout

from ..torch_backend.check import to_numpy
from ..torch_backend.checkpoint import ranks
from ..torch_backend.checkpoint.conversion import split_weight
from ..torch_backend.checkpoint.files import high_precision_state_dict
from ..torch_backend.checkpoint.for_servers import KVScales, codes_of_values, kv_entries
from ..torch_backend.checkpoint.stream import WeightStream, stream_apart
from ..torch_backend.conversion.kinds import input_formats, quantized_names
from ..torch_backend.modules import model_names
from ..torch_backend.modules.experts import Experts
from ..torch_backend.quantized_tensor import sharding
from ..torch_backend.quantized_tensor.tensor import QuantizedTensor
from ..torch_backend.weights.state_dict import gathered, stored_parts


def save_in_layout(
    model: Any,
    folder: str | Path,
    layout: str,
    *,
    quantize: bool = False,
    kv_scales: KVScales | None = None,
    file_bytes: int | None = None,
) -> None:
    """Saves a model for other libraries, without blockfp: weights, config.json and generation_config.json.

    Writes the model's codes and scales under the names of the model's releases; experts are separate matrices if the family's
    files have them so. Every rank of a sharded model must call it, and rank 0 writes.

    Args:
        model: a transformers model with quantized weights.
        folder: the output folder.
        layout: a name from `blockfp convert --layout`: "compressed-tensors" or "fine-grained-fp8", which transformers and vLLM
            read, "modelopt", or "mxfp4", the layout of gpt-oss's experts.
        quantize: write weights of layers with weights="high_precision" as the codes that the forward multiplies.
        kv_scales: scales of cached keys and values, from `observe_kv`.
        file_bytes: maximum size of a file; None writes one file.

    Raises:
        TypeError, ValueError: the layout is unknown, a weight can't be split into the release's weights without new scales, the
            release combines several of the model's weights, `kv_scales` don't fit the model or layout, or the model contains
            adapters (call PEFT's `merge_and_unload()` first).
        BadFile: the layout can't hold a weight; `blockfp convert` requantizes.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if found := not_released(model_names.parameters(model)):
        raise ValueError(" ".join(found))
    folder = Path(folder)
    LAYOUTS[layout].kv_laid_out(Contents(folder, {}, {}, kv_scales=kv_entries(kv_scales, model, {})))
    quantized = _quantized(model, codes_of_values("save_in_layout", model, quantize))
    if not quantized:
        raise ValueError(
            "model has no quantized weights: use save_pretrained, or quantize=True for layers with weights='high_precision'"
        )
    others = {name: value for name, value in high_precision_state_dict(model).items() if name not in quantized}
    if ranks.rank_and_world(None)[0] != 0:
        return
    release = _Names(model)
    weights, names = {}, {}
    for name, q in quantized.items():
        # gpt-oss's files store all experts in one tensor.
        made = (
            {name: _weight(name, q)}
            if layout == "mxfp4"
            else split_weight(_weight(name, q), partial(release.of_one, codes=True))
        )
        names[name] = list(made)
        weights |= {part: _of_numpy(weight) for part, weight in made.items()}
    others = release.of(remove_tied_weights_from_state_dict(others, model))
    path = folder / "model.safetensors"
    kv = kv_entries(kv_scales, model, names)
    inputs = {own: format for name, format in input_formats(model).items() for own in names.get(name, ())}
    entries = {name: _entry(name, value) for name, value in others.items()}
    contents = Contents(path, weights, entries, inputs=inputs, kv_scales=kv)
    write_layout(LAYOUTS[layout], contents, folder, file_bytes, lambda _: None)
    if joined := joined_by_servers(weights):
        warnings.warn(joined, stacklevel=2)
    _write_configs(model, folder)


def stream_in_layout(model: Any, layout: str, **options: Any) -> WeightStream:
    """Sends weights to a server in buckets, under the names of the model's releases, as `save_in_layout` writes them.

    Like `blockfp.torch.stream_weights`, except for names and experts: experts are separate matrices if the family's files have
    them so, which vLLM and SGLang load. The experts of one parameter share a bucket.

    Args:
        model: a transformers model, sharded or whole.
        layout: see `stream_weights`.
        options: quantize, kv_scales, bucket_bytes, keep_on and sha256 of `stream_weights`.

    Raises:
        TypeError, ValueError: see `stream_weights`; or blocks span two experts, or the release combines several of the model's
            weights.
    """
    release = _Names(model)
    quantized = {f"{path}.{own}" for path, module in model.named_modules() for own in quantized_names(module)}
    together = quantized if layout == "mxfp4" else set()

    def apart(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        return {name: tensor} if name in together else release.of_one(name, tensor, codes=name in quantized)

    return stream_apart(model, apart, layout=layout, **options)


def _write_configs(model: Any, folder: Path) -> None:
    """Writes the model's config.json, with the layout's quantization_config."""
    written = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.quantization_config = written["quantization_config"]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _quantized(model: Any, instead: Mapping[int, Tensor]) -> dict[str, QuantizedTensor]:
    """Returns the whole quantized weights by name, experts as [experts, out, in]; collective if they are sharded.

    `instead` has those to write in place of a parameter, by its id.
    """
    found = {}
    for path, module in model.named_modules():
        for own in quantized_names(module):
            param = module.get_parameter(own)
            param = instead.get(id(param), param)
            local = sharding.local_of(param)
            if not isinstance(local, QuantizedTensor):
                continue
            q = _whole(param, local) if sharding.mesh_of(param) is not None else local.detach()
            found[f"{path}.{own}"] = q.mT if isinstance(module, Experts) and module.transposed else q
    return found


def _whole(param: Tensor, local: QuantizedTensor) -> QuantizedTensor:
    parts = [gathered(param, local, part).detach() for part in stored_parts(param)]
    columns = param.shape[-1]
    return QuantizedTensor.from_parts(*parts, format=local.format, columns=columns, dtype=local.dtype)


class _Names:
    """The names of a model's releases, from transformers' conversions in reverse."""

    def __init__(self, model: Any):
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in known if not isinstance(one, PrefixChange)]
        self.model = SimpleNamespace(_weight_conversions=conversions, config=model.config)
        self.converters = [one.reverse_transform() for one in conversions if isinstance(one, WeightConverter)]

    def of(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a state dict under the release's names, with combined weights split again."""
        model: Any = self.model
        return revert_weight_conversion(model, dict(state))

    def of_one(self, name: str, tensor: Tensor, *, codes: bool = False) -> dict[str, Tensor]:
        """Returns the release's tensors for one of the model's.

        Raises ValueError if the release combines it with other tensors, or if codes would need more than splitting along an
        axis.
        """
        converters: list[Any] = self.converters
        for conversion in converters:
            if conversion.rename_source_key(name)[1] is None:
                continue
            others = [operation for operation in conversion.operations if type(operation) not in (Chunk, SplitModulelist)]
            if len(conversion.source_patterns) > 1 or (codes and others):
                raise ValueError(
                    f"{name}: this model's releases have it as {', '.join(conversion.target_patterns)}, made by {others} of "
                    f"{', '.join(conversion.source_patterns)}, which isn't done with codes, nor with one tensor after another: "
                    "use save_pretrained, or blockfp.torch.stream_weights, which keep the model's own names"
                )
        return self.of({name: tensor})


def _weight(name: str, q: QuantizedTensor) -> Weight:
    """Returns a weight whose parts are read as torch tensors."""
    dtype = DTYPES[str(q.dtype).removeprefix("torch.")]
    codes, scales, *factor = (replace(_entry(name, part), read=lambda part=part: part) for part in q.parts)
    return Weight(name, q.format, tuple(q.shape), dtype, codes, scales, factor[0] if factor else None)


def _of_numpy(weight: Weight) -> Weight:
    def as_numpy(part: Any) -> Any:
        return replace(part, read=lambda: _entry("", part.read()).read())

    codes, scales, *factor = map(as_numpy, weight.parts)
    return replace(weight, codes=codes, scales=scales, tensor_scale=factor[0] if factor else None)


def _entry(name: str, tensor: Tensor) -> modelfile.Tensor:
    """Returns a tensor as a file entry; it is copied from its device when written."""
    dtype: np.dtype = to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype
    return modelfile.Tensor(name, dtype, tuple(tensor.shape), lambda: to_numpy(tensor.detach().cpu().contiguous()))

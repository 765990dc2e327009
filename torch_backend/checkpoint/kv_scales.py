"""Scales of cached keys and values, which a server reads with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from blockfp.files.modelfile import Tensor as Entry

from ..modules import model_names

KVScales = Mapping[str, tuple[Tensor, Tensor]]
"""By the path of an attention, the scales of its keys and of its values, with which FP8 codes are multiplied: float32 [1], or
[heads, 1, 1] with one for each head."""

_KEYS = ".k_proj.weight"


def kv_entries(scales: KVScales | None, model: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[Entry, Entry]]:
    """Checks scales of keys and values and returns them by the server's names of the attentions.

    `names` has the server's names of the model's tensors; an attention goes where its k_proj goes. Raises TypeError or
    ValueError for what isn't `KVScales` of this model.
    """
    if scales is not None and not isinstance(scales, Mapping):
        raise TypeError(f"kv_scales must be a dictionary by the path of an attention, got {type(scales).__name__}")
    modules, found = model_names.modules(model), {}
    for path, pair in (scales or {}).items():
        if path not in modules:
            raise ValueError(f"kv_scales: model has no module {path!r}")
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
            raise TypeError(f"kv_scales[{path!r}] must be two tensors, for keys and values, got {pair!r}")
        for scale in pair:
            heads = scale.shape[:1] if scale.ndim == 3 else ()
            if scale.dtype != torch.float32 or scale.shape not in ((1,), (*heads, 1, 1)):
                got = f"{scale.dtype} {tuple(scale.shape)}"
                raise ValueError(f"kv_scales[{path!r}] must be float32 of shape (1,) or (heads, 1, 1), got {got}")
            if scale.is_meta or not bool((scale.isfinite() & (scale > 0)).all()):
                raise ValueError(f"kv_scales[{path!r}] must be finite and above 0, got {scale}")
        server = names.get(path + _KEYS, (path + _KEYS,))[0]
        keys, values = (Entry("", np.dtype(np.float32), tuple(x.shape), lambda x=x: x.detach().cpu().numpy()) for x in pair)
        found[server.removesuffix(_KEYS)] = (keys, values)
    if len({len(scale.shape) for pair in found.values() for scale in pair}) > 1:
        raise ValueError("kv_scales: some are of a whole attention and some of each head: take either")
    return found

"""Operations that overwrite a whole parameter, which `torch.nn.init` is made of: drawn as plain values, then quantized."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..custom_ops import ops
from .dispatch import implements, run
from .refusals import refused
from .tensor import QuantizedTensor

aten = torch.ops.aten


def _fill(func: Any, q: QuantizedTensor, *args: Any, **options: Any) -> QuantizedTensor:
    # What a DTensor holds is no parameter, and may share its scales with other ranks.
    if not isinstance(q, nn.Parameter) or q.geometry.base is not None or q.geometry.gathered:
        raise refused(
            func,
            "it is not a whole parameter, and the scales of a part may depend on what others hold",
            "use blockfp.torch.init_(parameter, function) with the parameter itself, sharded or not",
        )
    if q.is_meta:
        return q
    values = func(torch.empty(q.shape, dtype=q.dtype, device=q.device), *args, **options)
    parts = ops.quantize(values, q.format.name, None)
    source = q.with_parts(*parts, geometry=q.geometry.copy(initial=None))
    # What an optimizer begins its masters from.
    source.initial = values.to("cpu", copy=True) if q.requires_grad else None
    return run(aten.copy_.default, (q, source), {})


for _func in (aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
    implements(_func)(partial(_fill, _func))

"""Quantized arrays of JAX as quantized tensors, through DLPack."""

from __future__ import annotations

from typing import Any

import torch

from .tensor import QuantizedTensor


def from_jax(q: Any) -> QuantizedTensor:
    """A `blockfp.jax.QuantizedArray` as a tensor on the same device, without a copy.

    The two share memory, and JAX takes arrays to be immutable: don't write into the result.

    Raises:
        TypeError: q is not a quantized array of JAX.
        ValueError: q is spread over several devices, or is being traced.
    """
    missing = [name for name in ("codes", "scales", "tensor_scale", "format", "columns") if not hasattr(q, name)]
    if missing or not hasattr(q.codes, "__dlpack__") or isinstance(q, QuantizedTensor):
        raise TypeError(f"q must be a blockfp.jax.QuantizedArray, got {type(q).__name__}")
    try:
        codes, scales = torch.from_dlpack(q.codes), torch.from_dlpack(q.scales)
        tensor_scale = None if q.tensor_scale is None else torch.from_dlpack(q.tensor_scale)
    except Exception as error:
        raise ValueError(
            f"q's arrays can't be shared with torch ({error}): it must be a concrete array on one device"
        ) from error
    return QuantizedTensor.from_parts(
        codes,
        scales,
        tensor_scale,
        format=q.format,
        columns=q.columns,
        dtype=getattr(torch, str(q.dtype)),
        origin=q.origin,
    )

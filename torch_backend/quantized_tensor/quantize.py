"""`quantize` and `fake_quantize`, with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.definition import checks
from blockfp.definition.rounding import Key
from blockfp.formats import Format

from ..custom_ops import ops
from ..torch_internals import jit_traces
from . import sharding
from .keys import key_tensor
from .refusals import jit_refusal
from .tensor import QuantizedTensor


def quantize(x: Tensor, format: Format | str, *, key: Key | None = None) -> QuantizedTensor:
    """Quantizes a tensor in blocks of its last two axes.

    Where x requires grad the result does too, and the gradient passes through unchanged (straight-through). In a compiled
    function the result's `dequantize` and `mT` can be used, its attributes not; one that is differentiated through must
    not be among the function's results.

    Args:
        x: float32, float16 or bfloat16, two or more axes.
        format: a `Format` or its name, see `blockfp.formats.NAMES`.
        key: None rounds to nearest even; a seed or a tensor of two uint32 words on x's device (int32 and int64 hold them
            too) rounds stochastically. In compiled code use a tensor: another seed is another graph.

    Raises:
        TypeError: x is not a tensor of a supported dtype, or the key is a `torch.Generator` (see `random_key`).
        ValueError: x has fewer than two axes or is a DTensor, or the format or key is not valid.
        NotImplementedError: under torch.jit.trace.

    Example:
        >>> q = quantize(torch.ones(4, 64), "mxfp8_e4m3")
        >>> q.codes.shape, q.scales.shape
        (torch.Size([4, 64]), torch.Size([4, 2]))
    """
    if isinstance(x, QuantizedTensor):
        raise TypeError(f"x is quantized already, got {x!r}: dequantize() it first")
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be a torch.Tensor, got {type(x).__name__}: use blockfp.quantize for NumPy and blockfp.jax.quantize for JAX"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"x must be a dense tensor, got layout {x.layout}: use x.to_dense()")
    if sharding.mesh_of(x) is not None:
        raise ValueError(
            "x is a DTensor, whose ranks may share scales: quantize x.full_tensor(), or x.to_local() as a tensor of its own"
        )
    if jit_traces():
        raise jit_refusal()
    checks.check_input(x)
    format = Format.parse(format)
    words = None if key is None else key_tensor(key, x.device)
    if x.requires_grad and torch.is_grad_enabled():
        return _Quantize.apply(x, format, words)
    return _quantize(x, format, words)


def fake_quantize(x: Tensor, format: Format | str, *, key: Key | None = None) -> Tensor:
    """x quantized and dequantized again, in its own dtype: what a product with it would see.

    The gradient passes through unchanged. Arguments and errors are those of `quantize`.
    """
    return quantize(x, format, key=key).dequantize()


def _quantize(x: Tensor, format: Format, key: Tensor | None) -> QuantizedTensor:
    try:
        parts = ops.quantize(x, format.name, key)
    except RuntimeError as error:
        if "allocate" in str(error):
            # A view of a few elements may stand for any number of them.
            error.add_note(f"x has shape {tuple(x.shape)}, {x.numel()} elements")
        raise
    return QuantizedTensor(parts[0], parts[1], parts[2] if len(parts) > 2 else None, format, x.shape[-1], x.dtype)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, format: Format, key: Tensor | None):
        return _quantize(x, format, key)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None, None


# ---- arrays of the other framework


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

"""`quantize` and `fake_quantize`, with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockfp.definition import checks
from blockfp.definition.rounding import Key, fold_in, key_words
from blockfp.formats import Format, FormatName

from ..distributed_internals import ddp_model
from ..ops import dequantize_plans
from ..ops.quantize.key_ops import signed
from ..torch_internals import jit_traces
from . import sharding
from .refusals import jit_refusal
from .tensor import QuantizedTensor


def quantize(x: Tensor, format: Format | FormatName, *, key: Key | None = None) -> QuantizedTensor:
    """Quantizes a tensor in blocks of its last two axes.

    If x requires grad, so does the result; the gradient passes through unchanged (straight-through). A compiled function may
    use the result's `dequantize` and `mT`, but not its attributes, and must not return a result that requires grad.

    Args:
        x: float32, float16 or bfloat16, with two or more axes.
        format: a `Format` or its name, see `blockfp.formats.NAMES`.
        key: None rounds to nearest even; a seed, or a tensor of two uint32 words on x's device (also as int32 or int64), rounds
            stochastically. Use a tensor in compiled code: each new seed would compile a new graph.

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
            "x is a DTensor, whose ranks may share scales: quantize x.full_tensor(), or x.to_local() as a separate tensor"
        )
    if jit_traces():
        raise jit_refusal()
    checks.check_input(x)
    format = Format.parse(format)
    words = None if key is None else key_tensor(key, x.device)
    if x.requires_grad and torch.is_grad_enabled():
        return _Quantize.apply(x, format, words)
    return _quantize(x, format, words)


def fake_quantize(x: Tensor, format: Format | FormatName, *, key: Key | None = None) -> Tensor:
    """Quantizes and dequantizes x, in its own dtype: the values that a product with the quantized x uses.

    The gradient passes through unchanged. Arguments and errors are the same as for `quantize`.
    """
    return quantize(x, format, key=key).dequantize()


def _quantize(x: Tensor, format: Format, key: Tensor | None) -> QuantizedTensor:
    try:
        parts = dequantize_plans.quantize(x, format.name, key)
    except RuntimeError as error:
        if "allocate" in str(error):
            # An expanded view can have any number of elements.
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
    """Returns a `blockfp.jax.QuantizedArray` as a tensor on the same device, without a copy.

    Both share memory, and JAX assumes that arrays are immutable: don't write into the result.

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


# ---- keys


def key_tensor(key: Key, device: torch.device) -> Tensor:
    """Returns a seed, or two uint32 words in any form, as an int32 tensor (2,) on `device`.

    Raises TypeError for a `torch.Generator`, and ValueError for an invalid key or one on another device. An int64 tensor's
    values are checked only on the CPU and outside of tracing.
    """
    # torch 2.15 can't compile isinstance(key, torch.Generator) for a tensor.
    if not isinstance(key, Tensor) and isinstance(key, torch.Generator):
        raise TypeError("key must be a seed or two uint32 words, got a torch.Generator: pass random_key(generator)")
    words = key_words(key)
    if not isinstance(key, Tensor):
        return torch.tensor([signed(int(word)) for word in words], dtype=torch.int32, device=device)
    if key.device != device:
        raise ValueError(f"key is on {key.device} and x on {device}: pass key.to(x.device)")
    if key.dtype is torch.int64 and type(key) is Tensor and key.device.type == "cpu" and not torch.compiler.is_compiling():
        key_words(key.numpy(force=True))
    return key.view(torch.int32) if key.dtype is torch.uint32 else key.to(torch.int32)


def random_key(generator: torch.Generator | None = None) -> Tensor:
    """Draws a key from a generator: an int64 tensor of two uint32 words on the generator's device.

    Args:
        generator: by default torch's global CPU generator.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randint(1 << 32, (2,), generator=generator, dtype=torch.int64, device=device)


_COPIED = int.from_bytes(b"copy")
"""Folded into the key of a copied layer; larger than any step count."""


def copied_key(key: Tensor, number: int) -> Tensor:
    """Returns the key of a layer's copy `number` (from 1): int64, on the device of the layer's own key."""
    folded: Any = fold_in(fold_in(key, _COPIED), number)
    return folded.to(torch.int64) & 0xFFFFFFFF


def data_rank(sharded: int) -> int:
    """Returns this rank's index along the axes that divide the batch.

    `sharded` is its index along FSDP2's axes (`sharding.data_rank`). Inside a DDP forward, DDP's rank replaces it.
    """
    model = ddp_model()
    return sharded if model is None or model.process_group is None else model.process_group.rank()

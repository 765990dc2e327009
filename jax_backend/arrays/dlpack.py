"""Quantized arrays of another library, whose memory is shared through DLPack."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .array import QuantizedArray


def from_torch(q) -> QuantizedArray:
    """Makes a JAX array of a `blockfp.torch.QuantizedTensor`, on the same device and without a copy where that is possible.

    Codes and scales go over through DLPack. XLA's CPU wants 64-byte alignment, which PyTorch's own allocations have and
    slices of them may not; JAX copies those. Where memory is shared, an update of `q` in place changes the result: JAX
    assumes that it doesn't happen.

    Raises:
        TypeError: `q` is not a QuantizedTensor.
    """
    missing = [name for name in ("codes", "scales", "tensor_scale", "format", "origin") if not hasattr(q, name)]
    if missing or not hasattr(q.codes, "data_ptr"):
        raise TypeError(f"q must be a blockfp.torch.QuantizedTensor, got {type(q).__name__}")

    def share(tensor) -> jax.Array | None:
        return None if tensor is None else jnp.from_dlpack(tensor.detach().contiguous())

    return QuantizedArray.from_parts(
        share(q.codes),  # pyright: ignore[reportArgumentType]
        share(q.scales),  # pyright: ignore[reportArgumentType]
        share(q.tensor_scale),
        format=q.format,
        columns=q.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        origin=tuple(q.origin),
    )

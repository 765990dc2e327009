"""The peers timed by gpu.py: torchao, the definition through torch.compile, and XLA, if installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from blockfp.definition import numerics


def peers(x: torch.Tensor, milliseconds: Callable[..., float]) -> Iterator[tuple[str, float, int]]:
    """Returns (name, milliseconds per call, bytes read and written) of every installed peer."""
    size = x.numel()
    mx_bytes = size * 2 + size + size // 32
    compiled = torch.compile(lambda x: numerics.quantize(x, "mxfp8_e4m3")[:2], fullgraph=True, dynamic=False)
    if x.shape[1] % 32 == 0:
        yield "torch.compile of the definition, MXFP8 row", milliseconds(lambda: compiled(x), 5), mx_bytes
    yield from _torchao(x, mx_bytes, milliseconds)
    yield from _xla(x, mx_bytes)


def _torchao(x, mx_bytes, milliseconds):
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        print(f"  torchao left out: {error}")
        return
    if x.shape[1] % 32:
        return
    for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):
        call = torch.compile(lambda x, mode=mode: to_mx(x, torch.float8_e4m3fn, 32, mode), fullgraph=True)
        yield f"torchao MXFP8 row, {mode.name.lower()}", milliseconds(lambda call=call: call(x), 5), mx_bytes


def _xla(x, mx_bytes):
    try:
        import jax
    except ImportError as error:
        print(f"  XLA left out: {error}")
        return
    if not any(device.platform == "gpu" for device in jax.devices()) or x.shape[1] % 32:
        print("  XLA left out: jax sees no GPU")
        return
    array = jax.dlpack.from_dlpack(x)
    call = jax.jit(lambda x: numerics.quantize(x, "mxfp8_e4m3")[:2])

    # JAX has streams of its own, which torch's events don't see: the host's clock, both libraries idle before and after.
    jax.block_until_ready(call(array))
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            result = call(array)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / 10)
    yield "XLA of the definition, MXFP8 row (host clock)", best * 1e3, mx_bytes

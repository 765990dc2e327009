"""A stand-in for a GPU: the Python code of the CUDA path runs on CPU tensors, and launches do nothing or call given functions.

    with standin.launches():
        layer(x)        # the host's work on a Hopper GPU; the values are not the product's

It measures the host's time and calls without a GPU. Functions of the CUDA library are replaced by one that takes the same
arguments through the same FFI and returns, products return new memory, and CPU tensors claim to be CUDA tensors. Tests pass
functions that compute.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from blockfp.torch_backend.ops.layer import gated_kernels
from blockfp.torch_backend.ops.product import products
from torch import Tensor

from blockfp.kernels import cuda_library, switch
from blockfp.kernels import products as product_plans

CAPABILITY, CUBLAS = (9, 0), 130000
_routes = products.route_on

Replacement = tuple[Callable[..., Any], Callable[..., Any]]


def _idle() -> dict[str, Callable[..., Any]]:
    """Returns the library's functions, none of which does anything."""
    import tvm_ffi

    nothing = tvm_ffi.get_global_func("testing.nop")

    def all_right(found, *arrays):
        nothing(found, *arrays)
        found.fill(1)  # where numbers are counted, the first step
        return -1

    def fitting(first, *arrays):
        nothing(first, *arrays)
        return -1

    answers = {"addresses": all_right, "count_steps": all_right, "newest_amaxes": fitting, "update_scales": fitting}
    return {**dict.fromkeys(cuda_library._FUNCTIONS, nothing), **answers}


@contextlib.contextmanager
def launches(
    functions: Mapping[str, Callable[..., Any]] | None = None, torchs: Sequence[Replacement] | None = None
) -> Iterator[None]:
    """Makes CPU tensors take the CUDA path until the block ends. Create layers and tensors before it.

    Args:
        functions: the library's; by default they do nothing.
        torchs: functions of torch's with their replacements; by default its products do nothing.
    """
    idle = functions is None
    functions = {**(_idle() if functions is None else functions), "cublas_version": lambda: CUBLAS}
    with contextlib.ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(cuda_library._cuda, "loaded", SimpleNamespace(path=Path("stand-in"), **functions))
        )
        # Attributes of the class stand before those that torch's C code has for its base.
        for name, value in (("is_cuda", True), ("is_cpu", False)):
            # torch.compile asks descriptors; one of Python's would be counted with what a call enters.
            patches.enter_context(_class_attribute(name, value if idle else property(lambda _, value=value: value)))
        patches.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY))
        patches.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", bool))
        # A GPU's allocator has it at hand; a CPU's asks the system for that much.
        patches.enter_context(mock.patch.object(product_plans, "_CUBLAS_WORKSPACE", 256))
        # Kernels of activations have torch's bits on GPUs; nothing launched has any.
        patches.enter_context(mock.patch.dict(gated_kernels._agreed, clear=True))
        patches.enter_context(mock.patch.object(gated_kernels, "differing", return_value={}))
        patches.callback(_forget_plans)
        _forget_plans()
        for target, replacement in ((_routes, _route_on), *(_IDLE if torchs is None else torchs)):
            _replace(patches, target, replacement)
        yield


def _forget_plans() -> None:
    """Drops plans made for CPU tensors before, or with a stand-in."""
    _routes.cache_clear()
    product_plans.plan.cache_clear()
    with switch.definition_only():
        pass


@contextlib.contextmanager
def _class_attribute(name: str, value: Any) -> Iterator[None]:
    setattr(Tensor, name, value)
    try:
        yield
    finally:
        delattr(Tensor, name)


def _replace(patches: contextlib.ExitStack, target: Any, replacement: Callable[..., Any]) -> None:
    """Replaces a function everywhere in torch or blockfp, under whatever name it is held."""
    holders = [torch, *(module for name, module in list(sys.modules.items()) if name.startswith("blockfp"))]
    for module in holders:
        for name, value in list(vars(module).items()):
            if value is target:
                patches.enter_context(mock.patch.object(module, name, replacement))


def _route_on(device, *arguments, **options):
    return _routes(torch.device("cuda"), *arguments, **options)


def _scaled_mm(a: Tensor, b: Tensor, *arguments: Any) -> Tensor:
    dtype = next(argument for argument in arguments if isinstance(argument, torch.dtype))
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _mul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return a * b if out is None else out


_IDLE: tuple[Replacement, ...] = (
    (torch._scaled_mm, _scaled_mm),
    (torch._scaled_mm_v2, _scaled_mm),
    (torch.mm, _mm),
    (torch.mul, _mul),
)

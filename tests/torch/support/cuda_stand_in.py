"""The CUDA path of the Python code on a CPU, for counting: the library's calls and the matrix units do nothing."""

from types import SimpleNamespace

import torch
from blockfp.torch_backend.custom_ops import cuda, dequantize_plans, kernels, key_ops, linear_ops, ops, products, quantize_plans

from blockfp.kernels import cuda_library
from blockfp.kernels.routes import route

CAPABILITY = (9, 0)
_CALLS = ("amax", "amax_blocks", "quantize", "encode", "dequantize", "transpose", "interleave", "fold_keys", "product", "align")


def _nothing(*_):
    return None


def install(monkeypatch):
    """Makes CPU tensors take the CUDA path from now on."""
    library, routes, mm = SimpleNamespace(**dict.fromkeys(_CALLS, _nothing)), {}, torch.mm

    def route_on(device, *question):
        if question not in routes:
            options = dict(zip(("m", "n", "k", "in_order", "exact"), question[2:], strict=False))
            routes[question] = route(*question[:2], platform="cuda", capability=CAPABILITY, **options)
        return routes[question]

    monkeypatch.setattr(cuda, "library", lambda: library)
    monkeypatch.setattr(cuda, "_check", _nothing)
    for module in (kernels, key_ops, ops, quantize_plans, dequantize_plans):
        monkeypatch.setattr(module, "kernels_for", lambda x: cuda)
    monkeypatch.setattr(products, "route_on", route_on)
    library.cublas_version = lambda: 130_000
    monkeypatch.setattr(cuda_library, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: mm(a, b).to(out_dtype or a.dtype))
    forget()


def forget():
    """Drops the plans, which hold the library that they were made for."""
    for plans in (linear_ops._forwards, linear_ops._backwards, quantize_plans._plans, dequantize_plans._plans):
        plans.clear()

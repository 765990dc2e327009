"""The CUDA optimizer's two passes carried out on a CPU: what they read and write is what the tables point to."""

import ctypes
import math

import numpy as np
import torch
from blockfp.torch_backend.optimizer import optimizer_step

from blockfp.definition import layout, numerics
from blockfp.formats import FORMATS
from blockfp.kernels import native
from blockfp.kernels.calls import format_numbers
from blockfp.kernels.step_table import _AMAX, _NONE, _ROW, one_pass

# DLPack's: code * 256 + bits.
CODES = {torch.float32: 0x220, torch.float16: 0x210, torch.bfloat16: 0x410, torch.uint8: 0x108}
_BY_NUMBERS = {format_numbers(format): format for format in FORMATS if not one_pass(format)}


class Kernels:
    """Stands where `ops.cuda` and `cuda_steps` do in the optimizer's step; counts its calls."""

    def __init__(self):
        self.calls, self.tables = [], []

    def addresses(self, arrays, expected):
        """As kernels/cuda/adamw/step_arrays.cu says."""
        self.tables.append(expected)
        found = np.zeros(len(arrays), np.int64)
        for i, (x, (code, count)) in enumerate(zip(arrays, expected, strict=True)):
            if x is None:
                if code >= 0:
                    return found, i
                continue
            if code != CODES.get(x.dtype) or x.numel() != count or not x.is_contiguous() or x.device != arrays[0].device:
                return found, i
            found[i] = x.data_ptr()
        return found, -1

    def adamw(self, table, on):
        rows = table.view(_ROW).reshape(-1).copy()
        waiting = rows["output"] == _AMAX
        self.calls.append(("adamw", int(waiting.sum())))
        rows["output"][waiting] = _NONE
        native.adamw(rows.view(np.int64).reshape(len(rows), -1), on)
        for row in table.view(_ROW).reshape(-1)[waiting]:
            if _moves(row):
                amax = _memory(row["out_scales"], np.int32, 1)
                amax[0] = max(amax[0], numerics.amax(_weight(row), "fp8_e4m3").blocks.max())

    def adamw_codes(self, table, on):
        rows = table.view(_ROW).reshape(-1)
        self.calls.append(("adamw_codes", len(rows)))
        for row in rows:
            if not _moves(row):
                continue
            format = _BY_NUMBERS[tuple(int(row[name]) for name in ("element", "block_rows", "block_columns", "rule"))]
            weight, amax = _weight(row), _memory(row["first"], np.int32, 1)
            whole = numerics.Amax(amax.reshape((1,) * weight.ndim), None, None)
            if format.scale.two_level:
                whole = numerics.amax(weight, format)._replace(tensor=amax.reshape(()))
            codes, scales, tensor_scale = numerics.quantize(weight, format, amax=whole)
            _memory(row["out"], np.uint8, codes.size)[:] = codes.ravel()
            _memory(row["out_scales"], scales.dtype, scales.size)[:] = scales.ravel()
            if format.scale.two_level:
                assert scales.shape == layout.scales_shape(weight.shape, format)
                _memory(row["second"], np.float32, 1)[0] = tensor_scale
            else:
                assert row["second"] == 0


def install(monkeypatch):
    """Puts them in the optimizer's step for the rest of a test, and returns them."""
    kernels = Kernels()
    monkeypatch.setattr(optimizer_step, "kernels_for", lambda x: kernels)
    for module in ("cuda", "cuda_steps"):
        monkeypatch.setattr(optimizer_step, module, kernels)
    return kernels


def _moves(row):
    decay, rate, skip = row["coefficients"][[0, 7, 9]]
    return not skip and not (rate == 0 and decay == 1)


def _weight(row):
    shape = tuple(int(row[name]) for name in ("batches", "rows", "columns"))
    return _memory(row["weight"], np.float32, math.prod(shape)).reshape(shape)


def _memory(address, dtype, count):
    dtype = np.dtype(dtype)
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(int(address)), dtype)

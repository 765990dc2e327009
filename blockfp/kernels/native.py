"""The kernel library: quantize, dequantize and amax of NumPy arrays and CPU torch tensors, with the definition's bits.

The functions have the contract of `definition.numerics` and give the same bits. The library is loaded on first use, because
importing Apache TVM FFI takes a second. Where it can't be loaded `available()` is False, `status()` says why, and callers run
the definition instead.

Which instruction set runs (`instruction_set`, `use_instruction_set`) and on how many threads (`set_threads`) changes the
speed and nothing else.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from array_api_compat import is_torch_array

from ..definition import bits, checks, matrix_units, products
from ..definition.bits import Array
from ..definition.matrix_units import Summation
from ..definition.numerics import Amax, Origin, Quantized, check_members
from ..definition.products import Operand
from ..definition.rounding import WIDE, Key, key_words
from ..formats import Format
from . import calls, reused_memory
from .calls import DTYPE_NUMBERS, Call
from .library import Library, installed

LIBRARY = "libblockfp_cpu.so"

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NUMPY_DTYPES = {name: np.dtype(name) for name in ("uint8", "int32", "float32", "float16")} | {"bfloat16": _BFLOAT16}

_dtype_names: dict[Any, str] = {}


def _find() -> Path:
    found = installed(LIBRARY)
    if found is None:
        raise FileNotFoundError(f"{LIBRARY} was not built: install blockfp again on a machine with a C++ compiler")
    return found


_cpu = Library(
    "kernels",
    _find,
    (
        *("amax", "quantize", "dequantize", "rotate", "adamw", "amax_arrays", "quantize_arrays", "dequantize_arrays"),
        "product_arrays",
        *("instruction_sets", "instruction_set", "use_instruction_set", "set_threads"),
    ),
)

available = _cpu.available
library = _cpu.get


def status() -> str:
    """Says in one line which library is loaded and what it runs on, or why there is none."""
    if not available():
        return _cpu.missing()
    return f"{_cpu.loaded.path}: {instruction_set()} (of {', '.join(instruction_sets())}), up to {set_threads(0)} threads"


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that can run here, fastest first; the last is always "scalar"."""
    return tuple(str(name) for name in _cpu.get().instruction_sets())


def instruction_set() -> str:
    """The instruction set in use."""
    return str(_cpu.get().instruction_set())


def use_instruction_set(name: str) -> None:
    """Uses this instruction set from now on, in the whole process; every one gives the same bits.

    Raises:
        ValueError: it is not one of `instruction_sets()`.
    """
    if not _cpu.get().use_instruction_set(name):
        raise ValueError(f"instruction set {name!r} can't run here; use one of {', '.join(instruction_sets())}")


def set_threads(threads: int) -> int:
    """Uses at most so many threads a call from now on; 0 means one for each core. Returns the limit in use."""
    if threads < 0:
        raise ValueError(f"threads must be 0 (one for each core) or more, got {threads}")
    return int(_cpu.get().set_threads(threads))


def amax(x: Array, format: Format | str, *, origin: Origin = (0, 0)) -> Amax:
    """The largest magnitude of each block of x, a NumPy array or CPU tensor of any strides; see `numerics.amax`."""
    format, arrays = Format.parse(format), _arrays_of(x)
    call = calls.amax(tuple(x.shape), format, tuple(origin), "cpu.amax", _input_dtype(x))
    return Amax(**_carry_out(call, arrays, arrays.lend(x)))


def _carry_out(call: Call, arrays: _NumPy | _Torch, *inputs: Any, **given: Any) -> dict[str, Any]:
    """Makes a call of the library, with new arrays but for those that are given; returns all of them."""
    made = {
        name: given.get(name) if array is None or name in given else arrays.empty(*array) for name, array in call.arrays.items()
    }
    getattr(_cpu.get(), call.function.removeprefix("cpu."))(*inputs, *made.values(), *call.numbers.values())
    return made


def quantize(
    x: Array,
    format: Format | str,
    *,
    key: Key | None = None,
    eps: float = 0.0,
    nominal: str | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
) -> Quantized:
    """Quantizes a NumPy array or CPU tensor of any strides; see `numerics.quantize`."""
    format, arrays = Format.parse(format), _arrays_of(x)
    dtype = _input_dtype(x)
    call = calls.cpu_quantize(tuple(x.shape), dtype, format, eps, nominal, tuple(origin), shape and tuple(shape))
    return _quantize(arrays, x, call, format, key, 1, amax)


def _quantize(
    arrays: _NumPy | _Torch, x: Array, call: Call, format: Format, key: Key | None, random: int, amax: Amax | None, **kept: Any
) -> Quantized:
    """Makes a call that quantizes, with `random` bytes an element where there is a key."""
    if key is not None:
        key0, key1 = (int(word) & 0xFFFFFFFF for word in key_words(key))
        call = call._replace(numbers=call.numbers | {"random": random, "key0": key0, "key1": key1})
    scales = call.arrays["scales"]
    fields = {} if amax is None else _given(amax, scales[0] if scales else (), format)
    found = _carry_out(call, arrays, arrays.lend(x), **fields, **kept)
    return Quantized(found["codes"], found["scales"], found["tensor_scale"])


def requantize(
    x: Array,
    format: Format | str,
    scales: Array,
    tensor_scale: Array | None = None,
    *,
    key: Key | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
) -> Quantized:
    """Quantizes a float32 array of any strides with scales that go on from those it had; see `numerics.requantize`."""
    format, arrays = Format.parse(format), _arrays_of(x)
    if (dtype := _input_dtype(x)) != "float32":
        raise TypeError(f"the kernels requantize float32, got {dtype}")
    checks.check_scales(scales, tensor_scale, x.shape, format, origin)
    call = calls.cpu_quantize(tuple(x.shape), dtype, format, 0.0, None, tuple(origin), shape and tuple(shape), keeps=True)
    kept = {name: arrays.empty(*array) for name, array in call.arrays.items() if array is not None and name != "codes"}
    for new, old in zip(kept.values(), (scales, tensor_scale), strict=False):
        new[...] = old
    return _quantize(arrays, x, call, format, key, WIDE, None if amax is None else amax._replace(members=None), **kept)


def dequantize(
    codes: Array,
    scales: Array,
    tensor_scale: Array | None,
    format: Format | str,
    dtype: str,
    *,
    columns: int,
    origin: Origin = (0, 0),
) -> Array:
    """The values of codes and scales, in the same array library; see `numerics.dequantize`."""
    format = Format.parse(format)
    checks.check_output_dtype(dtype)
    shape = (*codes.shape[:-1], columns)
    checks.check_codes(codes, columns, format)
    checks.check_scales(scales, tensor_scale, shape, format, origin)
    arrays = _arrays_of(codes)
    out, factor = arrays.empty(shape, dtype), 1.0 if tensor_scale is None else float(tensor_scale)
    call = calls.dequantize(shape, dtype, format, tuple(origin), "cpu.dequantize")
    inputs = arrays.contiguous(codes), arrays.contiguous(scales)
    _carry_out(call, arrays, *inputs, tensor_scale=factor, out=arrays.lend(out))
    return out


def rotate(x: Array) -> Array:
    """The random Hadamard transform along the last axis of an array of any strides; see `rotation.rotate`."""
    library, arrays = _cpu.get(), _arrays_of(x)
    dtype = _input_dtype(x)
    out = arrays.empty(x.shape, dtype)
    library.rotate(arrays.lend(x), arrays.lend(out), DTYPE_NUMBERS[dtype])
    return out


def product(
    a: Operand,
    b: Operand,
    summation: Summation | str,
    *,
    dtype: str = "float32",
    bias: Array | None = None,
    addend: Array | None = None,
) -> Array:
    """Multiplies NumPy arrays or CPU tensors of two axes with the bits of a matrix unit; see `products.product`.

    Raises:
        ValueError: the summation has no such operands, or only the definition has the summation.
    """
    summation, arrays = matrix_units.named(summation), _arrays_of(a.codes)
    left, right = products.sides(a, b, summation)
    call = calls.product_arrays(left, right, summation)
    given = calls.product_inputs(left, right, summation, bias, addend, one=arrays.full((1, 1), 1), absent=arrays.full((0,), 0))
    out = _carry_out(call, arrays, *map(arrays.contiguous, given))["out"]
    return out if dtype == "float32" else bits.to_float(bits.from_float(out), dtype)


def summations() -> tuple[str, ...]:
    """Returns the names of the summations that `product` has here: none without the library."""
    return calls.SUMS_HERE if available() else ()


def adamw(table: np.ndarray, on: Any = None) -> None:
    """Takes AdamW steps in place, of a table of `step_table.pack`; see `adamw.update`. `on` is for GPUs (`cuda.adamw`).

    The arrays at the table's addresses must be alive and contiguous, which can't be checked here. Moments in fewer bits are
    rounded with `adamw.rounding_key`, codes to nearest.
    """
    _cpu.get().adamw(table)


def _given(amax: Amax, grid: tuple[int, ...], format: Format) -> dict[str, Array | None]:
    """Checks that an amax fits the format; returns its fields as the library takes them, by their names there."""
    nan = None if format.element.has_nan else amax.nan
    tensor = amax.tensor if format.scale.two_level else None
    if tuple(amax.blocks.shape) != grid:
        raise ValueError(f"amax.blocks of {format} must have shape {grid}, got {tuple(amax.blocks.shape)}")
    if (nan is None) != format.element.has_nan or (tensor is not None) != format.scale.two_level:
        raise ValueError(f"amax is not one of {format}: take it from amax(x, {str(format)!r})")
    check_members(amax, format)
    fields = Amax(amax.blocks, nan, tensor, amax.members)
    for name, field in zip(Amax._fields, fields, strict=True):
        if field is not None and bits.dtype_name(field) != "int32":
            raise TypeError(f"amax.{name} must be int32, got {bits.dtype_name(field)}")
    lent = [None if field is None else _arrays_of(field).contiguous(field) for field in fields]
    return {f"given_{name}": field for name, field in zip(Amax._fields, lent, strict=True)}


class _NumPy:
    """Lends NumPy arrays to the library, and makes new ones."""

    def empty(self, shape, dtype: str) -> np.ndarray:
        size = math.prod(shape)
        if size >= reused_memory.LEAST:
            memory = reused_memory.array(size * _NUMPY_DTYPES[dtype].itemsize)
            if memory is not None:
                return memory.view(_NUMPY_DTYPES[dtype]).reshape(shape)
        return np.empty(shape, _NUMPY_DTYPES[dtype])

    def full(self, shape, value: float) -> np.ndarray:
        return np.full(shape, value, np.float32)

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        return self.lend(np.ascontiguousarray(x))

    def lend(self, x: np.ndarray) -> np.ndarray:
        """Returns x as DLPack can carry it: without bfloat16, and aligned."""
        if x.dtype == _BFLOAT16:
            x = x.view(np.uint16)
        if not x.flags.aligned or (not x.flags.c_contiguous and any(stride % x.itemsize for stride in x.strides)):
            x = np.require(x, requirements=["C", "A"])
        return x if x.flags.writeable else np.asarray(_Writable(x))


class _Writable:
    """Lends a read-only array, which NumPy doesn't export through DLPack; the library only reads it."""

    def __init__(self, x: np.ndarray):
        self.owner = x
        self.__array_interface__ = {**x.__array_interface__, "data": (x.__array_interface__["data"][0], False)}


class _Torch:
    """Lends CPU tensors to the library, and makes new ones. torch is imported where the first tensor comes in."""

    def __init__(self):
        import torch

        # A default device is the user's, and has nothing to do with where these go.
        self._empty = partial(torch.empty, device="cpu")
        self._from_numpy = torch.from_numpy
        names = ("uint8", "int32", "float32", "float16", "bfloat16")
        self._dtypes = {name: getattr(torch, name) for name in names}

    def empty(self, shape, dtype: str) -> Any:
        size = math.prod(shape)
        if size >= reused_memory.LEAST:
            memory = reused_memory.array(size * self._dtypes[dtype].itemsize)
            if memory is not None:
                # Not `view`, for the result is no view of another tensor. Its storage can't be resized.
                empty: Any = self._empty(0, dtype=self._dtypes[dtype])
                return empty.set_(self._from_numpy(memory).untyped_storage(), 0, shape)
        return self._empty(shape, dtype=self._dtypes[dtype])

    def full(self, shape, value: float) -> Any:
        made = self._empty(shape, dtype=self._dtypes["float32"])
        return made.fill_(value)

    def contiguous(self, x: Any) -> Any:
        return self.lend(x.contiguous())

    def lend(self, x: Any) -> Any:
        if hasattr(x, "__tensor_flatten__"):
            raise TypeError(f"the CPU kernels take plain tensors, got a {type(x).__name__}, which has no memory of its own")
        if x.data_ptr() % x.element_size():  # as of torch.frombuffer
            x = x.detach().clone()
        # torch's negative bit: memory holds the negated values.
        return (x.detach() if x.requires_grad else x).resolve_neg()


_numpy = _NumPy()
_torch: _Torch | None = None


def _arrays_of(x: Array) -> _NumPy | _Torch:
    """The adapter of x's library; raises TypeError where x is neither a NumPy array nor a CPU torch tensor."""
    global _torch
    if isinstance(x, np.ndarray | np.generic):
        return _numpy
    if is_torch_array(x) and x.is_cpu:
        if _torch is None:
            _torch = _Torch()
        return _torch
    where = f" on {x.device}" if hasattr(x, "device") else ""
    raise TypeError(f"the CPU kernels take NumPy arrays and CPU torch tensors, got {type(x).__name__}{where}")


def _input_dtype(x: Array) -> str:
    """Checks that x can be quantized; returns the name of its dtype."""
    dtype = x.dtype
    if dtype not in _dtype_names or len(x.shape) < 2:
        checks.check_input(x)
        _dtype_names[dtype] = bits.dtype_name(x)
    return _dtype_names[dtype]

"""Checks of arguments. Every face and backend raises the same errors, before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar, NoReturn

import numpy as np

from ..formats import Format, block_name
from . import bits, layout
from .bits import Array
from .layout import DTYPES

_LARGEST = float(np.finfo(np.float32).max)


def check_input(x: Array) -> None:
    """Raises TypeError or ValueError unless x is an unmasked float32, float16 or bfloat16 array with two or more axes."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x must not be a masked array, whose masked values would be quantized too: pass x.filled(..) or x.data")
    dtype = bits.dtype_name(x)
    if dtype not in bits.FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(bits.FLOAT_DTYPES)}, got dtype {dtype}: cast it first")
    if len(x.shape) < 2:
        raise ValueError(f"x must have two or more axes, got shape {tuple(x.shape)}: reshape it to a matrix first")


def check_eps(eps: float) -> None:
    """Raises TypeError if eps is not a number, ValueError if it is negative or not finite in float32."""
    if not isinstance(eps, Real):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}: {eps!r}")
    if not 0 <= eps <= _LARGEST:
        raise ValueError(f"eps must be finite in float32 and not negative, got {eps}")


def check_limits(format: Format, eps: float, nominal: str) -> None:
    """Raises ValueError for an invalid eps or nominal dtype of FP8 scales, or for an eps with other formats."""
    if format.scale.dtype != "float32":
        if eps:
            raise ValueError(f"eps = {eps} has no meaning for {format}: only FP8 formats with fp32 scales take one")
        return
    check_eps(eps)
    if nominal not in bits.LARGEST_FINITE:
        raise ValueError(f"nominal must be one of {', '.join(bits.LARGEST_FINITE)}, got {nominal!r}")


def check_output_dtype(dtype: str) -> None:
    """Raises ValueError unless dtype names a dtype that `dequantize` can return."""
    if dtype not in bits.FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(bits.FLOAT_DTYPES)}, got {dtype!r}")


def output_dtype(dtype: Any) -> str:
    """Returns the name of an output dtype given in any form that NumPy accepts; raises TypeError or ValueError for others."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        raise TypeError(f"dtype must be one of {', '.join(bits.FLOAT_DTYPES)}, got {dtype!r}") from None
    check_output_dtype(name)
    return name


def nominal_dtype(dtype: Any) -> np.dtype:
    """Returns the NumPy dtype of the original array; raises TypeError unless it is float32, float16 or bfloat16."""
    dtype = np.dtype(dtype)
    if dtype not in DTYPES.values():
        raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return dtype


def check_parts(
    codes: Array, scales: Array, tensor_scale: Array | None, format: Format, columns: int, origin: tuple[int, int]
) -> None:
    """Raises TypeError or ValueError unless codes and scales form an array with `columns` columns in this format at
    `origin`."""
    check_place(columns, origin)
    check_codes(codes, columns, format)
    check_scales(scales, tensor_scale, (*codes.shape[:-1], columns), format, origin)


def check_place(columns: int, origin: tuple[int, int]) -> None:
    """Raises TypeError or ValueError unless columns and origin are non-negative integers."""
    if not hasattr(origin, "__len__") or len(origin) != 2:
        # Don't look at elements: an expanded array can have any number of them in the memory of one.
        got = f"{len(origin)} of them" if hasattr(origin, "__len__") else type(origin).__name__
        raise ValueError(f"origin must be of integers of 0 or more, (row, column), got {got}")
    for name, values in (("columns", (columns,)), ("origin", tuple(origin))):
        if not all(isinstance(value, int | np.integer) for value in values):
            raise TypeError(f"{name} must be of integers, got {values}")
        if min(values) < 0:
            raise ValueError(f"{name} must be of integers of 0 or more, (row, column) for origin, got {values}")


def check_square(format: Format) -> None:
    """Raises ValueError if transposing the codes doesn't give the codes of the transposed array."""
    if format.block is not None and not format.square:
        scales = "a scale for each row" if format.per_row else f"{block_name(format.block)} blocks"
        raise ValueError(
            f"{format} has {scales}, whose transpose is not exact: "
            "use a format with square blocks, or dequantize, transpose and quantize again"
        )


def check_matrix(shape: Sequence[int]) -> None:
    """Raises ValueError unless the array has two axes, as `.T` requires."""
    if len(shape) != 2:
        raise ValueError(f".T is for two axes, got shape {tuple(shape)}: .mT swaps the last two")


def check_codes(codes: Array, columns: int, format: Format) -> None:
    """Raises TypeError or ValueError unless codes are uint8 rows of `columns` packed codes."""
    if bits.dtype_name(codes) != "uint8":
        raise TypeError(f"codes must be uint8 or {format.element.native_dtype} for {format}, got {bits.dtype_name(codes)}")
    expected = layout.packed_columns(columns, format.element.bits)
    if len(codes.shape) < 2 or codes.shape[-1] != expected:
        raise ValueError(
            f"codes of {format} with {columns} columns must have shape [..., rows, {expected}], got {tuple(codes.shape)}"
        )


def check_scales(
    scales: Array, tensor_scale: Array | None, shape: Sequence[int], format: Format, origin: tuple[int, int] = (0, 0)
) -> None:
    """Raises TypeError or ValueError unless scales fit an array of `shape` in this format."""
    if bits.dtype_name(scales) != format.scale.dtype:
        names = " or ".join(dict.fromkeys((format.scale.dtype, format.scale.native_dtype)))
        raise TypeError(f"scales of {format} must be {names}, got {bits.dtype_name(scales)}")
    expected = layout.scales_shape(shape, format, origin)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales of {format} for shape {tuple(shape)} at origin {origin} must have shape {expected}, "
            f"got {tuple(scales.shape)}"
        )
    if (tensor_scale is None) == format.scale.two_level:
        need = "needs a tensor_scale" if tensor_scale is None else "has no tensor_scale"
        raise ValueError(f"{format} {need}")
    if tensor_scale is not None and (bits.dtype_name(tensor_scale), tuple(tensor_scale.shape)) != ("float32", ()):
        raise ValueError(
            f"tensor_scale must be float32 of shape (), got {bits.dtype_name(tensor_scale)} {tuple(tensor_scale.shape)}"
        )


# ---- quantized arrays used as values

_NO_EQUALITY = "compare format, codes, scales and tensor_scale for equal bits, or dequantize() for equal values"


_COMPARE = (np.array_equal, np.array_equiv)
_WRITE = (np.save, np.savez, np.savez_compressed, np.savetxt)


def array_function(self: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Serves as `__array_function__` of quantized arrays: runs NumPy's function, but not if it compares or writes.

    NumPy's comparisons take an array without values for one that is unequal, and return False instead of raising; those that
    write have emptied the file before they ask for values.
    """
    if function in _COMPARE:
        raise TypeError(f"numpy.{function.__name__} is not defined for a {type(self).__name__}: {_NO_EQUALITY}")
    if function in _WRITE:
        raise TypeError(
            f"numpy.{function.__name__} takes no {type(self).__name__}: save it by blockfp's save, or pass q.dequantize()"
        )
    return function._implementation(*args, **kwargs)


class NoValues:
    """Base of quantized arrays: operations that need values raise TypeError.

    Equality is one of them, because it could mean equal codes or equal values. Use `is`; hashing is by identity.
    """

    _hints: ClassVar[tuple[str, ...]] = ()
    """Notes added to its errors, one line each: alternatives for the caller."""

    # NumPy's operators defer to the methods below, and its functions raise.
    __array_ufunc__ = None
    __array_function__ = array_function

    def _refusal(self, what: str) -> TypeError:
        error = TypeError(f"{what}: q.dequantize() gives values")
        for hint in self._hints:
            error.add_note(hint)
        return error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise self._refusal("a QuantizedArray isn't an array of values, and codes aren't values")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not hasattr(other, "__array__"):
            return NotImplemented
        raise TypeError(f"== is not defined for a QuantizedArray: {_NO_EQUALITY}")

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise self._refusal("a QuantizedArray has no truth value: test `is None`, or its values")

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._refusal("a QuantizedArray can't be indexed, because codes and scales have other axes")

    def _refuse(self, other: Any = None) -> NoReturn:
        raise self._refusal("codes of a QuantizedArray can't be calculated with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __neg__ = __pos__ = __abs__ = __round__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

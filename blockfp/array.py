"""The NumPy face: `QuantizedArray`, `quantize` and `fake_quantize`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from . import notebook
from .definition import checks, layout, numerics
from .definition.checks import NoValues
from .definition.rounding import Key
from .formats import Format, FormatName
from .kernels import native


class BlockScaledArray(NoValues):
    """Base of the NumPy and JAX quantized arrays."""

    if TYPE_CHECKING:
        codes: Any
        scales: Any
        tensor_scale: Any
        format: Format
        dtype: Any

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def mT(self) -> Self: ...

    @classmethod
    def from_parts(
        cls,
        codes: Any,
        scales: Any,
        tensor_scale: Any = None,
        *,
        format: Format | FormatName,
        columns: int,
        dtype: Any,
        origin: tuple[int, int] = (0, 0),
    ) -> Self:
        """Makes a quantized array from existing codes and scales. Codes of one byte and scales are not copied.

        Args:
            codes: uint8 [..., rows, bytes], or elements as returned by `view_codes`.
            scales: one per block, in the format's storage dtype or as returned by `view_scales`.
            tensor_scale: float32 of shape () for formats with two levels of scales (NVFP4), else None.
            format: a `Format` or its name.
            columns: length of the last axis.
            dtype: float32, float16 or bfloat16: the dtype of the original.
            origin: (row, column) of the first element in the unsharded matrix.

        Raises:
            TypeError: codes, scales or dtype have a wrong dtype.
            ValueError: a shape doesn't fit, or the format is unknown.
        """
        return cls._from_parts(codes, scales, tensor_scale, Format.parse(format), columns, dtype, origin)

    @classmethod
    def _from_parts(cls, *parts: Any) -> Self:
        return cls(*parts)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        """Number of elements of the original array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.codes, self.scales, self.tensor_scale)
        return sum(part.size * part.dtype.itemsize for part in parts if part is not None)

    def _repr_html_(self) -> str | None:
        # JAX also makes trees of placeholders, which have no shape: notebooks then show the text.
        if not hasattr(self.codes, "shape"):
            return None
        return notebook.of_array(type(self).__name__, self.format, self.shape, self.dtype, self.nbytes)

    @property
    def T(self) -> Self:
        """The transposed matrix; `mT` restricted to two axes.

        Raises:
            ValueError: the array has more than two axes, or the blocks are not square.
        """
        checks.check_matrix(self.shape)
        return self.mT


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(BlockScaledArray):
    """An array stored as low-precision codes with one scale per block.

    Attributes:
        codes: uint8 [..., rows, bytes], packed along the last axis; `view_codes` returns them as elements.
        scales: uint8 or float32, one per block, of shape (1,) * ndim for one scale per tensor; `view_scales` returns numbers.
        tensor_scale: float32 of shape () for formats with two levels of scales (NVFP4), else None.
        format: the `Format`, or its name.
        columns: length of the last axis, which packed codes don't show.
        dtype: dtype of the original and default of `dequantize()`.
        origin: (row, column) of the first element in the unsharded matrix.
    """

    codes: np.ndarray
    scales: np.ndarray
    tensor_scale: np.ndarray | None
    format: Format
    columns: int
    dtype: np.dtype
    origin: tuple[int, int] = (0, 0)

    def __post_init__(self):
        for name in ("codes", "scales"):
            if not isinstance(getattr(self, name), np.ndarray):
                raise TypeError(f"{name} must be a NumPy array, got {type(getattr(self, name)).__name__}")
        object.__setattr__(self, "format", Format.parse(self.format))
        object.__setattr__(self, "codes", layout.stored_codes(self.codes, self.format))
        object.__setattr__(self, "scales", layout.stored_scales(self.scales, self.format))
        checks.check_parts(self.codes, self.scales, self.tensor_scale, self.format, self.columns, self.origin)
        object.__setattr__(self, "dtype", checks.nominal_dtype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the original array."""
        return (*self.codes.shape[:-1], self.columns)

    @property
    def mT(self) -> QuantizedArray:
        """The array with its last two axes swapped: exact, without requantizing.

        Raises:
            ValueError: the blocks are not square.
        """
        codes, scales = numerics.transpose(self.codes, self.scales, self.format, columns=self.columns)
        rows = self.codes.shape[-2]
        return QuantizedArray(codes, scales, self.tensor_scale, self.format, rows, self.dtype, (self.origin[1], self.origin[0]))

    def view_codes(self) -> np.ndarray:
        """Returns the codes as elements [..., rows, columns] of an ml_dtypes dtype; code times block scale is the value.

        float8_e4m3fn, float8_e5m2 and int8 (64 times the value) are views. float6_e3m2fn, float6_e2m3fn and float4_e2m1fn are
        unpacked copies, one element per byte.
        """
        return layout.view_codes(self.codes, self.columns, self.format)

    def view_scales(self) -> np.ndarray:
        """Returns a view of the scales as numbers: float8_e8m0fnu for MX, float8_e4m3fn for NVFP4 (multiply by `tensor_scale`),
        else float32.
        """
        return layout.view_scales(self.scales, self.format)

    def dequantize(self, dtype=None) -> np.ndarray:
        """Returns the values, rounded once to `dtype` (default: the dtype of the original)."""
        name = checks.output_dtype(self.dtype if dtype is None else dtype)
        run = native if native.available() else numerics
        return run.dequantize(
            self.codes, self.scales, self.tensor_scale, self.format, name, columns=self.columns, origin=self.origin
        )

    def __repr__(self) -> str:
        return f"QuantizedArray({self.format}, shape={self.shape}, dtype={self.dtype})"


def quantize(x: np.ndarray, format: Format | FormatName, *, key: Key | None = None) -> QuantizedArray:
    """Quantizes a NumPy array in blocks of its last two axes.

    Args:
        x: float32, float16 or bfloat16 (`ml_dtypes.bfloat16`), with two or more axes.
        format: a `Format` or its name; `blockfp.formats.NAMES` lists the names.
        key: None rounds to nearest even; a seed or two uint32 words round stochastically.

    Raises:
        TypeError: x is not a NumPy array of a supported dtype.
        ValueError: x has fewer than two axes, or the format or key is invalid.

    Example:
        >>> q = blockfp.quantize(np.ones((4, 64), np.float32), "mxfp8_e4m3")
        >>> q.codes.shape, q.scales.shape
        ((4, 64), (4, 2))
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"x must be a NumPy array, got {type(x).__name__}: "
            "use blockfp.jax.quantize for JAX and blockfp.torch.quantize for PyTorch"
        )
    checks.check_input(x)
    format = Format.parse(format)
    run = native if native.available() else numerics
    codes, scales, tensor_scale = run.quantize(x, format, key=key)
    return QuantizedArray(codes, scales, tensor_scale, format, x.shape[-1], x.dtype)


def fake_quantize(x: np.ndarray, format: Format | FormatName, *, key: Key | None = None) -> np.ndarray:
    """Quantizes and dequantizes x in its own dtype; takes the arguments of `quantize`."""
    return quantize(x, format, key=key).dequantize()

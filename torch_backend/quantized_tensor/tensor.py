"""`QuantizedTensor`: codes, scales and a format, wrapped as one tensor."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import blockfp
from blockfp import notebook
from blockfp.definition import checks
from blockfp.formats import Format, FormatName

from ..ops import dequantize_plans, library
from ..ops.library import DTYPES
from ..torch_internals import NO_TORCH_FUNCTION, forbid_pointer, make_wrapper_subclass
from . import fsdp
from .agreement import agree_before_gather
from .dispatch import run
from .geometry import COPIED, Base, Geometry, Origin
from .identity import NO_POINTER, Wrapper
from .sharding import place_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class QuantizedTensor(Wrapper):
    """Codes and scales in any format, as a tensor of the original's shape and dtype.

    It stores no values of that dtype: operations on values raise, and `dequantize()` returns them. Create it by `quantize`, or
    by `from_parts` from existing codes and scales. It can be a parameter, be saved, loaded, copied, moved to a device, and be
    an argument or result of compiled functions.

    Attributes:
        codes: uint8 [..., rows, bytes], packed along the last axis; `view_codes` returns them as elements.
        scales: uint8 or float32, one per block; (1,) * ndim for one scale per tensor; `view_scales` returns them as numbers.
        tensor_scale: float32 of shape () for NVFP4, else None.
        format: the `Format`. A compiled function can read it on arguments and parameters, not on tensors that it creates.

    `shape` and `dtype` are the original's. `mT` is a copy with the last two axes swapped, exact, without requantization, for
    square blocks and one scale per tensor; other blocks raise ValueError. Slices of rows, and of whole blocks along the last
    axis, share memory with the whole. `fully_shard` shards it and gathers codes and scales.

    `nbytes` counts codes and scales. `element_size()` is the nominal dtype's. `to(dtype)`, or setting `data` to such a copy,
    only changes the nominal dtype. `data_ptr()` identifies a weight (weights that share codes have equal ones); it is not a
    pointer.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    format: Format
    geometry: Geometry

    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, codes, scales, tensor_scale, format, columns, dtype, geometry=None):
        shape = (*codes.shape[:-1], columns)
        return make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        tensor_scale: Tensor | None,
        format: Format,
        columns: int,
        dtype: torch.dtype,
        geometry: Geometry | None = None,
    ):
        # No checks, since tracing passes placeholders; `from_parts` checks.
        self.codes = codes
        self.scales = scales
        self.tensor_scale = tensor_scale
        self.format = format
        self.geometry = Geometry() if geometry is None else geometry
        forbid_pointer(self)

    @classmethod
    def from_parts(
        cls,
        codes: Tensor,
        scales: Tensor,
        tensor_scale: Tensor | None = None,
        *,
        format: Format | FormatName,
        columns: int,
        dtype: torch.dtype,
        origin: Origin = (0, 0),
    ) -> QuantizedTensor:
        """Creates a quantized tensor from existing codes and scales, without copying them.

        Args:
            codes: uint8 [..., rows, bytes] (`definition.layout.codes_shape`), or in the form of `view_codes`.
            scales: uint8 or float32, one per block (`definition.layout.scales_shape`), or in the form of `view_scales`.
            tensor_scale: float32 of shape () for NVFP4, else None.
            format: a `Format` or its name.
            columns: length of the last axis, which packing hides.
            dtype: float32, float16 or bfloat16, the nominal dtype.
            origin: (row, column) of the first element in the unsharded matrix.

        Raises:
            TypeError: a part is not a tensor or has the wrong dtype; columns or origin are not integers.
            ValueError: the parts don't fit each other, the format or `columns`, or are on different devices; a negative origin.
        """
        format = Format.parse(format)
        parts = {"codes": codes, "scales": scales}
        if tensor_scale is not None:
            parts["tensor_scale"] = tensor_scale
        for name, part in parts.items():
            if not isinstance(part, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(part).__name__}")
            if part.device != codes.device:
                raise ValueError(f"{name} is on {part.device} and codes on {codes.device}: move them to one device")
            if part.layout is not torch.strided:
                raise TypeError(f"{name} must be dense, got layout {part.layout}: pass {name}.to_dense()")
            if part.requires_grad:
                raise ValueError(f"{name} requires grad, but no gradient flows into scales: pass {name}.detach()")
        codes, scales = library.stored(codes, scales.resolve_neg(), format)
        tensor_scale = None if tensor_scale is None else tensor_scale.resolve_neg()
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
        numbers = (columns, *origin) if isinstance(origin, tuple | list) else (columns,)
        if not any(isinstance(number, torch.SymInt) for number in numbers):
            checks.check_place(columns, origin)
        checks.check_codes(codes, columns, format)
        checks.check_scales(scales, tensor_scale, (*codes.shape[:-1], columns), format, origin)
        return cls(codes, scales, tensor_scale, format, columns, dtype, Geometry((origin[0], origin[1])))

    def with_parts(
        self,
        codes: Tensor,
        scales: Tensor,
        tensor_scale: Tensor | None = None,
        *,
        columns: int | None = None,
        dtype: torch.dtype | None = None,
        geometry: Geometry | None = None,
    ) -> QuantizedTensor:
        """Creates a tensor of other parts, unchecked; by default with this tensor's columns, dtype and geometry."""
        columns = self.shape[-1] if columns is None else columns
        dtype = self.dtype if dtype is None else dtype
        geometry = self.geometry if geometry is None else geometry
        return QuantizedTensor(codes, scales, tensor_scale, self.format, columns, dtype, geometry)

    @property
    def parts(self) -> list[Tensor]:
        """Codes, scales and, for formats with two levels, the tensor scale."""
        return [self.codes, self.scales] if self.tensor_scale is None else [self.codes, self.scales, self.tensor_scale]

    @property
    def origin(self) -> Origin:
        """(row, column) of the first element in the unsharded matrix; (0, 0) if unsharded."""
        return self.geometry.start

    @property
    def initial(self) -> Tensor | None:
        """Original values of exactly these rows, a plain CPU tensor, or None if not kept.

        An optimizer takes them as its masters and sets None; freezing the weight sets None too. They follow slices, copies and
        sharding, are never written to, and are not saved. Overwriting the codes drops them, unless the source has its own.
        """
        return self.geometry.initial

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        if values is not None and (values.shape != self.shape or values.device.type != "cpu" or values.dtype not in DTYPES):
            raise ValueError(
                f"initial must be a float tensor of shape {tuple(self.shape)} on the CPU, got {values.dtype} "
                f"{tuple(values.shape)} on {values.device}"
            )
        self.geometry.initial = None if values is None else values.detach()
        self.geometry.loaded = None if values is None else "values"

    def view_codes(self) -> Tensor:
        """Returns the codes as elements of a torch dtype, in the same memory; value = element * block scale.

        [..., rows, columns] of float8_e4m3fn, float8_e5m2 or int8 (64 times the value); for E2M1 [..., rows, ceil(columns / 2)]
        of float4_e2m1fn_x2, two elements per byte.

        Raises:
            TypeError: 6-bit elements, for which torch has no dtype.
        """
        return library.view_codes(self.codes, self.format)

    def view_scales(self) -> Tensor:
        """Returns the scales as numbers, in the same memory: float8_e8m0fnu for MX, float8_e4m3fn for NVFP4 (times
        `tensor_scale`), else float32.
        """
        return library.view_scales(self.scales, self.format)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the values, rounded once to `dtype`; the gradient passes through unchanged.

        Args:
            dtype: float32, float16 or bfloat16; by default the original's.

        Raises:
            TypeError: another dtype.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
        if self.requires_grad and torch.is_grad_enabled():
            return library.outputs(_Dequantize.apply(self, dtype), self, self, None)
        return dequantize_plans.dequantize_tensor(self, dtype)

    @property
    def requires_grad(self) -> bool:
        return Tensor.requires_grad.__get__(self)  # pyright: ignore

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Sets whether the weight is trained; freezing drops the original values, since a frozen weight gets no master."""
        before = self.requires_grad
        Tensor.requires_grad.__set__(self, value)  # pyright: ignore
        if before and not value:
            self.initial = None

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedTensor:
        self.requires_grad = requires_grad
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self.parts)

    def memory(self) -> Tensor:
        return self.codes

    def shift(self) -> int:
        return NO_POINTER

    def adopt(self, other: QuantizedTensor) -> None:
        self.codes, self.scales, self.tensor_scale = other.codes, other.scales, other.tensor_scale
        self.format, self.geometry = other.format, other.geometry

    def share_memory_(self) -> QuantizedTensor:
        """Moves codes and scales to memory that other processes can map, as `Tensor.share_memory_` does."""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.codes.is_shared()

    def _repr_html_(self) -> str:
        return notebook.of_array(type(self).__name__, self.format, tuple(self.shape), self.dtype, self.nbytes)

    def __repr__(self, *, tensor_contents=None) -> str:
        where = f", device='{self.device}'" if self.device.type != "cpu" else ""
        origin = f", origin={self.origin}" if self.origin != (0, 0) else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"QuantizedTensor({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}{where}{origin}{grad})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __tensor_flatten__(self):
        names = ["codes", "scales"] if self.tensor_scale is None else ["codes", "scales", "tensor_scale"]
        return names, (self.format, self.dtype, self.origin)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        format, dtype, origin = context
        parts = (inner["codes"], inner["scales"], inner.get("tensor_scale"))
        return QuantizedTensor(*parts, format, outer_size[-1], dtype, Geometry(origin))

    @fsdp.GatherHook
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], fsdp.GatherMetadata]:
        """Returns this shard's codes and scales for FSDP2 to gather (`fsdp.send`)."""
        if self.geometry.copied is not None:
            raise RuntimeError(COPIED)
        agree_before_gather()
        gather = fsdp.weight_gather(self.format, self.shape, self.geometry, *place_on(mesh))
        return fsdp.send(gather, self.codes, self.scales, self.tensor_scale)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: fsdp.GatherMetadata,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """Returns the whole weight from the gathered chunks, with `dtype` as its nominal dtype (`fsdp.receive`)."""
        received = fsdp.receive(gathered, metadata, dtype, out)
        return None if received is None else (QuantizedTensor(*received.arguments), received.derived)

    def _stable_hash_for_caching(self) -> str:
        # Identifies a quantized argument in torch.compile's disk cache; the parts' shapes follow from it. The version is
        # included because operations may change with it.
        identity = (
            blockfp.__version__,
            str(self.format),
            self.dtype,
            self.origin,
            tuple(self.shape),
            self.device,
            self.requires_grad,
        )
        return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()

    def __reduce_ex__(self, protocol):
        is_parameter = isinstance(self, torch.nn.Parameter)
        parts = (self.codes, self.scales, self.tensor_scale, str(self.format), self.shape[-1], self.dtype, self.origin)
        base = self.geometry.base
        return _rebuild_tensor, (*parts, self.requires_grad, is_parameter, base and (base.shape, base.origin))


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = q.dtype
        return dequantize_plans.dequantize_tensor(q, dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient.to(ctx.dtype), None


def _rebuild_tensor(codes, scales, tensor_scale, format, columns, dtype, origin, requires_grad, is_parameter, base):
    q = QuantizedTensor.from_parts(codes, scales, tensor_scale, format=format, columns=columns, dtype=dtype, origin=origin)
    q.geometry.base = base and Base(*base)
    return torch.nn.Parameter(q, requires_grad) if is_parameter else q.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild_tensor])

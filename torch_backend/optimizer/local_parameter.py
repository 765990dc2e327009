"""`LocalParameter`: this rank's shard of a parameter, its position in the whole, and its current step.

parameter (DTensor or plain)          codes or values that the model computes with
  | find
  v
LocalParameter                        local tensor and layout, recomputed only if the layout changes
  | gradient, state, coefficients, step
  v
row of a table                        input of the kernels (`step_table`); its constant fields are cached
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockfp.definition import adamw
from blockfp.definition.adamw import Coefficients
from blockfp.definition.muon import Settings
from blockfp.formats import Format
from blockfp.kernels import step_table
from blockfp.sharding.placement import Mesh, Placement, Shard, Sharding, StridedShard, from_dtensor

from ..ops.library import name_of
from ..quantized_tensor import sharding
from ..quantized_tensor.tensor import QuantizedTensor
from ..weights.cast_weight import CastWeight
from ..weights.requantize import quantization_of

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
SCALE_NAMES = ("exp_avg_scales", "exp_avg_sq_scales")
MOMENTUM_NAME = "momentum_buffer"
SCALES_OF = dict(zip(MOMENT_NAMES, SCALE_NAMES, strict=True)) | {MOMENTUM_NAME: "momentum_buffer_scales"}
"""The entry with the scales of an FP8 moment."""

# Users' names for `step_table.ARRAYS`.
_NAMES = ("gradient", "master", *MOMENT_NAMES, *SCALE_NAMES, "values or codes", "scales")


class LocalParameter:
    """This rank's shard of a parameter and the step it takes.

    An optimizer keeps one for each parameter. Between steps it holds no tensors, so replaced memory can be freed.

    Attributes:
        param: the parameter, a DTensor or a plain tensor.
        held: its local tensor, the one autograd knows.
        local: `held`, or the values of a `CastWeight`: quantized or plain.
        placements: a DTensor's placements, else None.
        start: (batch, row, column) of the first element in the unsharded array, with leading axes flattened.
        whole: (rows, columns) of the unsharded matrix.
        lies: sharding of the parameter.
        format: format of its codes; None for plain values.
        one_pass: the kernel that updates the master can also write the codes; equal on all ranks that share the parameter.
        two_passes: a second kernel can write them from the whole parameter's amax, since no block crosses ranks; likewise.
        ratio: for matrices that Muon steps, the ratio of their learning rate (`definition.muon.ratio`), else None.
        muon: their settings, and the factors of gradient and momentum in this step's direction.
        version: autograd version of `held` after the last step.
        number: the parameter's index in the optimizer.
        state: its optimizer state.
        gradient: local, contiguous.
        coefficients: the step's constants: numbers, or a float32 tensor in the same order if only the device knows them.
        step: the step's number, or a tensor likewise.
        row: the cached part of its table row; None before the arrays are known.
    """

    param: Tensor
    held: Tensor
    local: Tensor
    placements: tuple[Any, ...] | None
    start: tuple[int, int, int]
    whole: tuple[int, int]
    lies: Sharding
    format: Format | None
    one_pass: bool
    two_passes: bool
    version: int | None
    number: int
    state: dict[str, Tensor]
    gradient: Tensor
    coefficients: Coefficients | Tensor
    step: int | Tensor
    muon: tuple[Settings, tuple[Any, Any]]

    def __init__(self, param: Tensor | None = None):
        self._found: tuple | None = None
        self._arrays: tuple | None = None
        self.version = None
        self.ratio: float | None = None
        self.row: step_table.Row | None = None
        if param is not None:
            self.find(param)

    def find(self, param: Tensor) -> None:
        """Sets the local tensor, which FSDP replaces; recomputes the layout if shape, dtype, device or placement changed."""
        mesh = sharding.mesh_of(param)
        local, placements = param, None
        if mesh is not None:
            local, placements = sharding.local_of(param), param.placements  # pyright: ignore[reportAttributeAccessIssue]
        self.held = local
        if type(local) is CastWeight:
            local = local.values
        self.param, self.local, self.placements, format, origin = param, local, placements, None, None
        if isinstance(local, QuantizedTensor):
            format, origin = local.format, local.geometry.origin or local.geometry.start
        whole = None if mesh is None else param.shape
        found = (mesh, placements, whole, local.shape, local.dtype, local.device, format, origin)
        if found == self._found:
            return
        self._found = self._arrays = self.row = None  # reset until everything is known
        if local.is_neg():
            raise ValueError(
                f"params: the memory of a parameter of shape {tuple(param.shape)} holds the negated values (torch's negative "
                "bit, is_neg()): make the parameter of values.resolve_neg()"
            )
        self.lies = _lying(param)
        row, column = origin or (0, 0)
        self.start = (0, row, column) if mesh is None else _start(self.lies, sharding.rank_in(param, self.lies))
        self.whole, self.format = (self.lies.shape[-2], self.lies.shape[-1]), format
        self.one_pass = self.two_passes = False
        # The GPU kernel processes tiles and has no amax of a whole row.
        if format is not None and not ((format.per_row and local.is_cuda) or self._cuts(format)):
            self.one_pass = step_table.one_pass(format)
            self.two_passes = step_table.two_passes(format)
        self._reduced_over: tuple[str, ...] | None = None
        self._found = found

    def take_gradient(self, gradient: Any) -> None:
        """Takes this rank's shard of `param.grad`, contiguous; raises TypeError if it is sparse."""
        if gradient.layout is not torch.strided:
            raise TypeError(f"gradients must be dense, got layout {gradient.layout}: use sparse=False in the embedding")
        if self.placements is not None and (dtensor := sharding.as_dtensor(gradient)) is not None:
            if dtensor.placements != self.placements:
                dtensor = dtensor.redistribute(sharding.mesh_of(self.param), self.placements)
            gradient = dtensor.to_local()
        gradient = gradient.contiguous()
        self.gradient = gradient.resolve_neg() if gradient.is_neg() else gradient

    @staticmethod
    def forget(todo: list[LocalParameter]) -> None:
        """Drops the step's tensors."""
        for one in todo:
            one.param = one.held = one.local = one.state = one.gradient = one.coefficients = one.step = None  # pyright: ignore

    def begin(self, state: dict[str, Tensor]) -> None:
        """Begins another pass of the step, with other arrays."""
        self.state, self._arrays, self.row = state, None, None

    def constants(self, **changed: Any) -> Coefficients | Tensor:
        """Returns the step's coefficients with some of them replaced."""
        c = self.coefficients
        if isinstance(c, Coefficients):
            return c._replace(**changed)
        c = c.clone()
        for name, value in changed.items():
            c[Coefficients._fields.index(name)].fill_(value)
        return c

    @property
    def origin(self) -> tuple[int, int]:
        """Returns (row, column) of the first element with matrices stacked vertically; indexes the random bytes."""
        return (self.start[0] * self.whole[0] + self.start[1], self.start[2])

    def _cuts(self, format: Format) -> bool:
        return format.block is not None and self.cuts_blocks(format.block)

    def cuts_blocks(self, block: tuple[int, int]) -> bool:
        """Returns whether a block crosses ranks, or this part starts inside one; equal on every rank of a mesh."""
        if self.lies.mesh is sharding.ONE_RANK:
            return bool(self.start[1] % block[0] or self.start[2] % block[1])
        return _cuts_blocks(self.lies, block)

    @property
    def reduced_over(self) -> tuple[str, ...]:
        """Returns the names of the process groups that reduce the whole parameter's amax."""
        if self._reduced_over is None:
            assert isinstance(self.local, QuantizedTensor)
            step, groups = quantization_of(self.param, self.local)
            self._reduced_over = tuple(groups[axis] for axis in step.amax_axes)
        return self._reduced_over

    @property
    def tensor_scale_address(self) -> int:
        """Returns the address of the tensor scale, or 0 if the format has none."""
        scale = self.local.tensor_scale  # pyright: ignore[reportAttributeAccessIssue]
        if scale is None:
            return 0
        if scale.dtype is not torch.float32 or scale.numel() != 1 or scale.device != self.local.device:
            raise self._misfit("tensor scale", scale, (torch.float32, 1, 4))
        return scale.data_ptr()

    @property
    def scalars(self) -> Coefficients:
        """Returns the coefficients as separate scalars."""
        c = self.coefficients
        return c if isinstance(c, Coefficients) else Coefficients(*c.unbind())

    @property
    def moves(self) -> bool | Tensor:
        """Returns whether the step may change the weight; a tensor if only the device knows."""
        c = self.coefficients
        if isinstance(c, Coefficients):
            return not (adamw.stands_still(c) or c.skip)
        c = self.scalars
        return ~adamw.stands_still(c) & (c.skip == 0)

    def key(self, key: tuple[int, int], rounded: int) -> Any:
        """Returns the random key that rounds the weight or a moment in this step."""
        if isinstance(self.step, int):
            return adamw.rounding_key(key, self.step, self.number, rounded)
        # Filled on the device: a captured graph allows no host-to-device copies.
        words = [torch.full((), word, dtype=torch.int64, device=self.step.device) for word in (*key, self.number, rounded)]
        return adamw.rounding_key(torch.stack(words[:2]), self.step.to(torch.int32), words[2], words[3])

    def addresses(self, arrays: tuple[Tensor | None, ...], *, again: bool = False) -> list[int]:
        """Returns the addresses of a row (`step_table.ADDRESSES`), 0 for missing arrays; renews `row` if dtypes have changed.

        Raises TypeError or ValueError if an array is not contiguous or has another dtype, size or device than expected.
        """
        device, found = self.local.device, []
        for x, expected in zip(arrays[: len(step_table.ARRAYS)], self._arrays or self._expected(arrays), strict=True):
            if x is None and expected is None:
                found.append(0)
                continue
            if x is not None and expected is not None:
                dtype, count, alignment = expected
                if x.dtype is dtype and x.numel() == count and x.device == device and x.is_contiguous():
                    address = x.data_ptr()
                    if not address % alignment:
                        found.append(address)
                        continue
            if again:
                raise self._misfit(_NAMES[len(found)], x, expected)
            self._arrays = None
            return self.addresses(arrays, again=True)
        if isinstance(self.coefficients, Coefficients):
            found += (0, 0)
            return found
        for x, count in ((self.coefficients, len(Coefficients._fields)), (self.step, 1)):
            assert isinstance(x, Tensor)
            if x.device != device or x.dtype is not torch.float32 or x.numel() != count or not x.is_contiguous():
                raise self._misfit("step", x, (torch.float32, count, 4))
            found.append(x.data_ptr())
        return found

    def _expected(self, arrays: tuple[Tensor | None, ...]) -> tuple:
        """Sets `row` and returns (dtype, number of elements, alignment) of each array, or None."""
        gradient, _, first, _, _, _, out, *_ = arrays
        assert gradient is not None
        assert first is not None
        shape = tuple(self.local.shape)
        self.row = step_table.row(
            shape if len(shape) >= 2 else (1, math.prod(shape)),
            name_of(gradient.dtype),
            name_of(first.dtype),
            None if out is None or self.format is not None else name_of(out.dtype),
            None if out is None else self.format,
            nominal=name_of(self.local.dtype),
            start=self.start,
            whole=self.whole,
            two_passes=self.two_passes,
        )
        expected = ((getattr(torch, one[0]), one[1]) if one is not None else None for one in self.row.arrays)
        self._arrays = tuple(None if one is None else (*one, one[0].itemsize) for one in expected)
        return self._arrays

    def _misfit(self, name: str, x: Tensor | None, expected: tuple | None) -> Exception:
        what = f"{name} of parameter {self.number}, of shape {tuple(self.param.shape)},"
        if x is None or expected is None:
            return ValueError(f"{what} {'is missing' if x is None else 'must not be there'}")
        dtype, count, _ = expected
        if x.device != self.local.device:
            return ValueError(f"{what} must be on {self.local.device}, got one on {x.device}")
        if x.dtype is not dtype:
            return TypeError(f"{what} must be of {dtype}, got {x.dtype}")
        return ValueError(f"{what} must be contiguous, aligned, and hold {count} elements, got shape {tuple(x.shape)}")


def _lying(param: Tensor) -> Sharding:
    """Returns a parameter's sharding; a vector counts as a matrix of one row."""
    if param.ndim >= 2:
        return sharding.sharding_of(param)
    mesh, shape = sharding.mesh_of(param), (1, math.prod(param.shape))
    if mesh is None:
        return sharding.unsharded(shape)
    placements = from_dtensor(param.placements)  # pyright: ignore[reportAttributeAccessIssue]
    return _row(shape, sharding.core_mesh(mesh), placements)


# Many parameters share one layout.
_kept = lru_cache(maxsize=4096)


@_kept
def _row(shape: tuple[int, int], mesh: Mesh, placements: tuple[Placement, ...]) -> Sharding:
    return Sharding(shape, mesh, tuple(map(_along_columns, placements)))


def _along_columns(placement: Any) -> Any:
    if isinstance(placement, StridedShard):
        return StridedShard(1, placement.split_factor)
    return Shard(1) if isinstance(placement, Shard) else placement


@_kept
def _start(lies: Sharding, rank: int) -> tuple[int, int, int]:
    start, batch = lies.region(rank).start, 0
    for first, size in zip(start[:-2], lies.shape[:-2], strict=True):
        batch = batch * size + first
    return batch, start[-2], start[-1]


@_kept
def _cuts_blocks(lies: Sharding, block: tuple[int, int]) -> bool:
    last = len(lies.shape) - 1
    return not (lies.aligned(last - 1, block[0]) and lies.aligned(last, block[1]))

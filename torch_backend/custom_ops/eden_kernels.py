"""The CUDA library's MS-EDEN: the bits of `definition.eden`, from one read of the operand and another for its amax.

The tensor scale of an operand that holds an Inf is NaN. The functions enqueue work on the current stream, wait for nothing, and
may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockfp.definition import layout
from blockfp.definition.eden import Operand
from blockfp.definition.rotation import RANDOM_GROUP
from blockfp.formats import Format
from blockfp.kernels.cuda_library import library

from . import cuda
from .kernels import kernels_for

_FORMAT = Format.parse("nvfp4")
_OPERANDS: dict[Operand, int] = {"gradient": 1, "input": 2}


def take(x: Tensor, columnwise: bool) -> bool:
    """Says whether the kernels take x: on a CUDA device that has them, with neighbours along its rotated axis less than 2^31
    bytes apart. The definition takes all else.
    """
    return kernels_for(x) is cuda and abs(x.stride(-2 if columnwise else -1)) * x.element_size() < 1 << 31


def amaxes(x: Tensor, key: Tensor, columnwise: bool, origin: int) -> list[Tensor]:
    """Finds the fields of `numerics.amax` of the rotated values.

    Args:
        x: [.., rows, columns], float32, float16 or bfloat16, of any strides.
        key: of the cast, two words.
        columnwise: whether x is transposed first.
        origin: index of the first rotated element in the unsharded axis, a multiple of 128.

    Raises:
        TypeError, ValueError: as `eden.rotate`; a key on another device.
    """
    values, shape = _columns(x, columnwise, origin)
    blocks, nan = (x.new_empty(layout.scales_shape(shape, _FORMAT), dtype=torch.int32) for _ in range(2))
    tensor = x.new_empty((), dtype=torch.int32)
    library().amax_eden(values, cuda.key_beside(key, x).contiguous(), None, tensor, blocks, nan, origin)
    return [blocks, nan, tensor]


def quantize(
    x: Tensor,
    amax: Tensor | None,
    key: Tensor,
    operand: Operand,
    columnwise: bool,
    origin: Sequence[int],
    shape: Sequence[int] | None,
) -> list[Tensor]:
    """Rotates and quantizes x; returns codes, scales and tensor scale.

    Args:
        x, key, columnwise: as for `amaxes`.
        amax: int32 (), fp32 bits of the rotated tensor's amax, reduced over ranks; None to find that of x.
        operand: "input" or "gradient".
        origin: (row, column) of the first element in the unsharded matrix as it is encoded; the column is a multiple of 128.
        shape: (rows, columns) of that matrix, or None where it ends where x ends.

    Raises:
        TypeError, ValueError: as `eden.rotate` and `eden.quantize`; a key on another device.
    """
    values, encoded = _columns(x, columnwise, origin[1])
    codes, scales = cuda.outputs_of(x, encoded, _FORMAT)
    tensor_scale = x.new_empty((), dtype=torch.float32)
    measure = amax is None
    known = x.new_empty((2,), dtype=torch.int32) if amax is None else amax.view(1)
    cuda.check_beside(x, "x", amax=known)
    rows, columns = shape or (0, 0)
    library().quantize_eden(
        values, known, cuda.key_beside(key, x).contiguous(), codes, scales, tensor_scale, _OPERANDS[operand], measure,
        x.numel() > 0, origin[1], origin[0], columns, rows,
    )  # fmt: skip
    return [codes, scales, tensor_scale]


def _columns(x: Tensor, columnwise: bool, origin: int) -> tuple[Tensor, tuple[int, ...]]:
    """x with the rotated axis before the last, as the kernels take it, and the shape of what is encoded, which has it last."""
    cuda.check_input_on_device(x)
    if origin % RANDOM_GROUP:
        raise ValueError(f"origin {origin} of a rotated axis must be a multiple of {RANDOM_GROUP}: a group can't be cut")
    values = cuda.stack_of(x)
    return (values, tuple(x.mT.shape)) if columnwise else (values.mT, tuple(x.shape))

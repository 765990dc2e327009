"""The CUDA kernel library: quantize, dequantize and their parts for torch CUDA tensors, with the definition's bits.

The functions have the contract of `definition.numerics`; `quantize_both` adds the transposed direction from the same read. They
enqueue work on the current stream, wait for nothing, and may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from blockfp.definition import numerics
from blockfp.definition.bits import Array
from blockfp.definition.checks import check_codes, check_input, check_output_dtype, check_scales, check_square
from blockfp.definition.numerics import Amax, Origin, Quantized
from blockfp.definition.rounding import key_words
from blockfp.formats import Format
from blockfp.kernels import calls, switch
from blockfp.kernels.calls import Call
from blockfp.kernels.cuda_library import library
from blockfp.kernels.operand_cast import OperandCast

from .library import maker, name_of


class Both(NamedTuple):
    """One array quantized along both axes; and fp32 bits of its amax, int32 [1], where the scales needed it."""

    row: Quantized
    column: Quantized
    amax: Array | None = None


def check_input_on_device(x: Array) -> None:
    """Raises TypeError or ValueError where x can't be quantized, or is no CUDA tensor."""
    check_input(x)
    if not isinstance(x, torch.Tensor) or not x.is_cuda:
        where = f" on {x.device}" if hasattr(x, "device") else ""
        raise TypeError(f"the CUDA kernels take torch CUDA tensors, got {type(x).__name__}{where}")


def check_beside(x: torch.Tensor, name: str, **others: torch.Tensor | None) -> None:
    """Raises ValueError where another argument is not on x's device: a GPU reads another's memory wrongly or slowly."""
    device = x.device
    for other, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{other} is on {tensor.device} and {name} on {device}: pass {other}.to({name}.device)")


def stack_of(x: Array) -> Array:
    """Makes x a stack of matrices, as the library takes it; copies only where leading axes are not evenly spaced."""
    x = x.detach().resolve_neg()
    return x.flatten(0, -3) if x.ndim > 3 and not x.is_contiguous() else x


def key_beside(key: Any, x: Array) -> Any:
    """The key's two words as an int32 tensor beside x."""
    if key is None:
        return None
    if isinstance(key, torch.Tensor):
        check_beside(x, "x", key=key)
        return key.view(torch.int32) if key.dtype is torch.uint32 else key.to(torch.int32)
    words = [int(w) - (1 << 32) if int(w) >> 31 else int(w) for w in key_words(key)]
    return torch.tensor(words, dtype=torch.int32, device=x.device)


def carry_out(call: Call, *inputs: Any, **given: Array | None) -> dict[str, Any]:
    """Makes a call of the library, with new arrays beside its first input but for those that are given; returns all of them."""
    arrays: dict[str, Any] = {}
    for name, array in call.arrays.items():
        found = given.get(name)
        arrays[name] = inputs[0].new_empty(array[0], dtype=getattr(torch, array[1])) if found is None and array else found
    getattr(library(), call.function)(*inputs, *arrays.values(), *call.numbers.values())
    return arrays


def amax(x: Array, format: Format | str, *, origin: Origin = (0, 0)) -> Amax:
    """The largest magnitude of each block of x, a torch CUDA tensor of any strides; see `numerics.amax`."""
    check_input_on_device(x)
    format = Format.parse(format)
    found = carry_out(calls.amax(tuple(x.shape), format, origin), stack_of(x))
    return Amax(found["out"], None, None) if format.per_tensor else Amax(found["blocks"], found["nan"], found["tensor"])


_amax_of = amax  # where an argument has its name


def quantize(
    x: Array,
    format: Format | str,
    *,
    key: Any = None,
    eps: float = 0.0,
    nominal: str | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Quantizes a torch CUDA tensor; see `numerics.quantize`. `out`: contiguous parts on x's device to write to."""
    check_input_on_device(x)
    if amax is not None:
        check_beside(x, "x", **{f"amax.{field}": part for field, part in amax._asdict().items()})
    if out is not None:
        check_beside(x, "x", **{f"out.{field}": part for field, part in out._asdict().items()})
    format = Format.parse(format)
    if format.scale.four_over_six and not _chooses(x, format, origin, amax):
        return _by_definition(x, format, key, origin, shape, amax, out)
    cast = OperandCast(format, None, None if amax is None else "amax", eps=eps)
    return _quantize(x, cast, key, nominal, origin, shape, amax, out or _NOTHING).row


def _chooses(x: Array, format: Format, origin: Origin, amax: Amax | None) -> bool:
    """Says whether the kernels find blocks' scales by 4-over-6: of adjacent columns, and of blocks that are whole in x."""
    assert format.block is not None
    phase = [at % size for at, size in zip(origin, format.block, strict=True)]
    whole = phase == [0, 0] and all(size % one == 0 for size, one in zip(x.shape[-2:], format.block, strict=True))
    adjacent = x.shape[-1] == 1 or x.stride(-1) == 1 or x.numel() == 0
    return adjacent and not any(at % 8 for at in phase) and (amax is None or whole)


def _by_definition(x, format: Format, key, origin, shape, amax: Amax | None, out: Quantized | None) -> Quantized:
    """Quantizes in a format whose blocks choose between scales, where no CUDA kernel does: array operations do, slowly."""
    made = numerics.quantize(x.detach(), format, key=key_beside(key, x), origin=origin, shape=shape, amax=amax)
    if out is None:
        return made
    for part, new in zip(out, made, strict=True):
        if part is not None and new is not None:
            part.copy_(new)
    return out


def quantize_both(
    x: Array,
    format: Format | str,
    *,
    key: Any = None,
    eps: float = 0.0,
    nominal: str | None = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    rotate: bool = False,
    rows: bool = True,
    columns: bool = True,
) -> Both:
    """`quantize` of x and of x transposed, or one of them, from one read of x, whose columns must be adjacent.

    A key of four words has two for each direction. `rotate` is for NVFP4 in blocks of 1x16.
    """
    check_input_on_device(x)
    format = Format.parse(format)
    cast = OperandCast(format if rows else None, format if columns else None, rotate=rotate, eps=eps)
    return _quantize(x, cast, key, nominal, origin, shape)


_NOTHING = Quantized(None, None, None)


def _quantize(
    x, cast: OperandCast, key, nominal, origin: Origin, whole, given: Amax | None = None, out: Quantized = _NOTHING
) -> Both:
    key, format, (height, width) = key_beside(key, x), cast.row or cast.column, x.shape[-2:]
    assert format is not None
    place = {"origin": tuple(origin), "whole": None if whole is None else tuple(whole)}
    block = format.block or (1, 1)
    phase = (origin[0] % block[0], 0 if format.per_row else origin[1] % block[1])
    # Amaxes of whole blocks are those that the kernel finds itself.
    inside = phase == (0, 0) and height % block[0] == 0 and width % block[1] == 0
    adjacent = width == 1 or x.stride(-1) == 1 or x.numel() == 0
    if (given is not None and not inside) or (phase[0] | phase[1]) % 8 or not adjacent:
        if cast.column is not None:
            raise ValueError(f"origin {origin} or the strides of x can't be quantized along both axes in one read")
        given = given or amax(x, format, origin=origin)
        return Both(_encode(x, format, given, key, out, eps=cast.eps, nominal=nominal, **place), _NOTHING)
    whole_amax = given and (given.blocks if format.per_tensor else given.tensor)
    tensor_amax = None if whole_amax is None else whole_amax.reshape(1)
    call = calls.quantize(tuple(x.shape), nominal or name_of(x.dtype), cast, mark=False, **place)
    made = {"codes": out.codes, "scales": out.scales, "tensor_scale": out.tensor_scale}
    found = carry_out(call, stack_of(x), amax=tensor_amax, key=key, **made)
    row = Quantized(found["codes"], found["scales"], found["tensor_scale"])
    return Both(row, Quantized(found["codes_t"], found["scales_t"], found["tensor_scale_t"]), found["amax"])


def _encode(
    x,
    format: Format,
    given: Amax | None,
    key,
    out: Quantized,
    function="encode",
    *,
    nominal=None,
    eps=0.0,
    origin,
    whole,
    **kept,
) -> Quantized:
    """Quantizes by amaxes of the blocks; without them by the scales in `out`."""
    call = calls.encode(
        function, tuple(x.shape), nominal or name_of(x.dtype), format, eps, tuple(origin), whole and tuple(whole)
    )
    blocks, nan, tensor = (None if part is None else part.contiguous() for part in (given or (None,) * 3)[:3])
    amaxes = {"blocks": blocks, "nan": nan, "amax": tensor}
    found = carry_out(call, stack_of(x), key=key, **amaxes, **out._asdict(), **kept)
    return Quantized(found["codes"], found["scales"], found["tensor_scale"])


def encode(
    x: Array,
    format: Format | str,
    scales: Array,
    tensor_scale: Array | None = None,
    *,
    key: Any = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
) -> Array:
    """Codes of x for scales that are already there; see `numerics.encode`."""
    check_input_on_device(x)
    check_beside(x, "x", scales=scales, tensor_scale=tensor_scale)
    format = Format.parse(format)
    check_scales(scales, tensor_scale, x.shape, format, origin)
    there = Quantized(None, scales.contiguous(), tensor_scale)
    return _encode(x, format, None, key_beside(key, x), there, origin=origin, whole=shape).codes


def requantize(
    x: Array,
    format: Format | str,
    scales: Array,
    tensor_scale: Array | None = None,
    *,
    key: Any = None,
    origin: Origin = (0, 0),
    shape: tuple[int, int] | None = None,
    amax: Amax | None = None,
) -> Quantized:
    """Quantizes a float32 CUDA tensor with scales that go on from those it had; see `numerics.requantize`."""
    check_input_on_device(x)
    format = Format.parse(format)
    check_beside(x, "x", scales=scales, tensor_scale=tensor_scale)
    check_scales(scales, tensor_scale, x.shape, format, origin)
    if amax is None:
        amax = _amax_of(x, format, origin=origin)
    check_beside(x, "x", **{f"amax.{field}": part for field, part in amax._asdict().items()})
    kept = scales.clone(memory_format=torch.contiguous_format), None if tensor_scale is None else tensor_scale.clone()
    options = {"origin": origin, "whole": shape, "kept_tensor_scale": tensor_scale}
    return _encode(x, format, amax, key_beside(key, x), Quantized(None, *kept), "requantize", **options)


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
    """The values of codes and scales on a CUDA device; see `numerics.dequantize`."""
    format = Format.parse(format)
    check_beside(codes, "codes", scales=scales, tensor_scale=tensor_scale)
    check_output_dtype(dtype)
    shape = (*codes.shape[:-1], columns)
    check_codes(codes, columns, format)
    check_scales(scales, tensor_scale, shape, format, origin)
    call = calls.dequantize(shape, dtype, format, tuple(origin))
    return carry_out(call, codes.contiguous(), scales.contiguous(), tensor_scale=tensor_scale)["out"]


def transpose(codes: Array, scales: Array, format: Format | str, *, columns: int) -> tuple[Array, Array]:
    """Codes and scales of the transposed matrix; see `numerics.transpose`."""
    codes, turned = turner((codes, scales), Format.parse(format), columns)((codes, scales))
    return codes, scales.mT if turned is scales else turned


def turner(parts: Sequence[Array], format: Format, columns: int) -> Callable[[Sequence[Array]], tuple[Array, Array]]:
    """Plans `transpose` of [codes, scales, ..] that lie as these do; one scale for the whole tensor comes back itself."""
    codes, scales = parts[0], parts[1]
    check_beside(codes, "codes", scales=scales)
    return _turner(codes.shape, codes.dtype, codes.device, scales.shape, scales.dtype, format, columns)


@switch.memo
def _turner(codes, dtype, device, grid, scale_dtype, format, columns) -> Callable[[Sequence[Array]], tuple[Array, Array]]:
    check_square(format)
    check_codes(torch.empty(codes, dtype=dtype, device="meta"), columns, format)
    call = calls.transpose((*codes[:-1], columns), format)
    out, grid_out = call.arrays["out"], (*grid[:-2], grid[-1], grid[-2])
    assert out is not None
    new, new_scales = maker(out[0], dtype, device), maker(grid_out, scale_dtype, device)
    run, numbers, whole = library().transpose, tuple(call.numbers.values()), format.per_tensor
    numbers_of_scales = (32 if format.scale.dtype == "float32" else 8, *grid[-2:])

    def turn(parts: Sequence[Array]) -> tuple[Array, Array]:
        codes, scales = new(), parts[1]
        run(parts[0].contiguous(), codes, *numbers)
        if whole:
            return codes, scales
        turned = new_scales()
        run(scales.contiguous(), turned, *numbers_of_scales)
        return codes, turned

    return turn


def gradient_keys(
    run: Any, key: Array, step: Array | None, rank: int, groups: int, *, advance: bool = False, single: bool = False
) -> Array:
    """Folds the step, the rank (unless negative), each direction and each of `groups` (unless negative) into a key.

    `run` is the library's `fold_keys`. The key is int32 or int64 [2], the result int32 [groups or 1, 2, 2]; [2, 2] of a
    `single` one. `advance` raises the step afterwards, in the same launch.
    """
    if step is not None and step.device != key.device:
        check_beside(key, "key", step=step)
    shape, strides = ((2, 2), (2, 1)) if single else ((1 if groups < 0 else groups, 2, 2), (4, 2, 1))
    out = torch.empty_strided(shape, strides, dtype=torch.int32, device=key.device)
    run(key.contiguous(), step, rank, groups, advance, out)
    return out

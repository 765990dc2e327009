"""The CUDA kernel library: quantize, dequantize and their parts for torch CUDA tensors, with the definition's bits.

The functions have the contract of `definition.numerics`; `quantize_both` adds the transposed direction from the same read. They
enqueue work on the current stream, wait for nothing, and may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from blockfp.definition import bits, layout, numerics
from blockfp.definition.bits import Array
from blockfp.definition.checks import check_codes, check_input, check_output_dtype, check_scales, check_square
from blockfp.definition.numerics import Amax, Origin, Quantized
from blockfp.definition.rounding import key_words
from blockfp.formats import Format
from blockfp.kernels import switch
from blockfp.kernels.cuda_library import library
from blockfp.kernels.format_numbers import format_numbers, largest_multiplier

from .allocation import maker


class Both(NamedTuple):
    """One array quantized along both axes from one read.

    Attributes:
        row: the rowwise result.
        column: of the array transposed.
        amax: fp32 bits of the largest magnitude, int32 [1] (and that of the rotated values, [2]), where the scales needed it.
    """

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
    """Raises ValueError where another argument lies on another device than x, which the message calls `name`.

    The kernels run on x's device, and one GPU reads the memory of another wrongly or slowly.
    """
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


def outputs_of(x: Array, shape: tuple[int, ...], format: Format, origin: Origin = (0, 0)) -> tuple[Array, Array]:
    """Codes and scales of an array of this shape, beside x and not filled."""
    (codes, _), (scales, dtype) = layout.parts(shape, format, origin)[:2]
    scale_dtype = torch.float32 if dtype == "float32" else torch.uint8
    return x.new_empty(codes, dtype=torch.uint8), x.new_empty(scales, dtype=scale_dtype)


@lru_cache(maxsize=4096)
def limits(format: Format, eps: float, nominal: str) -> tuple[int, int]:
    """Returns fp32 bits of eps and of the largest multiplier, as the library takes them."""
    return bits.constant_bits(eps), largest_multiplier(format, eps, nominal)


def amax(x: Array, format: Format | str, *, origin: Origin = (0, 0)) -> Amax:
    """The largest magnitude of each block of x, a torch CUDA tensor of any strides; see `numerics.amax`."""
    check_input_on_device(x)
    format = Format.parse(format)
    grid = layout.scales_shape(x.shape, format, origin)
    blocks = x.new_empty(grid, dtype=torch.int32)
    if format.per_tensor:
        library().amax(stack_of(x), blocks)
        return Amax(blocks, None, None)
    nan = None if format.element.has_nan else x.new_empty(grid, dtype=torch.int32)
    tensor = x.new_empty((), dtype=torch.int32) if format.scale.two_level else None
    library().amax_blocks(stack_of(x), blocks, nan, tensor, *format_numbers(format), *origin)
    return Amax(blocks, nan, tensor)


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
    """Quantizes a torch CUDA tensor; see `numerics.quantize`, whose arguments, bits and errors these are.

    Args:
        out: contiguous parts of the right shapes on x's device to write to, instead of new ones.
    """
    check_input_on_device(x)
    if amax is not None:
        check_beside(x, "x", **{f"amax.{field}": part for field, part in amax._asdict().items()})
    if out is not None:
        check_beside(x, "x", **{f"out.{field}": part for field, part in out._asdict().items()})
    format = Format.parse(format)
    if format.scale.four_over_six and not _chooses(x, format, origin, amax):
        return _by_definition(x, format, key, origin, shape, amax, out)
    return _quantize(x, format, key, eps, nominal, origin, shape, amax, columns=False, rotate=False, out=out).row


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
    """`quantize` of x and of x transposed, from one read of x.

    Args:
        x: torch CUDA tensor with adjacent columns.
        key: two words for both directions, or an int32 tensor [4] whose second pair is for the transposed one.
        rotate: the random Hadamard transform before the transposed direction (NVFP4 in blocks of 1x16).
        rows, columns: False leaves out a direction, whose codes and scales are then None.
        format, eps, nominal, origin, shape: as for `quantize`.
    """
    check_input_on_device(x)
    format = Format.parse(format)
    return _quantize(x, format, key, eps, nominal, origin, shape, None, columns=columns, rotate=rotate, rows=rows)


def _quantize(x, format: Format, key, eps, nominal, origin, shape, given, *, columns, rotate, rows=True, out=None) -> Both:
    eps_bits, largest = limits(format, eps, nominal or bits.dtype_name(x))
    key = key_beside(key, x)
    run, two_level = library(), format.scale.two_level
    *leading, height, width = x.shape
    codes = scales = tensor_scale = tensor_scale_t = None
    if out is not None:
        codes, scales, tensor_scale = out
    elif rows:
        codes, scales = outputs_of(x, (*leading, height, width), format, origin)
    if two_level and tensor_scale is None:
        tensor_scale = x.new_empty((), dtype=torch.float32)
    if two_level and columns:
        # A rotated direction has a scale of its own.
        tensor_scale_t = x.new_empty((), dtype=torch.float32)
    x = stack_of(x)
    place = (*origin, *(shape or (0, 0)))
    if format.per_row:
        return quantize_rows(run, x, format, given, key, (codes, scales), eps_bits, largest, place, rows, columns)
    block = format.block or (1, 1)
    phase = (origin[0] % block[0], origin[1] % block[1])
    # Amaxes of whole blocks are those that the kernel finds itself.
    whole = phase == (0, 0) and height % block[0] == 0 and width % block[1] == 0
    adjacent = width == 1 or x.stride(-1) == 1 or x.numel() == 0
    if (given is not None and not whole) or (phase[0] | phase[1]) % 8 or not adjacent:
        if columns:
            raise ValueError(f"origin {origin} or the strides of x can't be quantized along both axes in one read")
        given = given or amax(x, format, origin=origin)
        _encode(run, x, format, given, key, codes, scales, tensor_scale, eps_bits, largest, place)
        return Both(Quantized(codes, scales, tensor_scale), Quantized(None, None, None))
    measure, tensor_amax = False, None
    if format.per_tensor or two_level:
        if given is not None:
            tensor_amax = (given.blocks if format.per_tensor else given.tensor).reshape(1)
        else:
            measure, tensor_amax = True, x.new_empty((2,) if rotate else (1,), dtype=torch.int32)
    codes_t = scales_t = None
    if columns:
        codes_t, scales_t = outputs_of(x, (*leading, width, height), format, (origin[1], origin[0]))
    run.quantize(
        x, tensor_amax, None, key, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t, *format_numbers(format),
        measure, eps_bits, largest, rotate, False, *place,
    )  # fmt: skip
    return Both(Quantized(codes, scales, tensor_scale), Quantized(codes_t, scales_t, tensor_scale_t), tensor_amax)


def quantize_rows(
    run, x, format: Format, given: Amax | None, key, parts, eps_bits, largest, place, rows: bool, columns: bool
) -> Both:
    """Quantizes with a scale for each row, or for each column, whose amaxes need a pass of their own, and tells the largest."""
    made, largest_of_all = [], None
    for number, (wanted, turned) in enumerate(((rows, False), (columns, True))):
        if not wanted:
            made.append(Quantized(None, None, None))
            continue
        values, origin = (x.mT.contiguous(), place[1::-1]) if turned else (x, place[:2])
        codes, scales = parts if not turned else outputs_of(values, tuple(values.shape), format, origin)
        own = given or amax(values, format, origin=origin)
        words = key if key is None or key.numel() == 2 else key.view(2, 2)[number].contiguous()
        whole = place[:1:-1] if turned else place[2:]
        _encode(run, values, format, own, words, codes, scales, None, eps_bits, largest, (*origin, *whole))
        made.append(Quantized(codes, scales, None))
        if largest_of_all is None and own.blocks.numel():
            largest_of_all = own.blocks.amax().view(1)
    row, column = made
    return Both(row, column, largest_of_all)


def _encode(run, x, format: Format, given: Amax, key, codes, scales, tensor_scale, eps_bits, largest, place) -> None:
    blocks, nan, tensor = (None if part is None else part.contiguous() for part in given[:3])
    run.encode(x, blocks, nan, tensor, key, codes, scales, tensor_scale, *format_numbers(format), eps_bits, largest, *place)


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
    codes = x.new_empty(layout.codes_shape(x.shape, format), dtype=torch.uint8)
    library().encode(
        stack_of(x), None, None, None, key_beside(key, x), codes, scales.contiguous(), tensor_scale,
        *format_numbers(format), 0, 0, *origin, *(shape or (0, 0)),
    )  # fmt: skip
    return codes


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
    codes = x.new_empty(layout.codes_shape(x.shape, format), dtype=torch.uint8)
    new = Quantized(
        codes, scales.clone(memory_format=torch.contiguous_format), None if tensor_scale is None else tensor_scale.clone()
    )
    blocks, nan, tensor = (None if part is None else part.contiguous() for part in amax[:3])
    library().requantize(
        stack_of(x), blocks, nan, tensor, key_beside(key, x), *new, tensor_scale, *format_numbers(format), *origin,
        *(shape or (0, 0)),
    )  # fmt: skip
    return new


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
    out = codes.new_empty(shape, dtype=getattr(torch, dtype))
    library().dequantize(codes.contiguous(), scales.contiguous(), tensor_scale, out, *format_numbers(format), *origin)
    return out


def transpose(codes: Array, scales: Array, format: Format | str, *, columns: int) -> tuple[Array, Array]:
    """Codes and scales of the transposed matrix; see `numerics.transpose`."""
    format = Format.parse(format)
    out, turned = turned_parts((codes, scales), format, columns)
    return out, scales.mT if turned is scales else turned


def turned_parts(parts: Sequence[Array], format: Format, columns: int) -> tuple[Array, Array]:
    """As `transpose`, of [codes, scales, ..]; one scale for the whole tensor comes back itself."""
    codes, scales = parts[0], parts[1]
    key = (format, codes.shape, codes.dtype, codes.device, scales.shape, scales.dtype, scales.device, columns)
    turn = _turns.get(key)
    if turn is None:
        if len(_turns) >= _MOST_TURNS:
            _turns.clear()
        turn = _turns[key] = turner(parts, format, columns)
    return turn(parts)


def turner(parts: Sequence[Array], format: Format, columns: int) -> Callable[[Sequence[Array]], tuple[Array, Array]]:
    """Plans `turned_parts` of parts that lie as these do."""
    codes, scales = parts[0], parts[1]
    check_beside(codes, "codes", scales=scales)
    check_square(format)
    check_codes(codes, columns, format)
    leading, rows = tuple(codes.shape[:-2]), codes.shape[-2]
    new = maker((*leading, *layout.codes_shape((columns, rows), format)), codes.dtype, codes.device)
    *groups, down, across = scales.shape
    new_scales = maker((*groups, across, down), scales.dtype, scales.device)
    run, size, size_of_scales = library().transpose, format.element.bits, 32 if format.scale.dtype == "float32" else 8
    whole = format.per_tensor

    def turn(parts: Sequence[Array]) -> tuple[Array, Array]:
        out, scales = new(), parts[1]
        run(parts[0].contiguous(), out, size, rows, columns)
        if whole:
            return out, scales
        turned = new_scales()
        run(scales.contiguous(), turned, size_of_scales, down, across)
        return out, turned

    return turn


_turns: dict[Any, Callable[[Sequence[Array]], tuple[Array, Array]]] = {}
"""Plans of `turned_parts`, made once for tensors of a kind."""
switch.when_turned(_turns.clear)

_MOST_TURNS = 4096


def gradient_keys(
    key: Array, step: Array | None, rank: int, groups: int, *, advance: bool = False, single: bool = False
) -> Array:
    """`fold_in` of a key and, one after another, the step, the rank, 0 or 1 for the direction, and the group.

    Args:
        key: int32 or int64 [2] on a CUDA device.
        step: int64 of one element beside it, or None.
        rank: negative where none is folded in.
        groups: how many; negative for a layer without groups.
        advance: raises the step by one afterwards, in the same launch.
        single: leaves out the axis of groups, of a layer without.

    Returns:
        int32 [groups or 1, 2, 2]; [2, 2] of a single one.
    """
    if step is not None and step.device != key.device:
        check_beside(key, "key", step=step)
    shape, strides = ((2, 2), (2, 1)) if single else ((1 if groups < 0 else groups, 2, 2), (4, 2, 1))
    out = torch.empty_strided(shape, strides, dtype=torch.int32, device=key.device)
    library().fold_keys(key.contiguous(), step, rank, groups, advance, out)
    return out

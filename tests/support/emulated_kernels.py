"""The CUDA library's functions of whole arrays, carried out by the definition on CPU tensors; see emulated_cuda.py."""

import math
import struct

import torch
from blockfp.torch_backend.ops.layer.activations import ROWS, activate, gradients

from blockfp.definition import alignment, bits, layout, numerics, rotation, rounding, scaling
from blockfp.definition.numerics import Amax
from blockfp.formats import E4M3, E5M2, FORMATS, WHOLE_ROW, Format
from blockfp.kernels import calls

BY_NUMBERS = {calls.format_numbers(format): format for format in FORMATS}
_TENSOR = Format.parse("fp8_e4m3")


def float_of(word):
    return struct.unpack("f", struct.pack("i", word))[0]


def write(out, made):
    """What a kernel writes, unseen by torch, to memory of the caller's that is as large and of that size of elements."""
    if out is None:
        assert made is None
        return
    assert made is not None
    assert out.is_contiguous()
    assert out.numel() == made.numel(), f"room for {out.numel()} elements, and there are {made.numel()}"
    assert out.element_size() == made.element_size()
    out.data.view(made.dtype).view(-1).copy_(made.reshape(-1))


def _whole(pair):
    return None if pair == (0, 0) else pair


def amax_bits(x):
    return numerics.amax(x, _TENSOR).blocks.reshape(())


def _key(key, direction):
    return None if key is None else key.reshape(-1, 2)[direction if key.numel() == 4 else 0]


def _spoil(x, quantized):
    """Marks an Inf in x as overflow.py says."""
    if not bool(x.isinf().any()):
        return quantized
    last = quantized.scales if quantized.tensor_scale is None else quantized.tensor_scale
    last.fill_(255 if last.dtype is torch.uint8 else math.nan)
    return quantized


def amax(x, out):
    write(out[:1] if out.numel() == 2 else out, amax_bits(x))
    if out.numel() == 2:
        write(out[1:], amax_bits(rotation.rotate(x.mT)))


def record_amax(amax, history):
    value = amax.view(torch.float32).reshape(())
    if bool(value.isfinite()):
        write(history[:1], torch.maximum(history[:1], value))


def _operands(state):
    """Histories and scales one after the other, and the index of the first that the kernel doesn't take, or -1."""
    taken = set()
    for i, x in enumerate(state):
        sized = x.numel() == 1 if i % 2 else x.numel() >= 1
        if not sized or x.dtype is not torch.float32 or not x.is_contiguous() or x.data_ptr() in taken:
            return [], i
        taken.add(x.data_ptr())
    return list(zip(state[::2], state[1::2], strict=True)), -1


def newest_amaxes(out, *state):
    operands, misfit = _operands(state)
    if misfit < 0:
        write(out, torch.stack([history[0] for history, _ in operands]))
    return misfit


def update_scales(options, newest, *state):
    operands, misfit = _operands(state)
    if misfit >= 0:
        return misfit
    assert options.shape == (len(operands), 2)
    assert newest is None or newest.numel() == len(operands)
    for place, ((history, scale), (target, alone)) in enumerate(zip(operands, options.tolist(), strict=True)):
        # Both elements' largest numbers differ in the exponent alone, as by a margin.
        element = E5M2 if target >= scaling.largest_with_margin(E5M2, 0) else E4M3
        margin, rest = divmod(scaling.largest_with_margin(element, 0) - target, 1 << 23)
        assert rest == 0
        before = history.clone()
        if newest is not None:
            before[0] = newest.view(torch.float32)[place]
        algorithm = "most_recent" if alone else "max"
        moved, new = scaling.update(before, scale.clone(), element, margin=margin, algorithm=algorithm)
        write(history, moved)
        write(scale, new)
    return -1


def amax_blocks(x, blocks, nan, tensor, element, block_rows, block_columns, rule, row, column):
    found = numerics.amax(x, BY_NUMBERS[element, block_rows, block_columns, rule], origin=(row, column))
    write(blocks, found.blocks)
    if nan is not None:
        write(nan, found.nan)
    if tensor is not None:
        write(tensor, found.tensor)


def quantize(
    x, key, amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t, element, block_rows, block_columns,
    rule, measure, eps_bits, largest_bits, rotate_t, rows_ordered, columns_ordered, mark, row, column, rows, columns,
):  # fmt: skip
    format = BY_NUMBERS[element, block_rows, block_columns, rule]
    eps = float_of(eps_bits)
    # x's own, or that of an update whose master x is.
    nominal = next(
        name
        for name in (bits.dtype_name(x), *calls.DTYPE_NUMBERS)
        if calls.largest_multiplier(format, eps, name) == largest_bits
    )
    assert not mark or format.has_tensor_scale or recorded is not None
    words = amax_bits(x)
    if recorded is not None:
        write(recorded, words if format.per_tensor else words * (words == bits.INFINITY))
    multiplied = format.per_tensor and amax.dtype is torch.float32
    if measure and multiplied:
        amax = scaling.delayed_multiplier(amax, words.reshape(amax.shape), format, eps)
    elif measure:
        write(amax[:1], words)
        if rotate_t:
            write(amax[1:], amax_bits(rotation.rotate(x.mT)))
    directions = (
        (x, rows_ordered, (codes, scales, tensor_scale), (row, column), (rows, columns)),
        (x.mT, columns_ordered, (codes_t, scales_t, tensor_scale_t), (column, row), (columns, rows)),
    )
    for number, (values, ordered, out, origin, shape) in enumerate(directions):
        if out[0] is None:
            continue
        turned = number == 1
        values = rotation.rotate(values) if turned and rotate_t else values
        options = {"key": _key(key, number), "eps": eps, "nominal": nominal, "origin": origin, "shape": _whole(shape)}
        if multiplied:
            options = {"key": options["key"], "multiplier": amax, "origin": origin, "shape": _whole(shape)}
        elif format.per_tensor:
            options["amax"] = Amax(amax.reshape((1,) * x.ndim), None, None)
        elif format.scale.two_level:
            found = numerics.amax(values, format, origin=origin)
            options["amax"] = found._replace(tensor=amax[-1 if turned and rotate_t else 0].reshape(()))
        made = numerics.quantize(values, format, **options)
        if mark:
            made = _spoil(x, made)
        if ordered:
            assert format.block in ((1, 128), (1, WHOLE_ROW))
            assert (x.ndim, row, column) == (2, 0, 0)
            made = made._replace(scales=in_order(made.scales, math.nan))
        for to, part in zip(out, made, strict=True):
            # One scale may be the same memory for both directions.
            write(to, part)


def encode(
    x, blocks, nan, amax, key, codes, scales, tensor_scale, element, block_rows, block_columns, rule, eps_bits, largest_bits,
    row, column, rows, columns,
):  # fmt: skip
    format = BY_NUMBERS[element, block_rows, block_columns, rule]
    place = {"key": _key(key, 0), "origin": (row, column), "shape": _whole((rows, columns))}
    if blocks is None:
        return write(codes, numerics.encode(x, format, scales, tensor_scale, **place))
    given = Amax(blocks, nan, amax)
    made = numerics.quantize(x, format, eps=float_of(eps_bits), amax=given, **place)
    for to, part in zip((codes, scales, tensor_scale), made, strict=True):
        write(to, part)


def requantize(
    x, blocks, nan, amax, key, codes, scales, tensor_scale, kept_tensor_scale, element, block_rows, block_columns, rule,
    row, column, rows, columns,
):  # fmt: skip
    format = BY_NUMBERS[element, block_rows, block_columns, rule]
    assert x.dtype is torch.float32
    place = {"key": _key(key, 0), "origin": (row, column), "shape": _whole((rows, columns)), "amax": Amax(blocks, nan, amax)}
    kept = None if kept_tensor_scale is None else kept_tensor_scale.reshape(())
    made = numerics.requantize(x, format, scales, kept, **place)
    for to, part in zip((codes, scales, tensor_scale), made, strict=True):
        write(to, part)


def dequantize(codes, scales, tensor_scale, out, element, block_rows, block_columns, rule, row, column):
    format = BY_NUMBERS[element, block_rows, block_columns, rule]
    if format.scale.two_level:
        tensor_scale = torch.ones(()) if tensor_scale is None else tensor_scale.reshape(())
    name, columns = str(out.dtype).removeprefix("torch."), out.shape[-1]
    made = numerics.dequantize(codes, scales, tensor_scale, format, name, columns=columns, origin=(row, column))
    write(out, made.contiguous())


def transpose(x, out, size, rows, columns):
    if not x.numel():
        return write(out, x)
    if size in (8, 32):
        return write(out, x.reshape(-1, rows, columns).mT.contiguous())
    lines = x.reshape(-1, rows, x.shape[-1])
    write(out, layout.pack(layout.unpack(lines, size, columns).mT, size))


def fold_keys(key, step, rank, groups, advance, out):
    words = tuple(int(word) & 0xFFFFFFFF for word in key)
    if step is not None:
        words = rounding.fold_in(words, int(step) & 0xFFFFFFFF)
        step += int(advance)
    if rank >= 0:
        words = rounding.fold_in(words, rank)
    numbers = (None,) if groups < 0 else range(groups)
    keys = [[rounding.gradient_key(words, way, group=number) for way in (0, 1)] for number in numbers]
    write(out, torch.tensor(keys, dtype=torch.int64).to(torch.int32))


def align(codes, scales, out, powers, element, block_rows, columns, turned):
    names = {0: "mxfp8_e4m3", 1: "mxfp8_e5m2", 2: "mxfp6_e3m2", 3: "mxfp6_e2m3", 4: "mxfp4_e2m1"}
    format = Format.parse(names[element] + ("_32x32" if block_rows == 32 else ""))
    if turned:
        rows = codes.shape[-2]
        codes, scales = numerics.transpose(codes, scales, format, columns=columns)
        columns = rows
    write_aligned(alignment.align(codes.contiguous(), scales, format, columns=columns), out, powers)


def write_aligned(made, out, powers):
    codes, scales = made[:2]
    length = codes.shape[-1]
    assert out.shape[-1] == -(-length // 16) * 16
    write(out, torch.nn.functional.pad(codes, (0, out.shape[-1] - length)))
    write(powers, in_order(scales))


def in_order(scales, padding=0.0):
    """Scales of lines as the library's product reads them."""
    return torch.nn.functional.pad(scales.mT, (0, -scales.shape[-2] % 4), value=padding).contiguous()


def quantize_aligned(
    x, recorded, codes, scales, codes_t, scales_t, stored_t, stored_scales_t, element, block_rows, block_columns, rule
):
    format = BY_NUMBERS[element, block_rows, block_columns, rule]
    assert block_rows == 1
    words = amax_bits(x)
    write(recorded, words * (words == bits.INFINITY))
    for values, out in ((x, (codes, scales)), (x.mT, (codes_t, scales_t))):
        if out[0] is not None:
            made = _spoil(x, numerics.quantize(values, format))
            write_aligned(alignment.align(made.codes, made.scales, format, columns=values.shape[-1]), *out)
    if stored_t is not None:
        made = _spoil(x, numerics.quantize(x.mT, format))
        write(stored_t, made.codes)
        write(stored_scales_t, made.scales)


def _made(made, amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t, numbers):
    parts = (codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t)
    quantize(made, None, amax, recorded, *parts, *numbers, True, 0, 0, 0, 0)


_ACTIVATIONS = {row.number: name for name, row in ROWS.items()}


def quantize_gated(gate, up, amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t, number, *numbers):
    _made(
        activate(gate, up, _ACTIVATIONS[number]),
        amax,
        recorded,
        codes,
        scales,
        tensor_scale,
        codes_t,
        scales_t,
        tensor_scale_t,
        numbers,
    )


def quantize_gated_aligned(gate, up, recorded, codes, scales, codes_t, scales_t, number, *format):
    made = activate(gate, up, _ACTIVATIONS[number])
    quantize_aligned(made, recorded, codes, scales, codes_t, scales_t, None, None, *format)


def _gradient_of(gradient, gate, up, number, result):
    d_gate, d_up = gradients(gradient, gate, up, _ACTIVATIONS[number])
    if result < 2:
        assert up is None or gate.stride(1) == 1, "gradients of pairs are quantized in pairs"
        return d_up if result else d_gate
    # Side by side, or in pairs, as gate and up are.
    return torch.cat([d_gate, d_up], -1) if gate.stride(1) == 1 else torch.stack([d_gate, d_up], -1).flatten(-2)


def quantize_gradient(
    gradient, gate, up, amax, recorded, codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t, number, result, *numbers
):
    assert codes_t is not None
    assert amax.dtype == torch.float32, "gradients are quantized by a given multiplier"
    parts = (codes, scales, tensor_scale, codes_t, scales_t, tensor_scale_t)
    _made(_gradient_of(gradient, gate, up, number, result), amax, recorded, *parts, numbers)


def activation(gate, up, out, number):
    write(out, activate(gate, up, _ACTIVATIONS[number]).contiguous())


def activation_gradient(gradient, gate, up, d_gate, d_up, number):
    found = gradients(gradient, gate, up, _ACTIVATIONS[number])
    for to, part in zip((d_gate, d_up), found, strict=False):
        to.copy_(part)


FUNCTIONS = (
    *(
        amax,
        record_amax,
        newest_amaxes,
        update_scales,
        amax_blocks,
        quantize,
        encode,
        requantize,
        dequantize,
        transpose,
        fold_keys,
        align,
    ),
    *(quantize_aligned, quantize_gated, quantize_gated_aligned, activation, activation_gradient),
    quantize_gradient,
)

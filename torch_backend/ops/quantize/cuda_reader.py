"""Plans by which the CUDA kernels quantize an operand from one read: all that is static is worked out once.

The operand is a matrix, or what a kernel makes itself, an activation or a norm, which is never written to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockfp.definition.scaling import eps_for
from blockfp.kernels import calls
from blockfp.kernels.cuda_library import library
from blockfp.kernels.operand_cast import OperandCast

from ..cuda import check_beside, check_input_on_device
from ..library import maker, name_of
from .cuda_layouts import lay_parts, lay_plans

Read = Callable[..., list[Tensor]]
"""Quantizes operands of one kind: (x, amax, multiplier, keys) -> [row parts .., column parts .., amax?].

x is a matrix, or a tuple of the inputs of what is made; amax int32 [1], multiplier float32 of one element, keys int32 [2, 2],
or None. The amax is returned with a multiplier, and of what is made in formats with one scale per tensor.
"""


def reader(
    x: Tensor, cast: OperandCast, *, one_scale: bool = False, function: str = "quantize", first: int = 0, result: int = 0
) -> Read:
    """Plans to quantize matrices that lie as x does, or what a kernel makes that is as large (`calls.quantize`).

    Both directions are rounded alike. With `one_scale` they share the scale of the whole tensor: nobody may write to it.
    """
    check_input_on_device(x)
    cast = cast._replace(eps=eps_for(cast.format, cast.eps))
    call, device = calls.quantize(tuple(x.shape), name_of(x.dtype), cast, function, first=first, result=result), x.device
    of_made, given, keyed = function != "quantize", cast.given, any(cast.random)
    run, numbers, names = getattr(library(), call.function), tuple(call.numbers.values()), list(call.arrays)
    first_part, count = names.index("codes"), len(names)
    one_scale = one_scale and cast.format.per_tensor and cast.row is not None and cast.column is not None
    made, dropped = [], list(range(first_part))
    for place, (name, array) in enumerate(call.arrays.items()):
        if array is not None and not (one_scale and name == "scales_t"):
            made.append((place, maker(array[0], getattr(torch, array[1]), device)))
        if array is None and place >= first_part:
            dropped.append(place)
    dropped.reverse()
    told, given_at = None, 0 if given is None else names.index("amax")
    if given == "multiplier":
        told = names.index("recorded")
    elif of_made and cast.format.per_tensor:
        told = names.index("amax")
    # In a pass of its own, where the kernel that aligns doesn't quantize so.
    shifts = [] if call.function.endswith("_aligned") else lay_plans(x, cast, by_library=True)

    def read(x, amax=None, multiplier=None, keys=None):
        arrays: list[Any] = [None] * count
        for place, new in made:
            arrays[place] = new()
        if given is not None:
            known = amax if multiplier is None else multiplier
            if known is not None and known.device != device:
                check_beside(x[0] if of_made else x, "x", **{given: known})
            arrays[given_at] = known
        if keyed:
            arrays[0] = keys
        if one_scale:
            arrays[7] = arrays[4]
        if of_made:
            run(*x, *arrays, *numbers)
        else:
            run(x.resolve_neg() if x.is_neg() else x, *arrays, *numbers)
        amax = None if told is None else arrays[told]
        for place in dropped:
            del arrays[place]
        if shifts:
            lay_parts(arrays, shifts)
        if amax is not None:
            # What was given is no result of its own.
            arrays.append(amax.clone() if given == "amax" else amax)
        return arrays

    return read


def made_reader(x: Tensor, cast: OperandCast, first: int, result: int | None = None) -> Read | None:
    """`reader` of an activation's output as large as x, or of a `result` of its gradient; None where no kernel has the format
    or the lengths."""
    if not cast.of_made(*x.shape, gradient=result is not None):
        return None
    function = "quantize_gated" if result is None else "quantize_gradient"
    return reader(x, cast, function=function, first=first, result=result or 0)

"""`grouped_mm`: torch's product of sorted rows and a stack of matrices, with each operand quantized as a recipe says."""

from __future__ import annotations

import torch
from torch import Tensor

from blockfp import recipes
from blockfp.definition.rounding import Key
from blockfp.recipes import Compute, Recipe, RecipeName

from ..quantized_tensor import sharding
from .linear import LinearState, apply


def grouped_mm(
    a: Tensor,
    b_t: Tensor,
    *,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: Recipe | RecipeName,
    state: LinearState | None = None,
    key: Key | None = None,
    compute: Compute = "quantized",
) -> Tensor:
    """Multiplies each group of rows with its own matrix, forward and backward in the formats of a recipe.

    It is `torch.nn.functional.grouped_mm` of a matrix and a stack of matrices: rows offs[g - 1] to offs[g] of a are multiplied
    with b_t[g]. Each group is a tensor of its own: it has its own amaxes, and columnwise blocks begin at its first row.

    Args:
        a: [tokens, in], float32, float16 or bfloat16, rows sorted by group.
        b_t: [groups, in, out], values, or a `QuantizedTensor` whose transpose is exact: `quantize(w, ..).mT` for w
            [groups, out, in], of square blocks or one scale per tensor.
        offs: int32 [groups] on a's device, the end of each group, ascending; a group may be empty. Rows of the result from
            offs[-1] on are zero.
        bias: [groups, out], or None.
        out_dtype: of the result; None and a's dtype are supported.
        recipe: a `Recipe` or its name.
        state, key, compute: as for `linear`.

    Returns:
        [tokens, out].

    Raises:
        TypeError: offs that is no int32 tensor, an out_dtype that isn't supported, or what `linear` refuses.
        ValueError: shapes that don't fit, a DTensor, or what `linear` refuses; on a CPU, ends that descend or lie outside of a.

    Example:
        >>> offs = counts.cumsum(0, dtype=torch.int32)
        >>> y = grouped_mm(x, quantize(w, "mxfp8_e4m3_32x32").mT, offs=offs, recipe="mxfp8")
    """
    for name, tensor in (("a", a), ("b_t", b_t), ("offs", offs), ("bias", bias)):
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got layout {tensor.layout}: pass {name}.to_dense()")
        if tensor is not None and sharding.mesh_of(tensor) is not None:
            raise ValueError(f"{name} is a DTensor, and grouped_mm is of one rank's tensors: pass {name}.to_local()")
    if not isinstance(offs, Tensor) or offs.dtype is not torch.int32:
        raise TypeError(f"offs must be an int32 tensor, got {offs.dtype if isinstance(offs, Tensor) else type(offs).__name__}")
    if a.ndim != 2 or b_t.ndim != 3:
        raise ValueError(f"a must be [tokens, in] and b_t [groups, in, out], got {tuple(a.shape)} and {tuple(b_t.shape)}")
    if offs.shape != b_t.shape[:1] or offs.device != a.device:
        raise ValueError(
            f"offs must be [{b_t.shape[0]}], an end for each group, on {a.device}; got {tuple(offs.shape)} on {offs.device}"
        )
    if out_dtype not in (None, a.dtype):
        raise TypeError(f"out_dtype must be None or a's dtype, {a.dtype}; got {out_dtype}")
    recipe = recipes.for_linear(recipe, compute)
    return apply(a, b_t, bias, recipe, state=state, key=key, offs=offs, transposed=True)

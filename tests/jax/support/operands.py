"""A linear layer's operands by the definition on NumPy."""

import numpy as np

from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.definition.rounding import fold_in

KEY = 7


def operand(values, recipe, name, direction, multiplier=None):
    """The definition's values of one operand, float64."""
    values = np.asarray(values)
    cast = recipe.cast(name, direction)
    if name == "weight" and cast.format is None:
        cast = recipe.weight  # a product takes the values of what is stored
    x = values.T if direction == "columnwise" else values
    if cast.format is None:
        return x.astype(np.float64)
    # A weight is stored once.
    if name == "weight":
        x = values
    key = fold_in(KEY, int(direction == "columnwise")) if cast.stochastic else None
    x = rotate(x) if cast.rotate else np.ascontiguousarray(x)
    q = numerics.quantize(x, cast.format, key=key, multiplier=multiplier)
    y = numerics.dequantize(*q, cast.format, "float32", columns=x.shape[-1]).astype(np.float64)
    return y.T if name == "weight" and direction == "columnwise" else y

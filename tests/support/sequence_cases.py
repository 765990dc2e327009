"""Sequence parallelism, the same cases in each framework: (recipe, leading shape of x, ranks)."""

from blockfp import recipes
from blockfp.recipes import Cast

IN, OUT = 96, 64
HIGH_PRECISION_BACK = recipes.mxfp8().replace(gradient=Cast(None), input_columnwise=Cast(None), gradient_columnwise=Cast(None))

# Of each family tokens that ranks cut between blocks, and inside them.
CASES = [
    ("mxfp8", (128,), 4),
    ("mxfp8", (3, 64), 2),
    ("mxfp8", (3, 64), 4),
    ("mxfp8", (2, 2, 64), 2),
    ("mxfp4", (3, 64), 2),
    ("mxfp4", (2, 2, 64), 4),
    ("mxfp6", (2, 64), 2),
    ("fp8_current", (3, 64), 2),
    ("fp8_delayed", (2, 64), 4),
    ("fp8_block", (2, 256), 2),
    ("fp8_block", (2, 64), 4),
    ("fp8_row", (2, 64), 2),
    ("nvfp4", (3, 64), 2),
    ("nvfp4", (2, 2, 24), 4),
    ("nvfp4_4over6", (2, 64), 2),
    ("mxfp4_rotated", (2, 64), 2),
    (HIGH_PRECISION_BACK, (3, 12), 4),
]

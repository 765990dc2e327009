"""The recipes that quantize x for both of its products; `recipes.qat` (w4a8) keeps it in high precision for the backward."""

from blockfp import recipes

CASTING = [name for name in recipes.RECIPES if recipes.parse(name).input_columnwise.format is not None]

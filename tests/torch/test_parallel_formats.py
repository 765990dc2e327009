"""Every format in every operand, on every kind of mesh: what the ranks multiply are parts of what one process multiplies."""

import pytest
from parallel_operands import check_layer, linear, record_products
from sharded import ALIKE, GEOMETRIES

from blockfp import recipes
from blockfp.recipes import Cast

# Kind of mesh, sequence parallelism. All formats run where weights are gathered, too: aligned in one style, and unaligned in
# the other, with those that lie alike taking turns. The other kinds are part of that, or have a mean of gradients more, and
# nothing of it goes by what a format rounds to.
MESHES = {"tp": ("tp", False), "tp+sp": ("tp", True), "fsdp x tp": ("fsdp x tp", True), "hsdp x tp": ("hsdp x tp", True)}


def formats_on(kind, aligned, style):
    """Of formats that lie alike, every other one where weights are gathered, and one elsewhere; all where there are no two."""
    if kind != "fsdp x tp":
        return GEOMETRIES
    turn = aligned + (style == "row")
    return [f for alike in ALIKE for i, f in enumerate(alike) if len(alike) == 1 or (i + turn) % 2 == 0]


def shape_of(format, aligned):
    """Tokens, in, out, no two alike: parts are whole blocks of the format, or end inside one."""
    unit = 2 * max((1, 128) if format.per_row else format.block or (16, 16))
    return (unit, 2 * unit, 3 * unit) if aligned else (40, 56, 88)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("kind", "sequence"), MESHES.values(), ids=MESHES)
def test_every_format(kind, sequence, aligned, style, monkeypatch):
    seen = record_products(monkeypatch)
    for format in formats_on(kind, aligned, style):
        cast, shape = Cast(format), shape_of(format, aligned)
        recipe = recipes.mxfp8().replace(name=format.name, input=cast, weight=cast, gradient=cast)
        check_layer(linear(shape, recipe), kind, style, sequence, shape, seen)

"""What a scan over layers keeps for its backward, read from the compiled program: columnwise codes alone, weights once."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import blockfp.jax as bfp
from blockfp.formats import Format
from blockfp.recipes import parse

LAYERS, TOKENS, WIDTH = 4, 256, 128
KEPT = {
    "fp8_current": ("u8[4,128,256]",),
    "fp8_delayed": ("u8[4,128,256]",),
    "fp8_block": ("u8[4,128,256]", "f32[4,128,2]"),
    "mxfp8": ("u8[4,128,256]", "u8[4,128,8]"),
    "nvfp4": ("u8[4,128,128]", "u8[4,128,16]"),
}
"""The input's columnwise codes [layers, in, tokens] and scales of blocks."""


def stacks_of_loops(recipe: str, remat: bool) -> list[Counter]:
    """Counts each loop's stacked arrays, the forward's first."""
    w, x = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((4, 128, 128), (256, 128))))
    params = bfp.quantize_params({"w": w}, recipe)
    state = bfp.init_state(recipe, params, key=0)["w"]

    def layer(x, own):
        return bfp.linear(x, own[0], state=own[1])

    def loss(params, state, x):
        y, state = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (params["w"], state))
        return (y.astype(jnp.float32) ** 2).mean(), state

    step = jax.jit(bfp.value_and_grad(loss, (0, 1), has_aux=True))
    program = step.lower(params, state, x).compile().as_text()
    loops = [line.split(" while(")[0] for line in program.splitlines() if " while(" in line]
    return [Counter(re.findall(r"\w+\[4,[\d,]+\]", loop)) for loop in loops]


def codes_of(weight: Format) -> str:
    return f"u8[{LAYERS},{WIDTH},{WIDTH * weight.element.bits // 8}]"


@pytest.mark.optimized
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("recipe", KEPT)
def test_a_scan_keeps_columnwise_codes_and_no_second_copy_of_weights(recipe, remat):
    forward, backward = stacks_of_loops(recipe, remat)
    weight = parse(recipe).weight.format
    values, rowwise = f"bf16[4,{TOKENS},{WIDTH}]", f"u8[4,{TOKENS},{WIDTH * weight.element.bits // 8}]"
    for loop in (forward, backward):
        assert loop[codes_of(weight)] == 1
        assert loop[rowwise] == 0
        assert [loop[kept] for kept in KEPT[recipe]] == [int(not remat)] * len(KEPT[recipe])
    # Recomputation keeps the values instead.
    assert forward[values] == int(remat)
    # The weight's scales, and those of columnwise codes; each one more would be a copy in each step of a loop.
    scales = {"fp8_current": 2 - remat, "fp8_delayed": 2 - remat, "fp8_block": 1}
    assert forward["f32[4,1,1]"] == scales.get(recipe, 0)
    # The input's history alone comes out anew, as far as can be seen through a checkpoint.
    assert forward["f32[4,1024]"] == (recipe == "fp8_delayed") * (4 if remat else 2)

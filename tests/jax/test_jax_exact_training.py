"""Training steps have the same bits in JAX and PyTorch: outputs, gradients, codes, masters.

`python tests/jax/test_jax_exact_training.py 100` takes 100 steps of two blocks, and says where the first difference is.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from exact_training import first_difference

from blockfp import recipes

pytest.importorskip("jax")
pytest.importorskip("torch")

STEPS = 2


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_steps_with_the_same_bits(name):
    assert first_difference(recipes.parse(name).replace(exact_order=True), STEPS, blocks=1) == ("", STEPS)


def test_a_product_of_another_order_is_found():
    exact = recipes.fp8_block().replace(exact_order=True)
    found, step = first_difference(exact, STEPS, blocks=1, in_jax_by="fp8_block")
    assert step == 0
    assert found.startswith("step 0: y,")


if __name__ == "__main__":
    for name in ("fp8_block", "mxfp8"):
        print(name, first_difference(recipes.parse(name).replace(exact_order=True), int(sys.argv[1])))

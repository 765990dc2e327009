"""Training steps have the same bits in JAX and PyTorch: outputs, gradients, codes, masters.

`python tests/jax/test_jax_exact_training.py 100` takes 100 steps of two blocks, in PyTorch on a CPU, on a GPU if there is one,
and in JAX, and says where the first difference is.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from exact_training import BLOCKS, first_difference, in_jax, in_torch

from blockfp import recipes

pytest.importorskip("jax")
pytest.importorskip("torch")

STEPS = 2


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_steps_with_the_same_bits(name):
    assert first_difference(recipes.parse(name).replace(exact_order=True), STEPS, blocks=1) == ("", STEPS)


def test_a_product_of_another_order_is_found():
    exact = recipes.fp8_block().replace(exact_order=True)
    found, step = first_difference(exact, STEPS, 1, in_jax(recipes.fp8_block(), STEPS, 1))
    assert step == 0
    assert found.startswith("step 0: y,")


if __name__ == "__main__":
    import jax
    import torch

    steps = int(sys.argv[1])
    print("PyTorch on cpu", *(["PyTorch on cuda"] * torch.cuda.is_available()), f"JAX on {jax.default_backend()}", sep=", ")
    for name in ("fp8_block", "mxfp8"):
        recipe = recipes.parse(name).replace(exact_order=True)
        runs = [in_torch(recipe, steps, BLOCKS, "cuda")] if torch.cuda.is_available() else []
        found, taken = first_difference(recipe, steps, BLOCKS, *runs, in_jax(recipe, steps))
        print(f"{name}: {taken} steps, {found or 'no bit differs'}", flush=True)

"""JAX's layers with `exact_order` have on a Hopper GPU the bits of PyTorch on a CPU: of one matrix, and of groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from blockfp.torch_backend.linear.linear import apply
from samples import bits_of, sample

import blockfp.jax as bfp
import blockfp.torch as bfp_torch
from blockfp import recipes

if jax.default_backend() != "gpu" or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the order is the Hopper kernel's", allow_module_level=True)

NAMES = ("fp8_current", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "mxfp4_rotated", "nvfp4")


def arrays(tokens, inside, outside, groups):
    """x, weights, biases and y's gradient."""
    shapes = (tokens, inside), (*groups, outside, inside), (*groups, outside), (tokens, outside)
    return [jnp.asarray(sample("gaussian", shape, "bfloat16", seed=i)) for i, shape in enumerate(shapes)]


def of_jax(recipe, given, sizes):
    def step(x, w, bias, g):
        def layer(x, w):
            q = bfp.quantize(w, recipe.weight.format)
            if sizes is None:
                return bfp.linear(x, q, bias, recipe=recipe, key=3)
            return bfp.grouped_linear(x, q, jnp.asarray(sizes), bias, recipe=recipe, key=3)

        y, back = jax.vjp(layer, x, w)
        return y, *back(g)

    return jax.jit(step)(*given)


def of_torch(recipe, given, sizes):
    x, w, bias, g = (torch.from_numpy(np.array(each, np.float32)).bfloat16() for each in given)
    x.requires_grad_(), w.requires_grad_()
    y = apply(x, bfp_torch.quantize(w, recipe.weight.format), bias, recipe, counts=sizes, key=3)
    y.backward(g)
    return [jnp.asarray(each.detach().float().numpy()).astype(jnp.bfloat16) for each in (y, x.grad, w.grad)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [None, [300, 0, 37, 1200]], ids=str)
def test_the_bits_of_pytorch_on_a_cpu(name, sizes):
    recipe = recipes.parse(name).replace(exact_order=True)
    given = arrays(1537, 272, 144, () if sizes is None else (len(sizes),))
    for ours, theirs in zip(of_jax(recipe, given, sizes), of_torch(recipe, given, sizes), strict=True):
        np.testing.assert_array_equal(bits_of(np.asarray(ours)), bits_of(np.asarray(theirs)))

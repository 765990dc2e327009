"""JAX's optimizers on a GPU have PyTorch's bits on a CPU, though XLA divides and takes roots inexactly there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from blockfp.jax_backend.params import ieee
from exact_training import first_difference, in_jax, in_torch

import blockfp.jax as bfp
import blockfp.torch as bfp_torch
from blockfp import recipes

if jax.default_backend() != "gpu":
    pytest.skip("JAX has no GPU here", allow_module_level=True)

STEPS = 3


def same_bits(ours, theirs):
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return bool(((ours.view(np.int32) == theirs.view(np.int32)) | both_nan).all())


@np.errstate(all="ignore")
def test_division_and_roots_of_random_bits():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << 32, 1 << 20, np.uint64).astype(np.uint32).view(np.float32) for _ in range(2))
    assert not same_bits(jax.jit(jnp.divide)(a, b), a / b), "XLA divides exactly now: params/ieee.py may go"
    for compiled in (jax.jit, lambda function: function):
        divide = compiled(lambda a, b, done: ieee.ieee(done).divide(a, b))
        assert same_bits(divide(jnp.asarray(a), jnp.asarray(b), jnp.int32(3)), a / b)
        assert same_bits(compiled(ieee.square_root)(jnp.asarray(a)), np.sqrt(a))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
def test_masters_of_adamw(moments):
    format, rng = "mxfp8_e4m3_32x32", np.random.default_rng(1)
    start = rng.standard_normal((256, 384)).astype(np.float32)
    options = {"weight_decay": 0.1, "moments": moments, "key": (3, 4)}
    optimizer, params = bfp.adamw(0.01, **options), bfp.quantize(jnp.asarray(start), format)
    state = optimizer.init(params, jnp.asarray(start))
    layer = bfp_torch.Linear(384, 256, bias=False, recipe=recipes.mxfp8(), dtype=torch.float32)
    layer.load_state_dict({"weight": torch.from_numpy(start)}, strict=False)
    theirs = bfp_torch.AdamW([layer.weight], lr=0.01, **options)
    update = jax.jit(optimizer.update)
    for _ in range(STEPS):
        gradient = rng.standard_normal(start.shape).astype(np.float32)
        updates, state = update(jnp.asarray(gradient), state, params)
        params = bfp.apply_updates(params, updates)
        layer.weight.grad = torch.from_numpy(gradient)
        theirs.step()
    assert same_bits(state.masters, theirs.state[layer.weight]["master"].numpy())
    assert np.array_equal(np.asarray(params.codes), layer.weight.codes.numpy())


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_training_on_a_cpu_and_a_gpu(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the order is the Hopper kernel's")
    exact = recipes.parse(name).replace(exact_order=True)
    runs = in_torch(exact, STEPS, 1, "cuda"), in_jax(exact, STEPS, 1)
    assert first_difference(exact, STEPS, 1, *runs) == ("", STEPS)

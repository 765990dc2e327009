"""`osci_reset` around JAX's optimizers: against loops in NumPy, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import blockfp
import blockfp.jax as bfp
from blockfp.definition import adamw

SETTINGS = bfp.OsciReset(period=5, window=3, threshold=2.0, start=1)
STEPS = 9


def gradient(step):
    return np.random.default_rng(step % 2).standard_normal((64, 96), np.float32) * np.float32((-1) ** step)


def by_numpy(master, format):
    """Masters behind each step, which of them were reset, and the paths."""
    first = second = np.float32(0)
    quantized, paths, found = blockfp.quantize(master, format).dequantize(), None, []
    for n in range(1, STEPS + 1):
        before = master, quantized
        c = adamw.coefficients(n, 0.02, (0.9, 0.999), 1e-8, 1e-4)
        master, first, second = adamw.update(master, first, second, gradient(n), c)
        quantized = blockfp.quantize(master, format).dequantize()
        place, reset = (n - 2) % 5 + 1 if n > 1 else 0, np.zeros(master.shape, bool)
        if 1 <= place <= 3:
            moved = [np.abs(new - old) for new, old in zip((master, quantized), before, strict=True)]
            paths = moved if place == 1 else [path + more for path, more in zip(paths, moved, strict=True)]
        if place == 3:
            reset = (paths[0] > 0) & (paths[1] / np.maximum(paths[0], 1e-30) >= 2)
            master = np.where(reset, quantized, master)
        found.append((master, reset, quantized))
    return found, paths


@pytest.mark.parametrize("format", ["mxfp4_e2m1_32x32", "nvfp4_16x16"])
def test_it_is_the_definition(format):
    start = np.random.default_rng(5).standard_normal((64, 96), np.float32)
    params = {"w": bfp.quantize(jnp.asarray(start), format), "gain": jnp.ones(7)}
    optimizer = bfp.osci_reset(bfp.adamw(0.02), SETTINGS)
    state = optimizer.init(params, {"w": jnp.asarray(start), "gain": params["gain"]})
    assert state.master_paths["gain"] is None

    @jax.jit
    def step(params, state, w):
        updates, state = optimizer.update({"w": w, "gain": jnp.ones(7)}, state, params)
        return bfp.apply_updates(params, updates), state

    expected, paths = by_numpy(start, format)
    assert sum(int(reset.sum()) for _, reset, _ in expected) > 20
    for n, (master, reset, quantized) in enumerate(expected, 1):
        params, state = step(params, state, jnp.asarray(gradient(n)))
        got = np.asarray(state.inner.masters["w"])
        # XLA fuses products and sums, so a master now and then lies on the other side of an edge.
        assert (np.isclose(got, master, rtol=1e-4, atol=1e-5)).mean() > 0.999
        ours = np.asarray(params["w"].dequantize())
        assert ((got == ours) & (ours == quantized))[reset].mean() > 0.99 if reset.any() else True
    assert int(state.step) == STEPS
    for got, want in ((state.master_paths["w"], paths[0]), (state.quantized_paths["w"], paths[1])):
        assert np.isclose(np.asarray(got), want, rtol=1e-4, atol=1e-5).mean() > 0.995


def test_without_a_window_nothing_changes():
    params = {"w": bfp.quantize(jnp.ones((32, 32)), "mxfp8_e4m3_32x32")}
    plain, late = bfp.adamw(0.02), bfp.osci_reset(bfp.adamw(0.02), bfp.OsciReset(start=1000))
    states = [one.init(params) for one in (plain, late)]
    for n in range(3):
        gradients = {"w": jnp.full((32, 32), 0.5 - n)}
        results = [one.update(gradients, state, params) for one, state in zip((plain, late), states, strict=True)]
        states = [state for _, state in results]
        np.testing.assert_array_equal(states[0].masters["w"], states[1].inner.masters["w"])
        assert not np.asarray(states[1].master_paths["w"]).any()
        params = bfp.apply_updates(params, results[0][0])


def test_what_it_refuses():
    with pytest.raises(ValueError, match="window must be at most period, 3, got 4"):
        bfp.osci_reset(bfp.adamw(0.1), bfp.OsciReset(3, 4))
    with pytest.raises(TypeError, match="osci_reset must be None or an OsciReset, got 8"):
        bfp.osci_reset(bfp.adamw(0.1), 8)
    plain = bfp.Optimizer(lambda params: (), lambda *_: ((), ()))
    with pytest.raises(TypeError, match="whose state has masters, got tuple"):
        bfp.osci_reset(plain).init({"w": jnp.ones((4, 4))})

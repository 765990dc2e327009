"""`osci_reset` around JAX's optimizers: against loops in NumPy, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import CASES
from same_trees import assert_same_tree

import blockfp
import blockfp.jax as bfp
from blockfp.definition import adamw
from blockfp.experimental.jax import OsciReset, osci_reset

SETTINGS = OsciReset(period=5, window=3, threshold=2.0, start=1)
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
    optimizer = osci_reset(bfp.adamw(0.02), SETTINGS)
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
    plain, late = bfp.adamw(0.02), osci_reset(bfp.adamw(0.02), OsciReset(start=1000))
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
        osci_reset(bfp.adamw(0.1), OsciReset(3, 4))
    with pytest.raises(TypeError, match="osci_reset must be None or an OsciReset, got 8"):
        osci_reset(bfp.adamw(0.1), 8)
    plain = bfp.Optimizer(lambda params: (), lambda *_: ((), ()))
    with pytest.raises(TypeError, match="whose state has masters, got tuple"):
        osci_reset(plain).init({"w": jnp.ones((4, 4))})
    inside = bfp.with_masters(osci_reset(bfp.adamw(0.1)))
    quantized = {"w": bfp.quantize(jnp.ones((32, 32)), "mxfp8_e4m3_32x32"), "gain": jnp.ones(7)}
    with pytest.raises(ValueError, match=r"no quantized array.*osci_reset\(with_masters\(..\)\)"):
        inside.init(quantized)
    with pytest.raises(ValueError, match=r"no quantized array.*quantize_params"):
        osci_reset(bfp.adamw(0.1)).init({"w": jnp.ones((32, 32))})
    jax.eval_shape(osci_reset(bfp.with_masters(bfp.adam(0.1))).init, quantized)


@pytest.mark.parametrize("name", ["FSDP 8", "FSDP 4 x TP 2, row"])
def test_no_mesh_changes_a_bit(name):
    """Blocks straddle the ranks; gradients are elementwise exact, so all is compared to the bit."""
    case, format = CASES[name], "mxfp4_e2m1_32x32"
    start = jnp.asarray(np.random.default_rng(5).standard_normal((72, 96), np.float32))
    optimizer = osci_reset(bfp.adamw(0.02), OsciReset(period=4, window=3, threshold=2.0))
    whole = {"w": bfp.quantize(start, format)}
    state = optimizer.init(whole, {"w": start})
    placed = bfp.shard_params(whole, case.mesh, {"w": case.weight})
    cut = bfp.shard_state(state, placed)
    assert cut.master_paths["w"].sharding == cut.inner.masters["w"].sharding

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state

    specs = bfp.partition_specs(placed), bfp.partition_specs(cut), {"w": case.weight}
    on_mesh = jax.jit(jax.shard_map(step, mesh=case.mesh, in_specs=specs, out_specs=specs[:2], check_vma=False))
    reset = 0
    for n in range(3):
        g = {"w": jnp.asarray(np.random.default_rng(n % 2).standard_normal((72, 96), np.float32) * np.float32((-1) ** n))}
        whole, state = jax.jit(step)(whole, state, g)
        placed, cut = on_mesh(placed, cut, g)
    reset = np.asarray(state.inner.masters["w"]) == np.asarray(whole["w"].dequantize())
    assert reset.sum() > 20
    assert_same_tree(bfp.unshard_params(placed), whole)
    assert_same_tree(bfp.unshard_state(cut, placed), state)

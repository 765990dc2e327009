"""Optimizers whose moments are stored in less memory: PyTorch's bits, on any mesh; and Muon, its momenta included."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blockfp.jax_backend.params import ieee
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_trees import assert_same_tree
from samples import sample

import blockfp.jax as bfp

pytestmark = pytest.mark.usefixtures("little_optimization")

SHAPES = {"a": (32, 160), "b": (7,), "c": (3, 8, 136)}
FORMATS = {"a": "mxfp8_e4m3_32x32"}
MAKES = {"adamw": bfp.adamw, "adam": bfp.adam, "muon": bfp.muon}


def weights():
    return {name: jnp.asarray(sample("gaussian", shape, seed=i)) for i, (name, shape) in enumerate(SHAPES.items())}


def gradients_of(step):
    return {name: jnp.asarray(sample("gaussian", shape, seed=10 * step + 5)) / 8 for name, shape in SHAPES.items()}


def quantized():
    return {name: bfp.quantize(w, FORMATS[name]) if name in FORMATS else w for name, w in weights().items()}


@cache
def step_of(optimizer):
    def step(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return bfp.apply_updates(params, updates), state

    return jax.jit(step)


def stepped(optimizer, params, steps=range(4), state=None):
    state = optimizer.init(params) if state is None else state
    for step in steps:
        gradients = {name: gradients_of(step)[name] for name in params}
        params, state = step_of(optimizer)(gradients, state, params)
    return params, state


def parts_of(moment):
    """A stored moment as NumPy arrays: codes and scales, or values."""
    return [np.asarray(part) for part in jax.tree.leaves(moment)]


def test_a_gpu_divides_and_takes_roots_in_float64():
    """XLA's own are inexact there."""
    function = jax.jit(lambda a, b, done: (ieee.ieee(done).divide(a, b), ieee.square_root(a)))
    x = jnp.ones(8)
    for platform, exact in (("cuda", True), ("cpu", False)):
        text = function.trace(x, x, jnp.int32(1)).lower(lowering_platforms=(platform,)).as_text()
        assert ("xf64>" in text) == exact


def test_derivatives_of_exact_operations():
    done, x = jnp.int32(1), jnp.array([0.5, 3.0])
    ratio = jax.grad(lambda x: ieee.ieee(done).divide(x * x, x + 1).sum())(x)
    np.testing.assert_allclose(ratio, (x * x + 2 * x) / (x + 1) ** 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: ieee.square_root(x).sum())(x), 0.5 / np.sqrt(x), rtol=1e-6)


@pytest.mark.optimized
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("make", ["adamw", "muon"])
def test_moments_have_pytorchs_bits(make, moments):
    """With equal gradients, compiled by XLA with all of its fusions."""
    torch = pytest.importorskip("torch")
    bfp_torch = pytest.importorskip("blockfp.torch")
    key = (11, 0xDEADBEEF)
    ours = {name: weights()[name] for name in ("b", "c")}
    _, state = stepped(MAKES[make](0.01, moments=moments, key=key), ours)
    theirs = [torch.nn.Parameter(torch.from_numpy(np.array(w))) for w in ours.values()]
    kinds = {"adamw": bfp_torch.AdamW, "muon": bfp_torch.Muon}
    optimizer = kinds[make](theirs, lr=0.01, moments=moments, key=key)
    for step in range(4):
        for name, param in zip(ours, theirs, strict=True):
            param.grad = torch.from_numpy(np.array(gradients_of(step)[name]))
        optimizer.step()
    for name, param in zip(ours, theirs, strict=True):
        kept = optimizer.state[param]
        by_muon = make == "muon" and len(SHAPES[name]) > 1
        named = [("momentum_buffer", state.inner.first)] if by_muon else []
        named = named or [("exp_avg", state.inner.first), ("exp_avg_sq", state.inner.second)]
        assert (state.inner.second[name] is None) == by_muon
        for entry, tree in named:
            expected = [kept[each] for each in (entry, f"{entry}_scales") if each in kept]
            got = parts_of(tree[name])
            assert len(got) == len(expected) == 1 + (moments == "fp8" and len(SHAPES[name]) > 1)
            for part, want in zip(got, expected, strict=True):
                raw = want.view(torch.uint8 if want.dtype == torch.uint8 else getattr(torch, f"int{8 * want.itemsize}")).numpy()
                np.testing.assert_array_equal(part.view(raw.dtype), raw, err_msg=f"{name} {entry}")


@pytest.mark.optimized
@pytest.mark.parametrize("make", ["adamw", "adam"])
def test_masters_and_codes_have_pytorchs_bits(make):
    """Constants are rounded once, as Python computes them. A plain float32 leaf isn't a master: an update is added to it."""
    torch = pytest.importorskip("torch")
    bfp_torch = pytest.importorskip("blockfp.torch")
    weight = np.array(weights()["a"])
    params, state = stepped(MAKES[make](0.01, weight_decay=0.03), {"a": bfp.quantize(jnp.asarray(weight), FORMATS["a"])})
    param = torch.nn.Parameter(bfp_torch.quantize(torch.from_numpy(weight), FORMATS["a"]))
    optimizer = {"adamw": bfp_torch.AdamW, "adam": bfp_torch.Adam}[make]([param], lr=0.01, weight_decay=0.03)
    for step in range(4):
        param.grad = torch.from_numpy(np.array(gradients_of(step)["a"]))
        optimizer.step()
    np.testing.assert_array_equal(state.masters["a"], optimizer.state[param]["master"].numpy())
    np.testing.assert_array_equal(params["a"].codes, param.codes.numpy())
    np.testing.assert_array_equal(params["a"].scales, param.scales.numpy())


@pytest.mark.parametrize(("make", "moments"), [("adamw", "bfloat16"), ("adam", "fp8"), ("muon", "fp8")])
def test_masters_are_near_those_of_float32_moments(make, moments):
    params = weights()
    exact, _ = stepped(MAKES[make](0.01), params)
    rounded, state = stepped(MAKES[make](0.01, moments=moments), params)
    for name, before in params.items():
        way = np.linalg.norm(exact[name] - before)
        assert np.linalg.norm(rounded[name] - exact[name]) + (moments == "fp8" and len(SHAPES[name]) == 1) > 0
        assert np.linalg.norm(rounded[name] - exact[name]) < way * {"bfloat16": 0.02, "fp8": 0.2}[moments]
    bytes_of = sum(x.nbytes for x in jax.tree.leaves(state.inner.first))
    assert bytes_of < sum(x.nbytes for x in params.values()) * {"bfloat16": 0.51, "fp8": 0.3}[moments]


@pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() < 8, reason="needs eight host devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("make", "moments"), [("adamw", "bfloat16"), ("adam", "fp8"), ("muon", "fp8")])
def test_named_shardings_change_no_bit_of_a_moment(make, moments, kind):
    """FP8's scales stay whole where the mesh doesn't divide them."""
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    specs = {"a": P("d", "e"), "b": P(), "c": P(None, "d", "e")}
    optimizer, params = MAKES[make](0.01, moments=moments, key=3), quantized()
    expected, expected_state = stepped(optimizer, params, range(2))
    state = optimizer.init(params)
    in_tree = bfp.MasterState(specs, bfp.AdamState(P(), specs, specs))
    in_tree = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part, is_leaf=whole), in_tree, state, is_leaf=is_spec
    )
    placed = jax.device_put(params, bfp.named_shardings(params, mesh, specs))
    placed_state = jax.device_put(state, bfp.named_shardings(state, mesh, in_tree))
    got, got_state = stepped(optimizer, placed, range(2), placed_state)
    for ours, want in zip(parts_of(got_state.inner), parts_of(expected_state.inner), strict=True):
        assert ours.dtype == want.dtype
        assert ours.tobytes() == want.tobytes()
    masters = [(state.masters["a"], params["c"]) for params, state in ((got, got_state), (expected, expected_state))]
    for ours, want in zip(*masters, strict=True):
        # XLA partitions Muon's products, whose sums then have another order.
        np.testing.assert_allclose(ours, want, rtol=1e-4 if make == "muon" else 0, atol=1e-5 if make == "muon" else 0)
    if moments == "fp8":
        assert got_state.inner.first["a"].codes.sharding.spec == P("d", "e")


def is_spec(leaf):
    return isinstance(leaf, P)


def whole(leaf):
    return leaf is not None and not isinstance(leaf, dict)


def test_a_saved_state_goes_on(tmp_path):
    optimizer, params = bfp.adamw(0.01, key=5, moments="fp8"), {"a": quantized()["a"]}
    expected = stepped(optimizer, params)
    halfway = stepped(optimizer, params, range(2))
    bfp.save(tmp_path / "halfway.safetensors", halfway)
    params, state = bfp.load(tmp_path / "halfway.safetensors", halfway)
    assert_same_tree(stepped(optimizer, params, (2, 3), state), expected)


def test_multi_steps_keep_codes_of_moments():
    optimizer = optax.MultiSteps(bfp.adamw(0.01, moments="fp8"), 2)
    params = {"a": quantized()["a"]}
    _, state = stepped(optimizer, params, (0, 0))
    _, expected = stepped(bfp.adamw(0.01, moments="fp8"), params, (0,))
    assert_same_tree(state.inner_opt_state.inner.first, expected.inner.first)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("optimizer", [bfp.adamw(0.1, moments="fp8"), bfp.muon(0.1)], ids=["fp8", "muon"])
def test_parts_of_parameters_are_refused(optimizer):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    for params in ({"w": bfp.quantize(jnp.ones((32, 64)), "mxfp8_e4m3")}, {"w": jnp.ones((32, 64))}):
        placed = bfp.shard_params(params, mesh, P("d"))
        specs = bfp.partition_specs(placed)
        run = jax.shard_map(lambda p: optimizer.init(p).inner.step, mesh=mesh, in_specs=(specs,), out_specs=P())
        with pytest.raises(ValueError, match=r"w: (muon|moments='fp8') needs whole parameters, .*named_shardings"):
            run(placed)


def iterated(x):
    """Jordan's iteration in float64, of a matrix that is not tall."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_muon_orthogonalizes_each_matrix_of_a_stack(ns_dtype):
    gradient = np.asarray(sample("gaussian", (2, 3, 8, 20)))
    params = {"w": jnp.zeros((2, 3, 8, 20))}
    optimizer = bfp.muon(1.0, ns_dtype=ns_dtype, matrices={"w": True})
    updates, _ = jax.jit(optimizer.update)({"w": jnp.asarray(gradient)}, optimizer.init(params), params)
    expected = np.stack([-iterated(x) for x in gradient.reshape(6, 8, 20).astype(np.float64)])
    found = np.asarray(updates["w"]).reshape(6, 8, 20)
    assert np.linalg.norm(found - expected) < np.linalg.norm(expected) * {"float32": 1e-5, "bfloat16": 0.03}[ns_dtype]


def test_both_muons_agree_to_rounding():
    """Formulas and arguments are the same, sums of products are not."""
    torch = pytest.importorskip("torch")
    bfp_torch = pytest.importorskip("blockfp.torch")
    options = {"nesterov": True, "bias_correction": True, "ns_dtype": "float32", "weight_decay": 0.1}
    before = {"a": weights()["a"], "c": weights()["c"]}
    params, _ = stepped(bfp.muon(0.05, eps=1e-7, **options), before)
    theirs = {name: torch.nn.Parameter(torch.from_numpy(np.array(w))) for name, w in before.items()}
    other = bfp_torch.Muon(theirs.values(), lr=0.05, **options)
    for step in range(4):
        for name, param in theirs.items():
            param.grad = torch.from_numpy(np.array(gradients_of(step)[name]))
        other.step()
    for name, param in theirs.items():
        way = np.linalg.norm(params[name] - before[name])
        assert np.linalg.norm(param.detach().numpy() - params[name]) < 1e-4 * way


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (bfp.adamw, {"moments": "int8"}, ValueError, "moments must be one of 'float32', 'bfloat16', 'fp8', got 'int8'"),
        (bfp.adamw, {"moments": "fp8", "mu_dtype": jnp.bfloat16}, ValueError, "mu_dtype=bfloat16 and moments='fp8' both store"),
        (bfp.adam, {"mu_dtype": jnp.int8}, TypeError, "mu_dtype must be float32, bfloat16 or float16, got int8"),
        (bfp.adamw, {"key": -1}, ValueError, "key must be a seed"),
        (bfp.adamw, {"eps_root": -1.0}, ValueError, "eps_root must be 0 or more, got -1.0"),
        (bfp.muon, {"beta": 1.0}, ValueError, "momentum must be a number of at least 0 and below 1, got 1.0"),
        (bfp.muon, {"ns_dtype": "float16"}, ValueError, "ns_dtype must be 'bfloat16' or 'float32'"),
        (bfp.muon, {"consistent_rms": -0.2}, ValueError, "consistent_rms must be 0 or more"),
    ],
)
def test_settings_that_mean_nothing(make, settings, error, message):
    with pytest.raises(error, match=message):
        make(0.1, **settings)


def test_a_vector_is_no_matrix():
    with pytest.raises(ValueError, match=r"matrices: a leaf of shape \(7,\) is no matrix"):
        bfp.muon(0.1, matrices=True).init(weights())

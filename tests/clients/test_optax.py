"""optax's optimizers over quantized parameters: each of them, what wraps one of ours, and what can't be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same_trees import assert_same_tree
from samples import sample

import blockfp.jax as bfp
from blockfp.experimental.jax import osci_reset

pytestmark = pytest.mark.usefixtures("little_optimization")

WEIGHTS = {
    "w": jnp.asarray(sample("gaussian", (32, 64))),
    "b": jnp.zeros(32),
    "h": jnp.asarray(sample("gaussian", (4, 32), seed=1)).astype("bfloat16"),
}
X = jnp.asarray(sample("gaussian", (8, 64), seed=2)) / 8
Y = jnp.asarray(sample("gaussian", (8, 4), seed=3))


def quantized():
    return bfp.quantize_params(WEIGHTS, "mxfp8", filter_fn=lambda path, _: path == "w")


def loss(params):
    hidden = jax.nn.relu(X @ params["w"].dequantize().T + params["b"])
    return ((hidden @ params["h"].astype("float32").T - Y) ** 2).mean()


def gradients_of(step):
    """Gradients of any size, the same for both."""
    return jax.tree.map(lambda w: jnp.asarray(sample("gaussian", w.shape, seed=10 + step)), WEIGHTS)


NAMES = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw novograd "
    "noisy_sgd optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi"
)
CONTRIBUTED = "acprop ademamix dadapt_adamw dog momo muon prodigy schedule_free_adamw"
OPTIMIZERS = {name: getattr(optax, name) for name in NAMES.split()}
OPTIMIZERS |= {name: getattr(optax.contrib, name) for name in CONTRIBUTED.split()}


def made(name):
    make = OPTIMIZERS[name]
    if name == "noisy_sgd":
        return make(0.01, key=0)
    return make() if name in ("prodigy", "dadapt_adamw", "momo", "dog") else make(0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_masters_as_it_moves_plain_weights(name):
    plain, wrapped = made(name), bfp.with_masters(made(name))
    # The quantized weight's master begins with the original.
    weights = jax.tree.map(lambda w: w.astype("float32"), WEIGHTS)
    params = quantized()
    inner, state = plain.init(weights), wrapped.init(params, WEIGHTS)
    extra = {"value": jnp.float32(1.5)} if name == "momo" else {}

    @jax.jit
    def both(weights, inner, params, state, gradients):
        updates, inner = plain.update(gradients, inner, weights, **extra)
        weights = optax.apply_updates(weights, updates)
        updates, state = wrapped.update(gradients, state, params, **extra)
        return weights, inner, bfp.apply_updates(params, updates), state

    for i in range(3):
        weights, inner, params, state = both(weights, inner, params, state, gradients_of(i))
    masters = state.masters | {"b": params["b"]}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), masters, weights)
    assert_same_tree(params["w"], bfp.quantize_params({"w": masters["w"]}, "mxfp8")["w"])
    np.testing.assert_array_equal(params["h"], masters["h"].astype("bfloat16"))


def train(optimizer, steps=4, params=None, state=None, **arguments):
    params = quantized() if params is None else params
    state = optimizer.init(params) if state is None else state

    @jax.jit
    def step(params, state):
        value, gradients = bfp.value_and_grad(loss)(params)
        extra = {name: {"value": value, "grad": gradients, "value_fn": loss}[name] for name in arguments}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return bfp.apply_updates(params, updates), state, value

    values = []
    for _ in range(steps):
        params, state, value = step(params, state)
        values.append(float(value))
    return params, state, values


def test_lbfgs_searches_along_the_line_with_quantized_weights():
    """It wants the loss as a function: the one of quantized parameters, whose gradient is straight-through."""
    _, _, values = train(bfp.with_masters(optax.lbfgs()), steps=6, value=1, grad=1, value_fn=1)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.2 * values[0]


def test_extra_arguments_go_on():
    optimizer = bfp.with_masters(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)))
    _, state, _ = train(optimizer, value=1)
    assert state.inner[1].plateau_count.dtype == jnp.int32
    assert float(state.inner[1].best_value) < 10  # infinite before it was told of a value
    polyak = bfp.with_masters(optax.polyak_sgd(max_learning_rate=0.1))
    _, _, values = train(polyak, value=1)
    assert values[-1] < values[0]
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        polyak.update(gradients_of(0), polyak.init(quantized()), quantized())


def test_lookahead():
    optimizer = bfp.with_masters(optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5))
    plain = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(quantized())
    weights = optax.LookaheadParams.init_synced(jax.tree.map(lambda w: w.astype("float32"), WEIGHTS))
    state, inner = optimizer.init(params, optax.LookaheadParams.init_synced(WEIGHTS)), plain.init(weights)
    for i in range(3):
        updates, state = optimizer.update(gradients_of(i), state, params)
        params = bfp.apply_updates(params, updates)
        updates, inner = plain.update(gradients_of(i), inner, weights)
        weights = optax.apply_updates(weights, updates)
    for masters, expected, got in zip(state.masters, weights, params, strict=True):
        np.testing.assert_allclose(masters["w"], expected["w"], rtol=1e-6)
        assert_same_tree(got["w"], bfp.quantize_params({"w": masters["w"]}, "mxfp8")["w"])


@pytest.mark.parametrize("make", [bfp.adamw, lambda rate: bfp.with_masters(optax.adamw(rate))], ids=["adamw", "with_masters"])
def test_multi_steps_around_ours_and_inside_are_the_same(make):
    outside = train(optax.MultiSteps(make(0.01), 2))
    inner = optax.MultiSteps(optax.adamw(0.01), 2).gradient_transformation()
    inside = train(bfp.with_masters(inner))
    np.testing.assert_allclose(outside[2], inside[2], rtol=1e-5)
    # The step between two updates changes nothing, and what is updated is really the mean of two gradients.
    assert outside[2][0] == outside[2][1] != outside[2][2] == outside[2][3]
    one = train(optax.MultiSteps(make(0.01), 2), steps=1)[0]
    assert_same_tree(one, quantized())


def test_multi_steps_skips():
    optimizer = optax.MultiSteps(bfp.adamw(0.01), 1, should_skip_update_fn=optax.skip_not_finite)
    params = quantized()
    state = optimizer.init(params)
    bad = jax.tree.map(lambda g: g * jnp.nan, gradients_of(0))
    updates, state = jax.jit(optimizer.update)(bad, state, params)
    assert_same_tree(bfp.apply_updates(params, updates), params)
    updates, state = jax.jit(optimizer.update)(gradients_of(0), state, params)
    moved = bfp.apply_updates(params, updates)
    assert (moved["w"].codes != params["w"].codes).any()


def test_apply_if_finite_inside():
    optimizer = bfp.with_masters(optax.apply_if_finite(optax.adamw(0.01), 5))
    params = quantized()
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    updates, state = update(jax.tree.map(lambda g: g * jnp.nan, gradients_of(0)), state, params)
    assert_same_tree(bfp.apply_updates(params, updates), params)
    updates, state = update(gradients_of(0), state, params)
    plain = bfp.with_masters(optax.adamw(0.01))
    expected, _ = jax.jit(plain.update)(gradients_of(0), plain.init(params), params)
    assert_same_tree(bfp.apply_updates(params, updates), bfp.apply_updates(params, expected))


@pytest.mark.parametrize("other", [osci_reset(bfp.adamw(0.1)), optax.adamw(0.1)], ids=["osci_reset", "optax"])
def test_a_state_of_another_optimizer_is_refused(other):
    optimizer = bfp.adamw(0.1)
    params = quantized()
    with pytest.raises(TypeError, match=r"state must be the MasterState of this optimizer's init, got (OsciResetState|tuple)"):
        optimizer.update(params, other.init(params), params)
    with pytest.raises(TypeError, match="state must be the OsciResetState of this optimizer's init, got MasterState"):
        osci_reset(optimizer).update(params, optimizer.init(params), params)


def test_around_ours():
    params, _, values = train(optax.chain(optax.clip_by_global_norm(1.0), bfp.adamw(0.01)))
    assert values[-1] < values[0]
    only = optax.masked(bfp.adamw(0.1), {"w": True, "b": True, "h": False})
    updates, _ = only.update(gradients_of(0), only.init(params), params)
    assert (bfp.apply_updates({"w": params["w"]}, {"w": updates["w"]})["w"].codes != params["w"].codes).any()
    parts = optax.multi_transform({"a": bfp.adamw(0.01), "b": optax.sgd(0.1)}, {"w": "a", "b": "b", "h": "a"})
    assert train(parts)[2][-1] < values[0]
    frozen = optax.multi_transform({"a": optax.sgd(0.1), "f": optax.set_to_zero()}, {"w": "f", "b": "a", "h": "a"})
    after, _, values = train(bfp.with_masters(frozen))
    assert_same_tree(after["w"], quantized()["w"])
    assert values[-1] < values[0]


OURS = [bfp.adamw(0.01), osci_reset(bfp.adamw(0.01)), bfp.with_masters(optax.sgd(0.1))]
REFUSED = r"labels or a mask .* is_leaf=lambda leaf: .*with_masters"


def dimensions(params):
    """Labels as for plain arrays: of the parts of a quantized leaf."""
    return jax.tree.map(lambda leaf: leaf.ndim, params)


@pytest.mark.parametrize("ours", OURS)
def test_equal_labels_of_codes_and_scales_are_the_leafs(ours):
    params = quantized()
    whole = jax.tree.map(lambda leaf: leaf.ndim, params, is_leaf=lambda leaf: isinstance(leaf, bfp.QuantizedArray))
    assert whole == {"w": 2, "b": 1, "h": 2}
    runs = [train(optax.multi_transform({2: ours, 1: optax.sgd(0.1)}, of)) for of in (whole, dimensions(params), dimensions)]
    for run in runs[1:]:
        assert_same_tree(run[0], runs[0][0])
    # Also where optax's are inside, and a label is a function of plain arrays.
    inside = {2: optax.adamw(0.01), 1: optax.sgd(0.1)}
    for of in (dimensions(params), dimensions):
        assert_same_tree(*(train(bfp.with_masters(optax.multi_transform(inside, one)))[0] for one in (of, whole)))


@pytest.mark.parametrize("ours", OURS)
def test_labels_and_masks_of_parts_are_refused_in_words(ours):
    params = bfp.quantize_params(WEIGHTS, "nvfp4", filter_fn=lambda path, _: path == "w")
    labels = dimensions(params)
    assert labels["w"].tensor_scale == 0
    each = dict.fromkeys(range(3), ours)
    masks = [
        optax.multi_transform(each, labels),
        optax.multi_transform(each, dimensions),
        optax.masked(ours, lambda params: jax.tree.map(lambda leaf: leaf.ndim == 2, params)),
        optax.masked(ours, jax.tree.map(lambda ndim: ndim == 2, labels)),
        bfp.with_masters(optax.multi_transform(dict.fromkeys(range(3), optax.sgd(0.1)), labels)),
        bfp.with_masters(optax.adamw(0.1, mask=labels)),
    ]
    for optimizer in masks:
        with pytest.raises(TypeError, match=REFUSED):
            optimizer.init(params)
    # A mask that is a tree has to fit gradients too, which are plain arrays.
    with pytest.raises(TypeError, match=REFUSED):
        optax.masked(ours, jax.tree.map(lambda _: True, quantized())).init(quantized())
    stateless = optax.chain(optax.masked(optax.clip(0.1), lambda p: jax.tree.map(lambda leaf: leaf.ndim == 2, p)), ours)
    stateless.update(gradients_of(0), stateless.init(params), params)


@pytest.mark.parametrize("make", [bfp.adamw, bfp.adam, bfp.muon])
def test_injected_hyperparameters(make):
    schedule = optax.linear_schedule(0.01, 0.0, 10)
    static = ("ns_steps",) if make is bfp.muon else ()
    injected = train(optax.inject_hyperparams(make, static_args=static)(learning_rate=schedule))
    np.testing.assert_allclose(injected[2], train(make(schedule))[2], rtol=1e-4)
    assert injected[1].hyperparams["learning_rate"] == schedule(3)


def assert_same_masters(ours, theirs, rtol=1e-5, atol=1e-6):
    masters = []
    for optimizer in (ours, theirs):
        params = quantized()
        state, update = optimizer.init(params, WEIGHTS), jax.jit(optimizer.update)
        for i in range(3):
            updates, state = update(gradients_of(i), state, params)
            params = bfp.apply_updates(params, updates)
        masters.append(state.masters | {"b": params["b"]})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), *masters)


@pytest.mark.parametrize("decay", [0.3, optax.linear_schedule(0.3, 0.1, 4)], ids=["number", "schedule"])
def test_adamw_is_optax_adamw(decay):
    schedule = optax.exponential_decay(0.01, 2, 0.5)
    ours = bfp.adamw(schedule, b1=0.8, b2=0.95, eps=1e-6, weight_decay=decay)
    theirs = bfp.with_masters(optax.adamw(schedule, b1=0.8, b2=0.95, eps=1e-6, weight_decay=decay))
    assert_same_masters(ours, theirs)
    assert_same_masters(bfp.adamw(0.01), bfp.with_masters(optax.adamw(0.01)))


MASKS = {
    "tree": {"w": True, "b": False, "h": True},
    "function": lambda params: jax.tree.map(lambda leaf: leaf.ndim == 2, params),
    "prefix": False,
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_weight_decay(mask):
    mask = MASKS[mask]
    ours, theirs = bfp.adamw(0.01, weight_decay=0.5, mask=mask), optax.adamw(0.01, weight_decay=0.5, mask=mask)
    assert_same_masters(ours, bfp.with_masters(theirs))


def test_a_mask_of_parts():
    """Gradients have no codes; with equal bools the mask is the leaf's."""
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, quantized())
    assert_same_masters(bfp.adamw(0.1, weight_decay=0.5, mask=mask), bfp.adamw(0.1, weight_decay=0.5, mask=MASKS["tree"]))
    params = bfp.quantize_params(WEIGHTS, "nvfp4", filter_fn=lambda path, _: path == "w")
    optimizer = bfp.adamw(0.1, mask=jax.tree.map(lambda leaf: leaf.ndim == 2, params))
    with pytest.raises(TypeError, match=REFUSED):
        optimizer.update(gradients_of(0), optimizer.init(params), params)
    optimizer = bfp.adamw(0.1, mask={"w": True})
    with pytest.raises(ValueError, match="mask: the tree: trees differ: expected dict of w, got dict of b, h, w"):
        optimizer.update(gradients_of(0), optimizer.init(quantized()), quantized())


@pytest.mark.parametrize(
    "settings",
    [{"eps_root": 1e-3}, {"nesterov": True}, {"nesterov": True, "b1": 0.5, "eps_root": 0.1}, {"mu_dtype": jnp.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_optax_other_arguments(name, settings):
    ours, theirs = (getattr(module, name)(0.01, **settings) for module in (bfp, optax))
    rounding = {"rtol": 1e-3, "atol": 1e-4} if "mu_dtype" in settings else {}
    assert_same_masters(ours, bfp.with_masters(theirs), **rounding)


def test_optax_positions():
    by_position = (0.01, 0.8, 0.95, 1e-6, 1e-4, None, 0.2, MASKS["tree"])
    assert_same_masters(bfp.adamw(*by_position), bfp.with_masters(optax.adamw(*by_position)))
    assert_same_masters(bfp.adam(*by_position[:6]), bfp.with_masters(optax.adam(*by_position[:6])))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "consistent_rms": 0.2},
        {"weight_decay": 0.1, "weight_decay_mask": MASKS["tree"] | {"h": False}, "adam_weight_decay": 0.2},
        {"adam_learning_rate": 0.1, "beta": 0.5, "ns_steps": 3, "adam_b1": 0.5, "adam_eps_root": 1e-3},
    ],
    ids=str,
)
def test_muon_is_optax_muon(settings):
    """Whose matrices are [in, out] by default."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    of = lambda params: jax.tree.map(lambda leaf: axes if leaf.ndim == 2 else None, params)  # noqa: E731
    theirs = optax.contrib.muon(0.05, muon_weight_dimension_numbers=of, **settings)
    assert_same_masters(bfp.muon(0.05, **settings), bfp.with_masters(theirs), rtol=1e-4, atol=1e-4)


def test_adam_is_optax_adam_and_its_decay_is_a_term_of_the_gradient():
    assert_same_masters(bfp.adam(0.01), bfp.with_masters(optax.adam(0.01)))
    with_term = bfp.with_masters(optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01)))
    assert_same_masters(bfp.adam(0.01, weight_decay=0.1), with_term)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be 0 or more, got -1.0"),
        ({"b2": 1.0}, ValueError, "b2 must be 0 or more and below 1, got 1.0"),
        ({"eps": "x"}, TypeError, "eps must be a number, got str: 'x'"),
        ({"weight_decay": None}, TypeError, "weight_decay must be a number, got NoneType: None"),
    ],
)
def test_settings_that_mean_nothing(settings, error, message):
    with pytest.raises(error, match=message):
        bfp.adamw(**{"learning_rate": 0.1} | settings)


@pytest.mark.parametrize("scale", [0.5, -1, 2])
def test_new_values_can_not_be_calculated_with(scale):
    with pytest.raises(TypeError, match=r"the update of a leaf with a master is its new value, .*belongs inside"):
        train(optax.chain(bfp.adamw(0.01), optax.scale(scale)), steps=1)


@pytest.mark.parametrize("name", ["adam", "sgd", "adamw", "lion"])
def test_without_masters_the_message_names_them(name):
    optimizer, params = getattr(optax, name)(0.01), quantized()

    def step():
        updates, _ = optimizer.update(gradients_of(0), optimizer.init(params), params)
        return bfp.apply_updates(params, updates)

    with pytest.raises(TypeError, match="with_masters"):
        step()


@pytest.mark.parametrize(
    "calculate",
    [
        optax.tree.norm,
        optax.tree.sum,
        optax.tree.max,
        lambda tree: optax.tree.vdot(tree, tree),
        lambda tree: optax.tree.add(tree, tree),
        lambda tree: optax.tree.sub(tree, tree),
        lambda tree: optax.tree.scale(2, tree),
        lambda tree: optax.tree.update_moment(tree, tree, 0.9, 1),
        lambda tree: optax.tree.allclose(tree, tree),
        optax.tree.ones_like,
        optax.projections.projection_non_negative,
        lambda tree: optax.incremental_update(tree, tree, 0.1),
    ],
)
def test_mathematics_of_trees_take_no_codes(calculate):
    params = bfp.quantize_params({"w": jnp.ones((32, 64))}, "mxfp8")
    with pytest.raises(TypeError, match=r"optax would calculate with the codes of a QuantizedArray.*dequantize_params"):
        calculate(params)
    calculate(bfp.dequantize_params(params))


def test_a_running_mean_of_values():
    params = bfp.quantize_params({"w": jnp.ones((32, 64))}, "mxfp8")
    mean = optax.incremental_update(bfp.dequantize_params(params), {"w": jnp.zeros((32, 64))}, 0.25)
    np.testing.assert_array_equal(mean["w"], np.full((32, 64), 0.25))
    assert optax.periodic_update(params, params, jnp.int32(2), 2)["w"].format is params["w"].format

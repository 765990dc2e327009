"""Flax models with quantized kernels: the numbers of a plain loop with blockfp's own functions, to the bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_trees import assert_same_tree

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.integrations.flax import QuantizedLinear, convert

pytestmark = pytest.mark.usefixtures("little_optimization")

X = jax.random.normal(jax.random.key(0), (4, 16, 64))
RECIPES = ("mxfp8", "fp8_block", "nvfp4")


class Nnx(nnx.Module):
    def __init__(self, rngs, **options):
        self.up = nnx.Linear(64, 96, rngs=rngs, **options)
        self.down = nnx.Linear(96, 64, use_bias=False, rngs=rngs, **options)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(64, use_bias=False, name="down")(linen.gelu(linen.Dense(96, name="up")(x)))


def plain(params, x, recipe, keys):
    h = bfp.linear(x, params["up"]["kernel"].mT, params["up"]["bias"], recipe=recipe, key=keys and keys[0])
    return x + bfp.linear(jax.nn.gelu(h), params["down"]["kernel"].mT, recipe=recipe, key=keys and keys[1])


def loop(loss, params, optimizer):
    """Losses, and the parameters in the end; `loss` takes them and the number of the step."""
    state = optimizer.init(params)
    losses = []
    for number in range(3):
        value, gradients = bfp.value_and_grad(loss)(params, number)
        updates, state = optimizer.update(gradients, state, params)
        params = bfp.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


def quantized(params, recipe):
    format = recipes.parse(recipe).weight.format
    # A kernel [in, out] in square blocks is its own transpose's codes, turned.
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: bfp.quantize(leaf, format) if path[-1].key == "kernel" else leaf, params
    )


def lion(rate):
    return bfp.with_masters(optax.lion(rate))


@pytest.mark.parametrize(("recipe", "optimizer"), [*((recipe, bfp.adamw) for recipe in RECIPES), ("mxfp8", lion)])
def test_nnx_trains_as_a_plain_loop(recipe, optimizer):
    draws = recipe == "nvfp4"
    model = convert(Nnx(nnx.Rngs(0)), recipe, rngs=nnx.Rngs(quantize=1) if draws else None)
    before = nnx.to_pure_dict(nnx.state(Nnx(nnx.Rngs(0)), nnx.Param))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    streams = [nnx.clone(layer.keys)["quantize"] if draws else None for layer in (model.up, model.down)]
    keys = [tuple(stream() for stream in streams) if draws else None for _ in range(3)]

    def loss(params, number):
        model = nnx.merge(graph, params, rest, copy=True)
        for layer in (model.up, model.down) if draws else ():
            for _ in range(number):
                layer.keys["quantize"]()
        return jnp.square(model(X) - 1).mean()

    losses, params = loop(loss, params, optimizer(1e-2))
    expected, wanted = loop(
        lambda params, number: jnp.square(plain(params, X, recipe, keys[number]) - 1).mean(),
        quantized(before, recipe),
        optimizer(1e-2),
    )
    assert losses == expected
    nnx.update(model, params)
    ends = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert_same_tree(ends, wanted)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), bfp.dequantize_params(ends), bfp.dequantize_params(before))
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("recipe", RECIPES)
def test_linen_trains_as_a_plain_loop(recipe):
    model = convert(Linen(), recipe)
    streams = {"params": jax.random.key(1), "quantize": jax.random.key(2)}
    variables = model.init(streams, X)
    before = Linen().init(streams, X)["params"]
    assert_same_tree(variables["params"], quantized(before, recipe))

    def loss(variables, number):
        return jnp.square(model.apply(variables, X, rngs={"quantize": jax.random.key(number)}) - 1).mean()

    losses, ends = loop(loss, variables, bfp.adamw(1e-2))
    if recipe != "nvfp4":
        expected, wanted = loop(
            lambda params, _: jnp.square(plain(params, X, recipe, None) - 1).mean(), variables["params"], bfp.adamw(1e-2)
        )
        assert losses == expected
        assert_same_tree(ends["params"], wanted)
    assert losses[-1] < losses[0]
    restored = serialization.from_bytes(ends, serialization.to_bytes(ends))
    assert_same_tree(restored, ends)
    assert loss(restored, 0) == loss(ends, 0)


def test_random_keys_of_linen_count():
    model = convert(Linen(), "nvfp4")
    variables = model.init({"params": jax.random.key(1), "quantize": jax.random.key(2)}, X)
    gradient = lambda seed: bfp.grad(  # noqa: E731
        lambda v: jnp.square(model.apply(v, X, rngs={"quantize": jax.random.key(seed)})).mean()
    )(variables)["params"]["up"]["kernel"]
    np.testing.assert_array_equal(gradient(0), gradient(0))
    assert (gradient(0) != gradient(1)).any()


def test_filters_recipes_by_path_and_what_stays():
    seen = []
    model = convert(Nnx(nnx.Rngs(0)), lambda path: "mxfp8" if path == "up" else None, lambda path, layer: not seen.append(path))
    assert sorted(seen) == ["down", "up"]
    assert type(model.up) is QuantizedLinear
    assert type(model.down) is nnx.Linear
    # In the other order where the parameters' names say so.
    variables = convert(Linen(), "mxfp8", lambda module, path: path == "down").init(jax.random.key(0), X)["params"]
    assert isinstance(variables["down"]["kernel"], bfp.QuantizedArray)
    assert isinstance(variables["up"]["kernel"], jax.Array)


def test_recipes_by_pattern():
    model = convert(Nnx(nnx.Rngs(0)), {"^up$": "mxfp8"})
    assert type(model.up) is QuantizedLinear
    assert type(model.down) is nnx.Linear
    variables = convert(Linen(), {"down": None, "": "mxfp8"}).init(jax.random.key(0), X)["params"]
    assert isinstance(variables["up"]["kernel"], bfp.QuantizedArray)
    assert isinstance(variables["down"]["kernel"], jax.Array)
    with pytest.raises(ValueError, match="pattern 'donw' matches no convertible layer"):
        convert(Nnx(nnx.Rngs(0)), {"donw": None, "": "mxfp8"})


def test_plain_kernels_are_quantized_at_each_use():
    params = Linen().init(jax.random.key(1), X)
    model = convert(Linen(), "mxfp8")
    value, gradients = jax.value_and_grad(lambda v: jnp.square(model.apply(v, X)).mean())(params)
    expected, wanted = bfp.value_and_grad(lambda v: jnp.square(model.apply(v, X)).mean())(
        {"params": quantized(params["params"], "mxfp8")}
    )
    assert value == expected
    assert_same_tree(gradients, wanted)


def test_a_stack_under_scan():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return Linen()(x), None

    stack = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    model = convert(stack(), "mxfp8")
    variables = model.init(jax.random.key(0), X, None)
    assert variables["params"]["Linen_0"]["up"]["kernel"].shape == (3, 64, 96)
    y, _ = jax.jit(model.apply)(variables, X, None)
    x = X
    for i in range(3):
        x = plain(jax.tree.map(lambda leaf: leaf[i], variables["params"]["Linen_0"]), x, "mxfp8", None)  # noqa: B023
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_a_stack_along_another_axis_is_refused(axis, recipe):
    """T5X and MaxText stack along axis 1. NVFP4's tensor scale has none, and no check of shapes knows one scale per tensor."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return linen.Dense(64, use_bias=False)(x), None

    def stack(axis):
        return linen.scan(Layer, variable_axes={"params": axis}, split_rngs={"params": True, "quantize": True}, length=3)()

    keys = {"params": jax.random.key(0), "quantize": jax.random.key(1)}
    stack(axis).init(keys, X, None)
    with pytest.raises(ValueError, match=r'along axis 0, variable_axes=\{"params": 0\}'):
        convert(stack(axis), recipe).init(keys, X, None)
    kernels = convert(stack(0), recipe).init(keys, X, None)
    with pytest.raises(ValueError, match=r"linen\.scan would move an axis of codes and scales"):
        convert(stack(axis), recipe).apply(kernels, X, None, rngs=keys)

    split = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=(0,), out_axes=nnx.StateAxes({nnx.Param: 1, ...: 0})))
    blocks = split(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"layer: a kernel of shape \(64, 3, 64\) .* stacked along axis 0"):
        convert(blocks, recipe, rngs=nnx.Rngs(1) if recipe == "nvfp4" else None)
    assert type(blocks.layer) is nnx.Linear


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.layer(x))


def test_a_stack_of_nnx_has_a_stream_for_each_layer():
    make = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=(0,), out_axes=0))
    blocks = convert(make(nnx.Rngs(0)), "nvfp4", rngs=nnx.Rngs(quantize=1))
    assert blocks.layer.kernel.get_value().tensor_scale.shape == (3,)
    keys = blocks.layer.keys["quantize"].key.get_value()
    assert len(set(map(str, jax.random.key_data(keys).tolist()))) == 3
    graph, params, rest = nnx.split(blocks, nnx.Param, ...)

    def loss(params):
        forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.square(forward(X, nnx.merge(graph, params, rest, copy=True))).mean()

    def by_hand(weights):
        x = X
        for i in range(3):
            one = jax.tree.map(lambda leaf: leaf[i], weights["kernel"])  # noqa: B023
            key = jax.random.fold_in(keys[i], 0)
            x = x + nnx.gelu(bfp.linear(x, one.mT, weights["bias"][i], recipe="nvfp4", key=key))
        return jnp.square(x).mean()

    value, gradients = jax.jit(bfp.value_and_grad(loss))(params)
    expected, wanted = jax.jit(bfp.value_and_grad(by_hand))(nnx.to_pure_dict(params)["layer"])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    got = nnx.to_pure_dict(gradients)["layer"]["kernel"]
    # The same random bits: other ones differ by more than a tenth.
    assert float(jnp.linalg.norm(got - wanted["kernel"]) / jnp.linalg.norm(got)) < 1e-3


@pytest.mark.parametrize("recipe", ["fp8_row", recipes.qat("nvfp4"), recipes.qat("fp8_e4m3_row")], ids=str)
def test_a_format_without_an_exact_transpose_is_refused_at_once(recipe):
    model = Nnx(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"(up|down): recipe .* has weights in .* a kernel \[in, out\] of such codes"):
        convert(model, recipe)
    assert type(model.up) is nnx.Linear
    with pytest.raises(ValueError, match=r"has no exact transpose\. Give the layer dot_general="):
        convert(Linen(), recipe).init(jax.random.key(0), X)
    # What the message says to do.
    plain, layer = Nnx(nnx.Rngs(0)), Nnx(nnx.Rngs(0), dot_general=partial(bfp.dot_general, recipe=recipe))
    assert 0 < float(jnp.linalg.norm(layer(X) - plain(X)) / jnp.linalg.norm(plain(X))) < 0.2


def test_a_linen_model_in_which_nothing_is_found():
    with pytest.raises(ValueError, match=r"pattern 'donw' matches no convertible layer; paths are 'up', 'down'"):
        convert(Linen(), {"donw": None, "": "mxfp8"}).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"model holds no flax\.linen\.Dense to convert"):
        convert(Linen(), "mxfp8", lambda path, layer: False).init(jax.random.key(0), X)


def test_kernels_of_another_recipe_are_named():
    model = convert(Linen(), "mxfp8")
    variables = model.init(jax.random.key(0), X)
    held = r"the kernel is in mxfp8_e4m3_32x32, and"
    with pytest.raises(ValueError, match=rf"^up: {held} recipe fp8_block wants fp8_e4m3_128x128"):
        convert(Linen(), "fp8_block").apply(variables, X)
    with pytest.raises(ValueError, match=rf"^down: {held} the layer isn't converted"):
        convert(Linen(), "mxfp8", lambda path, layer: path != "down").apply(variables, X)
    with pytest.raises(ValueError, match=r"model is converted already, by mxfp8: convert model\.module"):
        convert(model, "fp8_block")
    with pytest.raises(ValueError, match=r"converted layers keep their recipe"):
        convert(convert(Nnx(nnx.Rngs(0)), "mxfp8"), "fp8_block")


def test_programs_that_linen_keeps():
    """`linen.jit` keeps a program for a class and its fields; which recipe it was traced with, it isn't told."""
    model = linen.jit(Linen)()
    variables = model.init(jax.random.key(1), X)
    expected = model.apply(variables, X)
    for recipe in ("mxfp8", "mxfp4", {"up": "mxfp4", "": None}):
        changed = convert(model, recipe)
        for _ in range(2):
            kernels = changed.init(jax.random.key(1), X)["params"]
            assert isinstance(kernels["up"]["kernel"], bfp.QuantizedArray)
            down = recipe if isinstance(recipe, str) else None
            h = bfp.linear(X, kernels["up"]["kernel"].mT, kernels["up"]["bias"], recipe=down or "mxfp4")
            plain = jax.nn.gelu(h) @ variables["params"]["down"]["kernel"]
            y = bfp.linear(jax.nn.gelu(h), kernels["down"]["kernel"].mT, recipe=down) if down else plain
            for given in (variables, {"params": kernels}):
                np.testing.assert_allclose(changed.apply(given, X), X + y, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(model.apply(variables, X), expected)


class Coder(linen.Module):
    def setup(self):
        self.encoder, self.decoder = linen.Dense(32), linen.Dense(64)

    def __call__(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x):
        return self.encoder(x)


def test_another_method_of_a_linen_model():
    model = convert(Coder(), "mxfp8")
    variables = model.init(jax.random.key(0), X)
    layer = variables["params"]["encoder"]
    got = model.apply(variables, "encode", X, method="call")
    np.testing.assert_array_equal(got, bfp.linear(X, layer["kernel"].mT, layer["bias"], recipe="mxfp8"))


def test_wrong_calls():
    with pytest.raises(TypeError, match=r"must be a flax\.nnx\.Module or a flax\.linen\.Module, got dict"):
        convert({}, "mxfp8")
    with pytest.raises(ValueError, match="delayed scaling keeps a state"):
        convert(Nnx(nnx.Rngs(0)), "fp8_delayed")
    with pytest.raises(ValueError, match=r"holds no flax\.nnx\.Linear"):
        convert(Nnx(nnx.Rngs(0)), "mxfp8", lambda path, layer: False)
    model = Nnx(nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs = None: recipe nvfp4 rounds stochastically and needs one"):
        convert(model, "nvfp4")
    assert type(model.up) is nnx.Linear
    # One line serves all recipes.
    assert convert(model, "mxfp8", rngs=nnx.Rngs(quantize=1))(X).shape == Nnx(nnx.Rngs(0))(X).shape
    with pytest.raises(ValueError, match="rngs is for nnx models"):
        convert(Linen(), "nvfp4", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="precision and preferred_element_type must be None"):
        convert(Nnx(nnx.Rngs(0), precision="highest"), "mxfp8")(X)


class Named(linen.Module):
    """A layer of a stack, with logical names of its kernel's axes."""

    @linen.compact
    def __call__(self, x, _):
        kernel_init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        return x + linen.Dense(64, kernel_init=kernel_init, name="up")(x), None


class NamedStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        metadata = {linen.PARTITION_NAME: "layers"}
        stack = linen.scan(linen.remat(Named, prevent_cse=False), **axes, length=2, metadata_params=metadata)
        return stack(name="layers")(x, None)[0]


def test_names_of_axes_stay_and_place_codes_and_scales():
    model, x = convert(NamedStack(), "mxfp8"), X.reshape(-1, 64)
    boxed = model.init(jax.random.key(0), x)
    assert isinstance(boxed["params"]["layers"]["up"]["kernel"], linen.LogicallyPartitioned)
    rules = (("embed", "fsdp"), ("mlp", None), ("layers", None))
    specs = linen.logical_to_mesh(linen.get_partition_spec(boxed), rules)
    assert specs["params"]["layers"]["up"]["kernel"] == P(None, "fsdp", None)
    assert_same_tree(linen.meta.unbox(boxed), linen.meta.unbox(jax.jit(model.init)(jax.random.key(0), x)))

    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    init = lambda key: linen.meta.unbox(model.init(key, x))  # noqa: E731
    gradients = bfp.value_and_grad(lambda variables: jnp.square(model.apply(variables, x)).mean())
    with jax.set_mesh(mesh), linen.logical_axis_rules(rules):
        places = bfp.named_shardings(jax.eval_shape(init, jax.random.key(0)), mesh, specs)
        variables = jax.jit(init, out_shardings=places)(jax.random.key(0))
        kernel = variables["params"]["layers"]["up"]["kernel"]
        assert kernel.codes.sharding.spec == P(None, "fsdp", None)
        cut, of_boxed = jax.jit(gradients)(variables), jax.jit(gradients)(boxed)
    assert_same_tree(variables, linen.meta.unbox(boxed))
    for got, want in zip(jax.tree.leaves((cut, of_boxed)), 2 * jax.tree.leaves(gradients(boxed)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_named_axes_of_nnx_place_codes_and_scales():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))
        model = convert(Nnx(nnx.Rngs(0), kernel_init=kernel_init), "mxfp8")
        expected, state = model(X), nnx.state(model)
        nnx.update(model, jax.device_put(state, bfp.named_shardings(state, mesh, nnx.get_partition_spec(state))))
        assert model.up.kernel.get_value().codes.sharding.spec == P(None, "fsdp")
        np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)

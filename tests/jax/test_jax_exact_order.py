"""`exact_order` in JAX: PyTorch's bits, the same on the CUDA path, rows that depend on themselves alone; also in groups."""

import emulated_cuda_in_jax
import emulated_order
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits
from samples import sample

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.kernels import switch

torch = pytest.importorskip("torch")
bfp_torch = pytest.importorskip("blockfp.torch")
apply = pytest.importorskip("blockfp.torch_backend.linear.linear").apply

SHAPE = (40, 144, 72)
# Sums run over 4, 8 or 16 tiles of 128 rows; of the last group over 16, which begin before it.
SIZES, GROUPED = (400, 0, 1, 1100), (1501, 48, 24)


def exact(name):
    return recipes.parse(name).replace(exact_order=True)


def arrays(shape=SHAPE):
    """x, weight, bias and y's gradient, in float32."""
    tokens, inside, outside = shape
    return [
        sample("gaussian", each, seed=i)
        for i, each in enumerate([(tokens, inside), (outside, inside), (outside,), (tokens, outside)])
    ]


def of_jax(recipe, shape=SHAPE, dtype=jnp.bfloat16, run=jax.jit):
    def step(x, w, bias, g):
        y, back = jax.vjp(lambda x, w: bfp.linear(x, w, bias, recipe=recipe, key=3), x, w)
        return y, *back(g)

    return run(step)(*(jnp.asarray(x).astype(dtype) for x in arrays(shape)))


def of_torch(recipe, shape=SHAPE, dtype=torch.bfloat16):
    x, w, bias, g = (torch.tensor(x).to(dtype) for x in arrays(shape))
    x.requires_grad_(), w.requires_grad_()
    y = bfp_torch.linear(x, w, bias, recipe=recipe, key=3)
    y.backward(g)
    return [jnp.asarray(t.detach().float().numpy()).astype(str(dtype).removeprefix("torch.")) for t in (y, x.grad, w.grad)]


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp6", "mxfp4", "fp8_row", "nvfp4", "fp8_current"])
def test_the_bits_of_pytorch(name):
    assert_same_bits(of_jax(exact(name)), of_torch(exact(name)))


def test_ragged_float32_operation_by_operation():
    found = of_jax(exact("mxfp8"), (5, 33, 7), jnp.float32, run=lambda step: step)
    assert_same_bits(found, of_torch(exact("mxfp8"), (5, 33, 7), torch.float32))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "fp8_row"])
def test_the_cuda_path_has_the_cpus_bits(name):
    wanted = of_jax(exact(name))
    emulated_order.calls.clear()
    with emulated_cuda_in_jax.launches(product=emulated_order.product):
        found = jax.block_until_ready(of_jax(exact(name)))
    assert len(emulated_order.calls) == 3
    assert_same_bits(found, wanted)


def test_a_row_depends_on_itself_alone_also_under_vmap_and_without_kernels():
    x, w, *_ = arrays()
    x = jnp.asarray(x).astype(jnp.bfloat16)
    w = bfp.quantize_params(jnp.asarray(w).astype(jnp.bfloat16), "mxfp8")
    run = jax.jit(lambda x: bfp.linear(x, w, recipe=exact("mxfp8")))
    whole = run(x)
    for first, last in ((0, 1), (3, 36)):
        assert_same_bits([run(x[first:last])], [whole[first:last]])
    assert_same_bits([jax.vmap(run)(x.reshape(5, 8, -1)).reshape(whole.shape)], [whole])
    few, small = x[:3, :32], bfp.quantize(jnp.asarray(arrays()[1][:8, :32]).astype(jnp.bfloat16), "mxfp8_e4m3_32x32")
    wanted = bfp.linear(few, small, recipe=exact("mxfp8"))
    with switch.definition_only():
        assert_same_bits([bfp.linear(few, small, recipe=exact("mxfp8"))], [wanted])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight host devices")
def test_xla_may_cut_any_axis_over_devices():
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    x, w, bias, _ = (jnp.asarray(each).astype(jnp.bfloat16) for each in arrays((8, 256, 128)))
    run = jax.jit(lambda x, w: bfp.linear(x, w, bias, recipe=exact("fp8_block")))
    placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in ((x, P("d", "e")), (w, P(None, "e")))]
    assert_same_bits([run(*placed)], [run(x, w)])
    q = bfp.quantize_params(w, "fp8_block")
    q = jax.device_put(q, bfp.named_shardings(q, mesh, P(None, "e")))
    assert_same_bits([run(placed[0], q)], [run(x, w)])


def test_what_has_no_order_is_refused():
    x, w, *_ = map(jnp.asarray, arrays())
    with pytest.raises(ValueError, match="exact_order: float32 by bfloat16 has no defined order"):
        jax.grad(lambda x: bfp.linear(x, w, recipe=exact("fp8_row")).sum())(x)
    with pytest.raises(ValueError, match=r"recipe qat.*: forward: exact_order: float32 by mxfp4_e2m1"):
        bfp.linear(x, w, recipe=recipes.qat("mxfp4_e2m1").replace(exact_order=True))
    with pytest.raises(ValueError, match="forward: exact_order: float32 by mxfp4_e2m1"):
        bfp.grouped_linear(x, w[None], jnp.array([40]), recipe=recipes.qat("mxfp4_e2m1").replace(exact_order=True))


# ---- layers of groups


def grouped_arrays():
    """x, weights, biases and y's gradient."""
    tokens, inside, outside = GROUPED
    shapes = (tokens, inside), (len(SIZES), outside, inside), (len(SIZES), outside), (tokens, outside)
    return [jnp.asarray(sample("gaussian", each, seed=i)).astype(jnp.bfloat16) for i, each in enumerate(shapes)]


def of_groups(recipe, given=None, sizes=SIZES):
    """y and the gradients of x and the weights, which share scales as PyTorch's GroupedLinear has them."""

    def step(x, w, bias, g, sizes):
        def layer(x, w):
            q = bfp.quantize(w, recipe.weight.format)
            return bfp.grouped_linear(x, q, sizes, bias, recipe=recipe, key=3)

        y, back = jax.vjp(layer, x, w)
        return y, *back(g)

    return jax.jit(step)(*(given or grouped_arrays()), jnp.asarray(sizes))


def of_groups_in_torch(recipe, given=None, sizes=SIZES):
    x, w, bias, g = (torch.from_numpy(np.array(each, np.float32)).bfloat16() for each in given or grouped_arrays())
    x.requires_grad_(), w.requires_grad_()
    y = apply(x, bfp_torch.quantize(w, recipe.weight.format), bias, recipe, counts=list(sizes), key=3)
    y.backward(g)
    return [jnp.asarray(t.detach().float().numpy()).astype(jnp.bfloat16) for t in (y, x.grad, w.grad)]


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp6", "mxfp4_rotated", "nvfp4", "fp8_current"])
def test_groups_have_the_bits_of_pytorch(name):
    assert_same_bits(of_groups(exact(name)), of_groups_in_torch(exact(name)))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4", "fp8_current"])
def test_groups_on_the_cuda_path_have_the_cpus_bits(name):
    recipe = exact(name).replace(fast_accum={"forward", "dgrad", "wgrad"})
    wanted = of_groups(recipe)
    emulated_order.calls.clear()
    with emulated_cuda_in_jax.launches(product=emulated_order.product):
        found = jax.block_until_ready(of_groups(recipe))
    assert len(emulated_order.calls) == 3
    assert_same_bits(found, wanted)


def test_a_row_is_the_same_alone_and_in_groups_of_any_sizes():
    recipe, (x, w, bias, g) = exact("mxfp8"), grouped_arrays()
    whole, *_ = of_groups(recipe, (x, w, bias, g))
    one = jnp.stack([w[3]] * 3), jnp.stack([bias[3]] * 3)
    for sizes in ((1, 0, 1500), (433, 1068, 0)):
        again, *_ = of_groups(recipe, (x, *one, g), sizes)
        assert_same_bits([again[401:]], [whole[401:]])
    alone = bfp.linear(x[401:402], w[3], bias[3], recipe=recipe)
    assert_same_bits([alone], [whole[401:402]])


def test_sums_that_fall_below_the_smallest_number_keep_their_sign():
    """Tiles beyond a group add +0 times a scale to its sum, which would make a -0 +0."""
    x, w, bias, g = grouped_arrays()
    # In one block, scaled by 2^-74, codes as far apart as E4M3 has them: the sum is that of the smallest.
    x = x.at[:10].set(2.0**-82).at[0].set(2.0**-66).at[1].set(0)
    g = g.at[:10].set(-(2.0**-82)).at[0].set(0).at[1].set(2.0**-66)
    given, sizes = (x, w, bias, g), (10, 0, 391, 1100)
    found, wanted = of_groups(exact("mxfp8"), given, sizes), of_groups_in_torch(exact("mxfp8"), given, sizes)
    of_first = np.asarray(wanted[2][0], np.float32)
    assert not of_first.any()
    assert np.signbit(of_first).all()
    assert_same_bits(found, wanted)

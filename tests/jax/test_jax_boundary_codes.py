"""`keep_codes` in JAX: the backward of a function at the values of its input's codes, on any mesh; PyTorch's bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import blockfp
import blockfp.jax as bfp

LAYERS, TOKENS, SIZE = 3, 8, 64


def block(x, layer):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    layers = {name: jnp.asarray(rng.standard_normal((LAYERS, SIZE, SIZE)) / 8, jnp.float32) for name in ("up", "down")}
    x, g = (jnp.asarray(rng.standard_normal((2, TOKENS, SIZE)), jnp.float32) for _ in range(2))
    return layers, x, g


def scanned(layers, x, function=block):
    return lax.scan(lambda x, layer: (function(x, layer), None), x, layers)[0]


def values(x, format):
    return jnp.asarray(blockfp.quantize(np.asarray(x), format).dequantize())


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1", "fp8_e4m3_row"])
def test_forward_and_gradients(arrays, format):
    layers, x, g = arrays
    y, pullback = jax.vjp(jax.jit(lambda layers, x: scanned(layers, x, bfp.keep_codes(block, format))), layers, x)
    np.testing.assert_array_equal(y, jax.jit(scanned)(layers, x))
    of_layers, dx = pullback(g)
    inputs = [x]
    for i in range(LAYERS):
        inputs.append(jax.jit(block)(inputs[-1], jax.tree.map(lambda w, i=i: w[i], layers)))
    wanted = g
    for i in reversed(range(LAYERS)):
        layer = jax.tree.map(lambda w, i=i: w[i], layers)
        wanted, own = jax.vjp(block, values(inputs[i], format), layer)[1](wanted)
        for name, gradient in own.items():
            np.testing.assert_allclose(of_layers[name][i], gradient, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-5)
    plain = jax.vjp(scanned, layers, x)[1](g)[1]
    assert jnp.abs(plain - dx).max() > 1e-3 * jnp.abs(plain).max()


def test_what_is_kept_of_a_scan_is_codes(arrays):
    layers, x, _ = arrays
    x = x.astype(jnp.bfloat16)
    layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers)
    kept = jax.tree.leaves(jax.vjp(lambda x: scanned(layers, x, bfp.keep_codes(block, "mxfp8_e4m3")), x)[1])
    activations = [leaf for leaf in kept if leaf.shape[:3] == (LAYERS, 2, TOKENS)]
    assert {leaf.dtype for leaf in activations} == {jnp.dtype(jnp.uint8)}
    assert sum(leaf.nbytes for leaf in activations) == LAYERS * 2 * TOKENS * (SIZE + SIZE // 32)


@pytest.fixture(scope="module")
def wide():
    """x and g [2, 8, 96], of which two devices cut a block; exponents let a block's scale show in every code."""
    rng = np.random.default_rng(1)
    x, g = rng.standard_normal((2, 2, TOKENS, 96)) * np.exp2(rng.integers(-20, 20, (2, 2, TOKENS, 96)))
    return jnp.asarray(x, jnp.float32), jnp.asarray(g, jnp.float32)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, None, "a")])
def test_no_mesh_changes_it(wide, spec, kind):
    x, g = wide
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    kept = bfp.keep_codes(lambda x, layer: x * x * layer, "mxfp8_e4m3")
    run = jax.jit(lambda x, g, layer: jax.vjp(kept, x, layer)[1](g)[0])
    layer = jnp.float32(3)
    wanted = 2 * values(x, "mxfp8_e4m3") * (3 * g)
    np.testing.assert_array_equal(run(x, g, layer), wanted)
    placed = (jax.device_put(array, NamedSharding(mesh, spec)) for array in (x, g))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(run(*placed, layer), wanted)


@pytest.mark.parametrize(("spec", "columns"), [(P("a"), 96), (P(None, "a"), 96), (P(None, None, "a"), 64)])
def test_shard_map_with_whole_blocks_on_each_device(wide, spec, columns):
    x, g = (array[..., :columns] for array in wide)
    kept = bfp.keep_codes(lambda x: x * x, "mxfp8_e4m3")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    own = jax.shard_map(lambda x, g: jax.vjp(kept, x)[1](g)[0], mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(own)(x, g), 2 * values(x, "mxfp8_e4m3") * g)


def test_pytorchs_bits(arrays):
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    import blockfp.torch

    _, x, g = arrays
    dx = jax.vjp(bfp.keep_codes(lambda x: x * x, "mxfp8_e4m3"), x)[1](g)[0]
    x, g = (torch.from_numpy(np.array(array)) for array in (x, g))
    x.requires_grad_()
    context = blockfp.torch.keep_codes("mxfp8_e4m3")
    checkpoint(lambda x: x * x, x, use_reentrant=False, context_fn=context).backward(g)
    np.testing.assert_array_equal(dx, x.grad.numpy())


def test_quantized_layers(arrays):
    _, x, g = arrays
    w = bfp.quantize_params({"w": jnp.asarray(np.random.default_rng(1).standard_normal((SIZE, SIZE)), jnp.float32)}, "mxfp8")

    def layer(x, params):
        return bfp.linear(x, params["w"], recipe="mxfp8")

    kept = bfp.keep_codes(layer, "mxfp8_e4m3")
    np.testing.assert_array_equal(kept(x, w), layer(x, w))
    found = bfp.grad(lambda w, x: jnp.vdot(kept(x, w), g), (0, 1))(w, x)
    wanted = bfp.grad(lambda w, x: jnp.vdot(layer(x, w), g), (0, 1))(w, values(x, "mxfp8_e4m3"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_formats_whose_scales_other_rows_would_change():
    for format in ("fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4"):
        with pytest.raises(ValueError, match=f"format {format}: rows that go to different ranks must not share a scale"):
            bfp.keep_codes(block, format)

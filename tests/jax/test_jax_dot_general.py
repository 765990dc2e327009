"""`dot_general` against `lax.dot_general` and `linear`, and the routes of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.linear import products
from samples import sample

import blockfp.jax as bfp
from blockfp.kernels.routes import Route


@pytest.mark.parametrize(
    ("lhs", "rhs", "dimensions"),
    [
        ((6, 4, 32), (32, 20), (((2,), (0,)), ((), ()))),
        ((4, 32, 6), (3, 8, 32), (((1,), (2,)), ((), ()))),
        ((2, 5, 3, 32), (2, 7, 3, 32), (((3,), (3,)), ((0, 2), (0, 2)))),
        ((5, 4, 8), (4, 8, 9), (((1, 2), (0, 1)), ((), ()))),
    ],
)
def test_dot_general(lhs, rhs, dimensions):
    a, b = jnp.asarray(sample("gaussian", lhs)), jnp.asarray(sample("gaussian", rhs, seed=1))
    want = jax.lax.dot_general(a, b, dimensions)
    got = jax.jit(lambda a, b: bfp.dot_general(a, b, dimensions, recipe="mxfp8"))(a, b)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) < 0.06 * np.linalg.norm(want)


def test_all_matrices_of_a_dot_general_share_a_state():
    a, b = jnp.asarray(sample("gaussian", (3, 8, 32))), jnp.asarray(sample("gaussian", (3, 16, 32), seed=1))
    g = jnp.asarray(sample("integers", (3, 8, 16)))
    dimensions = (((2,), (2,)), ((0,), (0,)))

    scaled = bfp.DelayedState(jnp.zeros(4), jnp.float32(37.5), jnp.zeros(4), jnp.float32(1000))

    def loss(state, factors):
        """The same products twice, which is a layer that runs several times."""
        total = 0
        for factor in factors:
            y, state = bfp.dot_general(factor * a, b, dimensions, recipe="fp8_delayed", state=state)
            total += (y * factor * g).sum()
        return total, (y, state)

    (_, (y, state)), seen = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(scaled, (2.0, 1.0))
    assert state.input_amax_history[0] == 2 * jnp.abs(a).max()
    assert seen.gradient_amax_history[0] == 2 * jnp.abs(g).max()
    assert state.input_scale.shape == ()
    for i in range(3):
        want, _ = bfp.linear(a[i], b[i], recipe="fp8_delayed", state=scaled)
        np.testing.assert_allclose(y[i], want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_dot_general_of_a_quantized_kernel():
    x, kernels = jnp.asarray(sample("gaussian", (112, 80))), jnp.asarray(sample("gaussian", (4, 48, 80), seed=1))
    kernel = kernels[0].T
    contract = (((1,), (0,)), ((), ()))
    q = bfp.quantize(kernel, "mxfp8_e4m3_32x32")
    y = bfp.dot_general(x, q, contract, None, jnp.bfloat16, recipe="mxfp8")
    np.testing.assert_array_equal(y, bfp.linear(x, q.mT, recipe="mxfp8").astype("bfloat16"))
    with pytest.raises(ValueError, match="must be a matrix with one contracted axis"):
        bfp.dot_general(x, bfp.quantize(kernels, "mxfp8_e4m3_32x32"), (((1,), (2,)), ((), ())), recipe="mxfp8")
    with pytest.raises(ValueError, match="out_sharding = "):
        bfp.dot_general(x, kernel, contract, out_sharding=1, recipe="mxfp8")
    with pytest.raises(TypeError, match="lhs must be an array in high precision"):
        bfp.dot_general(q, q, contract, recipe="mxfp8")
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        bfp.dot_general(x, kernel[1:], contract, recipe="mxfp8")
    with pytest.raises(ValueError, match="precision = "):
        bfp.dot_general(x, kernel, contract, jax.lax.Precision.HIGHEST, recipe="mxfp8")


@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_preferred_dtype_is_that_of_the_sums(batch):
    """y of bfloat16 in float32 is no rounded y; and its gradient is quantized as it comes, in float32."""
    shapes = (40, 96), (48, 96), (40, 48)
    a, b, g = (jnp.asarray(sample("gaussian", (*batch, *shape), seed=i)) for i, shape in enumerate(shapes))
    a, b = a.astype("bfloat16"), b.astype("bfloat16")
    axes = tuple(range(len(batch)))
    dimensions = (((len(batch) + 1,), (len(batch) + 1,)), (axes, axes))

    def of(a, b, dtype=None):
        return jax.vjp(lambda a, b: bfp.dot_general(a, b, dimensions, None, dtype, recipe="mxfp8"), a, b)

    (y, back), (wanted, back_of_f32) = of(a, b, "float32"), of(a.astype("float32"), b.astype("float32"))
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    for got, want in zip(back(g), back_of_f32(g), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype("float32"), want, rtol=2.0**-8, atol=1e-6 * np.abs(want).max())


def scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
    """The result that `jax.nn.scaled_matmul` is documented to give."""
    values = []
    for x, scales in ((lhs, lhs_scales), (rhs, rhs_scales)):
        repeated = jnp.repeat(scales.astype(jnp.float32), x.shape[-1] // scales.shape[-1], axis=-1)
        values.append(x.astype(jnp.float32) * repeated)
    return jnp.einsum("bmk,bnk->bmn", *values).astype(preferred_element_type)


@pytest.mark.parametrize(
    ("mode", "a", "b"),
    [
        ("tensor", "fp8_e4m3", "fp8_e4m3"),
        ("tensor", "fp8_e5m2", "fp8_e4m3_pow2"),
        ("block", "fp8_e4m3_1x128", "fp8_e4m3_128x128"),
        ("block", "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128_fp32"),
        ("mx", "mxfp8_e4m3", "mxfp8_e4m3_32x32"),
        ("nvfp4", "nvfp4", "nvfp4_16x16"),
    ],
)
def test_modes_of_gpus_give_the_product_of_the_values(mode, a, b, monkeypatch):
    """Runs on the CPU the modes of GPUs: XLA has the same operations there, slower, but for `scaled_matmul`."""
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    a, b = (bfp.quantize(jnp.asarray(sample("gaussian", (rows, 128))), f) for rows, f in ((48, a), (32, b)))
    want = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    for fast in (False, True):
        got = products._MODES[mode](a, b, None, jnp.float32, Route(mode, None, False, ""), fast)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("a", "b"), [("fp8_e4m3", "fp8_e5m2"), ("nvfp4", "nvfp4_16x16"), ("mxfp6_e2m3", None), (None, "mxint8")]
)
def test_dequantized_to_bfloat16_with_the_tensor_scale_apart(a, b):
    x, w = (jnp.asarray(sample("gaussian", shape)) for shape in ((48, 128), (32, 128)))
    left, right = (v if f is None else bfp.quantize(v, f) for v, f in ((x, a), (w, b)))
    got = products._dequantized(left, right, None, jnp.float32, Route("dequantize", "bfloat16", True, ""), False)
    values = [np.asarray(v if isinstance(v, jax.Array) else v.dequantize(), np.float64) for v in (left, right)]
    want = values[0] @ values[1].T
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())

"""`grouped_linear` against `linear` group by group, `dot_general` against `lax.dot_general`, and the routes of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend import operands, products
from samples import sample

import blockfp.jax as bfp
from blockfp.products import Route
from blockfp.recipes import RECIPES
from blockfp.rounding import gradient_key

SIZES = (37, 0, 50, 20)
TOKENS, IN, OUT = 112, 80, 48
KEY = np.array([1, 2], np.uint32)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((TOKENS, IN)) * np.exp2(rng.integers(-3, 3, (TOKENS, 1)))
    w = rng.standard_normal((4, OUT, IN)) * np.arange(1, 5)[:, None, None]
    g, b = rng.standard_normal((TOKENS, OUT)), rng.standard_normal((4, OUT))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, w, g, b))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "fp8_delayed"])
def test_each_group_is_a_layer_of_its_own(recipe, arrays, monkeypatch):
    x, w, g, b = arrays
    q = bfp.quantize_params(w, recipe)

    def loss(x, q, b):
        y = bfp.grouped_linear(x, q, jnp.asarray(SIZES), b, recipe=recipe, key=KEY)
        return (y * g).sum(), y

    (_, y), (dx, dw, db) = jax.jit(bfp.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, q, b)
    start = 0
    for i, size in enumerate(SIZES):
        rows = slice(start, start + size)
        start += size
        if size == 0 or (recipe == "nvfp4" and i != 2):
            continue
        # A layer without groups folds no group's number in.
        monkeypatch.setattr(operands, "gradient_key", lambda key, way, coordinate, i=i: gradient_key(key, way, coordinate, i))
        own = jax.tree.map(lambda leaf, i=i: leaf[i], q)

        def one(x, q, b, rows=rows):
            y = bfp.linear(x, q, b, recipe=recipe, key=KEY)
            return (y * g[rows]).sum(), y

        (_, want_y), wants = jax.jit(bfp.value_and_grad(one, (0, 1, 2), has_aux=True))(x[rows], own, b[i])
        for got, want in zip((y[rows], dx[rows], dw[i], db[i]), (want_y, *wants), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    # Rows beyond all groups, and the group without rows.
    assert not jnp.any(y[start:])
    assert not jnp.any(dx[start:])
    assert not jnp.any(dw[1])


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("must share in", {"x": jnp.zeros((4, 81))}),
        ("group_sizes must be 4 integers", {"group_sizes": jnp.zeros(4)}),
        (r"bias must have shape \(4, 48\)", {"bias": jnp.zeros(48)}),
        ("groups have no state for delayed scaling", {"recipe": "fp8_delayed"}),
        ("rounds gradients stochastically: pass a key", {"recipe": "nvfp4"}),
        ("weight must be whole and in mxfp4_e2m1_32x32", {"recipe": "mxfp4"}),
    ],
)
def test_bad_groups(message, change, arrays):
    arguments = {"x": arrays[0], "weight": bfp.quantize_params(arrays[1], "mxfp8"), "group_sizes": jnp.asarray(SIZES)}
    with pytest.raises(ValueError, match=message):
        bfp.grouped_linear(**(arguments | {"recipe": "mxfp8"} | change))


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


def test_dot_general_of_a_quantized_kernel(arrays):
    x, kernel = arrays[0], arrays[1][0].T
    contract = (((1,), (0,)), ((), ()))
    q = bfp.quantize(kernel, "mxfp8_e4m3_32x32")
    y = bfp.dot_general(x, q, contract, None, jnp.bfloat16, recipe="mxfp8")
    np.testing.assert_array_equal(y, bfp.linear(x, q.mT, recipe="mxfp8").astype("bfloat16"))
    with pytest.raises(ValueError, match="must be a matrix with one contracted axis"):
        bfp.dot_general(x, bfp.quantize(arrays[1], "mxfp8_e4m3_32x32"), (((1,), (2,)), ((), ())), recipe="mxfp8")
    with pytest.raises(ValueError, match="out_sharding = "):
        bfp.dot_general(x, kernel, contract, out_sharding=1, recipe="mxfp8")
    with pytest.raises(ValueError, match="precision = "):
        bfp.dot_general(x, kernel, contract, jax.lax.Precision.HIGHEST, recipe="mxfp8")


def scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
    """What `jax.nn.scaled_matmul` is documented to give."""
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
@pytest.mark.parametrize("fast", [False, True])
def test_modes_of_gpus_give_the_product_of_the_values(mode, a, b, fast, monkeypatch):
    """What GPUs run, run on the CPU, where XLA has the same operations, slower, but for `scaled_matmul`."""
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    a, b = (bfp.quantize(jnp.asarray(sample("gaussian", (rows, 128))), f) for rows, f in ((48, a), (32, b)))
    got = products._MODES[mode](a, b, jnp.float32, Route(mode, None, False, ""), fast)
    want = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("a", "b"), [("fp8_e4m3", "fp8_e5m2"), ("nvfp4", "nvfp4_16x16"), ("mxfp6_e2m3", None), (None, "mxint8")]
)
def test_dequantized_to_bfloat16_with_the_tensor_scale_apart(a, b):
    x, w = (jnp.asarray(sample("gaussian", shape)) for shape in ((48, 128), (32, 128)))
    left, right = (v if f is None else bfp.quantize(v, f) for v, f in ((x, a), (w, b)))
    got = products._dequantized(left, right, jnp.float32, Route("dequantize", "bfloat16", True, ""), False)
    values = [np.asarray(v if isinstance(v, jax.Array) else v.dequantize(), np.float64) for v in (left, right)]
    want = values[0] @ values[1].T
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())

"""QuantizedArray as a value: its attributes, its parts checked, pickling, and the errors of bad input."""

import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from held_formats import FORMATS
from processes import LIMIT
from same_bits import assert_same_parts
from same_trees import assert_same_tree
from samples import bits_of, sample

import blockfp
import blockfp.jax as bfp
from blockfp.formats import MXFP8, Format


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(sample("bf16_valued", (2, 40, 70), "bfloat16"))


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp6_e2m3", "nvfp4"])
def test_it_has_the_face_of_the_numpy_array(name, x):
    q, reference = bfp.quantize(x, name), blockfp.quantize(np.asarray(x), name)
    assert (q.format, q.shape, q.dtype, q.origin) == (reference.format, reference.shape, reference.dtype, reference.origin)
    assert_same_parts(q, reference)
    assert (q.ndim, q.columns, repr(q)) == (3, 70, repr(reference))
    assert q.format is Format.parse(name)
    assert q.dequantize().dtype == x.dtype == q.dtype
    assert q.dequantize(jnp.float16).dtype == np.float16
    np.testing.assert_array_equal(bits_of(np.asarray(q.dequantize())), bits_of(reference.dequantize()))
    fake = blockfp.fake_quantize(np.asarray(x), name)
    np.testing.assert_array_equal(bits_of(np.asarray(bfp.fake_quantize(x, name))), bits_of(fake))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8_e4m3_32x32"])
def test_copies_and_pickles(name, x):
    q = bfp.quantize(x, name)
    for again in (pickle.loads(pickle.dumps(q)), copy.copy(q), copy.deepcopy(q)):
        assert again.format is q.format
        assert_same_tree(again, q)


def test_it_is_a_tree_of_its_arrays(x):
    q = bfp.quantize(x, "nvfp4")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".codes_nvfp4_bfloat16_70", ".scales", ".tensor_scale"]
    assert len(jax.tree.leaves(bfp.quantize(x, "mxint8"))) == 2
    names = jax.tree.map(lambda leaf: str(leaf.dtype), q)
    assert (names.codes, names.scales, names.tensor_scale) == ("uint8", "uint8", "float32")
    assert "uint8" in repr(names)
    other = bfp.quantize(x, "nvfp4_16x16")
    assert jax.tree.structure(q) != jax.tree.structure(other)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.square and f.element.name in ("e4m3", "e2m1", "e3m2")], ids=str)
def test_transpose(format, x):
    assert_same_tree(bfp.quantize(x, format).mT, bfp.quantize(x.mT, format))


def test_transpose_of_rows_is_refused(x):
    with pytest.raises(ValueError, match="square"):
        bfp.quantize(x, "mxfp8_e4m3").mT  # noqa: B018


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp4_e2m1", "nvfp4"])
def test_from_parts(name, x):
    q = bfp.quantize(x, name)
    again = bfp.QuantizedArray.from_parts(q.codes, q.scales, q.tensor_scale, format=name, columns=70, dtype="bfloat16")
    assert_same_tree(again, q)


def test_from_parts_of_a_shard(x):
    """Rows from 20 on: the first block of 32 is the rest of one that began before them."""
    whole = bfp.quantize(x[0], "mxfp8_e4m3_32x32")
    part = bfp.QuantizedArray.from_parts(
        whole.codes[20:], whole.scales, format=whole.format, columns=70, dtype=jnp.bfloat16, origin=(20, 0)
    )
    np.testing.assert_array_equal(part.dequantize(), whole.dequantize()[20:])
    assert part.mT.origin == (0, 20)
    np.testing.assert_array_equal(part.mT.dequantize(), whole.dequantize()[20:].T)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"columns": 60}, ValueError, "columns"),
        ({"dtype": "float64"}, TypeError, "float64"),
        ({"format": "mxfp8"}, ValueError, "mxfp8"),
        ({"format": "nvfp4"}, ValueError, "nvfp4"),
        ({"origin": (0, 31)}, ValueError, "origin"),
        ({"tensor_scale": jnp.float32(1)}, ValueError, "tensor_scale"),
        ({"codes": jnp.zeros((2, 40, 70), jnp.int8)}, TypeError, "uint8"),
        ({"scales": jnp.zeros((2, 40, 3), jnp.float32)}, TypeError, "float32"),
        ({"scales": jnp.zeros((2, 40, 2), jnp.uint8)}, ValueError, "shape"),
    ],
)
def test_parts_that_do_not_fit(change, error, message, x):
    q = bfp.quantize(x, "mxfp8_e4m3")
    given = {"codes": q.codes, "scales": q.scales, "format": MXFP8, "columns": 70, "dtype": "bfloat16"} | change
    with pytest.raises(error, match=message):
        bfp.QuantizedArray.from_parts(**given)


BAD_INPUT = [
    (np.zeros((4, 4)), TypeError, "float64"),
    (jnp.zeros((4, 4), jnp.int32), TypeError, "int32"),
    (jnp.zeros((4, 4), ml_dtypes.float8_e4m3fn), TypeError, "float8_e4m3fn"),
    (jnp.zeros(4), ValueError, r"two or more axes.*\(4,\)"),
    (jnp.float32(0), ValueError, r"two or more axes.*\(\)"),
    ([[1.0, 2.0]], TypeError, "list"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_INPUT)
def test_refused_input(bad, error, message):
    with pytest.raises(error, match=message):
        bfp.quantize(bad, "mxfp8_e4m3")
    if not isinstance(bad, list | np.ndarray):
        with pytest.raises(error, match=message):
            jax.jit(lambda x: bfp.fake_quantize(x, "mxfp8_e4m3"))(bad)


def test_refused_arguments(x):
    with pytest.raises(ValueError, match="did you mean 'mxfp8_e4m3'"):
        bfp.quantize(x, "mxfp8_e4m")
    with pytest.raises(TypeError, match="Format"):
        bfp.quantize(x, 8)
    q = bfp.quantize(x, "mxfp8_e4m3")
    for dtype, error in (("float64", ValueError), ("x", TypeError)):
        with pytest.raises(error, match=f"dtype must be one of .*, got {dtype!r}"):
            q.dequantize(dtype)


@pytest.mark.parametrize(
    "key",
    [
        -1,
        1 << 64,
        1.5,
        True,
        (1, 2, 3),
        (1, -2),
        "ab",
        np.zeros(2, np.float32),
        np.zeros((2, 2), np.uint32),
        np.array([2**32 + 1, 2]),
        pytest.param(lambda: jax.random.split(jax.random.key(0)), id="two keys"),
        pytest.param(lambda: jax.random.key(0, impl="rbg"), id="rbg"),
        pytest.param(lambda: jax.random.PRNGKey(0, impl="rbg"), id="four words"),
    ],
)
def test_refused_keys(key, x):
    with pytest.raises(ValueError, match="key must be"):
        bfp.quantize(x, "mxfp8_e4m3", key=key() if callable(key) else key)


def test_words_of_64_bits(x):
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="key must be"):
            bfp.quantize(x, "mxfp8_e4m3", key=jnp.array([2**32 + 1, 2]))
        words = jnp.array([2**32 - 1, 2])
        traced = jax.jit(lambda key: bfp.quantize(x, "mxfp8_e4m3", key=key).codes)(words)
        np.testing.assert_array_equal(traced, bfp.quantize(x, "mxfp8_e4m3", key=words).codes)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_a_stack_of_tensors_says_how_to_dequantize_it(name, x):
    stack = jax.vmap(lambda x: bfp.quantize(x, name))(x)
    assert stack.shape == x.shape
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        stack.dequantize()
    assert jax.vmap(lambda q: q.dequantize())(stack).shape == x.shape


def test_torch_is_not_imported():
    code = "import sys, blockfp.jax; sys.exit('torch' in sys.modules or 'tvm_ffi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT).returncode == 0

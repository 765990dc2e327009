"""What activations make, cast by Pallas kernels on a GPU: the bits of the cast of what they make, and of XLA where it runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice
from blockfp.jax_backend.implementations.activations import FUNCTIONS, Making
from same_bits import assert_same_bits
from samples import all_patterns

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.formats import FORMATS, Format

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
where = "blockfp.jax_backend.implementations.pallas"
arrays, agreement, rowwise, source = (
    pytest.importorskip(f"{where}.{name}", exc_type=ImportError) for name in ("arrays", "agreement", "rowwise", "source")
)
SHAPES = (256, 512), (133, 150)
FEW = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxint8", "nvfp4")


def gate_and_up(shape, dtype, *, gated=True, scale=2.0):
    random = np.random.default_rng(0)
    gate, up = ((random.standard_normal(shape, np.float32) * scale).astype(jnp.dtype(dtype)) for _ in range(2))
    return gate, up if gated else None


def made_by_kernel(gate, up, activation):
    """What the kernels compute, stored."""
    flat = jax.tree.map(lambda x: arrays._flat(jnp.asarray(x)), source.Source(gate, up, activation))
    return np.asarray(jax.jit(rowwise.made)(flat)).reshape(-1)[: gate.size].reshape(gate.shape)


def hold_casts(gate, up, activation, format):
    """All directions of a format against the definition's casts of what the kernels compute."""
    made = made_by_kernel(gate, up, activation)
    wanted = numerics.quantize(made, format), numerics.quantize(np.ascontiguousarray(made.T), format)
    both = arrays.refusal("quantize_both", format) is None
    for ways in ((True, False), (False, True), (True, True)) if both else ((True, False),):
        run = partial(arrays.quantize_made, activation=activation, format=format, rows=ways[0], columns=ways[1])
        for found, parts, way in zip(jax.jit(run)(gate, up), wanted, ways, strict=True):
            assert (found is not None) == way
            if way:
                assert_same_bits(found, parts)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations_have_xlas_bits(activation, dtype, gated):
    """Over all gates. Where this fails layers go on unfused, and are right."""
    assert agreement.differing(Making(activation, dtype, gated)) == ()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("gated", [True, False])
def test_casts_of_every_kind_of_format(name, gated):
    hold_casts(*gate_and_up(SHAPES[gated], "bfloat16", gated=gated), "silu", Format.parse(name))


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_casts_of_every_activation(activation):
    hold_casts(*gate_and_up(SHAPES[0], "bfloat16"), activation, Format.parse("mxfp8_e4m3"))
    hold_casts(*gate_and_up(SHAPES[1], "float16", gated=False), activation, Format.parse("fp8_e4m3"))


def test_casts_of_all_gates():
    """All finite values, of which some products are subnormal."""
    for dtype in ("bfloat16", "float16"):
        every = all_patterns(dtype)
        gate = np.where(np.isfinite(every.astype(np.float32)), every, 0).astype(every.dtype).reshape(256, 256)
        up = np.full(gate.shape, 2.0**-4, gate.dtype)
        for name in ("mxfp8_e4m3", "fp8_e4m3_1x128"):
            hold_casts(gate, up, "silu", Format.parse(name))


@pytest.mark.parametrize("name", FEW)
def test_an_inf_that_an_activation_makes_marks_all_scales(name):
    format = Format.parse(name)
    gate, up = gate_and_up(SHAPES[0], "bfloat16")
    gate[200, 300] = up[200, 300] = 3e38
    both = arrays.refusal("quantize_both", format) is None
    run = partial(arrays.quantize_made, activation="silu", format=format, rows=True, columns=both)
    for q in jax.jit(run)(gate, up):
        if q is not None:
            columns = q.codes.shape[1] * 8 // format.element.bits
            values = bfp.QuantizedArray.from_parts(*q, format=format, columns=columns, dtype="float32").dequantize()
            assert np.isnan(values).all()


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_a_layer_without_the_cuda_library(recipe, monkeypatch):
    """Its forward and gradients, as where XLA makes what a kernel casts."""
    if agreement.differing(Making("silu", "bfloat16", True)):
        pytest.skip("the kernels' silu isn't XLA's here")
    missing = choice.missing
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: False)
    monkeypatch.setattr(choice, "missing", lambda name: "not installed" if name == "ffi" else missing(name))
    (gate, up), (w, _) = gate_and_up((512, 256), "bfloat16"), gate_and_up((384, 256), "bfloat16", scale=0.1)

    def loss(gate, up, w):
        y = bfp.linear(gate, w, recipe=recipe, up=up, activation="silu")
        return (y.astype(jnp.float32) ** 2).sum(), y

    found = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(agreement, "differing", lambda making: (1.0,))
            jax.clear_caches()
            traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True)).trace(gate, up, w)
            kernel = f"blockfp_silu_{recipes.parse(recipe).input.format}_both"
            assert (kernel in str(traced.jaxpr)) == fused
            found.append(traced.lower().compile()(gate, up, w))
    jax.clear_caches()
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        # Where XLA fuses, it may leave out a rounding between the activation and its product.
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 2e-3 * np.linalg.norm(theirs)


def test_formats_are_those_that_quantize_has():
    making, plain = Making("relu2", "bfloat16", True), []
    for format in FORMATS:
        if arrays.refusal("quantize", format) is None and (format.block is None or format.block[0] == 1):
            plain.append(format)
            assert arrays.refusal_of_making(making, format) is None
    assert len(plain) > len(FEW)

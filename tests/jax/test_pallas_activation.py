"""What an activation makes, cast by one Pallas kernel: lowered everywhere, and interpreted on a CPU where JAX can."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import activations, choice
from blockfp.jax_backend.implementations.activations import Making
from blockfp.jax_backend.linear import products
from same_bits import assert_same_bits
from same_trees import assert_same_tree

import blockfp.jax as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.formats import Format

where = "blockfp.jax_backend.implementations.pallas"
arrays, mosaic, source, rowwise, agreement = (
    pytest.importorskip(f"{where}.{name}", reason="Mosaic GPU can't be imported", exc_type=ImportError)
    for name in ("arrays", "mosaic", "source", "rowwise", "agreement")
)
interpreted = pytest.mark.skipif(not mosaic.CAN_INTERPRET, reason="this JAX interprets no Mosaic GPU on a CPU")
FORMATS = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxint8", "nvfp4")


def gate_and_up(shape, dtype="bfloat16", *, gated=True):
    random = np.random.default_rng(0)
    gate, up = (random.standard_normal(shape, np.float32) * 2 for _ in range(2))
    return gate.astype(jnp.dtype(dtype)), up.astype(jnp.dtype(dtype)) if gated else None


def chain(gate, up, activation):
    """Rounded in NumPy after each operation."""
    function = jax.jit(activations.FUNCTIONS[activation])
    out = np.asarray(function(jnp.asarray(gate, jnp.float32))).astype(gate.dtype)
    return out if up is None else (out.astype(np.float32) * up.astype(np.float32)).astype(gate.dtype)


def both_ways(format):
    """The directions of which there are kernels, as (rows, columns)."""
    two = arrays.refusal("quantize_both", format) is None
    return ((True, False), (False, True), (True, True)) if two else ((True, False),)


@pytest.mark.parametrize(
    ("activation", "name"),
    [*(("silu", name) for name in FORMATS), *((other, "mxfp8_e4m3") for other in ("gelu", "gelu_tanh", "relu2"))],
)
def test_one_kernel_makes_and_casts(activation, name):
    format, check = Format.parse(name), jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    *_, widest = both_ways(format)
    cases = (*widest, "bfloat16", True), (*both_ways(format)[0], "float16", False)
    for rows, columns, dtype, gated in cases:
        run = partial(arrays.quantize_made, activation=activation, format=format, rows=rows, columns=columns)
        given = [jax.ShapeDtypeStruct((130, 260), jnp.dtype(dtype))] * (1 + gated)
        run = run if gated else partial(run, up=None)
        exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[check])(*given)
        # Another one looks for the amax.
        assert exported.mlir_module().count("mosaic_gpu_v2") == (2 if format.has_tensor_scale else 1)


@interpreted
@pytest.mark.parametrize(
    ("activation", "dtype", "gated", "name"),
    [
        ("silu", "bfloat16", True, "fp8_e4m3"),
        ("silu", "float16", False, "nvfp4"),
        ("relu2", "float16", True, "mxint8"),
        ("gelu", "bfloat16", False, "fp8_e4m3_1x128"),
        ("gelu_tanh", "bfloat16", True, "mxfp8_e4m3"),
    ],
)
def test_bits(activation, dtype, gated, name):
    format = Format.parse(name)
    gate, up = gate_and_up((133, 150), dtype, gated=gated)
    made = chain(gate, up, activation)
    for rows, columns in both_ways(format):
        run = partial(arrays.quantize_made, activation=activation, format=format, rows=rows, columns=columns)
        with mosaic.interpreted():
            row, column = jax.jit(run)(gate, up)
        if rows:
            assert_same_bits(row, numerics.quantize(made, format))
        if columns:
            assert_same_bits(column, numerics.quantize(made.T, format))


@interpreted
def test_vmapped():
    (gate, up), format = gate_and_up((2, 64, 96)), Format.parse("fp8_e4m3")
    run = partial(arrays.quantize_made, activation="relu2", format=format, rows=True, columns=False)
    with mosaic.interpreted():
        found = jax.jit(jax.vmap(lambda gate: run(gate, up[0])[0]))(gate)
    for i in range(2):
        made = numerics.quantize(chain(gate[i], up[0], "relu2"), format)
        assert_same_bits(jax.tree.map(lambda part, i=i: part[i], found), made)


@interpreted
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_an_inf_of_the_product_marks_all_scales(name):
    format = Format.parse(name)
    gate, up = gate_and_up((64, 96))
    gate[40, 50] = up[40, 50] = 3e38
    assert np.isinf(chain(gate, up, "relu2")[40, 50])
    run = partial(arrays.quantize_made, activation="relu2", format=format)
    for rows, columns in both_ways(format):
        with mosaic.interpreted():
            made = jax.jit(partial(run, rows=rows, columns=columns))(gate, up)
        for q in (one for one in made if one is not None):
            columns = q.codes.shape[1] * 8 // format.element.bits
            values = bfp.QuantizedArray.from_parts(*q, format=format, columns=columns, dtype="float32").dequantize()
            assert np.isnan(values).all()


@interpreted
def test_functions_are_near_those_of_float64():
    """At all values of a gate; a NaN where the exact function has one."""
    gate = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    with np.errstate(all="ignore"):
        x = gate.astype(np.float64)
        exact = {
            "silu": x / (1 + np.exp(-x)),
            "gelu_tanh": x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
            "gelu": x / 2 * np.array([math.erfc(-value / math.sqrt(2)) for value in x]),
            "relu2": np.maximum(x, 0) ** 2,
        }
    for name, wanted in exact.items():
        with mosaic.interpreted():
            found = jax.jit(rowwise.made)(source.Source(gate.reshape(-1, 32), None, name))
        found = np.asarray(found, np.float32).ravel()
        ordinary = (np.abs(wanted) < 3e38) & (np.abs(wanted) > 1e-30)
        # Below zero 1 + tanh loses what tanh rounds.
        slack = 1e-7 * np.abs(x) if name == "gelu_tanh" else 0
        with np.errstate(invalid="ignore"):
            error = np.abs(found - wanted)
        assert (error[ordinary] <= (2.0**-8 * np.abs(wanted) + slack)[ordinary]).all(), name
        assert np.isnan(found[np.isnan(x)]).all(), name


# ---- what runs, and why


@pytest.fixture
def pallas_alone(monkeypatch):
    """As on a GPU without the CUDA library, where the kernels have XLA's bits."""
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice, "would_be_partitioned", lambda: False)
    monkeypatch.setattr(choice, "missing", lambda name: "not installed" if name == "ffi" else None)
    monkeypatch.setattr(agreement, "differing", lambda making: ())


def test_the_kernel_is_chosen_where_it_has_xlas_bits(pallas_alone, monkeypatch):
    choose = partial(choice.choose, None, "quantize", making=Making("silu", "bfloat16", True))
    assert choose(format=Format.parse("mxfp8_e4m3")).name == "pallas"
    assert choose(format=Format.parse("mxfp6_e3m2")).name == "xla"
    monkeypatch.setattr(agreement, "differing", lambda making: (1.5, -2.0))
    assert choose(format=Format.parse("mxfp8_e4m3")).name == "xla"
    for making, name, why in (
        (Making("silu", "bfloat16", True), "mxfp8_e4m3", "kernels' silu in bfloat16 differs from XLA's, as at 1.5, -2.0"),
        (Making("gelu", "float32", False), "mxfp8_e4m3", "activations of 16-bit numbers, not gelu in float32"),
        (Making("relu2", "float16", False), "mxfp8_e4m3_32x32", "one row, not relu2 in float16 in those of mxfp8_e4m3_32x32"),
    ):
        with pytest.raises(ValueError, match=why):
            choice.choose("pallas", "quantize", format=Format.parse(name), making=making)


@interpreted
def test_kernels_are_compared_with_xla(monkeypatch):
    made = rowwise.made
    with mosaic.interpreted():
        assert agreement._differing(Making("silu", "bfloat16", True)) == ()
        monkeypatch.setattr(rowwise, "made", lambda x: made(x).at[7, 3].set(0.5))
        assert agreement._differing(Making("silu", "bfloat16", True)) == (float(np.uint16(227).view(jnp.bfloat16)),)


def test_kernels_are_compared_inside_any_trace(monkeypatch):
    """A layer asks while it is traced, on meshes and in modes that aren't the comparison's."""
    monkeypatch.setattr(rowwise, "made", lambda x: activations.activated(x.gate, x.up, x.activation))
    found = []

    def body(x):
        found.append(agreement.differing.__wrapped__(Making("silu", "bfloat16", True)))
        return x

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(jax.vmap(jax.grad(lambda x: body(x) * 2)), mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.debug_nans(True), jax.transfer_guard("disallow"), jax.checking_leaks():
        jax.jit(mapped).trace(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert found == [()]


def test_inside_shard_map(pallas_alone, monkeypatch):
    """Results vary over the mesh as those of the definition, which JAX lowers beside the kernel."""
    monkeypatch.setattr(products, "capability", lambda: (9, 0))
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.PartitionSpec("fsdp")
    w = bfp.shard_params(bfp.quantize_params(jnp.ones((64, 128), jnp.bfloat16), "mxfp8"), mesh, cut)

    def body(w, gate, up):
        def loss(w, gate, up):
            y = bfp.linear(gate, w, recipe="mxfp8", up=up, activation="relu2", data_axes=("fsdp",))
            return y.astype(jnp.float32).sum()

        return bfp.grad(loss, (0, 1, 2))(w, gate, up)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(bfp.partition_specs(w), cut, cut), out_specs=(cut, cut, cut))
    gate, up = (jnp.ones((1024, 128), jnp.bfloat16) for _ in range(2))
    program = str(jax.jit(mapped).trace(w, gate, up).jaxpr)
    both = arrays.refusal("quantize_both", Format.parse("mxfp8_e4m3")) is None
    assert ("blockfp_relu2_mxfp8_e4m3_both" in program) == both


@interpreted
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_layer(recipe, pallas_alone, monkeypatch):
    """Forward and backward, as where XLA makes what a kernel casts."""
    (gate, up), w = gate_and_up((96, 64)), gate_and_up((48, 64))[0]

    def loss(gate, up, w):
        y = bfp.linear(gate, w, recipe=recipe, up=up, activation="silu")
        return (y.astype(jnp.float32) ** 2).sum(), y

    step = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    monkeypatch.setattr(products, "capability", lambda: (9, 0))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, cuda=None, **_: (cuda or default)(*x))
    found = []
    for differing in ((), (1.0,)):
        monkeypatch.setattr(agreement, "differing", lambda making, differing=differing: differing)
        jax.clear_caches()
        with mosaic.interpreted():
            traced = jax.jit(step).trace(gate, up, w)
            fused = f"blockfp_silu_{recipes.parse(recipe).input.format}_both" in str(traced.jaxpr)
            assert fused == (not differing)
            found.append(traced.lower().compile()(gate, up, w))
    jax.clear_caches()
    assert_same_tree(*found)

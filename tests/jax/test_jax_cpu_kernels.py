"""The CPU library inside JAX's programs: the definition's bits under every transformation, and when it is that runs."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockfp.jax_backend.implementations import choice, ops
from held_formats import FORMATS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits, parts_of
from samples import DTYPES, KINDS, sample

import blockfp.jax as bfp
from blockfp.definition import numerics
from blockfp.definition.rotation import rotate
from blockfp.formats import Format
from blockfp.kernels import switch

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU library's programs"),
    pytest.mark.skipif(choice.missing("ffi") is not None, reason=str(choice.missing("ffi"))),
]
BY_NAME = pytest.mark.parametrize("format", FORMATS, ids=str)
FAMILIES = pytest.mark.parametrize(
    "format", ["fp8_e4m3", "fp8_e5m2_128x128", "mxfp8_e4m3_32x32", "mxfp6_e2m3", "mxint8", "nvfp4", "nvfp4_16x16"]
)
KEY = np.array([0xDEADBEEF, 0x87654321], np.uint32)
CALL = "blockfp_cpu_"


def text_of(function, *arguments):
    return jax.jit(function).lower(*arguments).as_text()


@BY_NAME
def test_every_format_in_both_directions(format):
    inputs = [np.stack([sample(kind, (71, 150), dtype) for kind in KINDS]) for dtype in DTYPES]

    @jax.jit
    def run(inputs):
        column = [bfp.quantize_columnwise(x, format, implementation="ffi") for x in inputs]
        return column, [bfp.quantize_both(x, format, implementation="ffi") for x in inputs]

    for x, column, both in zip(inputs, *run(inputs), strict=True):
        expected, turned = numerics.quantize(x, format), numerics.quantize(np.swapaxes(x, -1, -2), format)
        for got, want in ((column, turned), (both[0], expected), (both[1], turned)):
            assert_same_bits(parts_of(got), want)


@FAMILIES
def test_keys_rotation_eps_and_given_amaxes(format):
    format, named = Format.parse(format), {"implementation": "ffi"}
    x = sample("bf16_valued", (48, 80), "bfloat16")
    turned = np.swapaxes(x, 0, 1)
    keys = np.concatenate([KEY, KEY[::-1]])
    row, column = ops.quantize_both(x, keys, None, format=format, **named, rotate=True)
    assert_same_bits(row, numerics.quantize(x, format, key=keys[:2]))
    assert_same_bits(column, numerics.quantize(rotate(turned), format, key=keys[2:]))
    got = bfp.quantize_columnwise(x, format, key=KEY, rotate=True, implementation="ffi")
    assert_same_bits(parts_of(got), numerics.quantize(rotate(turned), format, key=KEY))
    found, expected = (run(x, format=format) for run in (ops.amax, numerics.amax))
    assert_same_bits(found, expected)
    if format.scale.dtype == "float32":
        got = ops.quantize(x, None, format=format, **named, eps=64.0, nominal="float16")
        assert_same_bits(got, numerics.quantize(x, format, eps=64.0, nominal="float16"))
    if format.per_tensor:
        multiplier = np.float32(3.7)
        got = ops.quantize(x, None, jnp.float32(multiplier), format=format, **named)
        assert_same_bits(got, numerics.quantize(x, format, multiplier=np.full((1,), multiplier)))
    if format.has_tensor_scale:
        larger = np.int32(0x44000000)
        amax = expected._replace(**{"blocks" if format.per_tensor else "tensor": np.full((1, 1), larger)})
        amax = amax if format.per_tensor else amax._replace(tensor=larger)
        got = ops.quantize(x, None, jnp.full((1, 1), larger), format=format, **named)
        assert_same_bits(got, numerics.quantize(x, format, amax=amax))


@FAMILIES
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_of_every_axis(format, axis):
    x = sample("exponents", (5, 40, 48))
    x = np.moveaxis(x, 0, axis)
    each = [numerics.quantize(np.take(x, i, axis), format, key=KEY) for i in range(5)]
    stacked = [None if p[0] is None else np.stack(p) for p in zip(*each, strict=True)]
    run = jax.jit(jax.vmap(lambda x: bfp.quantize(x, format, key=KEY), in_axes=axis))
    q = run(x)
    assert_same_bits(parts_of(q), stacked)
    assert text_of(run, x).count(f"@{CALL}quantize_1(") == 1  # one call, no loop
    if axis == 0:
        values = np.stack([numerics.dequantize(*e, format, "float32", columns=48) for e in each])
        assert_same_bits(jax.vmap(lambda q: q.dequantize())(q), values)


@FAMILIES
def test_nested_vmap_over_values_and_keys_apart(format):
    x = jnp.asarray(sample("gaussian", (2, 33, 32)))
    keys = jnp.asarray(np.arange(6, dtype=np.uint32).reshape(3, 2))
    over_keys = jax.vmap(lambda x, key: bfp.quantize(x, format, key=key), in_axes=(None, 0))
    q = jax.jit(jax.vmap(over_keys, in_axes=(0, None)))(x, keys)
    for i in range(2):
        for j in range(3):
            expected = numerics.quantize(np.asarray(x[i]), format, key=np.asarray(keys[j]))
            assert_same_bits(parts_of(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], q)), expected)
    # Codes that are the same for all, scales that are not.
    if Format.parse(format).scale.two_level:
        scales = jnp.stack([q.scales[0, 0], q.scales[1, 1]])
        values = jax.vmap(lambda s: q.replace(codes=q.codes[0, 0], scales=s, tensor_scale=q.tensor_scale[0, 0]).dequantize())
        expected = [
            numerics.dequantize(
                *(np.asarray(p) for p in (q.codes[0, 0], s, q.tensor_scale[0, 0])), format, "float32", columns=32
            )
            for s in scales
        ]
        assert_same_bits(values(scales), np.stack(expected))


@FAMILIES
def test_scan_cond_checkpoint_and_no_jit(format):
    x = sample("bf16_valued", (3, 32, 48), "bfloat16")
    expected = [numerics.quantize(each, format) for each in x]
    stacked = [None if p[0] is None else np.stack(p) for p in zip(*expected, strict=True)]
    assert_same_bits(parts_of(jax.lax.scan(lambda c, x: (c, bfp.quantize(x, format)), 0, x)[1]), stacked)
    chosen = jax.lax.cond(True, lambda x: bfp.quantize(x, format), lambda x: bfp.quantize(-x, format), x[0])
    assert_same_bits(parts_of(chosen), expected[0])
    assert_same_bits(parts_of(jax.checkpoint(lambda x: bfp.quantize(x, format))(x[0])), expected[0])
    with jax.disable_jit():
        q = bfp.quantize(x[0], format)
        values = q.dequantize()
    assert_same_bits(parts_of(q), expected[0])
    assert_same_bits(values, numerics.dequantize(*expected[0], format, "bfloat16", columns=48))


def test_nans_are_found_where_they_come_from():
    """`jax_debug_nans` takes a program apart that gave a NaN; a kernel is one operation to it."""
    x, w = jnp.ones((4, 64)), jnp.ones((32, 64)).at[0, 0].set(jnp.inf)
    q = bfp.quantize(w.at[0, 0].set(jnp.nan), "mxfp8_e4m3")
    layer = lambda w: bfp.linear(x, w, recipe="mxfp8")  # noqa: E731
    with jax.debug_nans(True):
        for run in (lambda: layer(w), lambda: jax.jit(layer)(w), lambda: jax.grad(lambda w: layer(w).sum())(w), q.dequantize):
            with pytest.raises(FloatingPointError, match="nan"):
                run()


@FAMILIES
def test_no_elements(format):
    for shape in ((0, 32), (4, 0), (2, 0, 5), (0, 4, 5), (1, 1)):
        x = np.zeros(shape, np.float32)
        q = bfp.quantize(x, format, implementation="ffi", key=3)
        assert_same_bits(parts_of(q), numerics.quantize(x, format, key=3))
        assert q.dequantize(implementation="ffi").shape == shape
    assert jax.vmap(lambda x: bfp.quantize(x, format))(jnp.zeros((0, 4, 32))).shape == (0, 4, 32)


def test_double_precision_and_default_strictness():
    x = sample("bf16_valued", (40, 72))
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        for format in ("fp8_e4m3", "nvfp4"):
            q = bfp.quantize(x, format, key=7)
            assert_same_bits(parts_of(q), numerics.quantize(x, format, key=7))
            assert q.dequantize().dtype == np.float32


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_ranks_are_never_promoted(implementation):
    x, b = sample("gaussian", (2, 24, 48)), jnp.ones(32)
    with jax.numpy_rank_promotion("raise"):
        for format in ("fp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4"):
            q = bfp.quantize_columnwise(x, format, key=7, rotate=True, implementation=implementation)
            assert_same_bits(parts_of(q), numerics.quantize(rotate(np.swapaxes(x, -1, -2)), format, key=7))
            assert q.dequantize(implementation=implementation).shape == (2, 48, 24)
        jax.grad(lambda x, w, b: bfp.linear(x, w, b, recipe="mxfp8").sum(), (0, 1, 2))(jnp.asarray(x), jnp.ones((32, 48)), b)


def test_kernels_run_in_programs_of_one_device_and_inside_shard_map():
    x = jnp.ones((64, 64))
    for make in (lambda x: bfp.quantize(x, "mxfp8_e4m3"), lambda x: bfp.fake_quantize(x, "nvfp4")):
        assert CALL in text_of(make, x)
    assert CALL not in text_of(lambda x: bfp.quantize(x, "mxfp8_e4m3", implementation="xla"), x)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(x, NamedSharding(mesh, P("d")))
    assert CALL not in text_of(lambda x: bfp.quantize(x, "mxfp8_e4m3"), placed)
    assert CALL in text_of(lambda x: bfp.quantize(x, "mxfp8_e4m3", implementation="ffi"), placed)
    mapped = jax.shard_map(lambda x: bfp.quantize(x, "mxfp8_e4m3"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert CALL in text_of(mapped, placed)
    two = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    partly = jax.shard_map(
        lambda x: bfp.quantize(x, "mxfp8_e4m3"), mesh=two, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    )
    assert CALL not in text_of(partly, x)
    for q in (jax.jit(mapped)(placed), jax.jit(partly)(x)):
        assert_same_bits(parts_of(q), numerics.quantize(np.asarray(x), "mxfp8_e4m3"))


@FAMILIES
def test_an_exported_program_needs_no_library(format):
    def run(x):
        q = bfp.quantize(x, format)
        return q.codes, q.scales, q.dequantize()

    x = sample("gaussian", (32, 64))
    exported = jax.export.export(jax.jit(run), platforms=["cpu", "cuda", "tpu"])(x)
    assert CALL not in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    expected = numerics.quantize(x, format)
    assert_same_bits(again.call(x)[:2], expected[:2])


def test_a_library_that_was_asked_for_is_exported_where_the_caller_allows_it():
    x = sample("gaussian", (32, 64))
    run = jax.jit(lambda x: bfp.quantize(x, "mxfp8_e4m3", implementation="ffi").codes)
    with pytest.raises(ValueError, match="blockfp_cpu_quantize_1"):
        jax.export.export(run)(x).serialize()
    allowed = jax.export.DisabledSafetyCheck.custom_call("blockfp_cpu_quantize_1")
    exported = jax.export.export(run, disabled_checks=[allowed])(x)
    assert_same_bits(exported.call(x), numerics.quantize(x, "mxfp8_e4m3").codes)


def test_a_cached_program_finds_the_library_in_a_new_process(tmp_path):
    program = textwrap.dedent(
        """
        import sys, jax, numpy as np
        import blockfp.jax as bfp
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        hits = []
        jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
        q = jax.jit(lambda x: bfp.quantize(x, "nvfp4"))(np.ones((32, 64), np.float32))
        print(len(hits), np.asarray(q.codes).sum())
        """
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert told[0][0] == "0"
    assert told[1][0] != "0"
    assert told[0][1] == told[1][1]


def test_without_the_library_xla_runs_and_asking_for_it_says_why():
    x = sample("gaussian", (32, 64))
    with switch.definition_only():
        assert choice.choose(None, "quantize", format=Format.parse("nvfp4")).name == "xla"
        assert_same_bits(parts_of(bfp.quantize(x, "mxint8")), numerics.quantize(x, "mxint8"))
        with pytest.raises(RuntimeError, match=r"'ffi' can't run here: .*definition_only\(\).*; use implementation='xla'"):
            bfp.quantize(x, "mxint8", implementation="ffi")

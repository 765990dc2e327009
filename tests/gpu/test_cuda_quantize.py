"""The CUDA kernels against the definition, bit for bit, on the inputs that tell roundings apart."""

import numpy as np
import pytest
import torch
from blockfp.torch_backend.ops import cuda
from cuda_arrays import assert_same, capture, to_gpu, to_numpy
from same_tensors import assert_equal
from samples import DTYPES, KINDS, all_patterns, sample

from blockfp.definition import four_over_six, numerics, scaling
from blockfp.formats import FORMATS, Format
from blockfp.kernels import calls, cuda_library
from blockfp.kernels.calls import format_numbers
from blockfp.kernels.operand_cast import OperandCast

WITH_KERNELS = [format for format in FORMATS if not format.scale.four_over_six]
BY_NAME = pytest.mark.parametrize("format", WITH_KERNELS, ids=str)
SHAPES = ((37, 150), (256, 384))


def swapped(x):
    return np.ascontiguousarray(np.swapaxes(x, -1, -2))


def check(x, format, key=None, **options):
    what = f"{format} {x.dtype} {x.shape} key={key} {options}"
    on_gpu = to_gpu(x)
    expected = numerics.quantize(x, format, key=key, **options)
    assert_same(cuda.quantize(on_gpu, format, key=key, **options), expected, what)
    expected_t = numerics.quantize(swapped(x), format, key=key, **options)
    both = cuda.quantize_both(on_gpu, format, key=key, **options)
    assert_same(both.row, expected, f"{what} row of both")
    assert_same(both.column, expected_t, f"{what} column of both")
    assert_same(cuda.quantize_both(on_gpu, format, key=key, rows=False, **options).column, expected_t, f"{what} column")
    return on_gpu, expected


@BY_NAME
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_input(format, dtype):
    assert cuda_library.available(), cuda_library.status()
    for kind in KINDS:
        for shape in SHAPES:
            check(sample(kind, shape, dtype), format)


@BY_NAME
def test_dequantize(format):
    for shape in (*SHAPES, (2, 3, 5)):
        for kind in ("random_bits", "exponents", "special"):
            rng = np.random.default_rng(len(kind))
            q = numerics.quantize(sample(kind, shape), format)
            # Codes and scales of any bits: foreign data decode too.
            codes = rng.integers(0, 256, q.codes.shape, dtype=np.uint8)
            scales = q.scales if q.scales.dtype == np.float32 else rng.integers(0, 256, q.scales.shape, dtype=np.uint8)
            for c, s in ((q.codes, q.scales), (codes, scales)):
                for dtype in DTYPES:
                    t = None if q.tensor_scale is None else torch.tensor(q.tensor_scale, device="cuda")
                    got = cuda.dequantize(to_gpu(c), to_gpu(s), t, format, dtype, columns=shape[-1])
                    expected = numerics.dequantize(c, s, q.tensor_scale, format, dtype, columns=shape[-1])
                    assert_same((got, None, None), (expected, None, None), f"{format} {kind} {dtype} {shape}")


@pytest.mark.parametrize("format", [format for format in FORMATS if format.scale.four_over_six], ids=str)
def test_blocks_that_choose_between_scales(format):
    """Kernels choose where blocks are whole on a rank, and array operations do elsewhere: the bits are the same."""
    for kind in KINDS:
        for dtype in DTYPES:
            x = sample(kind, (45, 72), dtype)
            g = to_gpu(x)
            for options in ({}, {"key": 5}, {"origin": (5, 3), "shape": (300, 400)}):
                expected = numerics.quantize(x, format, **options)
                assert_same(cuda.quantize(g, format, **options), expected, f"{format} {kind} {dtype} {options}")
            amaxes = numerics.amax(x, format)._replace(members=four_over_six.members(x, format))
            given = numerics.Amax(*(torch.tensor(np.asarray(a), device="cuda") for a in amaxes))
            assert_same(cuda.quantize(g, format, amax=given), numerics.quantize(x, format), f"{format} {kind} {dtype} amax")
            expected = numerics.quantize(x, format)
            out = numerics.Quantized(*(torch.empty_like(torch.tensor(np.asarray(part)), device="cuda") for part in expected))
            cuda.quantize(g, format, out=out)
            assert_same(out, expected, f"{format} {kind} {dtype} out")
            for ours, theirs in zip(cuda.amax(g, format)[:3], amaxes[:3], strict=True):
                assert (to_numpy(ours) == theirs).all()
            t = torch.tensor(expected.tensor_scale, device="cuda")
            codes = cuda.encode(g, format, to_gpu(expected.scales), t)
            again = numerics.encode(x, format, expected.scales, expected.tensor_scale)
            assert_same((codes, None, None), (again, None, None), f"{format} {kind} {dtype} encode")
    if not format.square:
        with pytest.raises(ValueError, match="along the rows alone"):
            cuda.quantize_both(g, format)


CHOOSING = [format for format in FORMATS if format.scale.four_over_six]


@pytest.mark.parametrize("format", CHOOSING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_that_choose_between_scales(format, dtype):
    """Rows of every length, both ways of rounding, and of square blocks the transposed direction too."""
    for kind in KINDS:
        for shape, keys in (((37, 150), (None, 3)), ((64, 256), (None, 3)), ((3, 40, 72), (None,)), ((33, 8), (3,))):
            x = sample(kind, shape, dtype)
            for key in keys:
                if format.square:
                    check(x, format, key=key)
                else:
                    what = f"{format} {kind} {dtype} {shape} {key}"
                    assert_same(cuda.quantize(to_gpu(x), format, key=key), numerics.quantize(x, format, key=key), what)


@pytest.mark.parametrize("format", CHOOSING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_that_are_close(format, dtype):
    """Elements near codes of both scales, so that their errors are nearly or exactly alike: estimates can't tell them apart."""
    rng = np.random.default_rng(0)
    shape = (128, 1024)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for exponent, spread in ((0, 0), (0, 2), (-60, 2), (-110, 2), (100, 2)) if dtype != "float16" else ((0, 0), (0, 2)):
        x = grid[rng.integers(0, 8, shape)] * np.where(rng.random(shape) < 0.5, 1, 1.5) * rng.choice([-1, 1], shape)
        x = x * np.ldexp(np.exp(rng.standard_normal((shape[0] // 16, shape[1] // 16))), exponent).repeat(16, 0).repeat(16, 1)
        x = x.astype(np.float32)
        for _ in range(spread):
            x = np.where(
                rng.random(shape) < 0.5, x, np.nextafter(x, rng.choice(np.array([-np.inf, np.inf], np.float32), shape))
            )
        x = x.astype(DTYPES[dtype])
        assert_same(cuda.quantize(to_gpu(x), format), numerics.quantize(x, format), f"{format} {dtype} {exponent} {spread}")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_half_way_between_codes(name, dtype):
    """A tensor's scale of 1, blocks' scales that are powers of two: multipliers are exact, and halves stay halves."""
    rng = np.random.default_rng(1)
    shape, largest = (256, 1024), 6 * 448
    halves = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    scales = np.ldexp(1.0, rng.integers(-9, 9, (shape[0] // 16, shape[1] // 16))).repeat(16, 0).repeat(16, 1)
    x = (halves[rng.integers(0, 9, shape)] * rng.choice([-1, 1], shape)).astype(np.float32)
    x = np.where(rng.random(shape) < 0.5, x, np.nextafter(x, rng.choice(np.array([-np.inf, np.inf], np.float32), shape)))
    x[:, ::16] = 6
    x = (x * scales).astype(np.float32)
    x[0, 0] = largest
    check(x.astype(DTYPES[dtype]), Format.parse(name))


@BY_NAME
def test_stochastic_rounding(format):
    for kind in ("bf16_valued", "exponents", "special"):
        for dtype in ("bfloat16", "float32"):
            for shape in ((9, 52), (64, 256)):
                check(sample(kind, shape, dtype), format, key=0x123456789ABCDEF0)


@BY_NAME
def test_shapes(format):
    for shape in ((2, 3, 33, 47), (1, 1), (3, 1, 129), (130, 3), (2, 128, 256), (3, 160, 96), (129, 264), (2, 512, 128)):
        check(sample("bf16_valued", shape, "bfloat16"), format)
    for shape in ((0, 32), (4, 0), (2, 0, 5), (0, 0)):
        check(np.zeros(shape, np.float32), format)


@BY_NAME
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_patterns_of_16_bits(format, dtype):
    x = all_patterns(dtype)
    shuffled = np.random.default_rng(1).permutation(x.reshape(-1)).reshape(x.shape)
    for array in (x, shuffled):
        check(array, format)


@BY_NAME
def test_row_strides(format):
    x = sample("bf16_valued", (96, 320), "bfloat16")
    wide = to_gpu(x)
    for start, stop in ((0, 256), (32, 160), (3, 200)):
        expected = numerics.quantize(np.ascontiguousarray(x[:, start:stop]), format)
        assert_same(cuda.quantize(wide[:, start:stop], format), expected, f"{format} columns {start}:{stop}")
    assert_same(cuda.quantize(wide.mT, format), numerics.quantize(swapped(x), format), f"{format} mT")
    x = sample("bf16_valued", (3, 2, 40, 128), "bfloat16")
    expected = numerics.quantize(np.ascontiguousarray(x.swapaxes(0, 1)), format)
    assert_same(cuda.quantize(to_gpu(x).transpose(0, 1), format), expected, f"{format} leading axes swapped")


@BY_NAME
@pytest.mark.parametrize("origin", [(7, 0), (0, 24), (130, 200), (16, 64), (5, 3)])
def test_origins_and_given_amaxes(format, origin):
    x = sample("bf16_valued", (45, 72), "bfloat16")
    g = to_gpu(x)
    for key in (None, 5):
        options = {"key": key, "origin": origin, "shape": (300, 400)}
        assert_same(cuda.quantize(g, format, **options), numerics.quantize(x, format, **options), f"{format} {options}")
        amaxes = numerics.amax(x, format, origin=origin)
        ours = cuda.amax(g, format, origin=origin)
        for a, b in zip(ours, amaxes, strict=True):
            assert (a is None) == (b is None)
            assert b is None or (to_numpy(a) == b).all()
        lifted = numerics.Amax(*(None if a is None else np.maximum(a, a.max()) for a in amaxes))
        lifted_gpu = numerics.Amax(*(None if a is None else torch.tensor(np.asarray(a), device="cuda") for a in lifted))
        expected = numerics.quantize(x, format, amax=lifted, **options)
        assert_same(cuda.quantize(g, format, amax=lifted_gpu, **options), expected, f"{format} {options} amax")
    q = numerics.quantize(x, format, origin=origin)
    t = None if q.tensor_scale is None else torch.tensor(q.tensor_scale, device="cuda")
    got = cuda.dequantize(to_gpu(q.codes), to_gpu(q.scales), t, format, "float32", columns=72, origin=origin)
    expected = numerics.dequantize(*q, format, "float32", columns=72, origin=origin)
    assert_same((got, None, None), (expected, None, None), f"{format} {origin} dequantize")
    codes = cuda.encode(g, format, to_gpu(q.scales), t, origin=origin)
    assert_same(
        (codes, None, None), (numerics.encode(x, format, q.scales, q.tensor_scale, origin=origin), None, None), str(format)
    )


@pytest.mark.parametrize("format", [f for f in FORMATS if f.scale.dtype == "float32"], ids=str)
def test_eps_and_nominal(format):
    for kind in ("subnormal", "exponents", "zeros"):
        check(sample(kind, (64, 256)), format, eps=1e-3)
        check(sample(kind, (64, 256)), format, nominal="bfloat16")
        check(sample(kind, (64, 256)), format, nominal="float16")


@pytest.mark.parametrize("format", [f for f in FORMATS if f.square], ids=str)
def test_transpose(format):
    for shape in ((2, 70, 45), (256, 384), (1, 3)):
        q = numerics.quantize(sample("bf16_valued", shape), format)
        expected = numerics.transpose(q.codes, q.scales, format, columns=shape[-1])
        got = cuda.transpose(to_gpu(q.codes), to_gpu(q.scales), format, columns=shape[-1])
        assert_same((*got, None), (*expected, None), f"{format} {shape}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [None, 77])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_guarded"])
def test_rotated_columns(dtype, key, name):
    from blockfp.definition.rotation import rotate

    for kind in ("gaussian", "exponents", "special", "huge", "subnormal"):
        for shape in ((256, 384), (40, 24), (2, 37, 19), (15, 8)):
            x = sample(kind, shape, dtype)
            with np.errstate(all="ignore"):
                turned = rotate(swapped(x))
            got = cuda.quantize_both(to_gpu(x), name, key=key, rotate=True)
            assert_same(got.row, numerics.quantize(x, name, key=key), f"{kind} {shape} row")
            assert_same(got.column, numerics.quantize(turned, name, key=key), f"{kind} {shape} column")


@pytest.mark.parametrize("format", [f for f in WITH_KERNELS if not f.per_row], ids=str)
def test_nothing_else_is_written(format):
    """Outputs lie between guard bands, poisoned first; every byte of them is written, and none beside them."""
    from blockfp.definition import layout

    for shape in ((96, 256), (45, 77)):
        x = sample("bf16_valued", shape, "bfloat16")
        turned = (shape[1], shape[0])
        sizes, makers = [], []
        for s in (shape, turned):
            sizes += [int(np.prod(layout.codes_shape(s, format)))]
            grid = layout.scales_shape(s, format)
            sizes += [int(np.prod(grid)) * (4 if format.scale.dtype == "float32" else 1)]
        for poison in (0xA5, 0x5A):
            buffers = [torch.full((n + 512,), poison, dtype=torch.uint8, device="cuda") for n in sizes]
            inner = [b[256 : 256 + n] for b, n in zip(buffers, sizes, strict=True)]
            if format.scale.dtype == "float32":
                inner[1], inner[3] = inner[1].view(torch.float32), inner[3].view(torch.float32)
            amax = torch.zeros(1, dtype=torch.int32, device="cuda")
            tensor_scales = [torch.zeros((), device="cuda") if format.scale.two_level else None for _ in range(2)]
            per_tensor = format.has_tensor_scale
            cuda_library.library().quantize(
                to_gpu(x), None, amax if per_tensor else None, None, *inner[:2], tensor_scales[0], *inner[2:], tensor_scales[1],
                *format_numbers(format), per_tensor, 0, 0x7F7F0000, False, False, False, False, 0, 0, 0, 0,
            )  # fmt: skip
            for b, n in zip(buffers, sizes, strict=True):
                bands = torch.cat([b[:256], b[256 + n :]])
                assert (bands == poison).all(), f"{format} {shape}"
            makers.append([i.contiguous().view(torch.uint8).clone() for i in inner])
        assert_equal(*makers, f"{format} {shape}: not every byte is written")


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_row", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4"])
def test_graph_capture(name):
    format = Format.parse(name)
    xs = [sample("bf16_valued", (128, 256), "bfloat16", seed) for seed in (1, 2)]
    x = to_gpu(xs[0])
    cuda.quantize_both(x, format)

    def both_and_values():
        both = cuda.quantize_both(x, format)
        return both, cuda.dequantize(*both.row, format, "bfloat16", columns=256)

    graph, (both, y) = capture(both_and_values)
    for one in xs:
        x.copy_(to_gpu(one))
        graph.replay()
        torch.cuda.synchronize()
        expected = numerics.quantize(one, format)
        assert_same(both.row, expected, name)
        assert_same((y, None, None), (numerics.dequantize(*expected, format, "bfloat16", columns=256), None, None), name)


@pytest.mark.parametrize("shape", [(128, 256), (4096, 1040), (32, 8), (37, 150)])
@pytest.mark.parametrize(("given", "scale"), [("scale", 0.0), ("scale", 3.0), ("multiplier", 3.0)])
@pytest.mark.parametrize("kind", ["bf16_valued", "random_bits", "special", "zeros"])
def test_delayed_scaling_casts_records_and_measures_where_it_has_no_scale(shape, given, scale, kind):
    """A matrix and what an activation makes, both directions; a NaN in x doesn't count in its amax, an Inf marks the scales."""
    format = Format.parse("fp8_e4m3")
    x = sample(kind, shape, "bfloat16")
    with np.errstate(all="ignore"):
        made = np.where(x <= 0, np.float32(0), x.astype(np.float32) ** 2).astype(x.dtype)
    for function, inputs, values in (("quantize", (to_gpu(x),), x), ("quantize_gated", (to_gpu(x), None), made)):
        cast = OperandCast(format, format, given)
        if function == "quantize_gated" and not cast.of_made(*shape):
            continue
        call = calls.quantize(shape, "bfloat16", cast, function, first=calls.ACTIVATIONS["relu2"])
        found = cuda.carry_out(call, *inputs, amax=torch.tensor([scale], device="cuda"))
        amax = numerics.amax(values, format).blocks
        multiplier = scaling.delayed_multiplier(np.full(1, scale, np.float32), amax.reshape(1), format)[0]
        for names, one in ((calls.PARTS, values), (calls.PARTS_T, swapped(values))):
            wanted = numerics.quantize(one, format, multiplier=multiplier)
            if np.isinf(values).any():
                wanted = wanted._replace(scales=np.full_like(wanted.scales, np.nan))
            codes, scales = (to_numpy(found[name]) for name in names[:2])
            assert (codes == wanted.codes).all(), f"{function} {names}"
            np.testing.assert_array_equal(scales, wanted.scales)
        assert found["recorded"].item() == amax.item()


def test_another_stream():
    x = to_gpu(sample("bf16_valued", (4096, 1024), "bfloat16"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.mul_(2)
        q = cuda.quantize(x, "mxfp8_e4m3")
    stream.synchronize()
    assert torch.equal(q.codes, cuda.quantize(x, "mxfp8_e4m3").codes)


def test_refusals():
    with pytest.raises(TypeError, match="CUDA tensors"):
        cuda.quantize(torch.zeros(2, 2), "mxfp8_e4m3")
    with pytest.raises(ValueError, match="float32"):
        cuda.dequantize(torch.zeros(2, 2, dtype=torch.uint8), None, None, "mxfp8_e4m3", "float64", columns=2)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.scale.two_level], ids=str)
def test_the_library_takes_every_rule_where_scales_are_there_and_refuses_choices_elsewhere(format):
    """Codes and scales mean the same whatever rule has made the scales; a rule that chooses is never taken for another."""
    x = sample("gaussian", (64, 128), "bfloat16")
    g, numbers, library = to_gpu(x), format_numbers(format), cuda_library.library()
    q = numerics.quantize(x, format)
    codes, scales, tensor_scale = (torch.tensor(np.asarray(part), device="cuda") for part in q)
    out = torch.empty((64, 128), dtype=torch.bfloat16, device="cuda")
    library.dequantize(codes, scales, tensor_scale, out, *numbers, 0, 0)
    expected = numerics.dequantize(*q, format, "bfloat16", columns=128)
    assert_same((out, None, None), (expected, None, None), f"{format} dequantize")
    again = torch.zeros_like(codes)
    library.encode(g, None, None, None, None, again, scales, tensor_scale, *numbers, 0, 0, 0, 0, 0, 0)
    assert_same((again, None, None), (numerics.encode(x, format, *q[1:]), None, None), f"{format} encode")
    found = cuda.amax(g, format)
    if format.scale.four_over_six:
        with pytest.raises(ValueError, match="4-over-6"):
            library.encode(g, *found[:3], None, again, scales, tensor_scale, *numbers, 0, 0, 0, 0, 0, 0)
    else:
        library.encode(g, *found[:3], None, again, scales, tensor_scale, *numbers, 0, 0, 0, 0, 0, 0)
        assert_same((again, scales, tensor_scale), q, f"{format} encode by amaxes")


@pytest.mark.parametrize("format", [format for format in FORMATS if format.scale.two_level], ids=str)
def test_an_empty_part_has_the_scale_of_the_whole(format):
    """Whether the kernel takes its columns as whole blocks or not: a rank without rows knows as much of the whole as others."""
    for columns in (32, 24):
        x = sample("gaussian", (40, columns))
        amax, part = numerics.amax(x, format), x[:0]
        own = numerics.amax(part, format)._replace(tensor=amax.tensor, members=None)
        given = numerics.Amax(*(None if one is None else torch.tensor(np.asarray(one), device="cuda") for one in own))
        expected = numerics.quantize(part, format, amax=own)
        out = numerics.Quantized(*(torch.tensor(np.asarray(one), device="cuda") for one in expected))
        out.tensor_scale.fill_(float("nan"))
        assert_same(cuda.quantize(to_gpu(part), format, amax=given, out=out), expected, f"{format} {columns}")

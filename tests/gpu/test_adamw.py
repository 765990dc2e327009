"""The CUDA kernels' AdamW step and `requantize` against the definition, bit for bit; and the optimizer on a GPU."""

import gc

import numpy as np
import pytest
import torch
from adamw_cases import FUSED, Parameter, table
from any_scales import requantized, scales_of, shard_of_a_whole
from arrays import values
from blockfp.torch_backend.ops import cuda
from blockfp.torch_backend.ops.optimizer import cuda_steps
from cuda_arrays import assert_same, to_gpu, to_numpy
from same_bits import assert_same_bits
from same_tensors import assert_equal
from samples import sample

from blockfp.definition import adamw, numerics
from blockfp.formats import FORMATS, Format
from blockfp.kernels import step_table
from blockfp.kernels.step_table import two_passes

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def run(parameters, steps=2, **settings):
    settings = SETTINGS | settings
    lr = settings.pop("lr", 1e-2)
    on_gpu = None
    for t in range(1, steps + 1):
        c = adamw.coefficients(t, lr, **settings)
        expected = [p.expected(c, t) for p in parameters]
        if on_gpu is None:
            tasks = [p.step(c, t) for p in parameters]
            on_gpu = [s._replace(**{n: to_gpu(x) for n, x in s._asdict().items() if isinstance(x, np.ndarray)}) for s in tasks]
        cuda_steps.adamw(table([s._replace(coefficients=c, step=t) for s in on_gpu]), on_gpu[0].weight)
        for p, s, e in zip(parameters, on_gpu, expected, strict=True):
            pairs = ((s.first, s.first_scales), (s.second, s.second_scales), (s.out, s.out_scales))
            state = (to_numpy(s.weight), *(tuple(None if x is None else to_numpy(x) for x in pair) for pair in pairs))
            assert_same_bits(state, e)
            p.weight, p.first, p.second = state[:3]


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masters_and_moments(moments, dtype):
    mx = Format.parse("mxfp8_e4m3_32x32")
    run(
        [
            Parameter((37, 300), moments, dtype),
            Parameter((1, 7), moments, dtype, copy="bfloat16", seed=1),
            Parameter((70, 301), moments, dtype, copy="float16", seed=2),
            Parameter((256, 512), moments, dtype, format=mx, seed=3),
            Parameter((130, 258), moments, dtype, format=Format.parse("fp8_e4m3_128x128"), seed=4),
        ]
    )


@pytest.mark.parametrize("format", [format for format in FUSED if not format.per_row], ids=str)
def test_codes(format):
    shapes = [(70, 300), (3, 5, 33), (128, 256), (0, 16), (2, 2, 64, 130)]
    run([Parameter(shape, format=format, dtype="bfloat16", seed=i) for i, shape in enumerate(shapes)], steps=1)


def test_more_parameters_than_one_launch_takes():
    run([Parameter((8, 40 + i), copy="bfloat16", seed=i) for i in range(300)], steps=1)


TWO_PASSES = [format for format in FORMATS if two_passes(format)]


def two_passes(parameters, c):
    """Steps of parameters and their codes in formats that need the amax of the whole parameter, a launch a pass and format."""
    steps = [p.step(c, 1) for p in parameters]
    on_gpu = [s._replace(**{n: to_gpu(x) for n, x in s._asdict().items() if isinstance(x, np.ndarray)}) for s in steps]
    first = table(on_gpu, two_passes=True)
    count, places = len(steps), range(len(steps))
    scales = torch.full((count,), -1.0, device="cuda")
    two_level = [s.format.scale.two_level for s in steps]
    addresses = [scales[i].data_ptr() if two_level[i] else 0 for i in places]
    second = step_table.second_pass(first, places, addresses)
    amaxes = torch.zeros(count, dtype=torch.int32, device="cuda")
    step_table.point_to_amaxes(first, places, amaxes.data_ptr(), known=False)
    cuda_steps.adamw(first, on_gpu[0].weight)
    step_table.point_to_amaxes(second, places, amaxes.data_ptr(), known=True)
    cuda_steps.adamw_codes(second, on_gpu[0].weight)
    return on_gpu, [scales[i] if two_level[i] else None for i in places]


@pytest.mark.parametrize("format", TWO_PASSES, ids=str)
@pytest.mark.parametrize("special", [None, np.nan, np.inf, 0.0])
def test_codes_that_need_the_amax_of_the_parameter(format, special):
    shapes = [(70, 300), (3, 5, 33), (128, 256), (2, 2, 64, 130), (1, 1), (33, 16), (16, 20), (257, 129), (48, 4)]
    parameters = [Parameter(shape, format=format, dtype="bfloat16", seed=i) for i, shape in enumerate(shapes)]
    for p in parameters:
        if special == 0:
            p.gradient[:], p.weight[:], p.first[0][:] = 0, 0, 0
        elif special is not None:
            p.weight[..., p.weight.shape[-2] // 2, p.weight.shape[-1] // 3] = special
    c = adamw.coefficients(1, 1e-2, **SETTINGS)
    on_gpu, scales = two_passes(parameters, c)
    for p, s, scale in zip(parameters, on_gpu, scales, strict=True):
        with np.errstate(all="ignore"):
            weight = p.expected(c, 1)[0]
        expected = numerics.quantize(weight, format, nominal="bfloat16")
        if special is None:  # of a NaN not all bits are the same
            assert_same_bits(to_numpy(s.weight), weight)
        assert_same_bits((to_numpy(s.out), to_numpy(s.out_scales)), tuple(expected)[:2])
        assert (scale is None) == (expected.tensor_scale is None)
        if scale is not None:
            assert_same_bits(to_numpy(scale), expected.tensor_scale)


@pytest.mark.parametrize("format", TWO_PASSES, ids=str)
def test_a_step_that_moves_nothing_leaves_codes_that_need_two_passes(format):
    for c in (adamw.coefficients(1, 0.0, **SETTINGS), adamw.coefficients(1, 1e-2, **SETTINGS)._replace(skip=1.0)):
        p = Parameter((40, 48), format=format)
        before = p.out.copy(), p.out_scales.copy()
        on_gpu, _ = two_passes([p], c)
        assert_same_bits((to_numpy(on_gpu[0].out), to_numpy(on_gpu[0].out_scales)), before)


def test_an_empty_parameter_has_a_scale():
    for format in TWO_PASSES:
        on_gpu, scales = two_passes([Parameter((0, 16), format=format)], adamw.coefficients(1, 1e-2, **SETTINGS))
        scale = on_gpu[0].out_scales if scales[0] is None else scales[0]
        assert (to_numpy(scale) == 1).all()


def test_one_launch_a_pass_and_format():
    """However many parameters there are: two launches, and a memory set to zero."""
    from blockfp.torch import AdamW

    for name in ("fp8_e4m3", "nvfp4_16x16", "nvfp4"):
        params = [quantized((64, 96 + 16 * i), name, i) for i in range(20)]
        for p in params:
            p.grad = torch.randn(p.shape, device="cuda", dtype=p.dtype)
        optimizer = AdamW(params)
        for _ in range(2):
            optimizer.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
            optimizer.step()
            torch.cuda.synchronize()
        launched = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 2 <= len(launched) <= 3, [event.name for event in launched]


def test_nan_in_a_block():
    for name in ("mxfp4_e2m1_32x32", "mxfp6_e3m2", "mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "mxint8_32x32"):
        p = Parameter((64, 160), format=Format.parse(name))
        p.gradient[3, 5], p.weight[40, 150], p.weight[0, 0] = np.nan, -np.inf, np.inf
        c = adamw.coefficients(1, 1e-2, **SETTINGS)
        with np.errstate(all="ignore"):
            expected = p.expected(c, 1)
        s = p.step(c, 1)
        s = s._replace(**{n: to_gpu(x) for n, x in s._asdict().items() if isinstance(x, np.ndarray)})
        cuda_steps.adamw(table([s]), s.weight)
        assert_same_bits((to_numpy(s.out), to_numpy(s.out_scales)), expected[3])


def test_a_shard_rounds_as_the_whole():
    for moments in ("bfloat16", "fp8"):
        run([Parameter((5, 256), moments, start=(0, 11, 128), whole=(40, 500))])
        run([Parameter((5, 77), moments, start=(3, 11, 256), whole=(40, 333))])


def quantized(shape, name, seed=0):
    from blockfp.torch import quantize

    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(quantize(torch.randn(shape, generator=generator).bfloat16().cuda(), name))


NAMES = ("mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "fp8_e4m3", "nvfp4_16x16", "mxfp8_e4m3")


def parameters():
    params = [quantized((192, 320), name, i) for i, name in enumerate(NAMES)]
    params.append(torch.nn.Parameter(torch.randn(77, device="cuda")))
    params.append(torch.nn.Parameter(torch.randn(33, 65, device="cuda", dtype=torch.bfloat16)))
    for p in params:
        p.grad = torch.randn(p.shape, device="cuda", dtype=p.dtype)
    return params


def parts(p):
    return (p.codes, p.scales, p.tensor_scale) if hasattr(p, "codes") else (p.detach(), None, None)


def assert_equal_parameters(a, b):
    for p, q in zip(a, b, strict=True):
        for x, y in zip(parts(p), parts(q), strict=True):
            assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("moments", ["float32", "fp8"])
def test_the_optimizer_requantizes_its_masters(moments):
    from blockfp.torch import AdamW, quantize

    params = parameters()
    optimizer = AdamW(params, lr=1e-2, moments=moments)
    for _ in range(3):
        optimizer.step()
    for p in params[: len(NAMES)]:
        expected = quantize(optimizer.state[p]["master"], p.format)
        for x, y in zip(parts(p), parts(expected), strict=True):
            assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("master", ["float32", None])
def test_captured_in_a_graph(master):
    from blockfp.torch import AdamW

    results = []
    for captured in (False, True):
        torch.manual_seed(5)
        params = parameters()
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = AdamW(params, lr=lr, master=master, moments="bfloat16", capturable=True)
        optimizer.step()
        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                optimizer.step()
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(3):
                optimizer.step()
        torch.cuda.synchronize()
        assert optimizer.state[params[0]]["step"].item() == 4
        results.append(params)
    assert_equal_parameters(*results)


def test_capturable_with_found_inf_and_no_learning_rate_changes_nothing():
    from blockfp.torch import AdamW

    params = parameters()
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = AdamW(params, lr=lr, capturable=True)
    optimizer.step()
    before = [[x.clone() for x in parts(p) if x is not None] for p in params]
    optimizer.found_inf, optimizer.grad_scale = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    optimizer.step()
    optimizer.found_inf.zero_()
    lr.zero_()
    optimizer.step()
    assert optimizer.state[params[0]]["step"].item() == 2
    for p, old in zip(params, before, strict=True):
        assert_equal((x for x in parts(p) if x is not None), old)


def test_many_steps_need_no_more_memory():
    from blockfp.torch import AdamW

    params = parameters()
    optimizer = AdamW(params)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    gc.collect()  # of what tests before this one have left
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_steps_count_and_arrays_are_checked_in_one_call():
    """Errors are those of a CPU, and come before anything is changed; memory and dtypes may change between steps."""
    from blockfp.torch import AdamW

    params = parameters()
    optimizer = AdamW(params)
    for number in range(1, 4):
        optimizer.step()
        assert all(state["step"].item() == number for state in optimizer.state.values())
    (table,) = optimizer._tables.values()
    state = optimizer.state[params[1]]
    for name, change, error, message in (
        ("exp_avg", lambda x: x[:4].clone(), ValueError, "exp_avg of parameter 1.*hold 61440 elements"),
        ("exp_avg_sq", lambda x: x.t().contiguous().t(), ValueError, "exp_avg_sq of parameter 1.*contiguous"),
        ("exp_avg_sq", lambda x: x.bfloat16(), TypeError, "exp_avg_sq of parameter 1.*float32"),
        ("exp_avg", lambda x: x.cpu(), ValueError, "exp_avg of parameter 1.*on cuda"),
        ("exp_avg", lambda x: x.to("meta"), ValueError, "exp_avg of parameter 1.*on cuda"),
    ):
        kept, before = state[name], [x.clone() for p in params for x in parts(p) if x is not None]
        state[name] = change(kept)
        with pytest.raises(error, match=message):
            optimizer.step()
        state[name] = kept
        after = [x for p in params for x in parts(p) if x is not None]
        assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))
    for one in optimizer.state.values():
        one.update({name: x.clone() for name, x in one.items()})
    optimizer.step()
    assert next(iter(optimizer._tables.values())) is table
    params[5].data = params[5].data.bfloat16()
    params[5].grad = torch.randn(77, device="cuda", dtype=torch.bfloat16)
    optimizer.step()
    assert next(iter(optimizer._tables.values())) is not table


def on_gpu(parts):
    return [None if part is None else torch.tensor(np.asarray(part), device="cuda") for part in parts]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_kind_of_input_and_scale(format):
    for x, scales, key in requantized(format, ((133, 150), (2, 3, 33, 47), (64, 256), (0, 32))):
        got = cuda.requantize(to_gpu(x), format, *on_gpu(scales), key=key)
        assert_same(got, numerics.requantize(x, format, *scales, key=key), f"{format} {x.shape} {key}")
        codes, expected = cuda.encode(to_gpu(x), format, *on_gpu(scales)), numerics.encode(x, format, *scales)
        assert_same((codes, None, None), (expected, None, None), f"{format} {x.shape} encode")
    strided = sample("gaussian", (150, 133))
    got = cuda.requantize(to_gpu(strided).mT, format, *on_gpu(scales_of((133, 150), format, 0)), key=1)
    assert_same(got, numerics.requantize(strided.T, format, *scales_of((133, 150), format, 0), key=1), f"{format} strided")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_shard_with_amaxes_of_the_whole(format):
    x, scales, amax, place = shard_of_a_whole(format)
    got = cuda.requantize(to_gpu(x), format, *on_gpu(scales), amax=numerics.Amax(*on_gpu(amax)), **place)
    assert_same(got, numerics.requantize(x, format, *scales, amax=amax, **place), str(format))


WITHOUT_MASTERS = ("fp8_e4m3", "fp8_e4m3_row", "fp8_e4m3_128x128_fp32", "mxfp8_e4m3_32x32", "mxfp4_e2m1", "nvfp4_16x16")


@pytest.mark.parametrize("name", [*WITHOUT_MASTERS, "nvfp4_4over6_16x16"])
@pytest.mark.parametrize("moments", ["float32", "fp8"])
def test_steps_are_those_of_a_cpu(name, moments):
    import blockfp.torch as bfp

    results, start = [], bfp.quantize(values((192, 328), 1), name)
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(start.clone().to(device))  # on the CPU, too, one of its own
        optimizer = bfp.AdamW([p], lr=1e-2, master=None, moments=moments, key=7)
        for step in range(3):
            p.grad = values((192, 328), step).to(device)
            optimizer.step()
        results.append([part.cpu() for part in (p.codes, p.scales, p.tensor_scale) if part is not None])
    assert all(map(torch.equal, *results))

"""The CUDA kernel's AdamW step against the definition in NumPy, bit for bit; and the optimizer on a GPU."""

import gc

import numpy as np
import pytest
from adamw_cases import FUSED, Parameter, table
from cuda_arrays import to_gpu, to_numpy
from same_bits import assert_same_bits

torch = pytest.importorskip("torch")
from blockfp.torch_backend.custom_ops import cuda  # noqa: E402

from blockfp.definition import adamw  # noqa: E402
from blockfp.formats import Format  # noqa: E402

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
        cuda.adamw(table([s._replace(coefficients=c, step=t) for s in on_gpu]), on_gpu[0].weight)
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


@pytest.mark.parametrize("format", FUSED, ids=str)
def test_codes(format):
    shapes = [(70, 300), (3, 5, 33), (128, 256), (0, 16), (2, 2, 64, 130)]
    run([Parameter(shape, format=format, dtype="bfloat16", seed=i) for i, shape in enumerate(shapes)], steps=1)


def test_more_parameters_than_one_launch_takes():
    run([Parameter((8, 40 + i), copy="bfloat16", seed=i) for i in range(300)], steps=1)


def test_nan_in_a_block():
    for name in ("mxfp4_e2m1_32x32", "mxfp6_e3m2", "mxfp8_e4m3_32x32", "fp8_e4m3_128x128", "mxint8_32x32"):
        p = Parameter((64, 160), format=Format.parse(name))
        p.gradient[3, 5], p.weight[40, 150], p.weight[0, 0] = np.nan, -np.inf, np.inf
        c = adamw.coefficients(1, 1e-2, **SETTINGS)
        with np.errstate(all="ignore"):
            expected = p.expected(c, 1)
        s = p.step(c, 1)
        s = s._replace(**{n: to_gpu(x) for n, x in s._asdict().items() if isinstance(x, np.ndarray)})
        cuda.adamw(table([s]), s.weight)
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
        for x, y in zip((x for x in parts(p) if x is not None), old, strict=True):
            assert torch.equal(x, y)


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

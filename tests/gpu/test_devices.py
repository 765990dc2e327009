"""Several GPUs in one process: each call runs where its tensors lie, and refuses tensors of two devices."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FORMATS = ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4")


def values(device, shape=(128, 256)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    return x.requires_grad_()


@pytest.mark.parametrize("name", FORMATS)
def test_the_second_gpu_gives_the_bits_of_the_first(name):
    import blockfp.torch as bfp

    assert torch.cuda.current_device() == 0
    first, second = (bfp.quantize(values(device), name) for device in ("cuda:0", "cuda:1"))
    assert second.codes.device == second.scales.device == torch.device("cuda:1")
    assert torch.equal(first.codes.cpu(), second.codes.cpu())
    assert torch.equal(first.scales.cpu(), second.scales.cpu())
    assert torch.equal(first.dequantize().cpu(), second.dequantize().cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_a_layer_trains_on_the_second_gpu(recipe):
    import blockfp.torch as bfp

    results = []
    for device in ("cuda:0", "cuda:1"):
        x, weight = values(device), values(device, (384, 256))
        y = bfp.linear(x, weight, recipe=recipe, key=5)
        y.backward(torch.ones_like(y))
        results.append([part.detach().cpu() for part in (y, x.grad, weight.grad)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_tensors_of_two_gpus_are_refused():
    from blockfp.torch_backend.ops import dequantize_plans

    import blockfp.torch as bfp

    with pytest.raises(ValueError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        bfp.linear(values("cuda:0"), values("cuda:1", (384, 256)), recipe="fp8_current")
    q = bfp.quantize(values("cuda:0"), "fp8_e4m3")
    with pytest.raises(ValueError, match=r"cuda:1"):
        dequantize_plans.dequantize(q.codes, q.scales.to("cuda:1"), None, "fp8_e4m3", torch.float32, 256, [0, 0])
    with pytest.raises(ValueError, match=r"cuda:1"):
        dequantize_plans.quantize(values("cuda:0"), "nvfp4", torch.tensor([7, 9], device="cuda:1"))


def test_a_fresh_thread_makes_no_context_on_the_first_gpu():
    """Autograd runs backwards in threads of its own; half a gigabyte on GPU 0 for each rank would be the price."""
    program = """
import ctypes, threading, torch
import blockfp.torch as bfp
x = torch.randn(128, 256, device="cuda:1", dtype=torch.bfloat16)
thread = threading.Thread(target=lambda: bfp.quantize(x, "mxfp8_e4m3").dequantize())
thread.start(); thread.join(); torch.cuda.synchronize(1)
flags, active = ctypes.c_uint(), ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
print("active", active.value)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["active", "0"], done


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3", "nvfp4"])
def test_jax_on_the_second_gpu(name):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("JAX sees no two GPUs")
    import blockfp.jax as bfp

    x = jax.random.normal(jax.random.key(0), (128, 256), "bfloat16")
    first, second = (jax.jit(bfp.quantize, static_argnums=1)(jax.device_put(x, d), name) for d in jax.devices()[:2])
    assert second.codes.devices() == {jax.devices()[1]}
    assert (jax.device_get(first.codes) == jax.device_get(second.codes)).all()
    assert (jax.device_get(first.scales) == jax.device_get(second.scales)).all()

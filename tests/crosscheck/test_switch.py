"""The switch between kernels and the definition: everything that chooses follows it, in every thread, both ways."""

import threading

import numpy as np
import pytest
from same_bits import assert_same_bits
from samples import sample

import blockfp
from blockfp.check import backends
from blockfp.kernels import cuda_library, native, switch

X = sample("bf16_valued", (40, 64))
OPERATIONS = ("amax", "quantize", "dequantize", "rotate", "adamw", "amax_arrays", "quantize_arrays", "dequantize_arrays")


@pytest.fixture(autouse=True)
def _library():
    if not native.available():
        pytest.skip(native.status())


@pytest.fixture
def calls(monkeypatch):
    """The names of the CPU library's functions that PyTorch and NumPy call from now on."""
    called, library = [], native.library()

    class Counting:
        def __getattr__(self, name):
            if name in OPERATIONS:
                called.append(name)
            return getattr(library, name)

    monkeypatch.setattr(native._cpu, "loaded", Counting())
    return called


def test_it_says_so():
    with switch.definition_only():
        assert not native.available()
        assert not cuda_library.available()
        assert "definition_only() is in force; the definition runs instead" in native.status()
        assert "definition_only() is in force; the definition runs instead" in cuda_library.status()
        with pytest.raises(ImportError, match="definition_only"):
            backends.BACKENDS["kernels"]()
    assert native.available()
    assert "definition_only" not in native.status() + cuda_library.status()


def test_it_holds_in_other_threads_until_the_outermost_block_ends():
    seen = []

    def look():
        thread = threading.Thread(target=lambda: seen.append(native.available()))
        thread.start()
        thread.join()

    with switch.definition_only():
        with pytest.raises(ZeroDivisionError), switch.definition_only():
            _ = 1 / 0
        look()
    look()
    assert seen == [False, True]


def test_numpy(calls):
    kernel = blockfp.quantize(X, "nvfp4")
    values = kernel.dequantize()
    assert calls == ["quantize", "dequantize"]
    with switch.definition_only():
        q = blockfp.quantize(X, "nvfp4")
        assert_same_bits(q.dequantize(), values)
    assert calls == ["quantize", "dequantize"]
    assert_same_bits((q.codes, q.scales, q.tensor_scale), (kernel.codes, kernel.scales, kernel.tensor_scale))


def test_pytorch_and_its_optimizer(calls):
    torch = pytest.importorskip("torch")
    import blockfp.torch as bfp

    def trained():
        calls.clear()
        layer = bfp.Linear(64, 32, recipe="mxfp8")
        layer.load_state_dict({"weight": torch.from_numpy(X[:32]), "bias": torch.zeros(32)})
        layer(torch.from_numpy(X)).sum().backward()
        bfp.AdamW(layer.parameters(), lr=0.1).step()
        return [layer.weight.detach().codes.numpy(), layer.weight.grad.numpy()], set(calls)

    kernels, called = trained()
    assert {"quantize", "dequantize", "adamw"} <= called
    with switch.definition_only():
        definition, called = trained()
        assert called == set()
    assert_same_bits(tuple(definition), tuple(kernels))
    assert {"quantize", "dequantize", "adamw"} <= trained()[1]


def test_jax_and_programs_that_it_has_compiled():
    jax = pytest.importorskip("jax")
    import blockfp.jax as bfp

    if jax.default_backend() != "cpu":
        pytest.skip("another library runs there")

    def both(x):
        q = bfp.quantize(x, "mxfp8_e4m3")
        return q.codes, q.dequantize()

    jitted = jax.jit(both)

    def calls_the_library():
        return "blockfp_cpu" in jitted.lower(X).as_text()

    kernels = jax.tree.map(np.asarray, jitted(X))
    assert calls_the_library()
    with switch.definition_only():
        traces = jitted._cache_size()
        assert not calls_the_library()
        assert_same_bits(jax.tree.map(np.asarray, jitted(X)), kernels)
        assert_same_bits(jax.tree.map(np.asarray, both(X)), kernels)
        with pytest.raises(RuntimeError, match=r"'ffi' can't run here: .*definition_only"):
            bfp.quantize(X, "mxfp8_e4m3", implementation="ffi")
    assert traces == 0
    assert calls_the_library()
    assert_same_bits(jax.tree.map(np.asarray, jitted(X)), kernels)

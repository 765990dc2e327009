"""Everything here needs a CUDA device, and is skipped without one: each module as one test."""

import warnings
from contextlib import contextmanager, suppress

import pytest

torch = pytest.importorskip("torch")


@contextmanager
def _waiting_raises():
    def set_mode(mode):
        with warnings.catch_warnings():
            # Torch says at the first call that the mode may miss some.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(mode)

    torch.cuda.synchronize()
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


@pytest.fixture
def waiting_raises():
    """A context in which whatever makes the host wait for the device raises."""
    return _waiting_raises


@pytest.fixture(autouse=True)
def first_gpu():
    """XLA leaves the GPU that it used last as the thread's own, where there are several."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        torch.cuda.current_blas_handle()
        # Torch warns of a product that is the first thing its thread of backwards does on a GPU.
        torch.ones(1, device="cuda", requires_grad=True).exp().backward()
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
        # Other workers' tests share the GPU.
        torch.cuda.empty_cache()


class WithoutGpu(pytest.Module):
    """A module of tests that can't run: imported, so that a name that has moved shows without a GPU too, and skipped as one."""

    def collect(self):
        with suppress(pytest.skip.Exception):
            assert self.obj
        yield pytest.Function.from_parent(self, name="every_test", callobj=needs_a_gpu)


def needs_a_gpu():
    pytest.skip("needs a CUDA device")


def pytest_pycollect_makemodule(module_path, parent):
    return None if torch.cuda.is_available() else WithoutGpu.from_parent(parent, path=module_path)

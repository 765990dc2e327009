"""Everything here needs a CUDA device and is skipped without one."""

import warnings
from contextlib import contextmanager

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


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

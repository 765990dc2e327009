import pytest

from blockfp.kernels import native


@pytest.fixture(autouse=True)
def _kernels(every_processor):
    """These tests are about the kernel library: without one there is nothing to test."""
    if not native.available():
        pytest.skip(native.status())
    yield
    native.use_instruction_set(native.instruction_sets()[0])
    native.set_threads(0)

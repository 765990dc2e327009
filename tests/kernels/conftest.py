import pytest

from blockfp import native


@pytest.fixture(scope="session", autouse=True)
def _kernels():
    """These tests are about the kernel library: without one there is nothing to test."""
    if not native.available():
        pytest.skip(native.status())


@pytest.fixture(params=["avx512", "avx2", "scalar"])
def instruction_set(request, _kernels):
    """Runs a test once with each instruction set that this processor has."""
    if request.param not in native.instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(before)

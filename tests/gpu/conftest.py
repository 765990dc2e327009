"""Everything here needs a CUDA device and is skipped without one."""

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

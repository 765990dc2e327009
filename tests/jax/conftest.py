"""XLA optimizes little here: these tests compile long and hardly run. Those that are about what it optimizes are marked."""

import pytest


@pytest.fixture(autouse=True)
def _little_optimization(little_optimization):
    pass

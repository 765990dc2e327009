"""What libraries keep for the whole process is each test's own."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _accelerate_knows_nothing():
    """Of processes, precisions and batches that another test has told it of."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
            kept._reset_state()

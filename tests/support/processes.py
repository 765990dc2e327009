"""The environment of Python processes that tests start, and how long these may take."""

import os
from pathlib import Path

_TESTS = Path(__file__).parents[1]
SUPPORT = (_TESTS / "support", _TESTS / "torch" / "support", _TESTS / "jax" / "support")

LIMIT = 600
"""Seconds after which a process, or a rank, counts as hung: on a busy machine all takes ten times as long."""


def environment(**variables):
    """This process's environment, in which helpers of tests can be imported, and each process has one thread for sums."""
    paths = [*map(str, SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | variables

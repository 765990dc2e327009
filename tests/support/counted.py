"""Counts of calls that are the same alone and behind any other tests."""

import gc
import sys
from contextlib import contextmanager


@contextmanager
def profiled(profile):
    """Calls a function on every call that the block makes; garbage collection, with its weak references, is off."""
    gc.disable()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def of_blockfp(frame):
    """Whether a frame runs a file of blockfp. The path doesn't say so: a checkout named blockfp may hold torch in its .venv."""
    return frame.f_globals.get("__name__", "").split(".")[0] == "blockfp" and not frame.f_code.co_filename.startswith("<")


@contextmanager
def alone():
    """Hides other tests' layers with delayed scaling from optimizers, which ask all of them."""
    from unittest import mock
    from weakref import WeakKeyDictionary

    from blockfp.torch_backend.linear import scale_watch

    with mock.patch.object(scale_watch, "_watched", WeakKeyDictionary()):
        yield

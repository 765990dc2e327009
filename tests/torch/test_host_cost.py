"""The host's work for a layer in eager mode: how many functions of the library one call enters. Nothing here is timed."""

import sys
from collections import Counter

import cuda_stand_in
import pytest
import torch
from arrays import values

import blockfp.torch as bfp

NAMES = ("fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4")

# At most so many Python functions of the library, and calls of built-in ones from there: forward, backward.
MOST = {
    "cpu": {
        "fp8_current": ((29, 49), (36, 62)),
        "fp8_block": ((23, 53), (30, 66)),
        "fp8_delayed": ((32, 57), (37, 70)),
        "mxfp8": ((23, 52), (30, 65)),
        "nvfp4": ((27, 56), (191, 124)),
    },
    "cuda": {
        "fp8_current": ((23, 42), (34, 51)),
        "fp8_block": ((23, 41), (34, 52)),
        "fp8_delayed": ((26, 49), (35, 58)),
        "mxfp8": ((32, 51), (52, 73)),
        "nvfp4": ((42, 55), (65, 74)),
    },
}


def entered(call):
    """The Python functions of the library that a call enters, by file and name, and how many built-in ones are called there.

    The call has been made before.
    """
    for _ in range(3):
        call()
    found, builtins = Counter(), 0

    def profile(frame, event, _):
        nonlocal builtins
        code = frame.f_code
        if "torch_backend" in code.co_filename or "/blockfp/" in code.co_filename:
            if event == "call":
                found[code.co_filename.rsplit("/", 1)[-1], code.co_name] += 1
            builtins += event == "c_call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found, builtins


@pytest.fixture(params=["cpu", "cuda"])
def path(request, monkeypatch):
    yield request.param, lambda: request.param == "cuda" and cuda_stand_in.install(monkeypatch)
    cuda_stand_in.forget()


@pytest.mark.parametrize("name", NAMES)
def test_functions_entered_by_a_layer(name, path):
    where, install = path
    layer, x = bfp.Linear(128, 128, recipe=name, dtype=torch.bfloat16), values((128, 128), 0, torch.bfloat16).requires_grad_()
    install()
    y = layer(x)
    gradient = torch.ones_like(y)
    calls = {"forward": lambda: layer(x), "backward": lambda: y.backward(gradient, retain_graph=True)}
    for most, (direction, call) in zip(MOST[where][name], calls.items(), strict=True):
        found, builtins = entered(call)
        assert sum(found.values()) <= most[0], (direction, found)
        assert builtins <= most[1], (direction, builtins)


def test_no_layer_checks_twice():
    """A call that is known goes straight to its plan: nothing is checked, and no format is parsed or hashed."""
    layer, x = bfp.Linear(128, 128, recipe="mxfp8"), values((128, 128), 0)
    names = {name for _, name in entered(lambda: layer(x))[0]}
    assert not names & {"_check_tensors", "_call_of", "plan_of", "check_input", "parse", "__hash__"}

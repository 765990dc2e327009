"""The host's work for a layer in eager mode: how many functions of the library one call enters. Nothing here is timed."""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from arrays import values

import blockfp.torch as bfp

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import standin

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
        "fp8_current": ((24, 42), (40, 51)),
        "fp8_block": ((24, 41), (40, 52)),
        "fp8_delayed": ((27, 49), (41, 58)),
        "mxfp8": ((35, 51), (62, 73)),
        "nvfp4": ((42, 55), (69, 74)),
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", MOST)
def test_functions_entered_by_a_layer(name, where):
    layer, x = bfp.Linear(128, 128, recipe=name, dtype=torch.bfloat16), values((128, 128), 0, torch.bfloat16).requires_grad_()
    with standin.launches() if where == "cuda" else nullcontext():
        y = layer(x)
        gradient = torch.ones_like(y)
        calls = {"forward": lambda: layer(x), "backward": lambda: y.backward(gradient, retain_graph=True)}
        counts = {direction: entered(call) for direction, call in calls.items()}
    for most, (direction, (found, builtins)) in zip(MOST[where][name], counts.items(), strict=True):
        assert sum(found.values()) <= most[0], (direction, found)
        assert builtins <= most[1], (direction, builtins)


def test_no_layer_checks_twice():
    """A call that is known goes straight to its plan: nothing is checked, and no format is parsed or hashed."""
    layer, x = bfp.Linear(128, 128, recipe="mxfp8"), values((128, 128), 0)
    names = {name for _, name in entered(lambda: layer(x))[0]}
    assert not names & {"_check_tensors", "_call_of", "plan_of", "check_input", "parse", "__hash__"}

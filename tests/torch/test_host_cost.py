"""The host's work for a layer in eager mode: how many functions of the library one call enters. Nothing here is timed."""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from arrays import values, with_scales
from counted import alone, of_blockfp, profiled

import blockfp.torch as bfp

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import standin

NAMES = ("fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4")

# At most so many Python functions of the library, and calls of built-in ones from there: forward, backward. Those that plans
# hold ready with their arguments (`allocation.maker`) are not seen; OPERATIONS counts them.
MOST = {
    "cpu": {
        "fp8_current": ((18, 44), (18, 47)),
        "fp8_block": ((15, 47), (15, 50)),
        "fp8_delayed": ((20, 52), (19, 55)),
        "mxfp8": ((15, 46), (15, 49)),
        "nvfp4": ((17, 50), (175, 110)),
    },
    "cuda": {
        "fp8_current": ((10, 28), (10, 25)),
        "fp8_block": ((10, 28), (10, 26)),
        "fp8_delayed": ((14, 31), (13, 28)),
        "mxfp8": ((12, 30), (12, 28)),
        "nvfp4": ((14, 28), (17, 24)),
    },
}

# The operations of torch that a layer calls on the CUDA path, forward and backward: memory for what is made, and nothing else.
# (In the forward one without elements is for gradients of gradients.)
OPERATIONS = {
    "fp8_current": ({"empty_like": 6, "new_empty": 1}, {"empty_like": 9}),
    "fp8_block": ({"empty_like": 7, "new_empty": 1}, {"empty_like": 11}),
    "fp8_delayed": ({"empty_like": 6, "new_empty": 1}, {"empty_like": 9}),
    "mxfp8": ({"empty_like": 8, "new_empty": 1}, {"empty_like": 11}),
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
        if of_blockfp(frame):
            if event == "call":
                found[code.co_filename.rsplit("/", 1)[-1], code.co_name] += 1
            builtins += event == "c_call"

    with profiled(profile):
        call()
    return found, builtins


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", MOST)
def test_functions_entered_by_a_layer(name, where):
    layer, x = bfp.Linear(128, 128, recipe=name, dtype=torch.bfloat16), values((128, 128), 0, torch.bfloat16).requires_grad_()
    with_scales(layer)
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_torch(name):
    layer = bfp.Linear(128, 128, bias=False, recipe=name, dtype=torch.bfloat16)
    x = values((128, 128), 0, torch.bfloat16).requires_grad_()
    with_scales(layer)
    with standin.launches():
        y = layer(x)
        gradient = torch.ones_like(y)
        backward = lambda: torch.autograd.grad(y, (x, layer.weight), gradient, retain_graph=True)  # noqa: E731
        for call, most in zip((lambda: layer(x), backward), OPERATIONS[name], strict=True):
            for _ in range(2):
                call()
            with torch.autograd.profiler.profile() as profile:
                call()
            names = [event.name for event in profile.function_events if not _inside_another(event)]
            assert Counter(one.removeprefix("aten::") for one in names if one.startswith("aten::")) == most


def _inside_another(event):
    parent = event.cpu_parent
    return parent is not None and parent.name.startswith("aten::")


def step_of(name, layers, where):
    model = torch.nn.Sequential(*(bfp.Linear(32, 32, recipe=name) for _ in range(layers)))
    optimizer, x = bfp.AdamW(model.parameters()), values((32, 32), 0)

    with_scales(model)  # kernels that stand in for others find none

    def step():
        model(x).sum().backward()
        optimizer.step()

    with standin.launches() if where == "cuda" else nullcontext():
        return [sum(entered(call)[0].values()) for call in (step, optimizer.step)]


@pytest.mark.parametrize(("where", "most"), [("cpu", (6, 3)), ("cuda", (8, 1))])
def test_delayed_scaling_costs_little_more(where, most):
    """What one layer more adds to a small model's step, and to its optimizer's, in functions entered."""
    each = {}
    for name in ("fp8_current", "fp8_delayed"):
        with alone():
            five = step_of(name, 5, where)
        with alone():
            each[name] = [(several - one) / 4 for several, one in zip(five, step_of(name, 1, where), strict=True)]
    for current, own, more in zip(*each.values(), most, strict=True):
        assert 0 < current <= own <= current + more, each

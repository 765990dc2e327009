"""The host's work in eager mode and on the CUDA path: how many Python functions a call enters. Nothing here is timed."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from counted import alone

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from collections import Counter
from contextlib import nullcontext

import host
import standin
from arrays import values, with_scales
from counted import of_blockfp, profiled
from decoder_layer import decoder_layer

import blockfp.torch as bfp

NEW = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch enters more Python functions of its own before 2.13")

# The most that were needed; torch's own are among them (nn.Linear: 5 and 22). Of inputs of three axes one more.
LAYER = {
    "fp8_current": (16, 46),
    "fp8_delayed": (21, 52),
    "fp8_block": (16, 46),
    "mxfp8": (18, 50),
    "mxfp6": (18, 50),
    "mxfp4": (18, 50),
    "nvfp4": (22, 57),
}
# Forward and backward, the most of any recipe.
MODULES = {"LayerNormMLP": 156, "MultiheadAttention": 151, "GroupedLinear": 247}
QUANTIZE = 30
# NumPy's face and JAX's, eager, on the CPU.
# jnp.matmul's value_and_grad: 1,920, and 2,680 with a bias. These are JAX's own but for some hundreds.
FACES = {
    "numpy quantize": 50,
    "jax quantize": 18,
    "jax linear": 320,
    "jax linear, value_and_grad": 5100,
    "jax linear with bias, value_and_grad": 6000,
}
# Before a gather of codes, and of values that are cast for it, the lookup of the hook included; torchao's cast: 114.
GATHER = {"fp8_current": (25, 94), "fp8_block": (25, 50), "mxfp8": (25, 50), "nvfp4": (25, 100)}
AFTER_GATHER = 5
# A parameter: functions, and calls of C functions; torch's fused AdamW: 3.4 and 9.7.
ADAMW = {"fp8_current": (11, 27), "fp8_block": (9, 23), "mxfp8": (9, 23), "mxfp4": (9, 23), "nvfp4": (11, 29)}


def frames(cases):
    """{(kind, name): frames} of cases, each for one of what it counts."""
    with standin.launches():
        return {(case.kind, case.name): host.frames_of(case.call)[0] / case.count for case in cases}


@NEW
@pytest.mark.parametrize("recipe", LAYER)
def test_a_layers_frames(recipe):
    found = frames(host.layer_cases([recipe], "cpu"))
    assert found["layer forward", recipe] <= LAYER[recipe][0]
    assert found["layer forward + backward", recipe] <= LAYER[recipe][1]
    assert found["layer forward + backward, 3 axes", recipe] <= LAYER[recipe][1] + 1
    assert found["layer forward", "nn.Linear"] > 0  # frames are seen


@NEW
def test_frames_of_modules():
    found = frames([case for case in host.module_cases(["fp8_current", "mxfp8", "nvfp4"], "cpu") if case.name != "torch"])
    assert {kind.removesuffix(" forward + backward") for kind, _ in found} == set(MODULES)
    assert {key: count for key, count in found.items() if count > MODULES[key[0].partition(" ")[0]]} == {}


def test_quantizes_frames():
    found = frames(host.quantize_cases(list(host.RECIPES), "cpu"))
    assert {key: count for key, count in found.items() if not 0 < count <= QUANTIZE} == {}


def test_frames_of_the_other_faces():
    cases = [case for case in host.face_cases(["fp8_current", "fp8_block", "mxfp8", "nvfp4"]) if case.kind in FACES]
    found = {(case.kind, case.name): host.frames_of(case.call)[0] for case in cases}
    assert {kind for kind, _ in found} <= set(FACES)
    assert {key: count for key, count in found.items() if not 0 < count <= FACES[key[0]]} == {}


@pytest.mark.parametrize("recipe", ADAMW)
def test_a_steps_frames_for_each_parameter(recipe):
    with alone(), standin.launches():
        (case,) = [case for case in host.adamw_cases([recipe], "cpu") if case.name == recipe]
        found, calls = host.frames_of(case.call)
    assert 0 < found / case.count < ADAMW[recipe][0] + 0.5
    assert calls / case.count <= ADAMW[recipe][1]


@pytest.fixture
def no_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@NEW
@pytest.mark.parametrize("recipe", GATHER)
def test_frames_of_fsdps_hooks(recipe, no_group):
    found = frames([host.Case(*case) for case in host.host_fsdp.cases([recipe], host.FEATURES, "cpu", peers=False)])
    assert found["FSDP2 gather: before", recipe] <= GATHER[recipe][0]
    assert found["FSDP2 cast and gather: before", recipe] <= GATHER[recipe][1]
    for kind in ("gather", "cast and gather"):
        assert found[f"FSDP2 {kind}: after", recipe] <= AFTER_GATHER


def test_the_stand_in_is_gone_afterwards():
    x = torch.ones(2)
    with standin.launches():
        assert x.is_cuda
    assert x.is_cpu
    assert not x.is_cuda
    assert torch.mm is not standin._mm


sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


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
        "fp8_current": ((10, 29), (10, 25)),
        "fp8_block": ((10, 29), (10, 26)),
        "fp8_delayed": ((12, 32), (11, 28)),
        "mxfp8": ((12, 31), (12, 28)),
        "nvfp4": ((14, 28), (14, 25)),
    },
}

# The same of a decoder layer as Llama has it, of seven such layers: forward, backward.
DECODER = {
    "fp8_current": ((101, 244), (80, 218)),
    "fp8_delayed": ((122, 308), (87, 239)),
    "fp8_block": ((101, 243), (79, 223)),
    "mxfp8": ((115, 257), (89, 233)),
    "nvfp4": ((129, 229), (106, 202)),
}

# The operations of torch that a layer calls on the CUDA path, forward and backward: memory for what is made, and nothing else.
# (In the forward one without elements is for gradients of gradients.)
OPERATIONS = {
    "fp8_current": ({"empty_like": 6, "new_empty": 1}, {"empty_like": 9}),
    "fp8_block": ({"empty_like": 7, "new_empty": 1}, {"empty_like": 10}),
    "fp8_delayed": ({"empty_like": 6, "new_empty": 1}, {"empty_like": 9}),
    "mxfp8": ({"empty_like": 8, "new_empty": 1}, {"empty_like": 11}),
}


def entered(call):
    """The library's Python functions that a call enters after a first one, by file and name, and the count of built-in ones."""
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


def in_both_directions(layer, x):
    """What `entered` finds in a layer's forward, and in the backward of a new forward: a second backward draws no keys."""
    # A backward of CUDA tensors runs in a thread of its own, which the profile wouldn't see.
    with torch.autograd.set_multithreading_enabled(False):
        gradient = torch.ones_like(layer(x))
        forward, builtins = entered(lambda: layer(x))
        both, of_both = entered(lambda: layer(x).backward(gradient))
    return (forward, builtins), (both - forward, of_both - builtins)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", MOST)
def test_functions_entered_by_a_layer(name, where):
    layer, x = bfp.Linear(128, 128, recipe=name, dtype=torch.bfloat16), values((128, 128), 0, torch.bfloat16).requires_grad_()
    with_scales(layer)
    with standin.launches() if where == "cuda" else nullcontext():
        found = in_both_directions(layer, x)
    for most, (entered, builtins) in zip(MOST[where][name], found, strict=True):
        assert 0 < sum(entered.values()) <= most[0], entered
        assert builtins <= most[1], builtins


@pytest.mark.parametrize("name", DECODER)
def test_functions_entered_by_a_decoder_layer(name):
    layer, x = with_scales(decoder_layer(name)), values((1, 64, 128), 0, torch.bfloat16).requires_grad_()
    with standin.launches():
        found = in_both_directions(layer, x)
    for most, (entered, builtins) in zip(DECODER[name], found, strict=True):
        assert 0 < sum(entered.values()) <= most[0], entered
        assert builtins <= most[1], builtins


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


# The library's launches in a decoder layer's forward: query, key and value have one cast, gate and up another.
LAUNCHES = {
    "fp8_current": {"quantize": 3, "quantize_gated": 1, "product": 7},
    "fp8_delayed": {"quantize": 3, "quantize_gated": 1, "product": 7, "record_amax": 7},
    "fp8_block": {"quantize": 3, "quantize_gated": 1, "product": 7},
    "mxfp8": {"quantize_aligned": 3, "quantize_gated_aligned": 1, "product": 7, "align": 7},
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_layers_of_one_input_launch_one_cast(name):
    layer, x = with_scales(decoder_layer(name)), values((1, 64, 128), 0, torch.bfloat16).requires_grad_()
    launched = Counter()

    def counting(name, launch):
        return lambda *arguments: (launched.update([name]), launch(*arguments))[1]

    with standin.launches({name: counting(name, launch) for name, launch in standin._idle().items()}):
        for _ in range(3):
            launched.clear()
            layer(x)
    assert launched == LAUNCHES[name]


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

"""How many Python functions a call enters on the CUDA path, counted on this CPU with a stand-in for the launches."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from counted import alone

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import host
import standin

NEW = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch enters more Python functions of its own before 2.13")

# The most that were needed; torch's own are among them (nn.Linear: 5 and 22). Of inputs of three axes one more.
LAYER = {
    "fp8_current": (16, 46),
    "fp8_delayed": (23, 56),
    "fp8_block": (16, 46),
    "mxfp8": (18, 50),
    "mxfp6": (18, 50),
    "mxfp4": (18, 50),
    "nvfp4": (22, 59),
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

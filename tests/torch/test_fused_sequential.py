"""`torch.nn.Sequential` after `convert`: the bits of its modules one after the other."""

import copy
import pickle
from unittest import mock

import pytest
from same_tensors import assert_equal

torch = pytest.importorskip("torch")

from blockfp.torch_backend.conversion import fusing  # noqa: E402
from blockfp.torch_backend.conversion.fusing import FusedSequential  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import blockfp.torch as bfp  # noqa: E402


def model(recipe="mxfp8", activation=nn.GELU, fused=True, **options):
    torch.manual_seed(0)
    made = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 96), activation(), nn.Linear(96, 64), nn.Dropout(0.0))
    made = made.to(torch.bfloat16)
    if fused:
        return bfp.convert(made, recipe, **options)
    with mock.patch.object(fusing, "sequentials", return_value=()):
        return bfp.convert(made, recipe, **options)


def results(made, run=None):
    torch.manual_seed(1)
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16).requires_grad_()
    y = (run or made)(x)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad for p in made.parameters())]


class Operations(TorchDispatchMode):
    """Names of torch's own operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.ReLU, lambda: nn.GELU("tanh")])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "fp8_block"])
def test_bits(recipe, activation):
    ours, theirs = model(recipe, activation), model(recipe, activation, fused=False)
    assert (type(ours) is FusedSequential) == (activation is not nn.ReLU)
    assert type(theirs) is nn.Sequential
    assert_equal(results(ours), results(theirs))


def test_pairs_are_taken_at_once():
    """The norm runs; the activation doesn't."""
    made = model()
    with Operations() as seen:
        made(torch.randn(32, 64, dtype=torch.bfloat16))
    assert any("rsqrt" in name for name in seen.names)
    assert not any("gelu" in name for name in seen.names)


def test_who_looks_sees_each_output():
    theirs = results(model(fused=False))
    for place in range(4):
        made, seen = model(), []
        made[place].register_forward_hook(lambda module, inputs, y, seen=seen: seen.append(y))
        assert_equal(results(made), theirs)
        assert len(seen) == 1


def test_it_is_a_sequential():
    made = model()
    wanted = results(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        other.zero_grad()
        assert type(other) is FusedSequential
        assert_equal(results(other), wanted)
    assert list(made.state_dict()) == list(model(fused=False).state_dict())
    assert [type(module) for module in made[1:3]] == [type(made[1]), nn.GELU]
    assert type(model(filter_fn=lambda path, layer: path == "3")) is FusedSequential
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    assert type(bfp.convert(plain, "mxfp8")) is nn.Sequential
    own = type("Own", (nn.Sequential,), {})
    assert type(bfp.convert(own(nn.RMSNorm(64), nn.Linear(64, 64)), "mxfp8")) is own
    assert type(bfp.convert(nn.Sequential(nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)), "mxfp8")) is nn.Sequential


def test_compiled_whole():
    made = model("fp8_block")
    theirs = results(model("fp8_block", fused=False))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert_equal(results(made, compiled), theirs)

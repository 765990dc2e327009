"""Muon against float64 and torch's own: scalings, momentum, stacks, other parameters, state, and what is refused."""

import pytest
import torch
from adamw_parameters import assert_quantizes
from arrays import values
from torch import nn

import blockfp.torch as bfp
from blockfp.definition import muon
from blockfp.kernels import switch

SHAPES = ((24, 64), (64, 24), (40, 40), (1, 50))


def iterated(x, steps=5):
    """Jordan's iteration in float64."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / max(wide.norm().item(), 1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def reference(weight, gradients, lr, decay=0.1, momentum=0.95, nesterov=True, moonlight=False):
    """The steps of one matrix in float64, as torch.optim.Muon's documentation has them."""
    weight, kept = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    rows, columns = weight.shape
    ratio = 0.2 * max(rows, columns) ** 0.5 if moonlight else max(1, rows / columns) ** 0.5
    for gradient in gradients:
        gradient = gradient.double()
        kept = momentum * kept + (1 - momentum) * gradient
        direction = (1 - momentum) * gradient + momentum * kept if nesterov else kept
        weight = weight - lr * decay * weight - lr * ratio * iterated(direction)
    return weight


def gradients_of(shape, steps=4):
    return [values(shape, 100 + i) for i in range(steps)]


def stepped(param, gradients, **options):
    optimizer = bfp.Muon([param], **options)
    for gradient in gradients:
        param.grad = gradient.to(param.dtype)
        optimizer.step()
    return optimizer


def assert_close(got, expected, before, rtol):
    """The distance from what is expected, beside the way travelled."""
    way = (expected.double() - before.double()).norm()
    assert way > 0
    assert (got.double() - expected.double()).norm() <= rtol * way


@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"momentum": 0.5, "weight_decay": 0.3}], ids=str)
@pytest.mark.parametrize("scaling", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_published_formula(shape, scaling, options):
    before, gradients = values(shape, 1), gradients_of(shape)
    param = nn.Parameter(before.clone())
    stepped(param, gradients, lr=0.1, adjust_lr_fn=scaling, ns_dtype="float32", **options)
    named = {"momentum": options.get("momentum", 0.95), "decay": options.get("weight_decay", 0.1)}
    named |= {"nesterov": options.get("nesterov", True), "moonlight": scaling == "match_rms_adamw"}
    assert_close(param.detach(), reference(before, gradients, 0.1, **named), before, 1e-4)


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torchs_to_rounding(shape, options):
    """Both iterate in bfloat16, whose rounding is 0.4%."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    ours, theirs = (nn.Parameter(values(shape, 1)) for _ in range(2))
    before, gradients = ours.detach().clone(), gradients_of(shape)
    optimizer = stepped(ours, gradients, lr=0.1, **options)
    other = torch.optim.Muon([theirs], lr=0.1, **options)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        other.step()
    assert_close(ours.detach(), theirs.detach(), before, 0.02)
    torch.testing.assert_close(
        optimizer.state[ours]["momentum_buffer"], other.state[theirs]["momentum_buffer"], rtol=1e-5, atol=1e-6
    )


def test_each_matrix_of_a_stack_is_stepped_alone():
    stack, gradients = values((3, 16, 40), 2), gradients_of((3, 16, 40))
    together = nn.Parameter(stack.clone())
    stepped(together, gradients, lr=0.1)
    for i, matrix in enumerate(stack):
        alone = nn.Parameter(matrix.clone())
        stepped(alone, [gradient[i] for gradient in gradients], lr=0.1)
        assert torch.equal(together[i], alone)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3_32x32", "fp8_e4m3", "nvfp4_16x16"])
def test_codes_are_those_of_the_masters(name, moments):
    before = values((48, 160), 3)
    q = nn.Parameter(bfp.quantize(before, name))
    gradients = gradients_of(before.shape)
    start = q.dequantize(torch.float32).detach()
    optimizer = stepped(q, gradients, lr=0.1, moments=moments, ns_dtype="float32")
    state = optimizer.state[q]
    assert_quantizes(q, state["master"])
    assert {name: x.dtype for name, x in state.items() if name.startswith("momentum")} == {
        "float32": {"momentum_buffer": torch.float32},
        "bfloat16": {"momentum_buffer": torch.bfloat16},
        "fp8": {"momentum_buffer": torch.uint8, "momentum_buffer_scales": torch.float32},
    }[moments]
    expected = reference(start, gradients, 0.1)
    assert_close(state["master"], expected, start, {"float32": 1e-4, "bfloat16": 0.01, "fp8": 0.1}[moments])


@pytest.mark.parametrize("options", [{}, {"moments": "fp8"}, {"moments": "bfloat16", "master": None}], ids=str)
def test_kernels_and_definition_agree(options):
    """Also where only the device knows the constants."""
    found = []
    for capturable, switched in ((False, False), (True, False), (False, True)):
        params = [nn.Parameter(bfp.quantize(values((32, 128), 4), "mxfp8_e4m3_32x32")), nn.Parameter(values((8, 16), 5))]
        params += [nn.Parameter(values((8, 16), 6, torch.bfloat16)), nn.Parameter(values((9,), 7))]
        optimizer = bfp.Muon(params, lr=0.1, key=3, capturable=capturable, **options)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = values(p.shape, 10 * step + i).to(p.dtype)
            if switched:
                with switch.definition_only():
                    optimizer.step()
            else:
                optimizer.step()
        state = [x for p in params for name, x in optimizer.state[p].items() if name != "step"]
        found.append([params[0].dequantize().detach(), *(p.detach() for p in params[1:]), *state])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_other_parameters_take_adamws_steps():
    shapes = [(7,), (), (4, 3, 2, 2), (6, 8)]
    ours, theirs = ([nn.Parameter(values(shape, 20 + i)) for i, shape in enumerate(shapes)] for _ in range(2))
    groups = [{"params": ours[:3]}, {"params": ours[3:], "use_muon": False}]
    settings = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.95)}
    optimizer, other = bfp.Muon(groups, adamw_eps=1e-6, **settings), bfp.AdamW(theirs, eps=1e-6, **settings)
    for step in range(3):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = two.grad = values(one.shape, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    assert set(optimizer.state[ours[3]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_learning_rate_0_changes_no_code():
    q = nn.Parameter(bfp.quantize(values((32, 64), 8), "mxfp4_e2m1"))
    before = q.codes.clone()
    optimizer = stepped(q, gradients_of(q.shape), lr=0.0)
    assert torch.equal(q.codes, before)
    assert optimizer.state[q]["momentum_buffer"].norm() > 0


@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_with_inf_is_skipped_and_scaled_gradients_are_unscaled(capturable):
    plain, scaled = (nn.Parameter(values((16, 24), 9)) for _ in range(2))
    gradients = gradients_of(plain.shape, 2)
    stepped(plain, gradients, lr=0.1)
    optimizer = bfp.Muon([scaled], lr=0.1, capturable=capturable)
    scale = torch.tensor(1024.0)
    for gradient, found in ((gradients[0], 0.0), (torch.full_like(gradients[0], torch.inf), 1.0), (gradients[1], 0.0)):
        scaled.grad = gradient * scale
        optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(found)
        optimizer.step()
    assert torch.equal(plain, scaled)


def test_a_state_of_torchs_muon_is_taken():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    theirs, ours = (nn.Parameter(values((16, 24), 9)) for _ in range(2))
    other = torch.optim.Muon([theirs], lr=0.1)
    theirs.grad = values((16, 24), 10)
    other.step()
    optimizer = bfp.Muon([ours], moments="bfloat16")
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    torch.testing.assert_close(
        optimizer.state[ours]["momentum_buffer"].float(), other.state[theirs]["momentum_buffer"], rtol=0.01, atol=1e-4
    )
    ours.grad = values((16, 24), 11)
    optimizer.step()


def test_saved_and_loaded_it_goes_on_bit_for_bit():
    runs = []
    for interrupted in (False, True):
        q = nn.Parameter(bfp.quantize(values((32, 160), 3), "mxfp8_e4m3_32x32"))
        optimizer = bfp.Muon([q], lr=0.1, moments="fp8", key=5)
        for i, gradient in enumerate(gradients_of(q.shape)):
            if interrupted and i == 2:
                state = optimizer.state_dict()
                assert state["state"][0]["momentum_buffer"].dtype == torch.float32
                optimizer = bfp.Muon([q], moments="fp8")
                optimizer.load_state_dict(state)
            q.grad = gradient
            optimizer.step()
        runs.append((q, optimizer.state[q]))
    assert torch.equal(runs[0][0].codes, runs[1][0].codes)
    assert all(torch.equal(x, runs[1][1][name]) for name, x in runs[0][1].items())


def test_work_is_taken_in_batches(monkeypatch):
    from blockfp.torch_backend.optimizer import muon_step

    found = []
    for limit in (1 << 26, 1000):
        monkeypatch.setattr(muon_step, "_TOGETHER", limit)
        params = [nn.Parameter(values((20, 30), i)) for i in range(5)]
        optimizer = bfp.Muon(params, lr=0.1)
        for p in params:
            p.grad = values(p.shape, 50)
        optimizer.step()
        found.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_matrix_that_is_not_finite_becomes_nan_alone():
    stack = nn.Parameter(values((2, 8, 16), 1))
    gradient = values((2, 8, 16), 2)
    gradient[0, 3, 3] = torch.inf
    stepped(stack, [gradient], lr=0.1)
    assert stack[0].isnan().all()
    assert stack[1].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum must be a number of at least 0 and below 1, got 1.0"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        ({"ns_steps": 0}, "ns_steps must be an integer of 1 to 99, got 0"),
        ({"eps": 0.0}, "eps must be above 0, got 0.0"),
        ({"ns_dtype": "float16"}, "ns_dtype must be 'bfloat16' or 'float32', got 'float16'"),
        ({"adjust_lr_fn": "moonlight"}, "adjust_lr_fn must be None or one of 'original', 'match_rms_adamw', got 'moonlight'"),
        ({"adamw_eps": -1.0}, "eps must be 0 or more"),
        ({"maximize": True}, "maximize=True: not supported by Muon"),
    ],
)
def test_settings_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        bfp.Muon([nn.Parameter(torch.ones(2, 2))], **options)


def test_numpy_and_torch_iterate_alike():
    x = values((12, 30), 3)
    for settings in (muon.Settings(ns_dtype="float32"), muon.Settings(ns_dtype="float32", ns_steps=2)):
        expected = iterated(x.double(), steps=settings.ns_steps)
        for got in (muon.orthogonalize(x, settings), torch.from_numpy(muon.orthogonalize(x.numpy(), settings))):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)

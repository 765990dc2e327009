"""The optimizers on parameters of one rank: against torch's own, against quantizing the masters, and what changes nothing."""

import copy
from contextlib import nullcontext

import pytest
import torch
import two_pass_kernels
from adamw_parameters import assert_quantizes, give_gradients, mixed, values_of, weight
from arrays import tensors_of, values
from counted import alone, of_blockfp, profiled
from held_formats import FORMATS
from same_tensors import assert_equal
from torch import nn

import blockfp.torch as bfp
from blockfp.kernels import native, switch

# Of the largest weight: torch rounds a few operations in another order.
TOLERANCE = 4e-7


@pytest.mark.parametrize(("ours", "torchs"), [(bfp.AdamW, torch.optim.AdamW), (bfp.Adam, torch.optim.Adam)])
def test_as_torchs_own(ours, torchs, route):
    params = mixed()
    plain = [
        nn.Parameter(p.detach().dequantize(torch.float32) if hasattr(p, "codes") else p.detach().float().clone())
        for p in params
    ]
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer, reference = ours(params, **options), torchs(plain, **options)
    for step in range(10):
        give_gradients(params, step)
        for p, q in zip(params, plain, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, q in zip(params, plain, strict=True):
        got = values_of(optimizer, p)
        torch.testing.assert_close(got, q.detach(), rtol=0, atol=10 * TOLERANCE * q.detach().abs().max().item())
        state, expected = optimizer.state[p], reference.state[q]
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"], expected["exp_avg_sq"], rtol=1e-5, atol=1e-7)
        if hasattr(p, "codes"):
            assert_quantizes(p, got)
        elif p.dtype != torch.float32:
            assert torch.equal(p.detach(), got.to(p.dtype))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_codes_are_those_of_the_master(format):
    p = weight((70, 300), format, dtype=torch.bfloat16)
    optimizer = bfp.AdamW([p], lr=0.1)
    for step in range(2):
        give_gradients([p], step)
        optimizer.step()
    assert_quantizes(p, optimizer.state[p]["master"])


def test_both_routes_give_the_same_bits():
    if not native.available():
        pytest.skip(native.status())
    results = []
    for which in (nullcontext, switch.definition_only):
        for options in ({}, {"moments": "bfloat16"}, {"moments": "fp8", "weight_decay": 0.1}):
            params = mixed()
            optimizer = bfp.AdamW(params, lr=1e-2, key=5, **options)
            for step in range(3):
                give_gradients(params, step)
                with which():
                    optimizer.step()
            results.append([x.clone() for p in params for x in optimizer.state[p].values()])
    for a, b in zip(results[:3], results[3:], strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("master", ["float32", None])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_without_learning_rate_leaves_weights_as_they_are(master, capturable, route):
    params = [p for p in mixed() if p.dtype != torch.float16]
    before = [copy.deepcopy(p) for p in params]
    optimizer = bfp.AdamW(params, lr=0.0, master=master, capturable=capturable)
    for p in params:  # as torch's distributed checkpoints do to make an optimizer's state
        p.grad = torch.zeros(p.shape, dtype=p.dtype)
    optimizer.step(closure=None)
    give_gradients(params, 1)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert_equal(p, old)


def test_capturable_takes_the_same_steps():
    results = []
    for capturable in (False, True):
        params = mixed()
        lr = torch.tensor(1e-2) if capturable else 1e-2
        optimizer = bfp.AdamW(
            [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.0}], lr=lr, capturable=capturable
        )
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        results.append([values_of(optimizer, p) for p in params])
        assert optimizer.state[params[0]]["step"].item() == 3
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("capturable", [False, True])
def test_grad_scaler(capturable, route):
    """Gradients that are not finite change nothing; finite ones are unscaled first."""
    params, plain = ([p for p in mixed() if p.dtype != torch.float16] for _ in range(2))
    optimizer, reference = bfp.AdamW(params, lr=1e-2, capturable=capturable), bfp.AdamW(plain, lr=1e-2, capturable=capturable)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # makes the scale
    for step in range(3):
        give_gradients(plain, step)
        for p, q in zip(params, plain, strict=True):
            p.grad = q.grad * 1024
        if step == 1:
            params[2].grad[3, 4] = torch.inf
        else:
            reference.step()
        before = [x.clone() for p in params for x in optimizer.state[p].values()]
        scaler.step(optimizer)
        scaler.update(1024.0)
        if step == 1:
            assert_equal(before, (x for p in params for x in optimizer.state[p].values()))
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(values_of(optimizer, p), values_of(reference, q))
        assert optimizer.state[p]["step"].item() == 2


def test_gradients_of_any_kind():
    p = nn.Parameter(values((64, 48), 0).t())  # not contiguous
    q, none = weight((48, 64), "mxfp8_e4m3_32x32"), weight((32, 32), "fp8_e4m3")
    codes = none.codes.clone()
    optimizer = bfp.AdamW([p, q, none], lr=1e-2)
    reference = nn.Parameter(p.detach().clone())
    torchs = torch.optim.AdamW([reference], lr=1e-2)
    for step in range(2):
        p.grad = values((48, 64), step)
        q.grad = values((64, 48), step).t()
        reference.grad = p.grad.clone()
        optimizer.step()
        torchs.step()
    torch.testing.assert_close(p, reference, rtol=0, atol=4 * TOLERANCE)
    assert_quantizes(q, optimizer.state[q]["master"])
    assert none not in optimizer.state
    assert torch.equal(none.codes, codes)
    sparse = nn.Embedding(4, 8, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="dense"):
        bfp.AdamW(sparse.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_travel_quantized(dtype):
    plain = nn.Parameter(values((40, 64), 0, dtype))
    p = nn.Parameter(bfp.CastWeight.from_values(plain.detach().clone(), "mxfp8_e4m3_32x32"))
    optimizers = [bfp.AdamW([q], lr=1e-2) for q in (p, plain)]
    for step in range(2):
        for q, optimizer in zip((p, plain), optimizers, strict=True):
            give_gradients([q], step)
            optimizer.step()
    assert torch.equal(p.values, plain.detach())
    assert torch.equal(p.detach().quantized().codes, bfp.quantize(plain.detach(), "mxfp8_e4m3_32x32").codes)


def test_closures_schedulers_and_groups():
    p, q = weight((32, 32), "mxfp8_e4m3_32x32"), nn.Parameter(torch.ones(3))
    optimizer = bfp.AdamW([{"params": [p], "lr": 1.0}, {"params": [q], "weight_decay": 0.5}], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    give_gradients([p, q], 0)
    assert optimizer.step(lambda: 42) == 42
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.1), pytest.approx(0.05)]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "moments": "bfloat16"})
    give_gradients([p, q, optimizer.param_groups[2]["params"][0]], 1)
    optimizer.step()
    (late,) = optimizer.param_groups[2]["params"]
    assert optimizer.state[late]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.state[late]["step"].item() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": "x"}, "lr must be 0 or more, got 'x'"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"master": "bfloat16"}, "master must be 'float32' or None"),
        ({"moments": "fp4"}, "moments must be one of"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"key": -1}, "key must be"),
    ],
)
def test_settings_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        bfp.AdamW([nn.Parameter(torch.ones(2))], **options)
    if "key" not in options:
        with pytest.raises(ValueError, match=message):
            bfp.AdamW([{"params": [nn.Parameter(torch.ones(2))], **options}])


def test_a_dtype_that_is_not_updated():
    half, double = nn.Parameter(torch.ones(2, dtype=torch.float16)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"parameter 1 of this group, of shape \(3,\), is torch\.float64: .* torch\.bfloat16"):
        bfp.AdamW([half, double])
    optimizer = bfp.AdamW([("half", half)])
    with pytest.raises(TypeError, match="parameter double of this group"):
        optimizer.add_param_group({"params": [("double", double)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("double", double.requires_grad_(False))]})


def test_it_trains():
    """Least squares: with masters, moments in FP8 and weights in MXFP8, the loss falls as with torch's AdamW."""
    x, target = values((256, 64), 1), values((32, 64), 2)
    y, losses = x @ target.t(), {}
    for kind in ("torch", "float32", "fp8"):
        start = bfp.quantize(values((32, 64), 3), "mxfp8_e4m3_32x32")
        p = nn.Parameter(start.dequantize() if kind == "torch" else start)
        optimizer = torch.optim.AdamW([p], lr=3e-2) if kind == "torch" else bfp.AdamW([p], lr=3e-2, moments=kind)
        for _ in range(200):
            w = p if kind == "torch" else optimizer.state[p].get("master", p.detach().dequantize())
            w = w.detach().requires_grad_()
            loss = (x @ w.t() - y).square().mean()
            loss.backward()
            p.grad = w.grad
            optimizer.step()
        losses[kind] = loss.item()
    assert losses["float32"] == pytest.approx(losses["torch"], rel=0.01)
    assert losses["fp8"] < 0.05 * (x @ (target - values((32, 64), 3)).t()).square().mean().item()


def calls_of_a_step(params):
    """Python calls in blockfp's own code."""
    optimizer = bfp.AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    calls = 0

    def profile(frame, event, _):
        nonlocal calls
        calls += event == "call" and of_blockfp(frame)

    with profiled(profile):
        optimizer.step()
    return calls


@pytest.mark.parametrize("make", [lambda: weight((64, 64), "mxfp8_e4m3_32x32"), lambda: nn.Parameter(values((64, 64), 0))])
def test_a_step_calls_no_more_functions_than_a_parameter_has_tensors(make):
    if not native.available():
        pytest.skip(native.status())
    with alone():
        one, many = (calls_of_a_step([make() for _ in range(count)]) for count in (1, 11))
    assert many - one <= 10 * 8
    assert one <= 52


@pytest.mark.parametrize("of_a_gpu", [False, True])
def test_whatever_changes_between_steps_is_seen(route, of_a_gpu, monkeypatch):
    """Memory, dtypes, formats and states: a step goes by what is there, not by what was there before."""
    if of_a_gpu and native.available():
        two_pass_kernels.install(monkeypatch)
    params = [
        weight((64, 96), "mxfp8_e4m3_32x32"),
        nn.Parameter(values((64, 96), 1)),
        nn.Parameter(values((9, 33), 2).bfloat16()),
    ]
    reference = copy.deepcopy(params)
    optimizer, other = bfp.AdamW(params), bfp.AdamW(reference)
    for step in range(4):
        give_gradients(params, step)
        give_gradients(reference, step)
        optimizer.step()
        other.step()
        assert len(optimizer._tables) <= 1
        if step == 0:  # other memory
            for p in params:
                p.data = p.detach().clone()
        if step == 1:  # other states, as tools have them that move states between devices
            for state in optimizer.state.values():
                for name in state:
                    state[name] = state[name].clone()
        if step == 2:  # other moments
            for group in (*optimizer.param_groups, *other.param_groups):
                group["moments"] = "bfloat16"
            optimizer.load_state_dict(optimizer.state_dict())
            other.load_state_dict(other.state_dict())
            assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16
    for p, q in zip(params, reference, strict=True):
        assert torch.equal(values_of(optimizer, p), values_of(other, q))
    assert_equal(params[0], reference[0])


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("exp_avg", lambda x: x[:4], ValueError, "exp_avg of parameter 1.*hold 320 elements"),
        ("exp_avg_sq", lambda x: x.t().contiguous().t(), ValueError, "exp_avg_sq of parameter 1.*contiguous"),
        ("exp_avg_sq", lambda x: x.bfloat16(), TypeError, "exp_avg_sq of parameter 1.*float32"),
        ("exp_avg", lambda x: x.half(), TypeError, "moments must be of"),
        ("master", lambda x: x.to("meta"), ValueError, "master of parameter 1.*on cpu"),
    ],
)
@pytest.mark.parametrize("of_a_gpu", [False, True])
def test_arrays_that_do_not_fit(name, change, error, message, of_a_gpu, monkeypatch):
    if not native.available():
        pytest.skip(native.status())
    if of_a_gpu:
        two_pass_kernels.install(monkeypatch)
    params = [weight((8, 40), "mxfp8_e4m3") for _ in range(2)]
    optimizer = bfp.AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    state = optimizer.state[params[1]]
    state[name] = change(state[name])
    before = [x.clone() for x in tensors_of(params[0])]
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_equal(tensors_of(params[0]), before)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8", "nvfp4"])
def test_a_step_that_is_compiled_runs_as_it_is(recipe):
    """As torch's tutorial compiles an optimizer: the step is a few launches already, and stays outside of the graph."""
    torch._dynamo.reset()

    def trained(compiled):
        torch.manual_seed(0)
        model = bfp.convert(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)).bfloat16(), recipe)
        optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        losses = []
        for seed in range(3):
            loss = model(values((16, 64), seed).bfloat16()).float().square().mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, [part for name, param in model.named_parameters() if "weight" in name for part in tensors_of(param)]

    for ours, eager in zip(*map(trained, (True, False)), strict=True):
        assert_equal(ours, eager)

"""OsciReset in AdamW: against NumPy's step and quantization, in every family, sharded, saved and resumed."""

import numpy as np
import pytest
import threaded
import torch
from adamw_parameters import FAMILIES
from arrays import values
from blockfp.torch_backend.weights.requantize import requantize_
from same_tensors import assert_equal
from small_model import Side, device_mesh, quantized, shapes_for, shard, weights_for
from torch import nn
from torch.distributed.tensor import distribute_tensor

import blockfp
import blockfp.torch as bfp
from blockfp.definition import adamw
from blockfp.experimental.torch import OsciReset, osci_reset
from blockfp.formats import Format
from blockfp.kernels import switch

SETTINGS = OsciReset(period=5, window=3, threshold=2.0, start=1)
STEPS = 9
"""One window of the steps 2 to 4, and two steps of the second, 7 to 9."""


def gradient(shape, step):
    """Back and forth: masters come to lie at edges between codes."""
    return values(shape, step % 2) * (-1) ** step


def by_numpy(master, format, steps, lr):
    """Masters after each step, how many were reset, and the paths, from NumPy's functions and loops of plain Python."""
    master, first, second = master.astype(np.float32), np.float32(0), np.float32(0)
    quantized, paths, masters, resets = blockfp.quantize(master, format).dequantize(), None, [], 0
    for n in range(1, steps + 1):
        before = master, quantized
        g = gradient(master.shape, n).numpy()
        c = adamw.coefficients(n, lr, (0.9, 0.999), 1e-8, 1e-2)
        master, first, second = adamw.update(master, first, second, g, c)
        quantized = blockfp.quantize(master, format).dequantize()
        place = (n - 2) % 5 + 1 if n > 1 else 0
        if 1 <= place <= 3:
            moved = [np.abs(new - old) for new, old in zip((master, quantized), before, strict=True)]
            paths = moved if place == 1 else [path + more for path, more in zip(paths, moved, strict=True)]
        if place == 3:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(paths[0] > 0, paths[1] / paths[0], 0)
            resets += int((ratio >= SETTINGS.threshold).sum())
            master = np.where(ratio >= SETTINGS.threshold, quantized, master)
        masters.append(master)
    return masters, resets, paths


@pytest.mark.parametrize("route", ["kernels", "definition"])
@pytest.mark.parametrize("format", FAMILIES)
def test_it_is_the_definition(format, route, monkeypatch):
    start = values((40, 160), 0)
    expected, resets, paths = by_numpy(start.numpy(), format, STEPS, 0.02)
    assert 0 < resets < start.numel() / 2
    q = nn.Parameter(bfp.quantize(start, format))
    q.initial = start.clone()
    vector = nn.Parameter(torch.zeros(7))
    optimizer = osci_reset(bfp.AdamW([q, vector], lr=0.02), SETTINGS)
    with switch.definition_only() if route == "definition" else monkeypatch.context():
        for n, want in enumerate(expected, 1):
            q.grad, vector.grad = gradient(q.shape, n), torch.ones(7)
            optimizer.step()
            torch.testing.assert_close(optimizer.state[q]["master"], torch.from_numpy(want), rtol=0, atol=0)
    for name, path in zip(("master_path", "quantized_path"), paths, strict=True):
        torch.testing.assert_close(optimizer.state[q][name], torch.from_numpy(path), rtol=0, atol=0)
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_reset_master_is_the_centre_of_its_code_and_codes_stay():
    start = values((64, 64), 3)
    q, plain = (nn.Parameter(bfp.quantize(start, "mxfp4_e2m1_32x32")) for _ in range(2))
    q.initial = plain.initial = start
    optimizer = osci_reset(bfp.AdamW([q], lr=0.02), OsciReset(4, 4, 2.0))
    other = bfp.AdamW([plain], lr=0.02)
    for n in range(1, 5):
        for param, one in ((q, optimizer), (plain, other)):
            param.grad = gradient(param.shape, n)
            one.step()
    assert_equal(q, plain)
    reset = optimizer.state[q]["master"] != other.state[plain]["master"]
    assert reset.any()
    assert torch.equal(optimizer.state[q]["master"][reset], q.dequantize(torch.float32)[reset])
    state = optimizer.state[q]
    assert (state["quantized_path"] >= 2 * state["master_path"])[reset].all()


@pytest.mark.parametrize("format", ["mxfp4_e2m1_32x32", "nvfp4_16x16", "fp8_e4m3"])
def test_no_mesh_changes_a_bit(format):
    """Aligned, uneven, straddling and empty shards, saved in the middle of a window and resumed on another mesh."""
    weights = weights_for(shapes_for(Format.parse(format), 4))

    def give(model, step):
        for i, p in enumerate(model.parameters()):
            whole = gradient(p.shape, 10 * i + step)
            on_mesh = hasattr(p, "device_mesh")
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None) if on_mesh else whole

    def steps(model, optimizer, numbers):
        for step in numbers:
            give(model, step)
            optimizer.step()

    def made(mesh=None, settings=SETTINGS):
        quantities = quantized(weights, format)
        for q, values_ in zip(quantities, weights, strict=True):
            q.initial = values_.clone()
        model = Side(quantities)
        if mesh is not None:
            shard(model, device_mesh(mesh))
        optimizer = bfp.AdamW(model.parameters(), lr=0.05)
        return model, optimizer if settings is None else osci_reset(optimizer, settings)

    model, optimizer = made()
    steps(model, optimizer, range(1, 4))
    middle = {i: {k: v.clone() for k, v in one.items()} for i, one in optimizer.state_dict()["state"].items()}
    steps(model, optimizer, range(4, STEPS + 1))
    expected = optimizer.state_dict()["state"]
    plain, without = made(settings=None)
    steps(plain, without, range(1, STEPS + 1))
    assert any((one["master"] != expected[i]["master"]).any() for i, one in without.state_dict()["state"].items())

    def ranks(rank, mesh, first):
        model, optimizer = made(mesh)
        if first:
            saved = {"state": middle, "param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict(saved)
            optimizer.load_state_dict(optimizer.state_dict())
            # The codes of the run that goes on, which the model's checkpoint would bring.
            params = list(model.parameters())
            requantize_(params, [optimizer.state[p]["master"] for p in params])
        steps(model, optimizer, range(first + 1, STEPS + 1))
        for i, one in optimizer.state_dict()["state"].items():
            assert one.keys() == expected[i].keys()
            for name, want in expected[i].items():
                got = one[name].full_tensor() if hasattr(one[name], "full_tensor") else one[name]
                assert torch.equal(got, want), (i, name)

    threaded.run(4, ranks, (4,), 0)
    threaded.run(4, ranks, (2, 2), 3)
    ranks(0, None, 3)


def test_checkpoints_of_runs_with_and_without_it(tmp_path):
    def made(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        bfp.convert(model, "mxfp4")
        optimizer = bfp.AdamW(model.parameters(), lr=0.05)
        return model, osci_reset(optimizer, **options) if options else optimizer

    def steps(model, optimizer, numbers):
        for n in numbers:
            for p in model.parameters():
                p.grad = gradient(p.shape, n)
            optimizer.step()

    runs = {"with": {"settings": SETTINGS}, "without": {}}
    for name, options in runs.items():
        model, optimizer = made(**options)
        steps(model, optimizer, range(1, 4))
        bfp.save_checkpoint(tmp_path / name, model, optimizer, step=3)
        steps(model, optimizer, range(4, STEPS + 1))
        again, resumed = made(**options)
        bfp.load_checkpoint(tmp_path / name, again, resumed)
        steps(again, resumed, range(4, STEPS + 1))
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            for entry, value in optimizer.state[p].items():
                assert torch.equal(value, resumed.state[q][entry]), entry
    for name, other in (("with", {}), ("without", {"settings": SETTINGS})):
        model, optimizer = made(**other)
        bfp.load_checkpoint(tmp_path / name, model, optimizer)
        weight = optimizer.state[model[0].weight]
        assert ("master_path" in weight) == bool(other)
        assert not other or not weight["master_path"].any()
        assert optimizer.param_groups[0]["osci_reset"] == (tuple(SETTINGS) if other else None)
        steps(model, optimizer, range(4, STEPS + 1))


def test_wrong_settings():
    q = nn.Parameter(bfp.quantize(values((32, 32), 0), "mxfp8_e4m3_32x32"))
    for options, message in (
        ({"master": None}, "osci_reset needs master='float32', got None"),
        ({"capturable": True}, "osci_reset needs capturable=False, got True"),
    ):
        with pytest.raises(ValueError, match=message):
            osci_reset(bfp.AdamW([q], **options), SETTINGS)
    with pytest.raises(TypeError, match="osci_reset must be None or an OsciReset, got 8"):
        osci_reset(bfp.AdamW([q]), 8)
    layer = bfp.Linear(32, 32, recipe="mxfp8", weights="high_precision")
    with pytest.raises(ValueError, match=r"has no codes between two steps.*OsciReset needs an optimizer without it"):
        osci_reset(bfp.AdamW(layer.parameters()), SETTINGS)
    plain, frozen = nn.Parameter(torch.ones(32, 32)), nn.Parameter(bfp.quantize(values((32, 32), 0), "mxfp4_e2m1_32x32"), False)
    for made in (bfp.AdamW([plain]), bfp.AdamW([plain, frozen]), bfp.Adam([plain])):
        with pytest.raises(ValueError, match="none of the optimizer's trained parameters is quantized"):
            osci_reset(made, SETTINGS)
        assert made.param_groups[0]["osci_reset"] is None
    with pytest.raises(TypeError, match="optimizer must be blockfp's AdamW, Adam or Muon, got SGD"):
        osci_reset(torch.optim.SGD([plain], lr=0.1))
    osci_reset(bfp.AdamW([{"params": [q]}, {"params": [plain], "weight_decay": 0.0}]), SETTINGS)

"""`observe`: figures of each operand and flips of codes, and not a bit of difference in what is observed."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import threaded
import torch
from arrays import values, with_scales
from blockfp.torch_backend.linear.observe import OPERANDS
from same_tensors import assert_equal
from small_model import device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import blockfp
import blockfp.torch as bfp
from blockfp import recipes
from blockfp.check.measure import measure
from blockfp.definition import numerics
from blockfp.formats import NAMES, Format
from blockfp.recipes import Cast


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_changes(name, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = bfp.Linear(64, 32, recipe=name)
    other = copy.deepcopy(layer)
    x, gradient = values((40, 64), 0), values((40, 32), 1)
    layer(x).backward(gradient)
    with bfp.observe(other) as observation:
        if compiled:
            other.compile(fullgraph=True, backend="aot_eager")
        y = other(x)
        y.backward(gradient)
        records = observation.step()
    assert torch.equal(layer.weight.grad, other.weight.grad)
    assert_equal(layer.buffers(), other.buffers())
    # x wants no gradient: the rowwise gradient isn't made.
    assert [record.operand for record in records] == [OPERANDS[0], OPERANDS[1], OPERANDS[3]]
    assert records[0].amax == x.abs().max()
    assert all(record.elements == 40 * (64 if "input" in record.operand else 32) for record in records)
    lowest = {"mxfp4": 15, "nvfp4": 12}.get(name, 20)
    assert all(record.sqnr > lowest for record in records)
    assert other.observed is None


def test_figures():
    """Counted by hand: with a scale of 1."""
    layer = with_scales(bfp.Linear(4, 2, bias=False, recipe="fp8_delayed"))
    x = torch.tensor([[1000.0, 2.0**-12, 0.0, 3.0], [448.0, 460.0, 1.0, -500.0]])
    with bfp.observe(layer) as observation:
        layer(x)
        layer(x)
        (row, *_) = observation.step()
        layer(torch.ones(1, 4))
        (second, *_) = observation.step()
    assert (row.step, row.module, row.amax, row.elements, row.saturated, row.flushed) == (0, "", 1000.0, 16, 4, 2)
    error = (x - x.clamp(-448, 448)).square().sum() + 2.0**-24
    torch.testing.assert_close(row.sqnr, (10 * torch.log10(x.square().sum() / error)).item(), rtol=1e-5, atol=0)
    assert (second.step, second.saturated, second.sqnr) == (1, 0, float("inf"))
    assert len(observation.records) == len(observation.rows()) == 4


def test_what_cannot_be_observed():
    with pytest.raises(ValueError, match="convert"), bfp.observe(nn.Linear(4, 2)):
        pass
    layer = bfp.Linear(4, 2, recipe="mxfp8")
    with bfp.observe(layer), pytest.raises(ValueError, match="already"), bfp.observe(layer):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_saturation_is_that_of_a_check(name):
    """The same count as `blockfp check` has, of values of both signs above, at and below the largest code's edge."""
    format = Format.parse(name)
    x = torch.randn((64, 256), generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]
    edge = format.element.max * (1 + torch.linspace(-0.5, 1.0, 256))
    x[3], x[5], x[7] = edge, -edge, 1.999
    x[9] = -1.999
    for multiplier in (None, torch.tensor(1.0), torch.tensor(4.0))[: 3 if format.per_tensor else 1]:
        q = numerics.quantize(x, format, multiplier=multiplier)
        values = numerics.dequantize(*q, format, "float32", columns=256)
        parts = [part for part in q if part is not None]
        figures = torch.ops.blockfp.quantization_figures(x, parts, name, False, [0, 0])
        plain = numerics.Quantized(*(None if part is None else part.numpy() for part in q))
        wanted = measure(x.numpy(), plain, values.numpy(), format)
        assert [int(figures[2]), int(figures[3])] == [wanted.saturated, wanted.flushed]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_integers_saturate_on_both_sides(sign):
    layer = bfp.Linear(32, 8, recipe=recipes.mxfp8().replace(input=Cast("mxint8_floor")))
    with bfp.observe(layer) as observation:
        layer(torch.full((2, 32), sign * 1.999))
        assert observation.step()[0].saturated == 64


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_an_inf_is_observed(name):
    layer, x = bfp.Linear(64, 32, recipe=name), torch.full((16, 64), 0.5)
    x[2, 3], x[4, 5] = torch.inf, 2.0
    with bfp.observe(layer) as observation:
        layer(x)
        (row, *_) = observation.step()
    assert (row.amax, row.saturated) == (2.0, 1)
    assert math.isnan(row.sqnr)


STEPS = 6


def whole_gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step % 3)) * (-1) ** step


def made(recipe, **options):
    with threaded.seeded(0):
        return bfp.convert(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)), recipe, **options)


def train(model, **options):
    """Yields behind each step what was found."""
    optimizer = bfp.AdamW(model.parameters(), lr=0.02)
    with bfp.observe(model, oscillations=True, **options) as observation:
        for step in range(STEPS):
            for p in model.parameters():
                g = whole_gradient(p.shape, step)
                on_mesh = hasattr(p, "device_mesh")
                p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None) if on_mesh else g
            optimizer.step()
            assert observation.step() == []
            yield observation, optimizer


def by_numpy(histories, momentum, threshold):
    """(changed, flipped, mean frequency, oscillating) of each step, from lists of dequantized values over their scales."""
    last = np.zeros(histories[0].shape)
    mean = np.zeros(histories[0].shape)
    for before, now in pairwise(histories):
        moved = np.sign(now - before)
        flipped = (moved * last) < 0
        last = np.where(moved != 0, moved, last)
        mean = momentum * flipped + (1 - momentum) * mean
        yield int((moved != 0).sum()), int(flipped.sum()), float(mean.mean()), int((mean > threshold).sum())


def elements(values, format):
    """The elements of a quantization, without their scales."""
    q = blockfp.quantize(values.numpy(), format)
    one = 1.0 if q.scales.dtype == np.float32 else 0x38 if format.startswith("nvfp4") else 127
    tensor_scale = None if q.tensor_scale is None else np.ones((), np.float32)
    return numerics.dequantize(q.codes, np.full_like(q.scales, one), tensor_scale, format, "float32", columns=values.shape[-1])


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "fp8_current", "mxfp6"])
def test_counts(recipe, weights):
    model = made(recipe, weights=weights)
    format = str(model[0].recipe.weight.format)
    values = [p.initial if weights == "quantized" else p.values for p in (model[0].weight, model[1].weight)]
    histories = [[elements(value.detach(), format)] for value in values]
    for found, optimizer in train(model, momentum=0.25, threshold=0.1):
        observation = found
        for history, layer in zip(histories, model, strict=True):
            master = optimizer.state[layer.weight]["master"] if weights == "quantized" else layer.weight.values
            history.append(elements(master.detach(), format))
    for i, history in enumerate(histories):
        found = [one for one in observation.oscillations if one.module == str(i)]
        assert [one.step for one in found] == list(range(STEPS))
        for one, (changed, flipped, mean, above) in zip(found, by_numpy(history, 0.25, 0.1), strict=True):
            assert (one.elements, one.changed, one.flipped, one.oscillating) == (64 * 48, changed, flipped, above)
            assert one.frequency == pytest.approx(mean, rel=1e-5)
        assert found[-1].flipped > 0


def test_ranks_count_their_parts():
    (*_, (whole, _)) = train(made("mxfp4"))
    expected = [(one.elements, one.changed, one.flipped, one.oscillating) for one in whole.oscillations]

    def rank(_):
        model = made("mxfp4")
        for layer in model:
            fully_shard(layer, mesh=device_mesh((4,)))
        (*_, (observation, _)) = train(model)
        return [(one.elements, one.changed, one.flipped, one.oscillating) for one in observation.oscillations]

    assert np.sum(threaded.run(4, rank), axis=0).tolist() == np.array(expected).tolist()


def test_nothing_is_counted_unasked_and_wrong_calls_leave_nothing():
    model = made("mxfp4")
    with bfp.observe(model) as observation:
        model(torch.ones(2, 64))
        observation.step()
    assert observation.oscillations == []
    for options in ({"momentum": 0}, {"threshold": 1.5}):
        with pytest.raises(ValueError, match="must be between 0 and 1"), bfp.observe(model, oscillations=True, **options):
            pass
    high = bfp.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp4", weights="high_precision")

    def rank(_):
        layer = made("mxfp4", weights="high_precision")
        fully_shard(layer, mesh=device_mesh((2,)))
        with pytest.raises(ValueError, match="shares it among ranks"), bfp.observe(layer, oscillations=True):
            pass
        assert layer[0].observed is None

    threaded.run(2, rank)
    assert high[0].observed is None

"""`observe`: figures of each operand, and not a bit of difference in what is observed."""

import copy
import math

import pytest
import torch
from arrays import values, with_scales
from blockfp.torch_backend.linear.observe import OPERANDS
from torch import nn

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
    for a, b in zip(layer.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
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

"""`observe(oscillations=True)`: flips of codes, against a loop over NumPy's quantizations of the masters."""

from itertools import pairwise

import numpy as np
import pytest
import threaded
import torch
from small_model import device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import blockfp
import blockfp.torch as bfp
from blockfp.definition import numerics

STEPS = 6


def whole_gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step % 3)) * (-1) ** step


def made(recipe, **options):
    with threaded.seeded(0):
        return bfp.convert(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)), recipe, **options)


def train(model, steps=STEPS, **options):
    """Yields behind each step what was found."""
    optimizer = bfp.AdamW(model.parameters(), lr=0.02)
    with bfp.observe(model, oscillations=True, **options) as observation:
        for step in range(steps):
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

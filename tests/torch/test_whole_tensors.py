"""full_tensor() of a sharded quantized weight, and averages of weights: refused, with remedies that help."""

import copy

import pytest
import threaded
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import blockfp.torch as bfp


def net(weights):
    torch.manual_seed(0)
    return bfp.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp8", weights=weights)


def _full_tensor(rank, model):
    expected, model = model[0].weight.detach().dequantize(), fully_shard(copy.deepcopy(model))
    with pytest.raises(NotImplementedError, match=r"all_gather.*high_precision_state_dict\(model\)"):
        model[0].weight.full_tensor()
    assert torch.equal(bfp.high_precision_state_dict(model)["0.weight"], expected)
    assert torch.equal(model[0].weight.to_local().detach().dequantize(), expected.chunk(2)[rank])


def test_full_tensor():
    threaded.run(2, _full_tensor, net("quantized"))


def test_averages():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    quantized, kept = net("quantized"), net("high_precision")
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for model in (quantized, kept)]
    averages[0].update_parameters(quantized)  # the first one copies
    with pytest.raises(NotImplementedError, match=r"(?s)lerp.*AveragedModel.*weights=\"high_precision\""):
        averages[0].update_parameters(quantized)
    expected = [param.detach().clone() for param in kept.parameters()]
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    averages[1].update_parameters(kept)
    kept(x).square().mean().backward()
    optimizer.step()
    averages[1].update_parameters(kept)
    for average, old, param in zip(averages[1].parameters(), expected, kept.parameters(), strict=True):
        torch.testing.assert_close(_values(average), (_values(old) + _values(param)) / 2)
    # The average is quantized when it is used, as the weights are.
    assert not torch.equal(averages[1](x), copy.deepcopy(kept)(x))


def in_place(mine, theirs):
    for name, value in mine.items():
        if value.is_floating_point():
            value.mul_(0.5).add_(theirs[name], alpha=0.5)


def copied(mine, theirs):
    for name, value in mine.items():
        value.copy_(0.5 * value + 0.5 * theirs[name])


def soup(mine, theirs):
    return {name: torch.stack([value.float(), theirs[name].float()]).mean(0) for name, value in mine.items()}


def _state_dicts(rank, models, options):
    models = [fully_shard(copy.deepcopy(model)) for model in models]
    for average in (in_place, copied, soup):
        both = [get_model_state_dict(model, options=StateDictOptions(**options)) for model in models]
        if not all(both):
            continue
        with pytest.raises(NotImplementedError, match=r"their averages mean nothing\..*high_precision_state_dict"):
            average(*both)
    for model in models:
        assert bfp.high_precision_state_dict(model)["0.weight"].shape == (64, 64)


@pytest.mark.parametrize(
    "options", [{}, {"full_state_dict": True}, {"cpu_offload": True}, {"full_state_dict": True, "cpu_offload": True}], ids=str
)
def test_averages_of_sharded_state_dicts(options):
    threaded.run(2, _state_dicts, [net("quantized"), net("quantized")], options)


def _values(param):
    return param.detach().values if hasattr(param, "cut") else param.detach()

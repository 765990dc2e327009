"""torchtitan 0.3: its `GroupedExperts`, alone and in the debug DeepSeek, converted as they are built."""

import copy
import sys
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import train

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:In CPU autocast, but the target dtype:UserWarning"
)


@pytest.fixture(scope="module")
def titan():
    # Its Triton kernels for experts are imported with everything else, and this machine has no Triton.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    return pytest.importorskip("torchtitan.models.common.moe")


def experts_of(titan):
    torch.manual_seed(0)
    experts = titan.GroupedExperts.Config(dim=64, hidden_dim=96, num_experts=4).build()
    for param in experts.parameters():
        nn.init.normal_(param, std=0.1)
    return experts


def test_the_forward_is_that_of_torchtitan_on_the_same_weights(titan):
    plain = experts_of(titan)
    experts = bfp.convert(copy.deepcopy(plain), "mxfp8", compute="high_precision")
    assert [name for name, _ in experts.named_parameters()] == ["w1_EFD", "w2_EDF", "w3_EFD"]
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(experts.get_parameter(name).dequantize())
    x, counts = torch.randn(40, 64), torch.tensor([10, 0, 25, 5])
    for one in (experts, plain):
        one(x, counts).square().sum().backward()
    torch.testing.assert_close(experts(x, counts), plain(x, counts), rtol=0.03, atol=0.03)
    for name, param in plain.named_parameters():
        assert experts.get_parameter(name).grad.dtype == param.grad.dtype
        error = (experts.get_parameter(name).grad - param.grad).norm() / param.grad.norm()
        assert error < 0.01
    assert not experts.w1_EFD.grad[1].any()


def test_routers_stay(titan):
    from torchtitan.models.common.linear import Linear

    gate = Linear.Config(in_features=64, out_features=4)
    model = nn.ModuleDict(
        {"router": titan.TokenChoiceTopKRouter.Config(num_experts=4, gate=gate).build(), "up": nn.Linear(64, 64)}
    )
    bfp.convert(model, "mxfp8")
    assert type(model["router"].gate) is Linear
    assert isinstance(model["up"], bfp.Linear)


def test_experts_with_products_of_their_own_are_left(titan):
    class Others(titan.GroupedExperts):
        def _grouped_mm(self, *, A, B_t, offs):
            return super()._grouped_mm(A=A, B_t=B_t, offs=offs)

    experts = experts_of(titan)
    experts.__class__ = Others
    with pytest.raises(ValueError, match=r"holds no torch\.nn\.Linear to convert"):
        bfp.convert(experts, "mxfp8")


def deepseek():
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry

    config = model_registry("debugmodel").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def losses_of(model, optimizer):
    tokens = torch.arange(34).view(2, 17) * 29 % 2048
    return train(
        optimizer, lambda _: F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()), range(3)
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_the_debug_deepseek_trains(titan, recipe):
    plain = deepseek()
    model = bfp.convert(copy.deepcopy(plain), recipe)
    assert bfp.summary(model).share > 0.9
    before = {name: value.clone() for name, value in bfp.high_precision_state_dict(model).items()}
    losses = losses_of(model, bfp.AdamW(model.parameters(), lr=1e-3))
    expected = losses_of(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses[-1] < losses[0]
    after = bfp.high_precision_state_dict(model)
    assert not [name for name, param in model.named_parameters() if torch.equal(before[name], after[name])]

"""Optimizers that aren't blockfp's: over weights in high precision they do what they do to plain ones; codes refuse them."""

import importlib

import pytest
import torch
from torch import nn

import blockfp.torch as bfp

# What these packages warn of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

FORMAT = "mxfp8_e4m3_32x32"
TORCH = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
]  # fmt: skip
OPTIMIZERS = {
    **{f"torch.optim.{name}": {} for name in TORCH},
    "torch.optim.AdamW, fused": {"fused": True},
    "torch.optim.SGD, foreach": {"foreach": True, "momentum": 0.9},
    "schedulefree.AdamWScheduleFree": {},
    "schedulefree.SGDScheduleFree": {"foreach": False},
    "pytorch_optimizer.ADOPT": {},
    "pytorch_optimizer.Lion": {},
    "pytorch_optimizer.SOAP": {},
    "pytorch_optimizer.StableAdamW": {"kahan_sum": True},
    "bitsandbytes.optim.AdamW8bit": {"min_8bit_size": 1},
    "bitsandbytes.optim.Lion8bit": {"min_8bit_size": 1},
    "torchao.optim.AdamW8bit": {},
}


def parameters(kind):
    generator = torch.Generator().manual_seed(0)
    values, bias = torch.randn(64, 96, generator=generator), torch.randn(64, generator=generator)
    made = {
        "plain": lambda: values,
        "high_precision": lambda: bfp.CastWeight.from_values(values, FORMAT),
        "quantized": lambda: bfp.quantize(values, FORMAT),
    }
    return [nn.Parameter(made[kind]()), nn.Parameter(bias)]


def stepped(name, params):
    path, _, optimizer = name.partition(",")[0].rpartition(".")
    module = pytest.importorskip(path.partition(".")[0]) and importlib.import_module(path)
    taken = params[:1] if optimizer == "Muon" else params
    run = getattr(module, optimizer)(taken, lr=1e-2, **OPTIMIZERS[name])
    if hasattr(run, "train"):
        run.train()
    generator = torch.Generator().manual_seed(1)
    # More than any of them warms up.
    for _ in range(8):
        for param in params:
            param.grad = 0.1 * torch.randn(param.shape, generator=generator)
        run.step(lambda: torch.tensor(1.0)) if optimizer == "LBFGS" else run.step()
    if hasattr(run, "eval"):
        run.eval()
    return params


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step for each shape, which takes half a minute and changes no bit here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_are_those_of_plain_weights(name):
    plain, ours = (stepped(name, parameters(kind)) for kind in ("plain", "high_precision"))
    assert not torch.equal(plain[0], parameters("plain")[0])
    assert torch.equal(ours[0].detach().values, plain[0])
    assert torch.equal(ours[1], plain[1])
    quantized = bfp.quantize(plain[0].detach(), FORMAT)
    assert torch.equal(ours[0].detach().quantized().codes, quantized.codes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_codes_refuse_and_name_what_helps(name):
    params = parameters("quantized")
    before = [part.clone() for part in params[0].parts]
    with pytest.raises(NotImplementedError, match=r'convert with weights="high_precision"'):
        stepped(name, params)
    assert all(map(torch.equal, params[0].parts, before))

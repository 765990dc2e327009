"""Parameters of every kind for the PyTorch optimizers' tests."""

import torch
from arrays import tensors_of, values
from same_tensors import assert_equal
from torch import nn

import blockfp.torch as bfp
from blockfp.definition import numerics

FAMILIES = ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp8_e4m3_32x32", "mxfp8_e4m3", "mxfp6_e3m2_32x32", "nvfp4_16x16")


def weight(shape, format, seed=0, dtype=torch.float32):
    return nn.Parameter(bfp.quantize(values(shape, seed, dtype), format))


def assert_quantizes(q, master):
    """q holds what the definition makes of the master."""
    expected = numerics.quantize(master, q.format, nominal=str(q.dtype).removeprefix("torch."))
    assert_equal(tensors_of(q), (part for part in expected if part is not None))


def mixed(seed=0):
    """Parameters of every kind, gradients included."""
    params = [weight((70, 300), name, seed + i, torch.bfloat16) for i, name in enumerate(FAMILIES)]
    params += [weight((3, 20, 40), "mxfp8_e4m3_32x32", 50)]
    params += [nn.Parameter(values(shape, 60)) for shape in ((17,), (5, 130), ())]
    params += [nn.Parameter(values((9, 33), 61, torch.bfloat16)), nn.Parameter(values((33,), 62, torch.float16))]
    return params


def give_gradients(params, step):
    for i, p in enumerate(params):
        p.grad = values(p.shape, 1000 * step + i).to(p.dtype)


def values_of(optimizer, p):
    """The fp32 value that the optimizer updates."""
    return optimizer.state[p].get("master", p.detach())

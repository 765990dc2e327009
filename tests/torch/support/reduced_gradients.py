"""Models whose gradients are given, reduce-scattered as codes, and what `simulate` makes of them."""

import numpy as np
import torch
from small_model import device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

from blockfp.definition.rounding import fold_in
from blockfp.experimental.torch import quantize_reduce_scatter
from blockfp.sharding import simulate

SHAPES = {"matrix": (8, 64), "odd": (7, 40), "bias": (6,), "experts": (5, 3, 33), "few": (1, 24), "kernel": (4, 2, 3, 3)}


class Terms(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self._parameters.items() if name in gradients)


class Model(nn.Module):
    """Two groups of FSDP2: `inner`, and the rest."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.outer = nn.Parameter(torch.zeros(12, 96, dtype=dtype))
        self.inner = Terms(dtype=dtype)

    def forward(self, gradients):
        total = self.inner(gradients)
        return total + (self.outer * gradients["outer"]).sum() if "outer" in gradients else total


def gradients_of(rank, step=0, dtype=torch.float32):
    """One rank's gradients, of all magnitudes."""
    made = {}
    for i, (name, shape) in enumerate({"outer": (12, 96), **SHAPES}.items()):
        generator = torch.Generator().manual_seed(1000 * rank + 100 * step + i)
        scale = torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
        made[name] = (torch.randn(shape, generator=generator) * scale).to(dtype)
    return made


def expected(ranks, format, key, reduction=0, factor=None, terms=None, **options):
    """The whole of each gradient, as `simulate` reduces it: float32 by name."""
    terms = terms or [gradients_of(rank, **options) for rank in range(ranks)]
    made = {}
    for number, name in enumerate(terms[0]):
        own = None if key is None else fold_in(fold_in(key, number), reduction)
        values = [term[name].numpy() if term[name].dtype != torch.bfloat16 else bf16(term[name]) for term in terms]
        parts = simulate.reduce_scatter(values, format, key=own, factor=factor or ranks)
        made[name] = torch.from_numpy(np.concatenate(parts))
    return made


def bf16(tensor):
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def sharded(mesh, format, key=0, dtype=torch.float32, **options):
    model = Model(dtype)
    fully_shard(model.inner, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, quantize_reduce_scatter(model, format, key=key)


def reduced(model):
    """The whole gradients by the last part of their names."""
    return {name.rpartition(".")[2]: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def two_steps(rank, shape, format, key):
    model, _ = sharded(device_mesh(shape), format, key)
    made = []
    for step in range(2):
        model.zero_grad()
        model(gradients_of(rank, step)).backward()
        made.append(reduced(model))
    return made

"""Sequence parallelism of x [.., tokens, features]: y and all gradients of one process, for every leading shape and recipe."""

import copy

import numpy as np
import pytest
import threaded
import torch
from samples import sample
from sequence_cases import CASES, IN, OUT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import blockfp.torch as bfp

UNEVEN = [("mxfp8", (3, 50), 4), ("mxfp4", (2, 70), 2), ("nvfp4", (2, 2, 9), 2)]


def whole_layer(recipe):
    layer = bfp.Linear(IN, OUT, recipe=recipe)
    layer.load_state_dict({"weight": torch.from_numpy(sample("gaussian", (OUT, IN))), "bias": torch.ones(OUT)}, strict=False)
    if layer.rng_key is not None:
        layer.rng_key.copy_(torch.tensor([3, 4]))
    return layer


def arrays(leading):
    scales = np.exp2(np.random.default_rng(5).integers(-6, 6, (*leading, 1))).astype(np.float32)
    return tuple(torch.from_numpy(sample("gaussian", (*leading, size), seed=size) * scales) for size in (IN, OUT))


def trained(layer, x, g):
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def on_rank(rank, whole, style, leading, ranks, uneven):
    mesh = init_device_mesh("cpu", (ranks,))
    layer = bfp.parallelize(copy.deepcopy(whole), mesh, style, sequence_parallel=True)

    def own(full, dim):
        local = full.chunk(ranks, dim)[rank]
        return DTensor.from_local(local, mesh, [Shard(dim)], shape=full.shape, stride=full.stride()) if uneven else local

    x, g = arrays(leading)
    tokens, features = len(leading) - 1, len(leading)
    column = style == "column"
    results = trained(layer, own(x, tokens if column else features), own(g, features if column else tokens))
    return [part.to_local() if isinstance(part, DTensor) else part for part in results]


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize(
    ("recipe", "leading", "ranks", "uneven"),
    [*((*case, False) for case in CASES), *((*case, True) for case in UNEVEN)],
    ids=str,
)
def test_every_leading_shape_is_that_of_one_process(recipe, leading, ranks, uneven, style):
    whole = whole_layer(recipe)
    wanted = trained(copy.deepcopy(whole), *arrays(leading))
    world = threaded.run(ranks, on_rank, whole, style, leading, ranks, uneven)
    tokens, features, weight = len(leading) - 1, len(leading), 0 if style == "column" else 1
    axes = (features, tokens, weight, 0) if style == "column" else (tokens, features, weight, None)
    for parts, want, axis in zip(zip(*world, strict=True), wanted, axes, strict=True):
        got = parts[0] if axis is None else torch.cat(parts, axis)
        assert got.shape == want.shape
        assert float((got - want).abs().max()) <= 3e-6 * float(want.abs().max())

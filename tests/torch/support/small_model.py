"""A model of quantized weights that needs nothing but `dequantize`, and its training under FSDP2 with every gather checked."""

import torch
from arrays import tensors_of
from blockfp.torch_backend.quantized_tensor.sharding import region_of
from blockfp.torch_backend.weights.requantize import requantize_
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize(x.dtype).mT

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        dw = (gradient.mT @ x).to(weight.dtype)
        return gradient @ weight.dequantize(gradient.dtype), dw if ctx.needs_input_grad[1] else None


class SmallLinear(nn.Module):
    """y = x w^T with a weight dequantized in forward and again in backward; `seen` has the parts of the last weight used."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.seen = None

    def forward(self, x):
        weight = self.weight
        self.seen = [part.clone() for part in tensors_of(weight.detach())]
        self.seen_as = (weight.format, tuple(weight.shape), weight.dtype, weight.origin)
        return _Product.apply(x, weight)


class Side(nn.Module):
    """Layers of any shapes beside each other: the sum of what each makes of the first columns of x."""

    def __init__(self, weights):
        super().__init__()
        self.layers = nn.ModuleList(SmallLinear(weight) for weight in weights)

    def forward(self, x):
        total = 0
        for layer in self.layers:
            columns = layer.weight.shape[-1]
            total = total + layer(x[..., :columns]).square().sum()
        return total


def weights_for(shapes, step=0):
    """High-precision weights, others at each step: what an optimizer might have made of them."""
    weights = []
    for i, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 * step + i)
        scale = torch.exp2(torch.randint(-8, 9, shape, generator=generator).float())
        weights.append(torch.randn(shape, generator=generator) * scale)
    return weights


def inputs_for(rank, columns, rows=3, dtype=torch.float32):
    """The batch of one data-parallel rank."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def shapes_for(format, ranks):
    """Shapes whose shards on so many ranks are aligned to the blocks, uneven, cut blocks apart, and are empty."""
    rows, columns = (1, 128) if format.per_row else format.block or (16, 32)
    return [(ranks * rows, columns), (max(ranks * rows - 1, 1), 40), (2 * rows + 7, columns // 2 + 5), (1, 24)]


def quantized(weights, format):
    """Each weight quantized whole."""
    return [bfp.quantize(weight, format) for weight in weights]


def device_mesh(shape):
    """A mesh of shards, behind an axis of replicas if it has two axes."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model, mesh, **options):
    """Every layer in a group of its own, and the rest in the root's."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def assert_gathered(layer, expected):
    """Asserts that the layer multiplied by the expected weight."""
    assert layer.seen_as == (expected.format, tuple(expected.shape), expected.dtype, (0, 0))
    for got, want in zip(layer.seen, tensors_of(expected), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def update(model, step, shapes):
    """New weights, of which each rank quantizes its own rows."""
    params = [layer.weight for layer in model.layers]
    values = [new[region_of(p).slices] for p, new in zip(params, weights_for(shapes, step), strict=True)]
    requantize_(params, values)


def train(rank, shape, reshard, shapes, first, last):
    """One step, three updates, one step of a rank with its own batch; weights are `first`, then `last`: first gradients."""
    mesh = device_mesh(shape)
    model = Side([q.clone() for q in first])
    shard(model, mesh, reshard_after_forward=reshard)
    x = inputs_for(rank, max(columns for _, columns in shapes))
    model(x).backward()
    gradients = [layer.weight.grad.full_tensor().clone() for layer in model.layers]
    for layer, weight in zip(model.layers, first, strict=True):
        assert_gathered(layer, weight)
    for step in (1, 2, 3):
        update(model, step, shapes)
    model(x).backward()
    for layer, weight in zip(model.layers, last, strict=True):
        assert_gathered(layer, weight)
    return gradients

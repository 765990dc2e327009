"""A model of quantized weights that needs nothing but `dequantize`, for tests of how weights are sharded and gathered."""

import torch
from torch import nn

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
        self.seen = [part.clone() for part in parts_of(weight.detach())]
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


def parts_of(q):
    """Codes, scales and tensor scale, where there is one."""
    return [part for part in (q.codes, q.scales, q.tensor_scale) if part is not None]


def weights_for(shapes, step=0, dtype=torch.float32):
    """High-precision weights, others at each step: what an optimizer might have made of them."""
    weights = []
    for i, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 * step + i)
        scale = torch.exp2(torch.randint(-8, 9, shape, generator=generator).float())
        weights.append((torch.randn(shape, generator=generator) * scale).to(dtype))
    return weights


def inputs_for(rank, columns, rows=3, dtype=torch.float32):
    """The batch of one data-parallel rank."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def shapes_for(format, ranks):
    """Shapes whose shards on so many ranks are aligned to the blocks, uneven, cut blocks apart, and are empty."""
    rows, columns = format.block or (16, 32)
    return [(ranks * rows, columns), (max(ranks * rows - 1, 1), 40), (2 * rows + 7, columns // 2 + 5), (1, 24)]


def quantized(weights, format):
    """Each weight quantized whole."""
    return [bfp.quantize(weight, format) for weight in weights]

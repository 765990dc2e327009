"""Quantized tensors in PyTorch: a frozen FP4 weight that is dequantized in a compiled forward."""

import torch

import blockfp.torch as bfp

torch.manual_seed(0)
x = torch.randn(64, 1024, dtype=torch.bfloat16)
weight = torch.randn(512, 1024, dtype=torch.bfloat16)

q = bfp.quantize(weight, "nvfp4")
print(q)
print("bytes:", weight.nbytes, "->", q.codes.nbytes + q.scales.nbytes + q.tensor_scale.nbytes)


class Frozen(torch.nn.Module):
    """A linear layer with a quantized weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(bfp.quantize(weight, "nvfp4"), requires_grad=False)

    def forward(self, x):
        return x @ self.weight.dequantize().T


layer = Frozen(weight)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
print("compiled equals eager:", torch.equal(compiled(x), layer(x)))

# What does not exist for quantized tensors raises, and says what to do.
try:
    layer.weight + 1
except (NotImplementedError, TypeError, RuntimeError) as error:
    print(type(error).__name__, error)

"""FSDP2's reduce-scatter as codes over NCCL: the gradients that `simulate` gives, bit for bit."""

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from blockfp.torch_backend.custom_ops import cuda
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from blockfp.definition import numerics
from blockfp.definition.rounding import fold_in
from blockfp.experimental.torch import quantize_reduce_scatter
from blockfp.sharding import simulate

SHAPES = ((5,), (64, 256), (7, 40), (3, 5, 33), (129, 96), (1, 24))
FORMATS = ("mxfp8_e5m2", "mxfp8_e4m3", "fp8_e4m3_1x128", "fp8_e5m2_1x128_fp32", "fp8_e4m3_row", "mxfp4_e2m1")


def terms(rank, step):
    random = np.random.default_rng((rank, step))
    return [(random.standard_normal(shape) * 2.0 ** random.integers(-6, 7, shape)).astype(np.float32) for shape in SHAPES]


class Terms(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self):
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients):
        return sum((p * torch.from_numpy(g).cuda()).sum() for p, g in zip(self.values, gradients, strict=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 1, 5, 16])
def test_gradients_that_lie_between_others(format, dtype, first):
    """[ranks, rows, columns] cut out of FSDP2's buffer, at any place."""
    buffer = torch.randn(4, first + 6 * 72 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = buffer[:, first : first + 6 * 72].view(4, 6, 72)
    key = torch.tensor([3, -4], dtype=torch.int32)
    want = numerics.quantize(x, format, key=key)
    on_gpu = buffer.cuda()[:, first : first + 6 * 72].view(4, 6, 72)
    got = cuda.quantize(on_gpu, format, key=key.cuda())
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.scales.cpu(), want.scales)


def over_nccl(rank):
    world = dist.get_world_size()
    for format in FORMATS:
        model = fully_shard(Terms().cuda(), mesh=init_device_mesh("cuda", (world,)))
        quantize_reduce_scatter(model, format, key=5)
        for step in range(2):
            model.zero_grad()
            model(terms(rank, step)).backward()
            for number, p in enumerate(model.parameters()):
                every = [terms(each, step)[number] for each in range(world)]
                parts = simulate.reduce_scatter(every, format, key=fold_in(fold_in(5, number), step), factor=world)
                np.testing.assert_array_equal(p.grad.full_tensor().cpu().numpy(), np.concatenate(parts))


def test_gradients_are_those_of_simulate():
    world = torch.cuda.device_count()
    if world < 2:
        pytest.skip("one GPU: FSDP2 reduces nothing")
    gloo.run(world, __file__, "over_nccl", timeout=300, backend="nccl")

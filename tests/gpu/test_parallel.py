"""Tensor and sequence parallelism and FSDP2's reduce-scatter as codes over NCCL, on as many GPUs as there are."""

import gc
import re

import gloo
import numpy as np
import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from arrays import values
from blockfp.torch_backend.ops import cuda
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from cuda_arrays import recordings
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.definition.rounding import fold_in
from blockfp.experimental.torch import quantize_reduce_scatter
from blockfp.sharding import simulate

STEPS = 10
WIDTH, HIDDEN, TOKENS = 256, 512, 512


def mesh_of_all():
    world = dist.get_world_size()
    tp = min(world, 2)
    return init_device_mesh("cuda", (world // tp, tp), mesh_dim_names=("dp", "tp"))


def transformer(recipe):
    return bfp.TransformerLayer(WIDTH, HIDDEN, 4, recipe=recipe, bias=False, norm="rms_norm")


def mlp(recipe):
    return bfp.LayerNormMLP(WIDTH, HIDDEN, recipe=recipe)


def trained(make, recipe, mesh, compiled, **options):
    """Of ten steps of two blocks under FSDP2: outputs, norms of the first step's gradients, the blocks, recordings."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with torch.device("cuda"):
        blocks = [bfp.parallelize(make(recipe), mesh["tp"], sequence_parallel=True) for _ in range(2)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in blocks:
        if compiled:
            block.compile(fullgraph=True, **options)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    model = fully_shard(nn.Sequential(*blocks), mesh=mesh["dp"], mp_policy=policy)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
    outputs, graphs, recorded = [], [], []
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(step * mesh["dp"].size() + mesh["dp"].get_local_rank())
        x = torch.randn(2, TOKENS, WIDTH, device="cuda", generator=generator)
        y = model(x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()].to(torch.bfloat16))
        # Kept on the CPU, so that the weights of the next step are gathered to where those of this one were.
        outputs.append(y.detach().cpu())
        y.float().square().mean().backward()
        if step == 0:
            gradients = torch.tensor([float(local_of(p.grad).float().norm()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        bfp.update_scales(model)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        recorded.append(recordings())
    if compiled:
        assert graphs[0] > 0
        # Delayed scaling casts by the current amax until the first step gave it scales.
        first = 0 if recipes.parse(recipe).delayed is None else 1
        assert graphs[-1] == graphs[first], f"compiled again: {graphs}"
        assert not torch._dynamo.utils.counters["graph_break"]
    return outputs, gradients, model, recorded


def cuda_graphs(rank, make, recipe):
    # Its backward adds with atomics: runs differ.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    mesh = mesh_of_all()
    eager, eager_gradients, _, _ = trained(make, recipe, mesh, compiled=False)
    plain, _, expected, _ = trained(make, recipe, mesh, compiled=True)
    outputs, gradients, model, recorded = trained(make, recipe, mesh, compiled=True, mode="reduce-overhead")
    print(f"rank {rank}, {recipe}: recorded until each step: {recorded}")
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    for step, (got, other) in enumerate(zip(outputs, plain, strict=True)):
        assert torch.equal(got, other), f"step {step}: {(got != other).sum()} values"
    assert_equal(model.buffers(), expected.buffers())
    # Fused code rounds fewer intermediate values to bfloat16, behind which some get another code.
    assert (outputs[0] - eager[0]).norm() <= 0.1 * eager[0].norm()
    assert ((gradients - eager_gradients).abs() <= 0.1 * eager_gradients).all(), f"{gradients} against {eager_gradients}"
    # Forward and backward of two blocks; later steps replay them.
    assert recorded[-1] >= 4
    assert recorded[-1] == recorded[STEPS // 2]


def mxfp8(rank):
    cuda_graphs(rank, transformer, "mxfp8")


def fp8_delayed(rank):
    cuda_graphs(rank, mlp, "fp8_delayed")


def nvfp4(rank):
    cuda_graphs(rank, mlp, "nvfp4")


def memory(rank):
    """Peak of a training step: as DTensors on a mesh of one, with and without sequences, and never parallelized."""
    mesh = init_device_mesh("cuda", (1,))
    peaks = {}
    for name, options in (("plain", None), ("tp", {}), ("tp + sequence", {"sequence_parallel": True})):
        torch.manual_seed(0)
        with torch.device("cuda"):
            blocks = [bfp.TransformerLayer(1024, 4096, 8, recipe="mxfp8", dtype=torch.bfloat16) for _ in range(4)]
        if options is not None:
            for block in blocks:
                bfp.parallelize(block, mesh, **options)
        model = nn.Sequential(*blocks)
        optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks[name] = torch.cuda.max_memory_allocated()
        del blocks, model, optimizer, x
        gc.collect()
        torch.cuda.empty_cache()
    print({name: f"{peak / 2**20:.1f} MiB" for name, peak in peaks.items()})
    # Layers that a group cuts keep the codes of the input that they share once for each, and others once.
    for peak in peaks.values():
        assert peak <= 1.15 * peaks["plain"], peaks


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
def test_cuda_graphs_of_blocks_under_fsdp2(recipe):
    """With state that is written in the forward, and in the backward; every buffer is where it would be without graphs."""
    world = {1: 1, 2: 2, 3: 2}.get(torch.cuda.device_count(), 4)
    printed = gloo.run(world, __file__, recipe, timeout=300, backend="nccl")
    print(printed)
    assert not re.search(r"cuda ?graph|not tracked as outputs|unwaited|recompil", printed, re.IGNORECASE)


def test_memory_of_dtensor_weights():
    print(gloo.run(1, __file__, "memory", backend="nccl"))


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
    buffer = values((4, first + 6 * 72 + 3), 0).to(dtype)
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

"""Tensor parallelism and pipelines on real processes: operands, meta initialization, compiled blocks, microbatches."""

import copy

import gloo
import pytest
import torch
import torch._dynamo.utils
from arrays import values
from blockfp.torch_backend.linear.tensor_parallel import parallel_layer
from blockfp.torch_backend.ops.product.products import multiply
from blockfp.torch_backend.quantized_tensor.sharding import local_of
from parallel_operands import (
    SHAPES,
    STYLES,
    assert_shared,
    batch_of,
    linear,
    mesh_of,
    one_process,
    part,
    record_products,
    shard,
    trained_layer,
)
from same_tensors import assert_equal
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes


class Patch:
    """The one method of pytest's monkeypatch that is used, in a process without pytest."""

    setattr = staticmethod(setattr)


def operands(rank):
    seen = record_products(Patch)
    for name, (style, sequence) in zip(("fp8_delayed", "fp8_block", "mxfp6", "nvfp4"), STYLES, strict=True):
        for shape in SHAPES.values():
            layer = linear(shape, name)
            batch = batch_of(mesh_of("fsdp x tp"))
            results, products, _ = one_process(shape, recipes.for_linear(name), seen, batch)
            y, dx, _, _, thread, tp, _ = trained_layer(rank, layer, "fsdp x tp", style, sequence, shape)
            assert_shared((y, dx, None, None), seen[thread], results, products, style, sequence, tp)
    parallel_layer.multiply = multiply


def block(device=None):
    torch.manual_seed(0)
    options = {"bias": False, "norm": "rms_norm", "activation": "swiglu"}
    return bfp.TransformerLayer(64, 128, 4, recipe="mxfp8", device=device, **options)


def column():
    torch.manual_seed(0)
    return bfp.LayerNormLinear(64, 64, False, recipe="mxfp8", norm="rms_norm")


def meta(rank):
    """parallelize, fully_shard, to_empty, reset_parameters: the shards of what one process draws."""
    expected, mesh = block(), mesh_of("fsdp x tp")
    layer = shard(bfp.parallelize(block("meta"), mesh["tp"], sequence_parallel=True), mesh)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    built = shard(bfp.parallelize(expected, mesh["tp"], sequence_parallel=True), mesh)
    for (name, got), other in zip(layer.named_parameters(), built.parameters(), strict=True):
        got, other = local_of(got), local_of(other)
        for field in ("codes", "scales", "initial") if hasattr(got, "codes") else ("data",):
            assert torch.equal(getattr(got, field), getattr(other, field)), (name, field)


def compiled(rank, make=block, kind="fsdp x tp", backend="aot_eager", steps=4):
    """One graph for a block with tensor and sequence parallelism under FSDP2; without inductor, the bits of the eager one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mesh = mesh_of(kind)
    eager = bfp.parallelize(make(), mesh["tp"], sequence_parallel=True)
    layer = copy.deepcopy(eager)
    layer.compile(fullgraph=True, backend=backend)
    optimizers = []
    for one in (eager, layer):
        shard(one, mesh)
        optimizers.append(bfp.AdamW(one.parameters(), lr=1e-3))
    for step in range(steps):
        x = values((2, 128, 64), 2 * step + batch_of(mesh))
        x = part(x, 1, mesh["tp"].get_local_rank())
        outputs = []
        for one, optimizer in zip((eager, layer), optimizers, strict=True):
            y = one(x)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach())
        if backend == "aot_eager":
            assert torch.equal(*outputs), f"step {step}: off by {(outputs[0] - outputs[1]).abs().max()}"
        elif step == 0:
            assert (outputs[0] - outputs[1]).norm() <= 1e-2 * outputs[0].norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def inductor(rank):
    compiled(rank, column, "tp", "inductor", 2)


@pytest.mark.parametrize("function", ["operands", "meta", "compiled"])
def test_four_processes(function):
    gloo.run(4, __file__, function)


def test_inductor_on_two_processes():
    gloo.run(2, __file__, "inductor")


RECIPES = ("nvfp4", "fp8_delayed", "mxfp8")
MICROBATCHES = 4


def model_of(recipe):
    torch.manual_seed(0)
    layers = [bfp.Linear(32, 32, recipe=recipe) if i % 2 == 0 else nn.GELU() for i in range(4)]
    for layer in layers:
        for name, buffer in layer.named_buffers():
            if name == "rng_key":
                buffer.copy_(torch.tensor([3, 4]))
    return nn.Sequential(*layers)


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8 * MICROBATCHES, 32, generator=generator) for _ in range(2)]


def loss(y, target):
    return (y - target).square().mean()


def by_schedules(rank):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    for recipe in RECIPES:
        whole = model_of(recipe)
        for schedule in (ScheduleGPipe, Schedule1F1B):
            for compiled in (False, True):
                one = copy.deepcopy(whole)
                stage = copy.deepcopy(whole)[2 * rank : 2 * rank + 2]
                if compiled:
                    stage[0].compile(backend="eager")
                x, target = batch()
                for rows, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                    loss(one(rows), wanted).backward()
                pipeline = schedule(PipelineStage(stage, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=loss)
                pipeline.step(x) if rank == 0 else pipeline.step(target=target)
                own = one[2 * rank : 2 * rank + 2]
                assert_equal(stage.buffers(), own.buffers(), (recipe, schedule, compiled))
                for a, b in zip(stage.parameters(), own.parameters(), strict=True):
                    assert torch.equal(a.grad, b.grad / MICROBATCHES), (recipe, schedule, compiled)


def without_bubbles(rank):
    """Each backward runs twice: for the inputs of a stage, and later for its weights."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

    for recipe in RECIPES:
        whole = nn.Sequential(*model_of(recipe), *model_of(recipe))
        for schedule, numbers in ((ScheduleInterleavedZeroBubble, (rank, rank + 2)), (ScheduleZBVZeroBubble, (rank, 3 - rank))):
            one, (x, target) = copy.deepcopy(whole), batch()
            for rows, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                loss(one(rows), wanted).backward()
            mine = {number: copy.deepcopy(whole)[2 * number : 2 * number + 2] for number in numbers}
            stages = [PipelineStage(mine[number], number, 4, torch.device("cpu")) for number in numbers]
            pipeline = schedule(stages, MICROBATCHES, loss_fn=loss)
            pipeline.step(*([x] if 0 in numbers else []), **({"target": target} if 3 in numbers else {}))
            for number, stage in mine.items():
                own = one[2 * number : 2 * number + 2]
                assert_equal(stage.buffers(), own.buffers(), (recipe, schedule, number))
                for (name, a), b in zip(stage.named_parameters(), own.parameters(), strict=True):
                    assert torch.equal(a.grad, b.grad / MICROBATCHES), (recipe, schedule, number, name)


OLD = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11's schedules without bubbles take no autograd.Function")


@pytest.mark.parametrize("schedules", ["by_schedules", pytest.param("without_bubbles", marks=OLD)])
def test_pipelines_are_one_process(schedules):
    gloo.run(2, __file__, schedules)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4_rotated"])
def test_backwards_of_one_forward_draw_the_same_bits(recipe):
    layer = model_of(recipe)[0]
    x = batch()[0].requires_grad_()
    step = layer.step.clone()
    y = layer(x).square().sum()
    first, second = (torch.autograd.grad(y, [x, *layer.parameters()], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert layer.step == step + 1
    (d_weight,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    assert not torch.equal(d_weight, first[1])

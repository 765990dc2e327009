"""Pipelines: every microbatch draws the bits, and records the amaxes, that one process would."""

import copy

import gloo
import pytest
import torch
from torch import nn

import blockfp.torch as bfp

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
                for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                    loss(one(part), wanted).backward()
                pipeline = schedule(PipelineStage(stage, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=loss)
                pipeline.step(x) if rank == 0 else pipeline.step(target=target)
                own = one[2 * rank : 2 * rank + 2]
                for (name, a), b in zip(stage.named_buffers(), own.buffers(), strict=True):
                    assert torch.equal(a, b), (recipe, schedule, compiled, name)
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
            for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
                loss(one(part), wanted).backward()
            mine = {number: copy.deepcopy(whole)[2 * number : 2 * number + 2] for number in numbers}
            stages = [PipelineStage(mine[number], number, 4, torch.device("cpu")) for number in numbers]
            pipeline = schedule(stages, MICROBATCHES, loss_fn=loss)
            pipeline.step(*([x] if 0 in numbers else []), **({"target": target} if 3 in numbers else {}))
            for number, stage in mine.items():
                own = one[2 * number : 2 * number + 2]
                for (name, a), b in zip(stage.named_buffers(), own.buffers(), strict=True):
                    assert torch.equal(a, b), (recipe, schedule, number, name)
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

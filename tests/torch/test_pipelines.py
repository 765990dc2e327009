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


@pytest.mark.parametrize("ranks", [2])
def test_pipelines_are_one_process(ranks):
    gloo.run(ranks, __file__, "by_schedules")

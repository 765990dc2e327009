"""Experts that ranks share, over NCCL, on as many GPUs as there are (one: a group of one): the bits of one process."""

import gloo
import torch
import torch.distributed as dist
import torch.nn.functional as F

import blockfp.torch as bfp
from blockfp import recipes

EXPERTS, IN, HIDDEN, TOKENS = 8, 512, 256, 300


def made(recipe, ranks):
    """The same on every rank: weights of all experts, and each rank's tokens, their experts and weights, a gradient."""
    random = torch.Generator().manual_seed(0)
    format = recipes.parse(recipe).weight.format
    up = torch.randn(EXPERTS, 2 * HIDDEN, IN, generator=random, dtype=torch.bfloat16) / 16
    down = torch.randn(EXPERTS, IN, HIDDEN, generator=random, dtype=torch.bfloat16) / 16
    each = []
    for rank in range(ranks):
        tokens = TOKENS + 31 * rank
        x, gradient = (torch.randn(tokens, IN, generator=random, dtype=torch.bfloat16) for _ in range(2))
        # Expert 5 gets nothing.
        experts = torch.rand(tokens, EXPERTS - 1, generator=random).argsort(1)[:, :2]
        each.append([x, experts + 2 * (experts == 5), torch.rand(tokens, 2, generator=random), gradient])
    return [bfp.quantize(weight.cuda(), format) for weight in (up, down)], [[one.cuda() for one in rank] for rank in each]


def run(weights, tokens, recipe, group, key=3):
    up, down = (weight.detach().requires_grad_() for weight in weights)
    x, experts, scores, gradient = tokens
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    received = bfp.dispatch(x, experts, EXPERTS, recipe=recipe, group=group, key=key)
    gate, value = received.multiply(received.tokens, up).chunk(2, 1)
    y = bfp.combine(received.multiply(F.silu(gate) * value, down), received, scores)
    y.backward(gradient)
    return y.detach(), x.grad, scores.grad, up.grad, down.grad


def bits_of_one_process(rank):
    for recipe in ("mxfp8", "fp8_current", "fp8_block"):
        compared(rank, recipe)


def compared(rank, recipe):
    ranks = dist.get_world_size()
    weights, each = made(recipe, ranks)
    alone = run(weights, [torch.cat(parts) for parts in zip(*each, strict=True)], recipe, None)
    chunk = -(-EXPERTS // ranks)
    own = [weight[rank * chunk : (rank + 1) * chunk] for weight in weights]
    first = sum(len(tokens[0]) for tokens in each[:rank])
    together = run(own, each[rank], recipe, dist.group.WORLD)
    names = ("y", "x.grad", "scores.grad", "up.grad", "down.grad")
    for name, got, whole in zip(names, together, alone, strict=True):
        begin = rank * chunk if name in ("up.grad", "down.grad") else first
        expected = whole[begin : begin + len(got)]
        assert whole.isfinite().all()
        assert torch.equal(got, expected), f"{name}: {(got != expected).float().mean()}"


def test_ranks_that_share_experts_give_the_bits_of_one_process():
    gloo.run(min(2, torch.cuda.device_count()), __file__, "bits_of_one_process", backend="nccl")


def test_rows_are_those_of_the_cpu():
    for recipe in ("mxfp8", "fp8_block", "mxfp4", "nvfp4"):
        _, each = made(recipe, 1)
        x, experts, *_ = each[0]
        own = [bfp.dispatch(one, to, EXPERTS, recipe=recipe) for one, to in ((x, experts), (x.cpu(), experts.cpu()))]
        for on_gpu, on_cpu in zip(*(one.tokens.parts for one in own), strict=True):
            assert torch.equal(on_gpu.cpu(), on_cpu)
        assert torch.equal(own[0].offs.cpu(), own[1].offs)


def test_products_of_all_experts_at_once_are_near_those_of_the_cpu():
    """bfloat16, which they are for; the codes are the same, and the order of sums is another."""
    for recipe in ("mxfp8", "fp8_current", "fp8_block", "nvfp4"):
        weights, each = made(recipe, 1)
        on_gpu = run(weights, each[0], recipe, None)
        on_cpu = run([weight.cpu() for weight in weights], [one.cpu() for one in each[0]], recipe, None)
        for name, ours, theirs in zip(("y", "x.grad", "scores.grad", "up.grad", "down.grad"), on_gpu, on_cpu, strict=True):
            error = (ours.cpu().float() - theirs.float()).norm() / theirs.float().norm()
            assert error < (0.08 if recipe == "nvfp4" else 0.02), f"{recipe}, {name}: {error}"


def test_the_host_does_not_wait_on_one_gpu(waiting_raises):
    weights, (tokens,) = made("mxfp8", 1)
    run(weights, tokens, "mxfp8", None, key=None)
    with waiting_raises():
        run(weights, tokens, "mxfp8", None, key=None)

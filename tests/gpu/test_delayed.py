"""Delayed scaling's step on a GPU: one kernel for all operands, bit for bit the definition's."""

import itertools

import pytest
import torch
from arrays import values
from blockfp.torch_backend.ops.optimizer import cuda_steps
from cuda_arrays import capture
from decoder_layer import decoder_layer
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import scaling
from blockfp.formats import E4M3, E5M2
from blockfp.recipes import Delayed

LENGTHS = (1, 2, 3, 16, 255, 256, 257, 258, 512, 513, 1024, 5000)
# Zeros, subnormals, the ends of the range, and what nobody records.
PATTERNS = (0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x40E00000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)
KINDS = tuple(
    (element, Delayed(margin=margin, algorithm=algorithm))
    for element, margin, algorithm in itertools.product((E4M3, E5M2), (-100, 0, 3, 100), ("max", "most_recent"))
)


def histories_of(length, seed):
    """Histories of one length: of any bits, of few numbers, of zeros but for one entry."""
    generator = torch.Generator().manual_seed(seed)
    yield torch.randint(0, 0x7F800000, (length,), generator=generator, dtype=torch.int32)
    yield torch.randint(0, 0x00900000, (length,), generator=generator, dtype=torch.int32)
    yield torch.randint(0x3F000000, 0x40000000, (length,), generator=generator, dtype=torch.int32)
    for place, pattern in enumerate(PATTERNS):
        history = torch.zeros(length, dtype=torch.int32)
        history[(place * 37 - 1) % length] = pattern
        yield history


def operands():
    """More than a launch takes, each with its kind, on the host: (kind, history, scale)."""
    kinds = itertools.cycle(KINDS)
    for seed in range(5):
        for length in LENGTHS:
            for place, history in enumerate(histories_of(length, seed)):
                yield next(kinds), history.view(torch.float32), torch.tensor(1.5 + place)


def assert_same_bits(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.cpu().view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("reduced", [False, True])
def test_many_operands_at_once(reduced, waiting_raises):
    kinds, histories, scales = zip(*operands(), strict=True)
    state = [x.cuda() for pair in zip(histories, scales, strict=True) for x in pair]
    numbers = [cuda_steps.numbers(*kind) for kind in kinds]
    assert len(kinds) > 512
    newest = torch.empty(len(kinds), dtype=torch.int32, device="cuda")
    for _ in range(3):
        with waiting_raises():
            assert cuda_steps.newest_amaxes(newest, state)
        assert_same_bits([newest], [torch.stack([history[0] for history in histories])])
        if reduced:
            # Of what other ranks recorded the largest counts: bits of amaxes are in their order.
            newest = torch.maximum(newest, newest.flip(0))
            first = newest.cpu().view(torch.float32).split(1)
            histories = [torch.cat([one, own[1:]]) for one, own in zip(first, histories, strict=True)]
        with waiting_raises():
            assert cuda_steps.update_scales(numbers, newest if reduced else None, state)
        moved = [
            scaling.update(history, scale, element, margin=options.margin, algorithm=options.algorithm)
            for (element, options), history, scale in zip(kinds, histories, scales, strict=True)
        ]
        histories, scales = zip(*moved, strict=True)
        assert_same_bits(state[::2], histories)
        assert_same_bits(state[1::2], scales)
        for history, own in zip(histories, state[::2], strict=True):
            history[0] = 3.0
            own[0] = 3.0


def test_state_that_lies_otherwise_is_left_alone():
    history, scale = torch.rand(6, 2, device="cuda"), torch.ones((), device="cuda")
    good = [torch.rand(6, device="cuda"), torch.ones((), device="cuda")]
    for bad in (
        [history[:, 0], scale],
        [history[0], torch.ones(2, device="cuda")],
        [history[0].double(), scale],
        [history[0].cpu(), scale],
        [torch.empty(0, device="cuda"), scale],
        [history[0], good[1]],
        [good[0], scale],
    ):
        state = [*good, *bad]
        before = [x.clone() for x in state]
        assert not cuda_steps.update_scales([(0x43E00000, False)] * 2, None, state)
        assert not cuda_steps.newest_amaxes(torch.empty(2, dtype=torch.int32, device="cuda"), state)
        assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
    with pytest.raises(ValueError, match="options must be"):
        cuda_steps.update_scales([(0x43E00000, False)], None, [*good, history[0], scale])
    with pytest.raises(ValueError, match="newest must be"):
        cuda_steps.update_scales([(0x43E00000, False)], torch.zeros(2, dtype=torch.int32, device="cuda"), good)


def model_of(device):
    torch.manual_seed(0)
    of = [recipes.fp8_delayed(), recipes.fp8_delayed(history=3, margin=1), recipes.fp8_delayed(algorithm="most_recent")]
    return torch.nn.Sequential(*(bfp.Linear(64, 64, recipe=recipe, dtype=torch.bfloat16) for recipe in of)).to(device)


def record(model, step):
    """Amaxes of a step, the same on any device."""
    for seed, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith("history"):
            buffer[0] = float(values((1,), 100 * step + seed).abs() * 10.0**seed)


def test_an_optimizer_updates_scales_as_on_a_cpu(waiting_raises):
    models = [model_of(device) for device in ("cuda", "cpu")]
    optimizers = [bfp.AdamW(model.parameters(), lr=1e-3) for model in models]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(4, 64, dtype=torch.bfloat16, device=model[0].input_scale.device)).sum().backward()
            record(model, step)
            if step and model is models[0]:
                with waiting_raises():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(models[0].buffers(), models[1].buffers())


def test_a_graph_that_is_captured_moves_the_same_state():
    on_gpu, on_cpu = model_of("cuda"), model_of("cpu")
    bfp.update_scales(on_gpu)
    bfp.update_scales(on_cpu)
    graph, _ = capture(lambda: bfp.update_scales(on_gpu))
    for step in range(4):
        for model in (on_gpu, on_cpu):
            record(model, step)
        graph.replay()
        bfp.update_scales(on_cpu)
        assert_same_bits(on_gpu.buffers(), on_cpu.buffers())


def test_layers_of_one_input_share_its_casts():
    """Bits are those of layers of which nothing is known, and after the first step nothing waits for the GPU."""
    found = []
    for shares in (True, False):
        torch.manual_seed(0)
        layer = decoder_layer("fp8_delayed", shares=shares, device="cuda")
        optimizer = bfp.AdamW(layer.parameters(), lr=1e-2)
        for step in range(4):
            for batch in range(2):
                x = values((2, 64, 128), 10 * step + batch, torch.bfloat16, scale=2.0**step).cuda().requires_grad_()
                waits = torch.cuda.get_sync_debug_mode()
                # Scales are looked for until each has been found; the layers are compared once.
                torch.cuda.set_sync_debug_mode("error" if shares and step > 2 else waits)
                try:
                    y = layer(x)
                finally:
                    torch.cuda.set_sync_debug_mode(waits)
                y.float().square().mean().backward()
                found.append([y.detach(), x.grad])
            optimizer.step()
            optimizer.zero_grad()
        found.append(layer.state_dict())
        if shares:
            joint = layer.self_attn.q_proj.joint
            assert joint is not None
            assert joint is layer.self_attn.v_proj.joint
            assert joint.unchanged()
    half = len(found) // 2
    assert_equal(found[:half], found[half:])


def test_scales_that_differ_unnoticed_raise():
    """A write through `.data` changes no version; the comparison of a later step finds it without waiting."""
    layer = decoder_layer("fp8_delayed", device="cuda")
    optimizer = bfp.AdamW(layer.parameters(), lr=1e-2)

    def steps(count):
        for _ in range(count):
            layer(values((2, 64, 128), 0, torch.bfloat16).cuda()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

    steps(3)
    layer.self_attn.k_proj.input_amax_history.data.fill_(2.0**20)
    with pytest.raises(RuntimeError, match="have different scales of it"):
        steps(3)
    assert layer.self_attn.q_proj.joint is None
    assert layer.mlp.gate_proj.joint is not None
    steps(1)

"""accelerate trains under FSDP2 as FSDP2 alone does. It takes FSDP on accelerators only, so its state says there is one."""

import os
import warnings

import gloo
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.head = nn.Linear(48, 40)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def plain_net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def net(recipe, weights, dtype=torch.float32):
    return bfp.convert(plain_net(dtype), recipe, weights=weights)


def reset_accelerate():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(rank, **options):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    reset_accelerate()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    mixed = options.pop("mixed_precision", "no")
    made = Accelerator(cpu=True, mixed_precision=mixed)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    assert made.is_fsdp2
    return made


def optimizer_of(model, weights):
    return (bfp.AdamW if weights == "quantized" else torch.optim.AdamW)(model.parameters(), lr=1e-2)


def train(model, optimizer, rank, backward=lambda loss: loss.backward()):
    losses = []
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        loss = model(x).float().square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(param):
    local = param.to_local()
    if isinstance(local, bfp.QuantizedTensor):
        return local.detach().dequantize().clone()
    return local.detach().clone()


@gloo.on(2)
def test_fsdp2_steps_every_parameter_as_without_it(rank):
    for recipe, weights in (("mxfp8", "quantized"), ("mxfp8", "high_precision"), ("nvfp4", "quantized")):
        plain = net(recipe, weights)
        fully_shard(plain)
        expected = train(plain, optimizer_of(plain, weights), rank)
        ours = accelerator(rank, reshard_after_forward=True, cpu_ram_efficient_loading=False)
        model = net(recipe, weights)
        model, optimizer = ours.prepare(model, optimizer_of(model, weights))
        params = list(model.parameters())
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == list(map(id, params))
        before = list(map(values, params))
        assert train(model, optimizer, rank, ours.backward) == expected, (recipe, weights)
        moved = [not torch.equal(values(p), old) for p, old in zip(params, before, strict=True)]
        assert all(moved), (recipe, weights, moved)
        for a, b in zip(params, plain.parameters(), strict=True):
            assert torch.equal(values(a), values(b))


@gloo.on(2)
def test_convert_behind_prepare(rank):
    """One process: the optimizer that accelerate wraps trains what `convert` makes of its model. Two: DDP holds the weights."""
    from accelerate import Accelerator

    for alone in (True, False):
        for weights in ("quantized", "high_precision"):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            if alone:
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                    os.environ.pop(name)
            reset_accelerate()
            ours = Accelerator(cpu=True)
            plain = plain_net()
            model, optimizer = ours.prepare(plain, optimizer_of(plain, weights))
            if not alone:
                with pytest.raises(ValueError, match=r"held by a DistributedDataParallel.*convert the model first"):
                    bfp.convert(model, "mxfp8", weights=weights)
                continue
            bfp.convert(model, "mxfp8", weights=weights)
            expected = net("mxfp8", weights)
            assert train(model, optimizer, 0, ours.backward) == train(expected, optimizer_of(expected, weights), 0)


@gloo.on(2)
def test_only_rank_0_has_read_the_model(rank):
    for recipe, weights in (("mxfp8", "quantized"), ("fp8_block", "quantized"), ("mxfp8", "high_precision")):
        whole = net(recipe, weights)
        fully_shard(whole)
        ours = accelerator(rank, reshard_after_forward=True, cpu_ram_efficient_loading=True)
        model = net(recipe, weights)
        if rank != 0:
            # Only rank 0 has read the model.
            with torch.no_grad():
                for p in model.parameters():
                    (p.codes if isinstance(p, bfp.QuantizedTensor) else p).zero_()
        model, optimizer = ours.prepare(model, optimizer_of(model, weights))
        for a, b in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(values(a), values(b)), (recipe, weights)
        before = list(map(values, model.parameters()))
        losses = train(model, optimizer, rank, ours.backward)
        assert losses[-1] < losses[0]
        assert all(not torch.equal(values(p), old) for p, old in zip(model.parameters(), before, strict=True))


@gloo.on(2)
def test_mixed_precision(rank):
    """With mixed precision accelerate casts every parameter's `.data` to float32: codes stay, their nominal dtype changes."""
    ours = accelerator(rank, reshard_after_forward=True, cpu_ram_efficient_loading=False, mixed_precision="bf16")
    model = net("mxfp8", "quantized", torch.bfloat16)
    model, optimizer = ours.prepare(model, optimizer_of(model, "quantized"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = list(map(values, model.parameters()))
    losses = train(model, optimizer, rank, ours.backward)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(values(p), old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_tied_weights_are_found_by_storage(weights):
    from accelerate.utils.modeling import find_tied_parameters, id_tensor_storage

    model = net("nvfp4", weights)
    model.blocks[2].weight = model.blocks[0].weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's, of its own
        assert find_tied_parameters(model) == [["blocks.0.weight", "blocks.2.weight"]]
    storages = [id_tensor_storage(block.weight) for block in model.blocks]
    assert storages[0] == storages[2] != storages[1]

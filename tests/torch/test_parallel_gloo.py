"""Tensor parallelism on four real processes: operands of one recipe of each kind, meta initialization, compiled blocks."""

import copy

import gloo
import pytest
import torch
import torch._dynamo.utils
from blockfp.torch_backend.custom_ops.products import multiply
from blockfp.torch_backend.linear import parallel_layer
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
        x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(2 * step + batch_of(mesh)))
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

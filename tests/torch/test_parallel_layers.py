"""Layers that `parallelize` cuts, alone and under FSDP2 and HSDP: the same bits, in every operand, as in one process."""

import copy
import threading

import pytest
import threaded
import torch
from blockfp.torch_backend.linear import check_recipe
from parallel_operands import (
    ALL,
    KEY,
    SHAPES,
    STYLE_NAMES,
    STYLES,
    assert_shared,
    one_process,
    part,
    record_products,
    tensors,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp

BY_STYLE = pytest.mark.parametrize(("style", "sequence"), STYLES, ids=STYLE_NAMES)
MESHES = {"tp": (2,), "fsdp x tp": (2, 2), "hsdp x tp": (2, 2, 2)}
NAMES = ("replicate", "shard", "tp")


@pytest.fixture
def seen(monkeypatch):
    return record_products(monkeypatch)


def mesh_of(kind):
    shape = MESHES[kind]
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def shard(module, mesh):
    """Over the axes that are not tensor parallelism's."""
    if mesh.ndim > 1:
        fully_shard(module, mesh=mesh[mesh.mesh_dim_names[:-1]] if mesh.ndim > 2 else mesh["shard"])
    return module


def batch_of(mesh):
    """This rank's number on the data-parallel axes."""
    return mesh.get_rank() // mesh["tp"].size()


def linear(shape, recipe, weights="quantized"):
    """A layer with the weight and the state of `parallel_operands`."""
    _, w, b, _ = tensors(shape)
    layer = bfp.Linear(w.shape[1], w.shape[0], recipe=recipe, weights=weights)
    layer.load_state_dict({"weight": w, "bias": b}, strict=False)
    for operand in ("input", "gradient"):
        if layer.checked.delayed is not None:
            getattr(layer, f"{operand}_scale").fill_(3)
    if layer.rng_key is not None:
        layer.rng_key.copy_(torch.tensor(KEY))
        layer.step.fill_(7)
    return layer


def on_rank(rank, layer, kind, style, sequence, shape):
    """Results of one rank, the thread that it ran on, and its number among the ranks and the batches."""
    mesh = mesh_of(kind)
    layer = copy.deepcopy(layer)
    bfp.parallelize(layer, mesh["tp"], style, sequence_parallel=sequence)
    shard(layer, mesh)
    tp, batch = mesh["tp"].get_local_rank(), batch_of(mesh)
    x, _, _, g = tensors(shape, batch)
    tokens = 0 if sequence else None
    x = part(x, tokens if style == "column" else 1, tp).requires_grad_()
    y = layer(x)
    y.backward(part(g, 1 if style == "column" else tokens, tp))
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad, threading.get_ident(), tp, batch


def check(layer, recipe, kind, style, sequence, shape, seen):
    ranks = torch.Size(MESHES[kind]).numel()
    references = [one_process(shape, recipe, seen, batch) for batch in range(ranks // 2)]
    world = threaded.run(ranks, on_rank, layer, kind, style, sequence, shape)
    for y, dx, _, _, thread, tp, batch in world:
        results, products, _ = references[batch]
        assert_shared((y, dx, None, None), seen[thread], results, products, style, sequence, tp)
    return references, world


@pytest.mark.filterwarnings("ignore:all-gather of the")
@BY_STYLE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_under_fsdp2_every_operand_is_that_of_one_process(name, shape, style, sequence, seen):
    recipe = check_recipe(ALL[name])
    check(linear(shape, ALL[name]), recipe, "fsdp x tp", style, sequence, shape, seen)

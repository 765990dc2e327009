"""Layers that `parallelize` cuts, alone and under FSDP2 and HSDP: the same bits, in every operand, as in one process."""

import copy

import pytest
import threaded
import torch
from parallel_operands import (
    ALL,
    SHAPES,
    SQUARE,
    STYLE_NAMES,
    STYLES,
    batch_of,
    check_layer,
    linear,
    mesh_of,
    part,
    record_products,
    shard,
    tensors,
)

import blockfp.torch as bfp

BY_STYLE = pytest.mark.parametrize(("style", "sequence"), STYLES, ids=STYLE_NAMES)


@pytest.fixture
def seen(monkeypatch):
    return record_products(monkeypatch)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@BY_STYLE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", *SQUARE])
def test_recipes_under_fsdp2(name, shape, style, sequence, seen):
    """Runs recipes that say more than formats; formats alone are in test_parallel_formats.py."""
    check_layer(linear(shape, ALL[name]), "fsdp x tp", style, sequence, shape, seen)


@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_recipes_under_hsdp(name, style, seen):
    check_layer(linear(SHAPES["aligned"], name), "hsdp x tp", style, True, SHAPES["aligned"], seen)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("kind", ["tp", "fsdp x tp"])
@BY_STYLE
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp6", "nvfp4", "nvfp4_4over6"])
def test_weights_in_high_precision_are_quantized_as_the_whole(name, style, sequence, kind, seen):
    """On the shard before each gather, or, where nothing gathers them, at use."""
    shape = SHAPES["unaligned" if style == "row" else "aligned"]
    layer = linear(shape, name, weights="high_precision")
    check_layer(layer, kind, style, sequence, shape, seen)


def test_delayed_scaling_moves_on_alike_on_all_ranks():
    """The new scales are those of the largest amax of all ranks: of tensors that are cut, and of the batches."""
    layer = linear(SHAPES["aligned"], "fp8_delayed")

    def run(rank):
        mesh, mine = mesh_of("fsdp x tp"), copy.deepcopy(layer)
        shard(bfp.parallelize(mine, mesh["tp"], "row", sequence_parallel=True), mesh)
        x, _, _, g = tensors(SHAPES["aligned"], batch_of(mesh))
        tp = mesh["tp"].get_local_rank()
        mine(part(x, 1, tp).requires_grad_()).backward(part(g, 0, tp))
        bfp.update_scales(mine)
        return mine.input_scale.item(), mine.gradient_scale.item()

    scales = threaded.run(4, run)
    assert len(set(scales)) == 1
    batches = [tensors(SHAPES["aligned"], batch) for batch in (0, 1)]
    # A tensor by a tensor: torch divides a number by a tensor in another way.
    assert scales[0][0] == (torch.tensor(448.0) / max(x.abs().max() for x, *_ in batches)).item()
    assert scales[0][1] == (torch.tensor(57344.0) / max(g.abs().max() for *_, g in batches)).item()


def wide(**options):
    torch.manual_seed(0)
    return bfp.TransformerLayer(64, 96, 4, recipe="mxfp8", **options)


def composed(rank, layer, sequence, mesh_kind="fsdp x tp"):
    """Output, input gradient and parameter gradients of a layer over [batch, tokens, features], whole."""
    mesh, layer = mesh_of(mesh_kind), copy.deepcopy(layer)
    bfp.parallelize(layer, mesh["tp"], sequence_parallel=sequence)
    shard(layer, mesh)
    tp = mesh["tp"].get_local_rank()
    x = part(inputs(batch_of(mesh)), 1 if sequence else None, tp).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad, {name: p.grad.full_tensor() for name, p in layer.named_parameters()}, batch_of(mesh), tp


def inputs(batch):
    return torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(batch))


def near(a, b, tolerance):
    return (a - b).norm() <= tolerance * b.norm()


@pytest.mark.filterwarnings("ignore:While redistributing")
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sequence"])
@pytest.mark.parametrize("options", [{}, {"bias": False, "norm": "rms_norm", "activation": "swiglu"}], ids=["gelu", "swiglu"])
def test_a_transformer_layer(options, sequence):
    """Behind the first product an activation that differs in its last bit may get another code, which the tolerance allows."""
    layer, grads, results = wide(**options), [], []
    for batch in (0, 1):
        whole = copy.deepcopy(layer)
        x = inputs(batch).requires_grad_()
        y = whole(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
        grads.append([p.grad for p in whole.parameters()])
    for y, dx, gradients, batch, tp in threaded.run(4, composed, layer, sequence):
        for got, expected in zip((y, dx), results[batch], strict=True):
            assert near(got, part(expected, 1 if sequence else None, tp), 2e-3)
        for i, (name, gradient) in enumerate(gradients.items()):
            # FSDP's is the mean over the batches.
            assert near(gradient, (grads[0][i] + grads[1][i]) / 2, 1e-2), name

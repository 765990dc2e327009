"""Layers that `parallelize` cuts, of every format, compiled, under FSDP2 and HSDP: the same bits as in one process."""

import copy
from collections import Counter

import pytest
import threaded
import torch
from arrays import values
from functorch.compile import make_boxed_func
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
from sharded import ALIKE, GEOMETRIES
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import Cast

BY_STYLE = pytest.mark.parametrize(("style", "sequence"), STYLES, ids=STYLE_NAMES)


@pytest.fixture
def seen(monkeypatch):
    return record_products(monkeypatch)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@BY_STYLE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", *SQUARE])
def test_recipes_under_fsdp2(name, shape, style, sequence, seen):
    """Runs recipes that say more than formats; formats alone follow below."""
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
    return values((2, 64, 64), batch)


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


@pytest.mark.parametrize("tokens", [128, 100], ids=["as codes", "as values"])
@pytest.mark.filterwarnings("ignore:all-gather of the")
def test_the_input_is_gathered_again_in_the_backward(tokens):
    """A compiler that gathered it in the forward would keep the gathered one, of all tokens, on every rank."""
    gathers = []

    def count(graph, inputs):
        names = Counter(str(node.target) for node in graph.graph.nodes)
        gathers.append(names["_c10d_functional.all_gather_into_tensor_coalesced.default"])
        return make_boxed_func(graph.forward)

    def run(rank):
        layer = bfp.Linear(64, 64, recipe="mxfp8")
        bfp.parallelize(layer, init_device_mesh("cpu", (1,)), "column", sequence_parallel=True)
        # As inductor divides a graph into forward and backward.
        backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        layer.compile(fullgraph=True, backend=backend)
        layer(torch.randn(2, tokens, 64)).sum().backward()

    threaded.run(1, run)
    assert gathers == [1, 1]


@threaded.on(1)
def test_a_grouped_layer_with_a_bias(rank):
    layer = bfp.parallelize(bfp.GroupedLinear(2, 32, 32, recipe="mxfp8"), init_device_mesh("cpu", (1,)), "row")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(5, 32)
    assert torch.equal(compiled(x, [2, 3]), layer(x, [2, 3]))


@pytest.mark.parametrize("style", ["column", "row"])
@threaded.on(1)
def test_one_graph_for_all_lengths_where_all_ranks_have_all_tokens(rank, style):
    layer = bfp.parallelize(bfp.Linear(32, 32, recipe="nvfp4"), init_device_mesh("cpu", (1,)), style)
    backend = CompileCounter()
    layer.compile(fullgraph=True, backend=backend, dynamic=True)
    for tokens in (16, 17, 64):
        layer(torch.randn(2, tokens, 32, requires_grad=True)).sum().backward()
    assert backend.frame_count == 1


# Kind of mesh, sequence parallelism. All formats run where weights are gathered, too: aligned in one style, and unaligned in
# the other, with those that lie alike taking turns. Without FSDP one of those runs: nothing there goes by what a format rounds
# to. Replicas are a mean of gradients more, which doesn't go by how a format lies either: one with each kind of amax runs.
MESHES = {"tp": ("tp", False), "tp+sp": ("tp", True), "fsdp x tp": ("fsdp x tp", True), "hsdp x tp": ("hsdp x tp", True)}
REPLICATED = ("fp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4_16x16")


def formats_on(kind, aligned, style):
    """Of formats that lie alike, every other one where weights are gathered, and one elsewhere; few of replicas."""
    if kind == "hsdp x tp":
        return [f for f in GEOMETRIES if f.name in REPLICATED]
    if kind != "fsdp x tp":
        return GEOMETRIES
    turn = aligned + (style == "row")
    return [f for alike in ALIKE for i, f in enumerate(alike) if len(alike) == 1 or (i + turn) % 2 == 0]


def shape_of(format, aligned):
    """Tokens, in, out, no two alike: parts are whole blocks of the format, or end inside one."""
    unit = 2 * max((1, 128) if format.per_row else format.block or (16, 16))
    return (unit, 2 * unit, 3 * unit) if aligned else (40, 56, 88)


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("kind", "sequence"), MESHES.values(), ids=MESHES)
def test_every_format(kind, sequence, aligned, style, monkeypatch):
    seen = record_products(monkeypatch)
    for format in formats_on(kind, aligned, style):
        cast, shape = Cast(format), shape_of(format, aligned)
        recipe = recipes.mxfp8().replace(name=format.name, input=cast, weight=cast, gradient=cast)
        check_layer(linear(shape, recipe), kind, style, sequence, shape, seen)

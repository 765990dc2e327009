"""Layers under FSDP2: forwards, gradients and updates of the unsharded model, compiled layers, keys, meta devices, DDP."""

import copy

import gloo
import pytest
import threaded
import torch
import torch._dynamo.testing
from blockfp.torch_backend.modules import stateful_layer
from blockfp.torch_backend.quantized_tensor.sharding import local_of, region_of
from same_tensors import assert_equal
from small_model import device_mesh, inputs_for
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.recipes import RECIPES, Cast, parse

NAMES = tuple(recipes.RECIPES)


def model_of(name, device=None, weights="quantized"):
    options = {"recipe": name, "device": device, "weights": weights}
    with threaded.seeded(0):
        # 50 rows on two or four ranks: shards that are uneven and straddle blocks.
        return nn.Sequential(bfp.Linear(64, 50, **options), nn.GELU(), bfp.Linear(50, 32, **options))


def inputs(rank, seed=0):
    return torch.randn((6, 64), generator=torch.Generator().manual_seed(100 * seed + rank))


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, bfp.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gradients(rank, name, shape, weights):
    model = shard(model_of(name, weights=weights), mesh_of(shape))
    y = model(inputs(rank))
    y.sum().backward()
    return y.detach(), [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_unsharded_model(name, weights, monkeypatch):
    for shape in ((4,), (2, 2)):
        monkeypatch.undo()
        results = threaded.run(4, gradients, name, shape, weights)
        total = None
        for rank in range(4):
            model = model_of(name, weights=weights)
            monkeypatch.setattr(stateful_layer, "data_rank", lambda sharded, rank=rank: rank)
            y = model(inputs(rank))
            y.sum().backward()
            assert torch.equal(results[rank][0], y)
            grads = [p.grad for p in model.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        for rank in range(4):
            for got, want in zip(results[rank][1], total, strict=True):
                torch.testing.assert_close(got, want / 4, rtol=1e-5, atol=1e-6)


def stepped(model):
    """A model after three steps with AdamW."""
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(inputs(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        bfp.update_scales(model)
    return model


def trained(rank, name, shape):
    """Three steps with AdamW; the shard's codes, and where they lie."""
    model = stepped(shard(model_of(name), mesh_of(shape)))
    return [
        (local_of(p).codes.clone(), region_of(p).slices) for p in (layer.weight for layer in model if hasattr(layer, "weight"))
    ]


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block", "mxfp8"])
def test_training_is_that_of_the_unsharded_model(name):
    """All ranks see the same batch: gradients differ by the rounding of their mean alone, which is exact for four."""
    model = stepped(model_of(name))
    whole = [layer.weight.codes for layer in model if hasattr(layer, "weight")]
    for shards in threaded.run(4, trained, name, (4,)):
        for (codes, slices), want in zip(shards, whole, strict=True):
            assert torch.equal(codes, want[slices[0]])


def ranks_of(rank, recipe, axes, given, cut):
    """The numbers that each rank folds into its keys, on a mesh of 2 x 2 .. with `fully_shard` over the given axes of it."""
    seen = []
    model, mesh = model_of(recipe), init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
    if cut:
        bfp.parallelize(model, mesh["tp"], {"0": "column", "2": "row"})
    shard(model, mesh[given]._flatten("flattened") if given == ("dp", "cp") else mesh[given])
    model[0].register_forward_pre_hook(lambda module, _: seen.append((type(module.weight), module.state().rank)))
    model(inputs(rank))
    return seen[0]


# Ranks of tp see the same batch, whether they cut a layer or have copies of it.
KEYED = {
    (("replicas", "shards"), ("replicas", "shards")): [0, 1, 2, 3],
    (("dp", "tp"), ("dp",)): [0, 0, 1, 1],
    (("tp", "dp"), ("dp",)): [0, 1, 0, 1],
    (("pp", "dp", "tp"), ("dp",)): [0, 0, 1, 1, 0, 0, 1, 1],
    (("replicas", "tp", "shards"), ("replicas", "shards")): [0, 1, 0, 1, 2, 3, 2, 3],
    (("dp", "cp", "tp"), ("dp", "cp")): [0, 0, 1, 1, 2, 2, 3, 3],
}


@pytest.mark.parametrize(
    ("axes", "given", "cut"), [(*names, cut) for names in KEYED for cut in (False, True) if not cut or "tp" in names[0]]
)
def test_ranks_have_random_bits_of_their_own_where_their_batches_are(axes, given, cut):
    assert [rank for _, rank in threaded.run(2 ** len(axes), ranks_of, "nvfp4", axes, given, cut)] == KEYED[axes, given]


def test_what_is_gathered_plain_knows_nothing_of_a_mesh():
    recipe, axes = recipes.nvfp4().replace(weight=Cast(None)), ("replicas", "shards")
    assert threaded.run(4, ranks_of, recipe, axes, axes, False) == [(nn.Parameter, rank) for rank in range(4)]


def from_meta(rank):
    """Every rank draws what the unsharded model draws, and keeps its rows; no random key is left to chance."""
    for name, weights in (("fp8_current", "quantized"), ("nvfp4", "quantized"), ("mxfp8", "high_precision")):
        real = shard(model_of(name, weights=weights), mesh_of((2,)))
        meta = shard(model_of(name, "meta", weights), mesh_of((2,)))
        meta.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in meta:
            if isinstance(layer, bfp.Linear):
                layer.reset_parameters()
        for a, b in zip(real.parameters(), meta.parameters(), strict=True):
            initial = getattr(local_of(a), "initial", None)
            assert initial is None or torch.equal(initial, local_of(b).initial)
        with torch.no_grad():
            assert torch.equal(real(inputs(rank)), meta(inputs(rank)))


def reset(rank, sizes, rows, weights):
    with torch.device("meta"):
        layer = bfp.Linear(16, rows, recipe="mxfp8", weights=weights)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    fully_shard(bfp.parallelize(layer, mesh["tp"], "column"), mesh=mesh["dp"])
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    weight = local_of(layer.weight)
    values = weight.initial if weights == "quantized" else weight.values
    return values.clone(), local_of(layer.bias).clone(), mesh.get_coordinate()


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize(("sizes", "rows"), [((3, 2), 7), ((2, 2), 1)])
def test_reset_where_ranks_do_not_divide_the_rows(sizes, rows, weights, monkeypatch):
    """FSDP2 divides what tensor parallelism left, which isn't what torch's placements say."""
    # Ranks that are threads would draw in turns.
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda t, *_: t.copy_(torch.arange(t.numel()).view(t.shape)))
    for *parts, (dp, tp) in threaded.run(sizes[0] * sizes[1], reset, sizes, rows, weights):
        for part, whole in zip(parts, (torch.arange(rows * 16.0).view(rows, 16), torch.arange(float(rows))), strict=True):
            for ranks, rank in ((sizes[1], tp), (sizes[0], dp)):
                whole = (*whole.chunk(ranks), *[whole[:0]] * ranks)[rank]
            assert torch.equal(part, whole)


@threaded.on(2)
def test_mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(model_of("mxfp8"), mesh_of((2,)), mp_policy=policy)
    y = model(inputs(rank))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def accumulated(rank):
    model = shard(model_of("fp8_delayed"), mesh_of((2,)))
    assert isinstance(model, FSDPModule)
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        model(inputs(rank, part) * 10.0 ** (1 - part)).sum().backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    bfp.update_scales(model)
    return total.full_tensor(), model[0].input_amax_history[-1].clone()


def test_gradient_accumulation_and_clipping():
    results = threaded.run(2, accumulated)
    largest = max(inputs(rank).abs().max() * 10 for rank in range(2))
    assert results[0][1] == results[1][1] == largest
    assert results[0][0] == results[1][0]


def compiled(rank):
    """Compiles, then shards: one graph a layer with eager bits, and a second one once delayed scaling has scales."""
    for name, steps, graphs in (("fp8_delayed", 10, 2), ("nvfp4", 2, 1)):
        torch._dynamo.reset()
        eager = model_of(name)
        counted = copy.deepcopy(eager)
        counters = []
        for layer in counted:
            if isinstance(layer, bfp.Linear):
                counters.append(torch._dynamo.testing.CompileCounterWithBackend("aot_eager"))
                layer.compile(fullgraph=True, backend=counters[-1])
        models = [shard(model, mesh_of((2,))) for model in (eager, counted)]
        optimizers = [bfp.AdamW(model.parameters(), lr=1e-2) for model in models]
        for step in range(steps):
            outputs = []
            for model, optimizer in zip(models, optimizers, strict=True):
                y = model(inputs(rank, step))
                y.sum().backward()
                outputs.append(
                    [y, *(p.grad.to_local().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
                )
                optimizer.step()
                optimizer.zero_grad()
                bfp.update_scales(model)
            assert_equal(*outputs)
        assert [counter.frame_count for counter in counters] == [graphs, graphs]


def block(rank):
    """A whole transformer block under FSDP2, compiled as one graph, and as another once there are scales."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = bfp.TransformerLayer(64, 96, 4, recipe="fp8_delayed", norm="rms_norm", activation="swiglu")
    whole = copy.deepcopy(eager)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    whole.compile(fullgraph=True, backend=counter)
    models = [fully_shard(model, mesh=mesh_of((2,))) for model in (eager, whole)]
    for step in range(3):
        outputs = []
        for model in models:
            y = model(inputs(rank, step).view(2, 3, 64))
            y.sum().backward()
            outputs.append([y, *(p.grad.to_local().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())])
            bfp.update_scales(model)
        assert_equal(*outputs)
    assert counter.frame_count == 2


@gloo.on(2)
def test_over_real_processes(rank):
    from_meta(rank)
    compiled(rank)
    block(rank)


def trained_in(rank, dtype, name):
    model = model_of(name)
    for layer in model:
        layer.bias = None
    model.to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = shard(model, mesh_of((2,)), mp_policy=policy)
    optimizer = bfp.AdamW(model.parameters(), lr=0.01)
    dtypes = set()
    for step in range(3):
        model(inputs(rank, seed=step).bfloat16()).float().square().mean().backward()
        dtypes |= {p.grad.dtype for p in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return dtypes, [local_of(p) for p in model.parameters()]


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8"])
def test_gradients_have_the_nominal_dtype_and_nothing_is_lost(name):
    wide, narrow = (threaded.run(2, trained_in, dtype, name) for dtype in (torch.float32, torch.bfloat16))
    for (dtypes, params), (narrow_dtypes, narrow_params) in zip(wide, narrow, strict=True):
        assert (dtypes, narrow_dtypes) == ({torch.float32}, {torch.bfloat16})
        for a, b in zip(params, narrow_params, strict=True):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)


def build(recipe, weights):
    return nn.Sequential(
        bfp.Linear(72, 50, recipe=recipe, weights=weights), nn.GELU(), bfp.Linear(50, 37, recipe=recipe, weights=weights)
    )


def step(model, rank):
    out = model(inputs_for(rank, 72, rows=40).view(4, 10, 72))
    out.square().mean().backward()
    return out.detach()


def sharded(rank, recipe, weights, values, expected):
    with torch.device("meta"):
        model = build(recipe, weights)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=device_mesh((4,)))
    fully_shard(model, mesh=device_mesh((4,)))
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(values), options=options)
    assert torch.equal(step(model, rank), expected[rank])
    for layer in (model[0], model[2]):
        assert type(local_of(layer.weight)) is not torch.Tensor
    return [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_as_without_sharding(recipe, weights):
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(p.shape, generator=generator) / 4 for name, p in build(recipe, weights).named_parameters()}
    expected, total = [], None
    for rank in range(4):
        whole = build(recipe, weights)
        whole.load_state_dict(values, strict=False)
        expected.append(step(whole, rank))
        gradients = [param.grad / 4 for param in whole.parameters()]
        total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
    ranks = threaded.run(4, sharded, recipe, weights, values, expected)
    if not parse(recipe).gradient.stochastic:
        # Others round gradients stochastically, each data-parallel rank with bits of its own.
        for got, want in zip(ranks[0], total, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())

"""The optimizers under FSDP2: with equal gradients, no mesh changes a bit of a weight, a master, or a moment."""

from contextlib import nullcontext

import pytest
import threaded
import torch
import two_pass_kernels
from arrays import tensors_of
from blockfp.torch_backend.quantized_tensor import sharding
from held_formats import FORMATS
from same_tensors import assert_equal
from sharded import GEOMETRIES
from small_model import Side, assert_gathered, device_mesh, inputs_for, quantized, shapes_for, shard, weights_for
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import blockfp.torch as bfp
from blockfp.formats import Format
from blockfp.kernels import native, switch
from blockfp.kernels.step_table import one_pass, two_passes

MESHES = {"fsdp4": (4,), "hsdp2x2": (2, 2)}
FAMILIES = ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp8_e4m3_32x32", "mxfp4_e2m1", "nvfp4_16x16")
STEPS = 3
PLAIN = ("vector", "matrix", "row", "experts", "narrow.weight")


class Model(Side):
    """Quantized weights beside plain ones: a vector, matrices, a stack of matrices, and a 16-bit matrix."""

    def __init__(self, weights):
        super().__init__(weights)
        generator = torch.Generator().manual_seed(5)
        self.vector = nn.Parameter(torch.randn(7, generator=generator))
        self.matrix = nn.Parameter(torch.randn(6, 33, generator=generator))
        self.row = nn.Parameter(torch.randn(1, 50, generator=generator))
        self.experts = nn.Parameter(torch.randn(5, 12, 40, generator=generator))
        self.cast = nn.Parameter(bfp.CastWeight.from_values(torch.randn(10, 64, generator=generator), "mxfp8_e4m3_32x32"))
        self.narrow = nn.Linear(20, 9, bias=False, dtype=torch.bfloat16)
        self.narrow.weight.data.copy_(torch.randn(9, 20, generator=generator))


def shard_all(model, mesh):
    """FSDP2 wants one dtype a group."""
    fully_shard(model.narrow, mesh=mesh)
    shard(model, mesh)


def whole_gradients(model, step):
    """Gradients that are the same for every mesh, in the parameters' order."""
    return [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i)).to(p.dtype)
        for i, p in enumerate(model.parameters())
    ]


def give_gradients(model, step):
    for p, whole in zip(model.parameters(), whole_gradients(model, step), strict=True):
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        else:
            p.grad = whole


def with_initial(weights, format):
    """Weights quantized, which remember what they were."""
    quantities = quantized(weights, format)
    for q, weight in zip(quantities, weights, strict=True):
        q.initial = weight.clone()
    return quantities


def make_optimizer(params, options):
    options = dict(options)
    return options.pop("make", bfp.AdamW)(params, **options)


def stepped(model, options):
    """The optimizer of a model after the steps."""
    optimizer = make_optimizer(model.parameters(), options)
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.step()
    return optimizer


def run_whole(weights, format, options):
    """The unsharded model after the steps, and the state dict of its optimizer."""
    model = Model(with_initial(weights, format))
    return model, stepped(model, options)


def whole_results(model):
    """The unsharded model's quantized weights, and its other parameters by name."""
    plain = {name: model.get_parameter(name).detach() for name in PLAIN}
    return [layer.weight.detach() for layer in model.layers], plain


def assert_same_state(state, expected):
    """A sharded state dict's values, gathered, against a whole one's."""
    for i, values in expected.items():
        assert state[i].keys() == values.keys()
        for name, want in values.items():
            got = state[i][name]
            got = got.full_tensor() if isinstance(got, DTensor) else got
            assert torch.equal(got, want), (i, name)


def sharded(rank, mesh_shape, weights, format, options, expected, expected_plain, expected_state):
    model = Model(with_initial(weights, format))
    shard_all(model, device_mesh(mesh_shape))
    optimizer = stepped(model, options)
    assert all(sharding.local_of(layer.weight).initial is None for layer in model.layers)
    assert_same_state(optimizer.state_dict()["state"], expected_state)
    model(inputs_for(rank, 300)).backward()
    for layer, weight in zip(model.layers, expected, strict=True):
        assert_gathered(layer, weight)
    for name, want in expected_plain.items():
        assert torch.equal(model.get_parameter(name).full_tensor(), want)


@pytest.mark.parametrize(
    ("format", "mesh"), [*((format, "fsdp4") for format in FORMATS), *((format, "hsdp2x2") for format in GEOMETRIES)], ids=str
)
def test_gathered_weights_are_the_masters_quantization(format, mesh):
    """Aligned, uneven, straddling and empty shards (`shapes_for`) after three steps."""
    shapes = shapes_for(format, MESHES[mesh][-1])
    weights, options = weights_for(shapes), {"lr": 0.1}
    model, optimizer = run_whole(weights, format, options)
    state = optimizer.state_dict()["state"]
    for layer in model.layers:
        expected = bfp.quantize(optimizer.state[layer.weight]["master"], format)
        assert_equal(layer.weight, expected)
    expected = whole_results(model)
    threaded.run(torch.Size(MESHES[mesh]).numel(), sharded, MESHES[mesh], weights, format, options, *expected, state)


@pytest.mark.skipif(not native.available(), reason=native.status())
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("format", [format for format in FORMATS if not one_pass(format)], ids=str)
def test_two_passes_of_a_gpu_give_the_masters_quantization(format, mesh, monkeypatch):
    """Blocks that straddle ranks are quantized as on a CPU, on every rank."""
    weights, options = weights_for(shapes_for(format, MESHES[mesh][-1])), {"lr": 0.1}
    model, optimizer = run_whole(weights, format, options)
    expected = (*whole_results(model), optimizer.state_dict()["state"])
    called = two_pass_kernels.install(monkeypatch).calls
    threaded.run(4, sharded, MESHES[mesh], weights, format, options, *expected)
    assert any(name == "adamw_codes" for name, _ in called) == two_passes(format)


OPTIONS = {
    "bfloat16": {"moments": "bfloat16"},
    "fp8": {"moments": "fp8", "weight_decay": 0.1},
    "without masters": {"master": None, "moments": "fp8"},
    "capturable": {"capturable": True},
}
ROUTES = [*((name, "kernels") for name in FAMILIES), ("fp8_e4m3", "definition"), ("mxfp4_e2m1", "definition")]
MUON = {
    "Muon": {"make": bfp.Muon},
    "Muon fp8": {"make": bfp.Muon, "moments": "fp8", "adjust_lr_fn": "match_rms_adamw"},
    "Muon without masters": {
        "make": bfp.Muon,
        "master": None,
        "moments": "bfloat16",
        "capturable": True,
        "ns_dtype": "float32",
    },
}
KEPT = [(route, name) for route in ROUTES for name in OPTIONS]
KEPT += [(route, name) for route in (("mxfp8_e4m3_32x32", "kernels"), ("fp8_e4m3", "definition")) for name in MUON]


@pytest.mark.parametrize(("route", "options"), KEPT, ids=str)
def test_nothing_that_is_kept_depends_on_the_mesh(route, options):
    (name, route), options = route, {"lr": 0.1, "key": 11, **(OPTIONS | MUON)[options]}
    format = Format.parse(name)
    weights = weights_for(shapes_for(format, 4))
    meshes = MESHES if "make" in options else ("fsdp4",)
    with nullcontext() if route == "kernels" else switch.definition_only():
        model, optimizer = run_whole(weights, format, options)
        expected = *whole_results(model), optimizer.state_dict()["state"]
        for mesh in meshes:
            threaded.run(4, sharded, MESHES[mesh], weights, format, options, *expected)


def saved_and_loaded(rank, mesh_shape, weights, format, options, halfway, expected):
    """Continues on this mesh from the whole state of another."""
    model = Model(quantized(weights, format))
    whole_model, whole_state = halfway
    for p, q in zip(model.parameters(), whole_model.parameters(), strict=True):
        p.data.copy_(q.data)
    shard_all(model, device_mesh(mesh_shape))
    optimizer = make_optimizer(model.parameters(), options)
    # As torch's distributed checkpoints: an empty step makes the state, which is then loaded into.
    before = [[part.clone() for part in tensors_of(sharding.local_of(layer.weight))] for layer in model.layers]
    get_optimizer_state_dict(model, optimizer)
    for layer, old in zip(model.layers, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(sharding.local_of(layer.weight)), old, strict=True))
    optimizer.load_state_dict(whole_state)
    for step in range(1, STEPS):
        give_gradients(model, step)
        optimizer.step()
    assert_same_state(optimizer.state_dict()["state"], expected)


@pytest.mark.parametrize("make", [bfp.AdamW, bfp.Muon])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
def test_training_goes_on_bit_for_bit_on_another_mesh(moments, make):
    format = Format.parse("mxfp8_e4m3_32x32")
    weights, options = weights_for(shapes_for(format, 4)), {"lr": 0.1, "moments": moments, "key": 2, "make": make}
    model = Model(with_initial(weights, format))
    optimizer = make_optimizer(model.parameters(), options)
    give_gradients(model, 0)
    optimizer.step()
    halfway = (Model(quantized(weights, format)), optimizer.state_dict())
    for p, q in zip(halfway[0].parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    halfway[1]["state"] = {i: {n: x.clone() for n, x in s.items()} for i, s in halfway[1]["state"].items()}
    for step in range(1, STEPS):
        give_gradients(model, step)
        optimizer.step()
    expected = optimizer.state_dict()["state"]
    for mesh_shape in ((4,), (2, 2), (1,)):
        ranks = torch.Size(mesh_shape).numel()
        threaded.run(ranks, saved_and_loaded, mesh_shape, weights, format, options, halfway, expected)


def distributed_state(rank, weights, format, options, expected):
    """torch's own functions for an optimizer's distributed state, there and back."""
    model = Model(with_initial(weights, format))
    shard_all(model, device_mesh((4,)))
    optimizer = stepped(model, options)
    state = get_optimizer_state_dict(model, optimizer)
    other = make_optimizer(model.parameters(), options)
    set_optimizer_state_dict(model, other, state)
    assert_same_state(other.state_dict()["state"], expected)


@pytest.mark.parametrize("make", [bfp.AdamW, bfp.Muon])
def test_torchs_distributed_state_dicts(make):
    format = Format.parse("mxfp8_e4m3_32x32")
    weights, options = weights_for(shapes_for(format, 4)), {"lr": 0.1, "moments": "fp8", "make": make}
    _, optimizer = run_whole(weights, format, options)
    threaded.run(4, distributed_state, weights, format, options, optimizer.state_dict()["state"])


def tensor_parallel(rank, weight, format, dim, options, expected):
    """A weight cut by tensor parallelism, then by FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            q = bfp.quantize(weight, format)
            half = q.shape[dim] // 2
            local = q.narrow(dim, mesh["tp"].get_local_rank() * half, half).clone()
            self.weight = nn.Parameter(
                DTensor.from_local(local, mesh["tp"], [Shard(dim)], run_check=False, shape=q.shape, stride=q.stride())
            )

    model = fully_shard(One(), mesh=mesh["fsdp"])
    optimizer = make_optimizer(model.parameters(), options)
    lies = sharding.sharding_of(model.weight)
    region = lies.region(sharding.rank_in(model.weight))
    for step in range(STEPS):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))[region.slices]
        model.weight.grad = DTensor.from_local(
            gradient.contiguous(), model.weight.device_mesh, model.weight.placements, run_check=False, shape=weight.shape,
            stride=model.weight.stride(),
        )  # fmt: skip
        optimizer.step()
    local = sharding.local_of(model.weight)
    whole, state = expected
    assert torch.equal(local.dequantize(torch.float32), whole.dequantize(torch.float32)[region.slices])
    kept = optimizer.state[model.weight]
    assert torch.equal(kept["master"], state["master"][region.slices])
    moment = "exp_avg" if "exp_avg" in state else "momentum_buffer"
    assert torch.equal(kept[moment], state[moment][region.slices])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_over_tensor_parallelism(name, dim):
    weight = weights_for([(96, 256)])[0]
    for options in ({"lr": 0.1}, {"lr": 0.1, "moments": "fp8", "key": 4}, {"lr": 0.1, "make": bfp.Muon}):
        p = nn.Parameter(bfp.quantize(weight, name))
        optimizer = make_optimizer([p], options)
        for step in range(STEPS):
            p.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        expected = (p.detach(), optimizer.state[p])
        threaded.run(4, tensor_parallel, weight, name, dim, options, expected)


def fp8_cut(rank, weight):
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)], src_data_rank=None))
    p.grad = DTensor.from_local(torch.ones_like(p.to_local()), mesh, [Shard(1)], run_check=False)
    with pytest.raises(ValueError, match="divide them"):
        bfp.AdamW([p], moments="fp8").step()


def test_fp8_moments_whose_blocks_straddle_ranks_are_refused():
    threaded.run(2, fp8_cut, torch.ones(4, 96))


def several_steps_of_training(rank, weights, format):
    """Forward, backward and step as users write them: each forward uses what the last step wrote."""
    model = Side(quantized(weights, format))
    shard(model, device_mesh((4,)))
    optimizer = bfp.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(inputs_for(0, 64))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3_32x32"])
def test_each_forward_uses_what_the_last_step_wrote(name):
    weights = [torch.randn(50, 64, generator=torch.Generator().manual_seed(0))]
    (losses, *others) = threaded.run(4, several_steps_of_training, weights, name)
    assert all(other == losses for other in others)
    assert losses[-1] < 0.1 * losses[0]

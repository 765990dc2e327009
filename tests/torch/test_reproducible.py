"""Runs that no mesh changes: losses, norms, weights and moments are the same bits on every mesh, and by way of checkpoints."""

import functools

import gloo
import pytest
import reproducible_runs as runs
import threaded
import torch
import torch.nn.functional as F
from arrays import values
from blockfp.torch_backend.quantized_tensor.sharding import mesh_of
from reproducible_runs import RECIPES, differences, on
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import blockfp.torch as bfp
from blockfp.experimental.torch import quantize_reduce_scatter

pytestmark = pytest.mark.filterwarnings("ignore:.*sequential all_gather:UserWarning")
MESHES = [(2, 1), (4, 1), (1, 2), (2, 2)]
whole_run = functools.cache(lambda name: on((1, 1), name, last=3))


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "fsdp{}-tp{}".format(*shape))
@pytest.mark.parametrize("name", RECIPES)
def test_steps_on_every_mesh(name, shape):
    assert not differences(whole_run(name), on(shape, name, last=3))


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 1)), ((4, 1), (1, 2)), ((1, 2), (2, 2)), ((1, 1), (2, 1))])
def test_resumed_on_another_mesh(name, before, after, tmp_path):
    first = on(before, name, last=2, save=tmp_path / "checkpoint")
    rest = on(after, name, first=2, last=3, load=tmp_path / "checkpoint")
    losses, norms, state = whole_run(name)
    assert not differences((losses[:2], norms[:2], state), (*first[:2], state))
    assert not differences((losses[2:], norms[2:], state), rest)


@pytest.mark.parametrize("name", ["nvfp4", "bf16"])
def test_without_tensor_parallelism_or_sharding(name):
    """FSDP2 of any number of ranks, and a model that nothing shards."""
    alone = on(None, name, splits=None)
    assert not differences(alone, on((1, 1), name, splits=None))
    assert not differences(alone, on((4, 1), name, splits=None))


def test_more_layers_units_and_pieces(monkeypatch):
    monkeypatch.setattr(runs, "UNITS", 12)
    options = {"splits": 4, "key_value_heads": 4, "layers": 2, "last": 2}
    first = on((3, 1), "mxfp8", **options)
    assert not differences(first, on((6, 1), "mxfp8", **options))
    assert not differences(first, on((3, 4), "mxfp8", **options))


def test_gradients_that_are_reduced_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options = {"policy": policy, "splits": None}
    assert not differences(on((1, 1), "mxfp8", **options), on((4, 1), "mxfp8", **options))


@pytest.mark.parametrize(("name", "shape"), [("mxfp8", (2, 1)), ("nvfp4", (2, 1)), ("mxfp8", (1, 2)), ("bf16", (1, 2))])
def test_without_the_mode_the_mesh_shows(name, shape):
    found = differences(*(on(mesh, name, mode=False, splits=None) for mesh in ((1, 1), shape)))
    assert [one for one in found if not one.startswith("loss")]


def test_each_part_of_the_mode_is_needed():
    """Units alone don't make tensor parallelism reproducible, nor do pieces data parallelism."""
    units = differences(on(None, "bf16", splits=None), on((2, 1), "bf16", mode=False, splits=runs.SPLITS))
    assert [one for one in units if not one.startswith("loss")]
    # In bf16 rounding may hide that sums of two pieces differ from the whole one.
    pieces = differences(on((1, 1), "mxfp8", splits=2), on((1, 1), "mxfp8", splits=1))
    assert [one for one in pieces if not one.startswith("loss")]


@gloo.on(2)
def test_processes_over_gloo(rank):
    found = {shape: runs.train(rank, shape, "nvfp4", last=2) for shape in ((2, 1), (1, 2))}
    assert not differences(found[2, 1], found[1, 2])


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
        self.other = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (self.weight @ x).sum()


ROWS = values((8, 2), 0)


def test_gradients_are_the_mean_in_the_order_of_the_tree():
    model = Product()
    loss = bfp.Reproducible(model, 8).backward(lambda unit: model(ROWS[unit]))
    pairs = [ROWS[2 * i] + ROWS[2 * i + 1] for i in range(4)]
    expected = ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])) / 8
    assert torch.equal(model.weight.grad[0], expected)
    assert model.other.grad is None
    torch.testing.assert_close(loss, model(ROWS.mean(0)).detach())


def test_gradients_are_added_to_those_before():
    model = Product()
    run = bfp.Reproducible(model, 4)
    run.backward(lambda unit: model(ROWS[unit]))
    first = model.weight.grad.clone()
    run.backward(lambda unit: model(ROWS[4 + unit]))
    second = model.weight.grad - first
    torch.testing.assert_close(second[0], ROWS[4:].mean(0))


def test_an_error_in_a_unit_leaves_gradients_and_keys():
    layer = bfp.Linear(32, 32, recipe="nvfp4")
    key = layer.rng_key.clone()
    run = bfp.Reproducible(layer, 4)
    layer.weight.grad = torch.ones(32, 32)

    def loss_of(unit):
        if unit == 2:
            raise KeyError("data")
        return layer(torch.ones(4, 32)).sum()

    with pytest.raises(KeyError):
        run.backward(loss_of)
    assert torch.equal(layer.weight.grad, torch.ones(32, 32))
    assert torch.equal(layer.rng_key, key)


def test_units_round_with_keys_of_their_own():
    layer = bfp.Linear(64, 64, recipe="nvfp4", bias=False)
    x = values((16, 64), 1)
    seen = []

    def loss_of(unit):
        seen.append((layer.rng_key.clone(), layer.step.clone()))
        return layer(x).square().mean()

    key = layer.rng_key.clone()
    run = bfp.Reproducible(layer, 4)
    run.backward(loss_of)
    run.backward(loss_of)
    assert torch.equal(layer.rng_key, key)
    assert [step.item() for _, step in seen] == [0] * 4 + [1] * 4
    assert len({tuple(one.tolist()) for one, _ in seen}) == 4
    assert all(0 <= word < 1 << 32 for one, _ in seen for word in one.tolist())


def test_another_recipe_in_the_middle_of_a_run():
    """Layers get and lose random keys then, and the mode follows."""
    layer = bfp.Linear(64, 64, recipe="mxfp8", bias=False)
    x = values((16, 64), 1)
    seen = []

    def loss_of(unit):
        seen.append(None if layer.rng_key is None else tuple(layer.rng_key.tolist()))
        return layer(x).square().mean()

    run = bfp.Reproducible(layer, 4)
    for recipe, keys in (("nvfp4", 4), ("fp8_block", 1), ("mxfp4_rotated", 4)):
        run.backward(loss_of)
        bfp.set_recipe(layer, None, recipe)
        assert layer.keyed_by_unit
        seen.clear()
        run.backward(loss_of)
        assert len(set(seen)) == keys
    bfp.set_recipe(layer, None, "fp8_delayed")
    with pytest.raises(ValueError, match="not reproducible on other meshes: the scales of fp8_delayed"):
        run.backward(loss_of)


def test_clipping_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 7), (5,), (), (0, 3)]
    parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    others = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for one, other, scale in zip(parameters, others, (1e-3, 1e18, 1e18, 1.0), strict=True):
        one.grad = torch.randn(one.shape, generator=generator) * scale
        other.grad = one.grad.clone()
    norm = bfp.clip_grad_norm_(parameters, 1e3)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(others, 1e3))
    for one, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@threaded.on(2)
def test_gradients_that_lie_otherwise_than_their_parameters(rank):
    """As torch's RowwiseParallel leaves the gradient of an embedding whole, and a norm's may be a term of the sum."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(6, 4)
    parameters = []
    for of_parameter, of_gradient, local in ((Shard(0), Replicate(), whole), (Replicate(), Partial(), whole / 2)):
        parameters.append(nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [of_parameter])))
        parameters[-1].grad = DTensor.from_local(local.clone(), mesh, [of_gradient])
    expected = (2 * whole.square().sum()).sqrt()
    torch.testing.assert_close(bfp.clip_grad_norm_(parameters, 1.0), expected)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad.full_tensor(), whole / expected)


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1.0, 3e38])
def test_the_norm_of_a_large_tensor(scale):
    weight = torch.zeros(2000, 50, requires_grad=True)
    weight.grad = torch.rand(2000, 50, generator=torch.Generator().manual_seed(2)) * scale
    expected = weight.grad.double().square().sum().sqrt()
    norm = bfp.clip_grad_norm_(weight, float("inf"))
    torch.testing.assert_close(norm, expected.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_norm_that_is_not_finite(value):
    weight = torch.zeros(4, requires_grad=True)
    weight.grad = torch.tensor([1.0, float(value), 2.0, -3.0])
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match=f"norm of the gradients is {value}"):
        bfp.clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    assert torch.equal(weight.grad.nan_to_num(5), before.nan_to_num(5))
    assert str(bfp.clip_grad_norm_(weight, 1.0).item()) == value


def test_no_gradients():
    assert bfp.clip_grad_norm_([torch.zeros(3, requires_grad=True)], 1.0) == 0


def test_units_that_do_not_fit():
    for units in (0, 3, 6, True, "4"):
        with pytest.raises(ValueError, match="units must be the 1 ranks of mesh times a power of two"):
            bfp.Reproducible(Product(), units)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        bfp.Reproducible(None, 4)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        bfp.Reproducible(Product(), 4, mesh="dp")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bfp.Linear(32, 32, recipe="fp8_delayed"), "inner, a Linear, .*fp8_delayed"),
        (lambda: nn.BatchNorm1d(4), "inner, a BatchNorm1d, .*statistics"),
    ],
)
def test_modules_that_remember_batches(make, message):
    with pytest.raises(ValueError, match=message):
        bfp.Reproducible(nn.ModuleDict({"inner": make()}), 4)


def test_units_that_draw_or_differ():
    model = Product()
    run = bfp.Reproducible(model, 4)
    with pytest.raises(RuntimeError, match="unit 0 drew from torch's random generator"):
        run.backward(lambda unit: F.dropout(model(ROWS[unit])))
    with pytest.raises(RuntimeError, match=r"unit 2 must give gradients of the same parameters as unit 0, .* other"):
        run.backward(lambda unit: model(ROWS[unit]) + (model.other.sum() if unit == 2 else 0))
    with pytest.raises(ValueError, match=r"a loss of shape \(\), got \(2,\)"):
        run.backward(lambda unit: model.other)
    with pytest.raises(TypeError, match="must return a tensor, got float"):
        run.backward(lambda unit: 1.0)


def refused_on_ranks(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layer, other, quantized, divided = (nn.Linear(4, 4) for _ in range(4))
    model = bfp.TransformerLayer(64, 64, 2, recipe="mxfp8")
    # Ranks are threads, and draw from one generator.
    torch.distributed.barrier()
    hsdp = fully_shard(Product(), mesh=mesh)
    with pytest.raises(ValueError, match=r"weight is placed as .* not the mesh of Reproducible"):
        bfp.Reproducible(hsdp, 8, mesh["shard"])
    with pytest.raises(ValueError, match="mesh must have the one axis"):
        bfp.Reproducible(hsdp, 8, mesh)
    with pytest.raises(ValueError, match="weight is not sharded over"):
        bfp.Reproducible(Product(), 8, mesh["shard"])
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        bfp.Reproducible(DistributedDataParallel(Product()), 8)
    bfp.parallelize(model, mesh["shard"])
    with pytest.raises(ValueError, match=r"attention.qkv, a Linear, .*splits="):
        bfp.Reproducible(model, 8)
    fully_shard(layer, mesh=mesh["shard"])
    bfp.Reproducible(layer, 4, mesh["shard"])
    with pytest.raises(RuntimeError, match=r"backward in Reproducible\.backward"):
        layer(torch.ones(1, 4)).sum().backward()
    fully_shard(quantized, mesh=mesh["shard"])
    quantize_reduce_scatter(quantized)
    with pytest.raises(ValueError, match="reduces by a QuantizedReduceScatter already"):
        bfp.Reproducible(quantized, 4, mesh["shard"])
    fully_shard(other, mesh=mesh["shard"])
    run = bfp.Reproducible(other, 4, mesh["shard"])
    quantize_reduce_scatter(other)
    with pytest.raises(RuntimeError, match="the model took part in 0 of this rank's 2 units"):
        run.backward(lambda unit: other(torch.ones(1, 4)).sum())
    fully_shard(divided, mesh=mesh["shard"])
    divided.set_gradient_divide_factor(3.0)
    run = bfp.Reproducible(divided, 4, mesh["shard"])
    with pytest.raises(ValueError, match="set_gradient_divide_factor"):
        run.backward(lambda unit: divided(torch.ones(1, 4)).sum())
    return True


def test_what_ranks_can_not_reproduce():
    assert all(threaded.run(4, refused_on_ranks))


def splits_on_ranks(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    layer = bfp.TransformerLayer(128, 128, 4, recipe="mxfp8")
    for splits in (1, 3, 6, 0, True):
        with pytest.raises(ValueError, match="splits must be a power of two that the 2 ranks of tp_mesh divide"):
            bfp.parallelize(layer, mesh, splits=splits)
    with pytest.raises(ValueError, match="splits=2 is not for sequence_parallel=True"):
        bfp.parallelize(layer, mesh, splits=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="splits=8: 4 heads of keys and values"):
        bfp.parallelize(layer, mesh, splits=8)
    with pytest.raises(ValueError, match=r"splits=8: 128 features are not 8 pieces of whole blocks of mxfp8; .* 256"):
        bfp.parallelize(bfp.LayerNormMLP(128, 128, recipe="mxfp8"), mesh, splits=8)
    with pytest.raises(ValueError, match="splits=2 is for a TransformerLayer"):
        bfp.parallelize(nn.Sequential(bfp.Linear(64, 64, recipe="mxfp8")), mesh, {"0": "column"}, splits=2)
    with pytest.raises(ValueError, match="splits=2 is for layers of one weight"):
        bfp.parallelize(bfp.GroupedLinear(2, 64, 64, recipe="mxfp8"), mesh, "column", splits=2)
    assert layer.attention.qkv.parallel is None
    assert mesh_of(layer.norm.weight) is None
    return True


def test_splits_that_do_not_fit():
    assert all(threaded.run(2, splits_on_ranks))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@threaded.on(1)
def test_pieces_are_not_compiled(rank):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))["tp"]
    layer = bfp.parallelize(bfp.Linear(64, 64, recipe="mxfp8"), mesh, "column", splits=2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="splits is not compiled"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(4, 64))

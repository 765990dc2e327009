"""`summary`: what is counted, what is said of the rest, and when `convert` warns."""

import copy

import pytest
import threaded
import torch
import torch.distributed as dist  # noqa: F401
from arrays import tensors_of
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import blockfp.torch as bfp


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 32))
        self.scale = nn.Parameter(torch.randn(1, 1, 32))


def model():
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(16, 32),
            "layers": nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(3)),
            "norm": nn.LayerNorm(32),
            "head": nn.Linear(32, 16, bias=False),
        }
    )


def test_the_table():
    done = bfp.summary(bfp.convert(model(), "mxfp8", filter_fn=lambda path, layer: path != "head"))
    assert [one.path for one in done.layers] == [f"layers.{i}.{j}" for i in range(3) for j in range(2)]
    first = done.layers[0]
    assert (first.kind, first.recipe, first.stored, first.shape) == ("Linear", "mxfp8", "mxfp8_e4m3_32x32", (64, 32))
    assert (first.parameters, first.bytes) == (64 * 32, 64 * 32 + 2)
    assert {left.path: (left.unasked, left.bytes) for left in done.left} == {
        "embedding.weight": (False, 4 * 16 * 32),
        "head.weight": (False, 4 * 16 * 32),
    }
    assert (done.others, done.other_bytes) == (3 * 96 + 64, 4 * (3 * 96 + 64))
    assert done.parameters == sum(param.numel() for param in model().parameters())
    assert done.bytes == sum(one.bytes for one in (*done.layers, *done.left)) + done.other_bytes
    assert (done.quantized, done.in_matrices) == (3 * 2 * 2048, 3 * 2 * 2048 + 512)
    assert done.share == done.quantized / done.in_matrices
    lines = str(done).splitlines()
    assert lines[2].split() == ["layers.*.0", "(3", "times)", "Linear", "mxfp8", "mxfp8_e4m3_32x32", "6,144", "6,150"]
    assert "quantized: 12,288 of 12,800 parameters in matrices (96.0%; embeddings aside)" in lines
    assert "left: head.weight [16, 32]: filter_fn or recipe left it, or it came after convert" in lines
    assert repr(done) == str(done)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp6", "fp8_current"])
def test_bytes_are_those_in_memory(recipe, weights):
    layer = bfp.Linear(64, 32, bias=False, recipe=recipe, weights=weights)
    (one,) = bfp.summary(layer).layers
    weight = layer.weight.detach()
    parts = [weight.values] if weights == "high_precision" else [weight.codes, weight.scales, weight.tensor_scale]
    assert one.bytes == sum(part.untyped_storage().nbytes() for part in parts if part is not None)
    assert one.stored == ("float32" if weights == "high_precision" else str(layer.recipe.weight.format))
    assert one.path == ""


def test_before_convert_and_on_meta():
    with torch.device("meta"):
        plain = model()
    done = bfp.summary(plain)
    assert (done.quantized, done.share, done.layers) == (0, 0.0, ())
    converted = bfp.summary(bfp.convert(plain, "mxfp8"))
    assert converted.share == 1
    assert converted.parameters == done.parameters
    assert bfp.summary(nn.GELU()).share == 0


def sharded(rank):
    layer = bfp.Linear(32, 64, bias=False, recipe="mxfp8")
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    (one,) = bfp.summary(layer).layers
    return one


def test_a_sharded_weight_counts_whole_and_weighs_what_a_rank_holds():
    for one in threaded.run(2, sharded):
        assert (one.shape, one.parameters) == ((64, 32), 2048)
        assert 1024 < one.bytes < 1024 + 16


def test_a_tenth_is_said():
    quiet = nn.ModuleList([nn.Linear(256, 256), nn.Conv2d(8, 8, 3)])
    bfp.convert(quiet, "mxfp8")
    loud = nn.ModuleList([nn.Linear(32, 32), nn.Conv2d(8, 8, 3), Experts()])
    with pytest.warns(UserWarning, match="left 90%") as caught:
        bfp.convert(loud, "mxfp8")
    (warning,) = caught
    text = str(warning.message)
    assert "left 90% of the parameters in matrices" in text
    assert (
        "2.up [4, 64, 32]: a Experts has it as its own parameter, outside of any layer; bfp.GroupedLinear holds experts" in text
    )
    assert "1.weight [8, 8, 3, 3]: a Conv2d is not a linear layer" in text
    assert warning.filename == __file__
    assert [left.path for left in bfp.summary(loud).left] == ["1.weight", "2.up"]


def test_what_a_recipe_or_filter_leaves_is_not():
    bfp.convert(model(), {"layers.0.0": "mxfp8"}.get)
    bfp.convert(model(), "mxfp8", filter_fn=lambda path, layer: path == "head")


def test_a_model_is_wanted():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        bfp.summary("model")


def storages(tensors):
    """Bytes of all memory behind tensors, each once."""
    found = {}
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            parts += [one for one in (getattr(tensor, "initial", None),) if one is not None]
        else:
            parts = [tensor]
        found |= {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(found.values())


@pytest.mark.parametrize(
    ("recipe", "weights", "options", "each"),
    [
        ("fp8_current", "quantized", {}, 1 + 4 + 8),
        ("fp8_delayed", "quantized", {}, 1 + 4 + 8),
        ("mxfp8", "quantized", {"moments": "bfloat16"}, 1 + 4 + 4),
        ("mxfp6", "quantized", {"moments": "fp8"}, 0.75 + 4 + 2),
        ("nvfp4", "quantized", {"master": None}, 0.5 + 8),
        ("fp8_block", "high_precision", {}, 2 + 4 + 8),
    ],
)
def test_what_is_held_is_what_is_in_memory(recipe, weights, options, each):
    """Before a step and after it: nothing is there twice, and nothing beside what the summary names."""
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 128)).to(torch.bfloat16)
    bfp.convert(model, recipe, weights=weights)
    optimizer = bfp.AdamW(model.parameters(), **options)
    for step in range(2):
        done = bfp.summary(model, optimizer)
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert done.held == storages([*model.parameters(), *model.buffers(), *states])
        assert ("between steps: " in str(done)) == (done.held > done.bytes)
        if step == 0:
            model(torch.randn(32, 256, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
    matrices = 256 * 512 + 512 * 128
    assert done.held / matrices == pytest.approx(each, rel=0.2)


def test_what_an_optimizer_keeps():
    model = nn.Sequential(bfp.Linear(64, 32, recipe="mxfp8"), nn.Linear(32, 16))
    before = bfp.summary(model, optimizer := bfp.AdamW(model.parameters()))
    assert (before.originals, before.states) == (64 * 32 * 4, ())
    assert "originals on the CPU" in str(before)
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    after = bfp.summary(model, optimizer)
    parameters, states = sum(p.numel() for p in model.parameters()), dict(after.states)
    assert after.originals == 0
    assert states["exp_avg"] == states["exp_avg_sq"] == 4 * parameters
    assert states["master"] == 4 * model[0].weight.numel()
    assert "optimizer: " in str(after)
    assert bfp.summary(model).states == ()
    with pytest.raises(TypeError, match="optimizer must be"):
        bfp.summary(model, model)


@pytest.mark.parametrize(
    ("kind", "options"), [(bfp.AdamW, {}), (bfp.AdamW, {"master": None}), (bfp.AdamW, {"moments": "fp8"}), (bfp.Muon, {})]
)
def test_originals_are_dropped_by_the_first_step(kind, options):
    model = nn.Sequential(bfp.Linear(64, 32, bias=False, recipe="mxfp8"))
    optimizer = kind(model.parameters(), **options)
    assert bfp.summary(model, optimizer).originals == 64 * 32 * 4
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    assert bfp.summary(model, optimizer).originals == 0
    assert all(row.holds != "originals, until the first step" for row in bfp.summary(model, optimizer).memory)


class Living(TorchDispatchMode):
    """Notes the storages that operations make, those `before` aside, and tells how many bytes of them live on."""

    def __init__(self, before):
        super().__init__()
        self.made, self.before = {}, {tensor.data_ptr() for tensor in before}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if type(tensor) is torch.Tensor and tensor.data_ptr() not in self.before:
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return made

    def bytes(self):
        return sum(size for ref, size in self.made.items() if not ref.expired())


def model_and_batch(recipe):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.BatchNorm1d(128), nn.Dropout(), nn.Linear(128, 32, bias=False))
    bfp.convert(model, recipe)
    return model, torch.randn(16, 64)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_the_table_of_memory_is_what_lives(recipe):
    """Against the objects that Python knows, and the storages that a forward leaves behind."""
    model, x = model_and_batch(recipe)
    optimizer = bfp.AdamW(model.parameters())
    for _ in range(2):
        model(x).square().sum().backward()
        done = bfp.summary(model, optimizer, batch=x)
        rows = {row.holds: row.bytes for row in done.memory}
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        gradients = [param.grad for param in model.parameters()]
        assert rows["gradients"] == storages(gradients) == sum(4 * p.numel() for p in model.parameters())
        assert rows["buffers"] == storages(model.buffers())
        assert rows.get("originals, until the first step", 0) == done.originals
        codes = [part for p in model.parameters() if hasattr(p, "codes") for part in tensors_of(p)]
        assert rows["codes and scales"] == storages(codes)
        assert sum(size for name, size in rows.items() if name.startswith("optimizer: ")) == storages(states)
        kept = rows["kept for the backward"]
        assert sum(rows.values()) - kept == storages([*model.parameters(), *model.buffers(), *gradients, *states])
        with Living([x, *model.buffers()]) as living:
            y = model(x)
        assert kept == living.bytes() - y.untyped_storage().nbytes() > 0
        del y
        optimizer.step()
        optimizer.zero_grad()


def test_a_forward_that_measures_leaves_no_trace():
    model, x = model_and_batch("fp8_delayed")
    optimizer = bfp.AdamW(model.parameters())
    model(x).square().sum().backward()
    optimizer.step()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    recorded = [layer.recorded for layer in (model[0], model[4])]
    table = str(bfp.summary(model, optimizer, batch={"input": x}))
    assert "kept for the backward" in table
    assert_equal(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert [layer.recorded for layer in (model[0], model[4])] == recorded == [False, False]
    assert "kept" not in str(bfp.summary(model, optimizer))
    with pytest.raises(ValueError, match="must share in"):
        bfp.summary(model, optimizer, batch=(torch.randn(16, 7),))
    assert_equal(model.state_dict(), before)


def measured_between_steps(rank, measures):
    with threaded.seeded(0):
        model = nn.Sequential(bfp.Linear(32, 64, recipe="fp8_delayed"), bfp.Linear(64, 32, recipe="fp8_delayed"))
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer, x = bfp.AdamW(model.parameters(), lr=1e-2), torch.ones(8, 32) * (rank + 1)
    for _ in range(2):
        model(x).square().sum().backward()
        if measures:
            rows = {row.holds: row.bytes for row in bfp.summary(model, optimizer, batch=x).memory}
            # Each rank has half of the gradients, and no gathered weight is taken for kept.
            assert rows["gradients"] == sum(4 * p.numel() for p in model.parameters()) / 2
            assert rows["kept for the backward"] < 8 * 32 + 8 * 64 + 64
        optimizer.step()
        optimizer.zero_grad()
    return [model(x).detach(), *(buffer.clone() for buffer in model.buffers())]


def test_measuring_a_sharded_model_leaves_no_trace():
    assert_equal(*(threaded.run(2, measured_between_steps, measures) for measures in (True, False)))

"""An Inf or NaN in an operand leaves no product of it finite, so that loss scalers, clipping and `isfinite` see it."""

import copy

import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.ops.quantize import operand_ops
from casting import CASTING
from same_tensors import assert_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics
from blockfp.formats import NAMES, Format
from blockfp.kernels.operand_cast import OperandCast

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_of(name, dtype, **options):
    options["recipe"] = "mxfp8" if name == "high_precision" else name
    if name == "high_precision":
        options["compute"] = "high_precision"
    torch.manual_seed(0)
    return bfp.Linear(64, 48, dtype=dtype, **options)


def grads(layer, x, g):
    """y, dx, dw, db."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*recipes.RECIPES, "high_precision"])
def test_every_gradient_shows_what_is_not_finite(name, dtype):
    layer, x, g = layer_of(name, dtype), values((40, 64), 0, dtype), values((40, 48), 1, dtype)
    finite = grads(copy.deepcopy(layer), x, g)
    assert all(part.isfinite().all() for part in finite)
    for value in (torch.inf, -torch.inf, torch.nan):
        bad = x.clone()
        bad[7, 33] = value
        y, d_x, d_weight, d_bias = grads(copy.deepcopy(layer), bad, g)
        assert not y.isfinite().all()
        assert not d_weight.isfinite().all()
        assert d_x.isfinite().all()
        assert d_bias.isfinite().all()
        bad = g.clone()
        bad[39, 2] = value
        y, d_x, d_weight, d_bias = grads(copy.deepcopy(layer), x, bad)
        assert y.isfinite().all()
        assert not any(part.isfinite().all() for part in (d_x, d_weight, d_bias))


@pytest.mark.parametrize("name", CASTING)
def test_an_inf_leaves_nothing_finite(name):
    layer, x, g = layer_of(name, torch.float32), values((40, 64), 0), values((40, 48), 1)
    bad = x.clone()
    bad[7, 33] = torch.inf
    y, _, d_weight, _ = grads(layer, bad, g)
    assert not y.isfinite().any()
    assert not d_weight.isfinite().any()
    bad = g.clone()
    bad[0, 0] = -torch.inf
    _, d_x, d_weight, _ = grads(layer, x, bad)
    # In high precision it stays in its row.
    assert not d_x[: None if recipes.parse(name).gradient.format else 1].isfinite().any()
    assert not d_weight.isfinite().any()
    values_at_use = layer_of(name, torch.float32, weights="high_precision")
    with torch.no_grad():
        values_at_use.weight.values[3, 5] = torch.inf
    y, d_x, _, _ = grads(values_at_use, x, g)
    assert not y.isfinite().any()
    assert not d_x.isfinite().any()


@pytest.mark.parametrize("name", NAMES)
def test_only_an_inf_is_marked(name):
    """The largest finite values, which have the scales of an Inf in some formats, and what comes to scale 1 keep their bits."""
    format = Format.parse(name)
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        for most in (largest, format.element.max, format.element.max * 448, 1.0, 0.0):
            if most > largest:
                continue
            x = values((32, 128), 3, dtype).clamp(-1, 1) * min(most, 1.0)
            x[5, 70] = most
            (*parts,) = operand_ops.quantize_operand(x, OperandCast(format)).row
            assert_equal(parts, [part for part in numerics.quantize(x, format) if part is not None])
            x[5, 71] = torch.inf
            codes, scales, *tensor_scale = operand_ops.quantize_operand(x, OperandCast(format)).row
            wanted = numerics.quantize(x, format)
            assert torch.equal(codes, wanted.codes)
            back = numerics.dequantize(
                codes, scales, tensor_scale[0] if tensor_scale else None, format, "float32", columns=x.shape[1]
            )
            assert back.isnan().all()


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_experts_are_apart(name):
    layer = bfp.GroupedLinear(3, 64, 32, recipe=name)
    x = values((48, 64), 0)
    x[20, 1] = torch.inf
    x.requires_grad_()
    y = layer(x, [16, 16, 16])
    assert [group.isfinite().all().item() for group in y.split(16)] == [True, False, True]
    y.backward(values((48, 32), 1))
    assert [one.isfinite().any().item() for one in layer.weight.grad] == [True, False, True]


def one_step(model, value, scaler, optimizer):
    x = values((32, 64), 5, torch.float16)
    x[3, 4] = value
    scaler.scale(model(x).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def backs_off(model, optimizer):
    """Asserts that a loss scaler lets ordinary steps pass and halves its scale after an Inf, which changes nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    one_step(model, 1.0, scaler, optimizer)
    assert scaler.get_scale() == 2.0**4
    before = [part.clone() for part in tensors_in(model)]
    one_step(model, torch.inf, scaler, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_in(model), strict=True))
    return scaler.get_scale() == 2.0**3


def tensors_in(model):
    for param in model.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        yield from (local.codes, local.scales) if isinstance(local, bfp.QuantizedTensor) else (local.detach(),)


class Model(nn.Sequential):
    def forward(self, x):  # torch's own is never compiled as a whole
        for layer in self:
            x = layer(x)
        return x


def without_biases(name):
    options = {"compute": "high_precision", "recipe": "mxfp8"} if name == "high_precision" else {"recipe": name}
    options |= {"bias": False, "dtype": torch.float16}
    with threaded.seeded(0):
        return Model(bfp.Linear(64, 64, **options), nn.GELU(), bfp.Linear(64, 32, **options))


@pytest.mark.parametrize("name", [*recipes.RECIPES, "high_precision"])
def test_loss_scalers_back_off(name):
    # Those that are left out are compiled as one that is not.
    for compiled in (False,) if name in ("fp8_current", "mxfp6", "mxfp4", "nvfp4_4over6") else (False, True):
        model = without_biases(name)
        optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
        if compiled:
            torch._dynamo.reset()
            model.compile(fullgraph=True, backend="aot_eager")
        assert backs_off(model, optimizer)


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_loss_scalers_back_off_under_inductor(name):
    torch._dynamo.reset()
    model = without_biases(name)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-3)
    model.compile(fullgraph=True)
    assert backs_off(model, optimizer)


def sharded_backs_off(rank, name):
    model = without_biases(name)
    for layer in model:
        if isinstance(layer, bfp.Linear):
            fully_shard(layer)
    fully_shard(model)
    return backs_off(model, bfp.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("name", [*recipes.RECIPES, "high_precision"])
def test_loss_scalers_back_off_under_fsdp2(name):
    assert threaded.run(2, sharded_backs_off, name) == [True, True]


def cut(rank, name, style, sequence, dtype):
    mesh = init_device_mesh("cpu", (2,))
    with threaded.seeded(0):
        whole = bfp.Linear(64, 64, bias=False, recipe=name, dtype=dtype)
    found = []
    for operand in ("x", "g"):
        layer = bfp.parallelize(copy.deepcopy(whole), mesh, style, sequence_parallel=sequence)
        x, g = values((64, 64), 0, dtype), values((64, 64), 1, dtype)
        (x if operand == "x" else g)[3, 5] = torch.inf
        x = part(x, 1 if style == "row" else (0 if sequence else None), rank).requires_grad_()
        y = layer(x)
        y.backward(part(g, 1 if style == "column" else (0 if sequence else None), rank))
        found.append((y.isfinite().all(), layer.weight.grad.to_local().isfinite().all(), x.grad.isfinite().all()))
    return found


def part(x, axis, rank):
    return (x if axis is None else x.chunk(2, axis)[rank]).clone()


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("style", "sequence"), [("column", False), ("column", True), ("row", False), ("row", True)])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_tensor_parallel_gradients_show_it(name, style, sequence, dtype):
    """The weight's gradient as a whole; with float16, that of every rank, as each has a loss scaler."""
    found = threaded.run(2, cut, name, style, sequence, dtype)
    of_x, of_g = ([rank[i] for rank in found] for i in range(2))
    assert not all(y for y, _, _ in of_x)
    assert not all(d_weight for _, d_weight, _ in of_x)
    assert not all(d_weight for _, d_weight, _ in of_g)
    assert not all(d_x for _, _, d_x in of_g)
    if dtype is torch.float16:
        assert not any(d_weight or d_x for _, d_weight, d_x in of_g)


def test_clipping_sees_it():
    model = without_biases("fp8_current").float()
    x = values((32, 64), 5)
    x[0, 0] = torch.inf
    model(x).square().mean().backward()
    assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()

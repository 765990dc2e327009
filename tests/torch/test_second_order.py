"""Gradients of gradients: those of the straight-through function, which is written out here in float64."""

import copy

import pytest
import threaded
import torch
from arrays import values
from linear_reference import MIXED, SCALES, quantized, state_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import rotation, rounding


def through(original, value):
    """`value`, with the derivative of `original`."""
    return original + (value - original).detach()


class Emulated(torch.autograd.Function):
    """y = cast(x) cast(w)^T with dx = cast(g) cast(w), dw = cast(g)^T cast(x), in float64; x, w and g are cast from float32."""

    @staticmethod
    def forward(ctx, x, w, recipe):
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        return row_cast(x, recipe.input, scale_of(recipe, "input_scale")) @ row_cast(w, recipe.weight).mT

    @staticmethod
    def backward(ctx, g):
        (x, w), recipe = ctx.saved_tensors, ctx.recipe
        scale = scale_of(recipe, "gradient_scale")
        keys = [rounding.fold_in(7, t) for t in (0, 1)]
        weight = row_cast(w, recipe.weight)
        if recipe.weight.format is None and recipe.weight_columnwise.format is not None:
            weight = column_cast(w, recipe.weight_columnwise)
        d_x = through(g, row_cast(g, recipe.gradient, scale, keys[0])) @ through(w, weight)
        columns = through(g, column_cast(g, recipe.gradient_columnwise, scale, keys[1]))
        inputs = column_cast(x, recipe.input_columnwise, scale_of(recipe, "input_scale"))
        d_w = columns.mT @ through(x, inputs)
        return d_x, d_w, None


def scale_of(recipe, name):
    return SCALES[name] if recipe.delayed else None


def row_cast(x, cast, scale=None, key=None):
    return quantized(x.detach().float(), cast, key=key, multiplier=scale)


def column_cast(x, cast, scale=None, key=None):
    """Cast along the rows; a rotation is undone."""
    turned = quantized(x.detach().float().mT.contiguous(), cast, key=key, multiplier=scale)
    if cast.rotate:
        whole = turned.shape[1] // 16 * 16
        matrix = rotation.rotate(torch.eye(16)).double()
        turned[:, :whole] = (turned[:, :whole].unflatten(1, (-1, 16)) @ matrix.mT).flatten(1)
    return turned.mT


def by_blockfp(recipe):
    return lambda x, w: bfp.linear(x, w, recipe=recipe, state=state_of(recipe), key=7)


def by_hand(recipe):
    recipe = recipes.for_linear(recipe, "quantized")
    return lambda x, w: Emulated.apply(x, w, recipe)


def penalty(linear, x, first, second):
    """A gradient penalty and a loss of two layers with something curved between."""
    y = linear(torch.tanh(linear(x, first)), second)
    (d_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return d_x.square().sum().sqrt() + y.square().mean()


def product_with_hessian(linear, x, first, second):
    y = linear(torch.tanh(linear(x, first)), second)
    grads = torch.autograd.grad(y.square().sum(), (first, second), create_graph=True)
    return sum((grad * torch.cos(torch.arange(grad.numel())).view(grad.shape)).sum() for grad in grads)


def inner_step(linear, x, first, second):
    """MAML: the loss after a step of gradient descent."""
    for _ in range(2):
        loss = linear(torch.tanh(linear(x, first)), second).square().mean()
        d_first, d_second = torch.autograd.grad(loss, (first, second), create_graph=True)
        first, second = first - 0.1 * d_first, second - 0.1 * d_second
    return linear(torch.tanh(linear(x, first)), second).square().mean()


def leaves(dtype):
    x, first, second = values((37, 48), 0), values((40, 48), 1, scale=0.2), values((24, 40), 2, scale=0.2)
    return [part.to(dtype).requires_grad_() for part in (x, first, second)]


def assert_alike(found, wanted, bound):
    for one, other in zip(found, wanted, strict=True):
        assert one.norm() > 0
        assert ((one.double() - other).norm() / other.norm()) < bound


ALL = {name: recipes.parse(name) for name in recipes.RECIPES}
ALL |= {f"mxfp8, {case}": recipes.mxfp8().replace(**change) for case, change in MIXED.items()}


TWICE = [(of, name, 0.02) for of in (penalty, product_with_hessian) for name in ALL]
TWICE += [(inner_step, name, 0.05) for name in ("fp8_current", "fp8_block", "mxfp8", "nvfp4")]


@pytest.mark.parametrize(("of", "name", "bound"), TWICE)
def test_gradients_of_gradients(of, name, bound):
    """Element by element, but where a sum in another order moves an activation over a rounding edge of the next cast."""
    recipe, found, wanted = ALL[name], leaves(torch.float32), leaves(torch.float64)
    of(by_blockfp(recipe), *found).backward()
    of(by_hand(recipe), *wanted).backward()
    assert_alike([part.grad for part in found], [part.grad for part in wanted], bound)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in ALL), ("mxfp8", torch.bfloat16)])
def test_one_layer_exactly(name, dtype):
    """Both gradients, and both gradients' gradients, of one layer whose operands are the same in both."""
    recipe = ALL[name]
    results = []
    for linear, own in ((by_blockfp(recipe), dtype), (by_hand(recipe), torch.float64)):
        x, weight, gradient = (
            part.detach().to(dtype).to(own).requires_grad_() for part in (*leaves(own)[:2], values((37, 40), 3))
        )
        first = torch.autograd.grad(linear(x, weight), (x, weight), gradient, create_graph=True)
        along = [values(part.shape, 4 + i).to(dtype).to(own) for i, part in enumerate(first)]
        second = torch.autograd.grad(first, (x, weight, gradient), along, retain_graph=True)
        alone = torch.autograd.grad(first[0], (weight, gradient), along[0], retain_graph=True)
        third = torch.autograd.grad(first[1], (x, gradient), along[1])
        results.append([*first, *second, *alone, *third])
    assert_alike(*results, 2e-6 if dtype is torch.float32 else 4e-3)


def test_third_order():
    results = []
    for linear, dtype in ((by_blockfp(ALL["mxfp8"]), torch.float32), (by_hand(ALL["mxfp8"]), torch.float64)):
        x, weight, _ = leaves(dtype)
        (d_x,) = torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(d_x.square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad((again * again.detach().cos()).sum() + d_x.square().sum(), weight))
    assert_alike(*results, 1e-5)


def test_products_of_one_graph_with_several_vectors():
    """Rows of a Hessian, each a run of its own: none is left over for the next."""
    x, weight, _ = leaves(torch.float32)
    y = by_blockfp(ALL["mxfp8"])(torch.sin(x), weight)
    (d_weight,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    torch.autograd.grad(d_weight.sum(), weight, retain_graph=True)  # asks nothing of x
    rows = [torch.autograd.grad(d_weight[i].sum(), x, retain_graph=True)[0] for i in range(2)]
    (both,) = torch.autograd.grad(d_weight[:2].sum(), x)
    torch.testing.assert_close(rows[0] + rows[1], both)


def layers(name, **options):
    torch.manual_seed(0)
    return nn.Sequential(bfp.Linear(48, 40, recipe=name, **options), nn.Tanh(), bfp.Linear(40, 24, recipe=name, **options))


def penalty_of(model, x):
    y = model(x)
    (d_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return d_x.square().sum() + y.square().mean()


def test_layers_with_stored_weights():
    """In all ways in which a layer keeps and multiplies its weight, and where activations are made again."""
    x = values((37, 48), 0)
    found = []
    for options in ({}, {"weights": "high_precision"}, {"checkpointed": True}):
        model = layers("fp8_current", **{key: value for key, value in options.items() if key != "checkpointed"})
        leaf = x.clone().requires_grad_()
        run = model
        if "checkpointed" in options:
            run = lambda x, model=model: checkpoint(model, x, use_reentrant=False)  # noqa: E731
        penalty_of(run, leaf).backward()
        found.append([*(param.grad for param in model.parameters()), leaf.grad])
    for other in found[1:]:
        assert_alike(other, [part.double() for part in found[0]], 1e-5)


def test_frozen_weights_and_inputs():
    model = layers("mxfp8")
    model[0].weight.requires_grad_(False)
    x = values((37, 48), 0).requires_grad_()
    penalty_of(model, x).backward()
    assert model[2].weight.grad.norm() > 0
    weight_alone = bfp.Linear(48, 40, recipe="mxfp8")
    (d_weight, d_bias) = torch.autograd.grad(
        weight_alone(x.detach()).square().sum(), (weight_alone.weight, weight_alone.bias), create_graph=True
    )
    (d_weight.sum() + d_bias.sum()).backward()
    assert weight_alone.weight.grad.norm() > 0


def test_experts():
    grouped = bfp.GroupedLinear(3, 48, 40, recipe="mxfp8", weights="high_precision")
    x, counts = values((37, 48), 0), [20, 0, 17]
    leaf = x.clone().requires_grad_()
    penalty_of(lambda x: grouped(x, counts), leaf).backward()
    wanted = x.clone().requires_grad_()
    singles = []
    for weight, bias in zip(grouped.weight.values, grouped.bias, strict=True):
        single = bfp.Linear(48, 40, recipe="mxfp8", weights="high_precision")
        single.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        singles.append(single)
    y = torch.cat([single(rows) for single, rows in zip(singles, wanted.split(counts), strict=True)])
    (d_x,) = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
    (d_x.square().sum() + y.square().mean()).backward()
    assert_alike([leaf.grad, grouped.weight.grad[0]], [wanted.grad.double(), singles[0].weight.grad.double()], 1e-5)


def test_values_of_quantized_tensors():
    """quantize, dequantize and fake_quantize are the identity, of which nothing is left."""
    for function in (lambda x: bfp.fake_quantize(x, "nvfp4"), lambda x: bfp.quantize(x, "mxfp8_e4m3").dequantize()):
        x = values((16, 64), 0).requires_grad_()
        (d_x,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        d_x.sum().backward()
        torch.testing.assert_close(x.grad, 6 * function(x).detach())


def test_first_order_is_as_it_was():
    """An ordinary backward and one with a graph give the same, and the latter moves random steps and amaxes alike."""
    for name in ("fp8_delayed", "nvfp4"):
        model, x = layers(name), values((37, 48), 0)
        other = copy.deepcopy(model)
        grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        with_graph = torch.autograd.grad(other(x).square().sum(), list(other.parameters()), create_graph=True)
        assert_alike([one.detach() for one in with_graph], [one.double() for one in grads], 1e-3)
        for a, b in zip(model.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(a, b)


def test_compiled_code_refuses():
    torch._dynamo.reset()
    layer = bfp.Linear(48, 40, recipe="mxfp8")
    layer.compile(fullgraph=True, backend="aot_eager")
    x = values((37, 48), 0).requires_grad_()
    (d_x,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        d_x.square().sum().backward()


@threaded.on(2)
def test_tensor_parallel_layers_refuse(rank):
    layer = bfp.parallelize(bfp.Linear(64, 64, recipe="mxfp8"), init_device_mesh("cpu", (2,)), "column")
    x = torch.ones(8, 64, requires_grad=True)
    (d_x,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="tensor-parallel layer has no gradient of its gradient"):
        d_x.square().sum().backward()
    torch.autograd.grad(layer(x).sum(), x, create_graph=True)[0].detach()


def test_sharded_layers():
    def on_rank(rank):
        model = copy.deepcopy(whole)
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        penalty_of(model, x.clone().requires_grad_()).backward()
        return [param.grad.full_tensor().double() for param in model.parameters()]

    whole, x = layers("mxfp8"), values((16, 48), 0)
    one = copy.deepcopy(whole)
    penalty_of(one, x.clone().requires_grad_()).backward()
    for grads in threaded.run(2, on_rank):
        assert_alike([param.grad for param in one.parameters()], grads, 1e-6)

"""A linear layer behind an activation that is cast as it is made: the bits, errors and state of the two one after the other."""

import copy

import emulated_cuda
import pytest
import torch
import torch.nn.functional as F
from arrays import values, with_scales
from blockfp.torch_backend.linear.prologue import ActivationFunction, takes
from blockfp.torch_backend.linear.prologue import activation as activation_alone
from blockfp.torch_backend.modules.layer_calls import fused_product, gated_product
from blockfp.torch_backend.ops.layer import gated_ops
from blockfp.torch_backend.ops.layer.activations import Gating, activate, gate_and_up, gradients, joined
from blockfp.torch_backend.ops.quantize.quantize_plans import quantize_matrix
from casting import CASTING
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.formats import Format
from blockfp.kernels.operand_cast import OperandCast
from blockfp.recipes import Cast

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}
LAYOUTS = ("alone", "apart", "halves", "pairs")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(layout, dtype=torch.bfloat16, shape=(3, 20), features=48, seed=0):
    """(gate, up, layout's name) that want gradients."""
    width = features if layout in ("alone", "apart") else 2 * features
    gate, up = (values((*shape, width), seed + i, dtype).mul_(2).requires_grad_() for i in range(2))
    return gate, up if layout == "apart" else None, "apart" if layout == "alone" else layout


def plain(gate, up, activation, layout):
    """What users write."""
    run = ACTIVATIONS[activation]
    if layout == "alone":
        return run(gate)
    if layout == "halves":
        gate, up = gate.chunk(2, -1)
    elif layout == "pairs":
        gate, up = gate.unflatten(-1, (-1, 2)).unbind(-1)
    return run(gate) * up


def results(layer, y, inputs):
    wanted = [one for one in (*inputs, *layer.parameters()) if one is not None]
    return [y, *torch.autograd.grad(y, wanted, values(y.shape, 5, y.dtype)), *(b.clone() for b in layer.buffers())]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_autograds(activation, layout):
    for dtype in DTYPES:
        gate, up, way = operands(layout, dtype)
        made = plain(gate, up, activation, layout)
        assert torch.equal(activate(*gate_and_up(gate, up, way), activation), made)
        gradient = values(made.shape, 3, dtype)
        wanted = torch.autograd.grad(made, [one for one in (gate, up) if one is not None], gradient)
        d_gate, d_up = gradients(gradient, *gate_and_up(gate.detach(), None if up is None else up.detach(), way), activation)
        found = [d_gate] if d_up is None else [d_gate, d_up] if way == "apart" else [joined(d_gate, d_up, way)]
        assert_equal(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASTING)
def test_layers(name, layout):
    """Output, gradients and state of two steps, with every activation and dtype."""
    for activation in ACTIVATIONS:
        for dtype in DTYPES if activation == "silu" else DTYPES[1:2]:
            layer = with_scales(bfp.Linear(48, 32, recipe=name, dtype=dtype))
            other = copy.deepcopy(layer)
            for seed in range(2):
                gate, up, way = operands(layout, dtype, seed=seed)
                ours = fused_product(layer, gate, up, Gating(activation, way))
                assert ours is not None
                assert_equal(
                    results(layer, ours, (gate, up)), results(other, other(plain(gate, up, activation, layout)), (gate, up))
                )
                bfp.update_scales(layer)
                bfp.update_scales(other)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "nvfp4"])
def test_shapes(name, shape):
    layer = bfp.Linear(50, 6, recipe=name)
    other = copy.deepcopy(layer)
    for layout in LAYOUTS:
        gate, up, way = operands(layout, torch.float32, shape, 50)
        y = fused_product(layer, gate, up, Gating("silu", way))
        assert y.shape == (*shape, 6)
        assert_equal(results(layer, y, (gate, up)), results(other, other(plain(gate, up, "silu", layout)), (gate, up)))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_special_values(special):
    layer = bfp.Linear(48, 32, recipe="fp8_block")
    other = copy.deepcopy(layer)
    gate, up, way = operands("apart", torch.float32)
    with torch.no_grad():
        gate[1, 3, 7], up[1, 3, 7] = special, 1e30
    ours = results(layer, fused_product(layer, gate, up, Gating("silu", way)), (gate, up))
    assert_equal(ours, results(other, other(F.silu(gate) * up), (gate, up)))


def test_gradients_that_are_not_wanted():
    for frozen in ("weight", "gate and up", "bias"):
        layer = bfp.Linear(48, 32, recipe="mxfp8")
        gate, up, _ = operands("apart")
        if frozen == "weight":
            layer.weight.requires_grad_(False)
        elif frozen == "bias":
            layer.bias.requires_grad_(False)
        else:
            gate, up = gate.detach(), up.detach()
        other = copy.deepcopy(layer)
        found = []
        for one, y in (
            (layer, fused_product(layer.bfloat16(), gate, up, Gating("silu", "apart"))),
            (other, other.bfloat16()(F.silu(gate) * up)),
        ):
            wanted = [t for t in (gate, up, *one.parameters()) if t.requires_grad]
            found.append([y, *torch.autograd.grad(y, wanted, values(y.shape, 1, y.dtype))])
        assert_equal(*found)


def test_gradients_of_gradients():
    for name in ("fp8_current", "fp8_delayed", "mxfp8"):
        found = []
        for fused in (True, False):
            torch.manual_seed(0)
            layer = with_scales(bfp.Linear(48, 32, recipe=name))
            gate, up, way = operands("halves", torch.float32)
            y = fused_product(layer, gate, up, Gating("gelu", way)) if fused else layer(plain(gate, up, "gelu", "halves"))
            gradient = values(y.shape, 3, y.dtype).requires_grad_()
            first = torch.autograd.grad(y, (gate, layer.weight), gradient, create_graph=True)
            second = torch.autograd.grad(sum((one * one).sum() for one in first), (gate, gradient, layer.weight))
            found.append([*first, *second, *layer.buffers()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block", "nvfp4"])
def test_compiled_whole_with_eager_bits(name):
    torch._dynamo.reset()
    layer = bfp.Linear(48, 32, recipe=name, dtype=torch.bfloat16)
    other = copy.deepcopy(layer)
    for layout in ("apart", "pairs"):
        gating = Gating("silu", layout)
        compiled = torch.compile(lambda gate, up: gated_product(other, gate, up, gating), fullgraph=True, backend="aot_eager")  # noqa: B023
        for seed in range(2):
            gate, up, _ = operands(layout, seed=seed)
            assert_equal(
                results(other, compiled(gate, up), (gate, up)),
                results(layer, gated_product(layer, gate, up, gating), (gate, up)),
            )


def test_what_wants_the_activation_gets_it():
    """Hooks see the layer's input; `observe`, high precision, transforms and autocast to another dtype take the operations."""
    layer = bfp.Linear(48, 32, recipe="mxfp8", dtype=torch.bfloat16)
    gate, up, _ = operands("apart")
    swiglu = Gating("silu", "apart")
    wanted = layer(F.silu(gate) * up)
    assert torch.equal(fused_product(layer, gate, up, swiglu), wanted)
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert fused_product(layer, gate, up, swiglu) is None
    assert torch.equal(gated_product(layer, gate, up, swiglu), wanted)
    assert torch.equal(seen[0], F.silu(gate) * up)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(y))
    assert fused_product(layer, gate, up, swiglu) is None
    handle.remove()
    for recipe in (
        recipes.parse("mxfp8").replace(input=Cast(None)),
        recipes.parse("mxfp8").replace(input_columnwise=Cast(None)),
    ):
        assert not takes(gate, up, layer.weight, recipe, None)
    with torch.autocast("cpu", torch.float16):
        assert fused_product(layer, gate, up, swiglu) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused_product(layer, gate, up, swiglu), wanted)
    assert fused_product(layer, gate, up.detach(), swiglu) is None
    assert fused_product(layer, gate.float(), up.float(), swiglu) is None
    assert fused_product(nn.Linear(48, 32), gate, up, swiglu) is None
    with bfp.observe(nn.Sequential(layer)):
        assert fused_product(layer, gate, up, swiglu) is None
        assert torch.equal(gated_product(layer, gate, up, swiglu), wanted)
    torch.func.vmap(lambda g, u: gated_product(layer, g, u, swiglu))(gate, up)


def test_what_the_activation_makes_is_not_kept():
    layer = bfp.Linear(48, 32, recipe="mxfp8", dtype=torch.bfloat16)
    gate, up, _ = operands("apart")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_product(layer, gate, up, Gating("silu", "apart"))
    whole = [x for x in kept if x.is_floating_point() and x.numel() == gate.numel()]
    assert [x.untyped_storage().data_ptr() for x in whole] == [x.untyped_storage().data_ptr() for x in (gate, up)]


def test_errors_are_the_layers_own():
    layer = bfp.Linear(48, 32, recipe="mxfp8", dtype=torch.bfloat16)
    gate, up, _ = operands("apart", features=40)
    with pytest.raises(ValueError, match=r"x \[.., in\] and weight \[out, in\] must share in"):
        gated_product(layer, gate, up, Gating("silu", "apart"))
    with pytest.raises(TypeError, match=r"x is torch\.float32, weight"):
        gated_product(layer, *(one.float() for one in operands("apart")[:2]), Gating("silu", "apart"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3_1x128"])
def test_gradients_are_cast_as_they_are_made(name, layout):
    """In one launch where the kernels have the format, by the operations everywhere else: the same bits."""
    format, multiplier, library = Format.parse(name), torch.tensor(3.0), emulated_cuda.Library()
    given = "multiplier" if format.per_tensor else None
    for rows in (32, 24, 20):
        gate, up, way = operands(layout, shape=(rows,))
        gate, up = gate.detach(), None if up is None else up.detach()
        gradient = values((rows, 48), 7, torch.bfloat16)
        wanted = gated_ops.gated_gradient(gradient, gate, up, "silu", way)
        cases = [(of_up, row) for of_up in range(len(wanted)) for row in (format, None)]
        for of_up, row in cases:
            inputs = (gradient, gate, up, "silu", way, bool(of_up))
            cast, scale = OperandCast(row, format, given), multiplier if given else None
            with emulated_cuda.launches(quantize_gradient=library.quantize_gradient):
                ours = gated_ops.quantize_gradient(*inputs, cast, scale)
                theirs = quantize_matrix(wanted[of_up], cast, None, scale)
            assert_equal(ours, theirs)
            assert_equal(gated_ops.quantize_gradient(*inputs, cast, scale), ours)
        assert len(library.calls) == (given is not None and rows % 16 == 0) * len(cases)
        library.calls.clear()


def test_ops():
    gate, up, _ = operands("apart", shape=(32,))
    gate, up = gate.detach(), up.detach()
    for name, multiplier in (("fp8_e4m3", torch.tensor(2.0)), ("nvfp4", None), ("fp8_e4m3_1x128", None)):
        arguments = (gate, up, "silu", "apart", name, name, None, multiplier, False, 0.0)
        torch.library.opcheck(gated_ops.quantize_op, arguments, test_utils=("test_schema", "test_faketensor"))
        if multiplier is not None:
            arguments = (gate, gate, up, "silu", "apart", True, None, name, multiplier)
            torch.library.opcheck(gated_ops.quantize_gradient_op, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        gated_ops.gradient_op, (gate, gate, up, "gelu", "apart"), test_utils=("test_schema", "test_faketensor")
    )
    torch.library.opcheck(
        gated_ops.gradient_op, (gate[:, :24], gate, None, "silu", "pairs"), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_by_itself(activation, layout):
    """In front of what can't take it in: what a GPU runs, here of PyTorch's operations."""
    for dtype in DTYPES:
        gate, up, way = operands(layout, dtype, shape=(20,))
        wanted = [one for one in (gate, up) if one is not None]
        gradient = values((20, 48), 3, dtype)
        made = ActivationFunction.apply(gate, up, Gating(activation, way))
        theirs = plain(gate, up, activation, layout)
        ours = [made, *torch.autograd.grad(made, wanted, gradient, retain_graph=True)]
        assert_equal(ours, [theirs, *torch.autograd.grad(theirs, wanted, gradient, retain_graph=True)])
        second = []
        for one in (made, theirs):
            first = torch.autograd.grad(one, wanted, gradient, create_graph=True)
            second.append(torch.autograd.grad(sum(x.sum() for x in first), wanted))
        assert_equal(*second)
    assert torch.equal(
        activation_alone(*operands(layout)[:2], Gating(activation, way)), plain(*operands(layout)[:2], activation, layout)
    )

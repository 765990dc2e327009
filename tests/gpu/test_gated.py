"""Activations cast as they are made, on a GPU: the bits of PyTorch's operations and the casts behind them."""

import math

import pytest
import torch
from arrays import with_scales
from blockfp.torch_backend.linear.prologue import activation
from blockfp.torch_backend.modules.layer_calls import gated_product
from blockfp.torch_backend.ops.layer import gated_kernels, gated_ops
from blockfp.torch_backend.ops.layer.activations import Gating, activate, gate_and_up, gradients, joined
from blockfp.torch_backend.ops.quantize.quantize_plans import quantize_matrix
from cuda_arrays import capture
from same_tensors import assert_same

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.formats import Format
from blockfp.kernels.operand_cast import OperandCast, given_of

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
LAYOUTS = ("alone", "apart", "halves", "pairs")
DTYPES = ("bfloat16", "float16")
FORMATS = (
    "fp8_e4m3",
    "fp8_e4m3_pow2",
    "fp8_e4m3_1x128",
    "fp8_e4m3_1x128_fp32",
    "mxfp8_e4m3",
    "mxfp6_e3m2",
    "mxfp4_e2m1",
    "nvfp4",
)
SHAPES = ((256, 384), (32, 8), (160, 1032), (4096, 64))


def tensors(shape, layout, dtype, seed=0):
    """(gate, up) as the ops take them, one of them or both of this shape."""
    rows, columns = shape
    width = columns if layout in ("alone", "apart") else 2 * columns
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [(torch.randn((rows, width), device="cuda", generator=generator) * 2.0).to(getattr(torch, dtype)) for _ in range(2)]
    return made[0], made[1] if layout == "apart" else None


def way(layout):
    return "apart" if layout == "alone" else layout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_have_the_bits_of_pytorch(activation, gated, dtype):
    """Over all gates, with ups and gradients of all sizes. Where this fails layers go on unfused, and are right."""
    assert gated_kernels.differing(torch.device("cuda:0"), getattr(torch, dtype), activation, gated) == {}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_casts(activation, layout, name):
    format, planned = Format.parse(name), []
    for dtype in DTYPES:
        for seed, shape in enumerate(SHAPES):
            gate, up = tensors(shape, layout, dtype, seed)
            made = activate(*gate_and_up(gate, up, way(layout)), activation).contiguous()
            both = OperandCast(format, format)
            plan = gated_kernels.plan_of(*gate_and_up(gate, up, way(layout)), activation, way(layout), both)
            planned.append(plan is not None)
            for row, column in ((format, format), (format, None), (None, format)):
                for multiplier in (None, torch.tensor(3.0, device="cuda")) if format.per_tensor else (None,):
                    inputs, cast = (gate, up, activation, way(layout)), OperandCast(row, column, given_of(None, multiplier))
                    ours = gated_ops.quantize_gated(*inputs, cast, None, multiplier)
                    theirs = quantize_matrix(made, cast, None, multiplier)
                    if format.per_tensor and multiplier is None:
                        *ours, amax = ours
                        again = gated_ops.quantize_gated(*inputs, cast._replace(given="amax"), amax)
                        assert_same(again[:-1], theirs, f"{layout} {shape} with its amax")
                        assert amax.view(torch.float32) == made.abs().max()
                    what = f"{activation} {layout} {dtype} {shape} {row} {column}, multiplier {multiplier}"
                    assert_same(ours, theirs, what)
    slower = layout == "alone" and format.has_tensor_scale
    assert set(planned) == {not slower}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotated(layout):
    format = Format.parse("nvfp4")
    cast = OperandCast(format, format, rotate=True)
    for seed, shape in enumerate(SHAPES):
        gate, up = tensors(shape, layout, "bfloat16", seed)
        made = activate(*gate_and_up(gate, up, way(layout)), "silu").contiguous()
        ours = gated_ops.quantize_gated(gate, up, "silu", way(layout), cast)
        assert_same(ours, quantize_matrix(made, cast), f"{layout} {shape}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", ["nan", "inf", "overflow", "zeros"])
def test_special_values(name, special):
    """An Inf of the activation marks scales, also where neither gate nor up holds one."""
    format = Format.parse(name)
    for layout in ("apart", "pairs"):
        gate, up = tensors((256, 256), layout, "bfloat16")
        first, second = gate_and_up(gate, up, layout)
        if special == "zeros":
            gate.zero_()
        else:
            first[70, 133] = {"nan": torch.nan, "inf": torch.inf, "overflow": 3e38}[special]
            second[70, 133] = 1e30
        made = activate(first, second, "silu").contiguous()
        for column in (format, None):
            ours = gated_ops.quantize_gated(gate, up, "silu", layout, OperandCast(format, column))
            theirs = quantize_matrix(made, OperandCast(format, column))
            assert_same(ours[: len(theirs)], theirs, f"{special} {layout} {column}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation, layout, dtype):
    for seed, shape in enumerate(SHAPES):
        gate, up = tensors(shape, layout, dtype, seed)
        gradient = tensors(shape, "alone", dtype, 9)[0]
        views = gate_and_up(gate, up, way(layout))
        d_gate, d_up = gradients(gradient, *views, activation)
        wanted = [d_gate] if d_up is None else [d_gate, d_up] if layout == "apart" else [joined(d_gate, d_up, layout)]
        found = gated_kernels.gradient_of(gradient, *views, activation, way(layout))
        if layout == "alone":
            assert found is None, "PyTorch's own kernel is the faster one"
            found = gated_ops.gated_gradient(gradient, gate, up, activation, way(layout))
        assert found is not None
        assert_same(found, wanted, f"{activation} {layout} {dtype} {shape}")
        # As autograd hands them on: of a sum, of a transpose.
        for other in (gradient[:1].expand(shape), gradient.new_ones(()).expand(shape), gradient.mT.contiguous().mT):
            d_gate, d_up = gradients(other, *views, activation)
            wanted = [d_gate] if d_up is None else [d_gate, d_up] if layout == "apart" else [joined(d_gate, d_up, layout)]
            assert_same(gated_ops.gated_gradient(other, gate, up, activation, way(layout)), wanted, f"strides {other.stride()}")


GRADIENTS = ("fp8_e4m3", "fp8_e5m2", "fp8_e5m2_pow2")


def cast_gradients(gradient, gate, up, activation, layout, format):
    """Compares the casts of the gradients, and says which a kernel made."""
    wanted, planned, multiplier = gated_ops.gated_gradient(gradient, gate, up, activation, layout), [], torch.tensor(3.0).cuda()
    for of_up, whole in enumerate(wanted):
        inputs = (gradient, gate, up, activation, layout, bool(of_up))
        for row in (format, None):
            cast = OperandCast(row, format, "multiplier")
            planned.append(gated_kernels.gradient_plan_of(*inputs[1:], cast) is not None)
            ours, theirs = (
                gated_ops.quantize_gradient(*inputs, cast, multiplier),
                quantize_matrix(whole, cast, None, multiplier),
            )
            assert_same(ours, theirs, f"{activation} {layout} {gate.dtype} {tuple(gate.shape)} of up {of_up} {cast}")
    return planned


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_casts_of_gradients(activation, layout, name):
    for dtype in DTYPES:
        for seed, shape in enumerate(SHAPES):
            gate, up = tensors(shape, layout, dtype, seed)
            gradient = tensors(shape, "alone", dtype, 9)[0]
            found = cast_gradients(gradient, gate, up, activation, way(layout), Format.parse(name))
            assert all(found)


@pytest.mark.parametrize("special", ["nan", "inf", "overflow", "zeros"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_casts_of_special_gradients(name, special):
    """Other lengths, strides and places too, where the operations run."""
    for layout in LAYOUTS:
        for shape in ((256, 256), (48, 136), (77, 130), (24, 64), (16, 20)):
            gate, up = tensors(shape, layout, "bfloat16")
            gradient = tensors(shape, "alone", "bfloat16", 9)[0]
            if special == "zeros":
                gradient.zero_()
            else:
                gradient[7, 13] = {"nan": torch.nan, "inf": torch.inf, "overflow": 3e38}[special]
                gate_and_up(gate, up, way(layout))[0][7, 13] = 3.0
                for one in gate_and_up(gate, up, way(layout))[1:]:
                    if one is not None:
                        one[7, 13] = 1e30
            for other in (gradient, gradient.mT.contiguous().mT, gradient[:1].expand(shape)):
                cast_gradients(other, gate, up, "silu", way(layout), Format.parse(name))


@pytest.mark.parametrize("shape", [(77, 130), (1, 16), (0, 64), (48, 64), (256, 20)])
def test_other_lengths_and_places_take_the_operations(shape):
    """Lengths that no kernel takes, rows that begin anywhere, parts of larger matrices: the same bits."""
    for name in ("fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"):
        format = Format.parse(name)
        for layout in LAYOUTS:
            gate, up = tensors((shape[0] + 3, shape[1]), layout, "bfloat16")
            for first in (0, 3):
                a, b = gate[first : first + shape[0]], None if up is None else up[first : first + shape[0]]
                made = activate(*gate_and_up(a, b, way(layout)), "silu").contiguous()
                ours = gated_ops.quantize_gated(a, b, "silu", way(layout), OperandCast(format, format))
                theirs = quantize_matrix(made, OperandCast(format, format))
                assert_same(ours[: len(theirs)], theirs, f"{name} {layout} from row {first}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_by_themselves(layout, dtype):
    """Output and gradients of what stands before layers that can't take it in, such as experts; odd lengths too."""
    for shape in (*SHAPES, (77, 130), (2, 16, 64)):
        for name in ACTIVATIONS:
            made = []
            for run in (activation, lambda g, u, gating: activate(*gate_and_up(g, u, gating.layout), gating.activation)):
                gate, up = tensors((math.prod(shape[:-1]), shape[-1]), layout, dtype)
                inputs = [one.view(*shape[:-1], -1).requires_grad_() for one in (gate, up) if one is not None]
                y = run(inputs[0], inputs[1] if len(inputs) > 1 else None, Gating(name, way(layout)))
                made.append([y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y) * 0.3)])
            assert_same(*made, f"{name} {layout} {dtype} {shape}")


def mlp(name, activation, dtype, fused, monkeypatch):
    """Output and gradients of an MLP, two steps."""
    torch.manual_seed(0)
    layer = bfp.LayerNormMLP(256, 384, recipe=name, activation=activation, device="cuda", dtype=dtype)
    results = []
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr("blockfp.torch_backend.modules.layer_calls.fused_product", lambda *_: None)
        for seed in range(2):
            x = tensors((512, 256), "alone", "bfloat16", seed)[0].to(dtype).view(2, 256, 256).requires_grad_()
            y = layer(x)
            y.backward(tensors((512, 256), "alone", "bfloat16", 7 + seed)[0].to(dtype).view(2, 256, 256))
            results += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
            bfp.update_scales(layer)
            layer.zero_grad()
    return results


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_layers(name, activation, dtype, monkeypatch):
    torch.use_deterministic_algorithms(False)
    ours, theirs = (mlp(name, activation, getattr(torch, dtype), fused, monkeypatch) for fused in (True, False))
    if recipes.parse(name).gradient.stochastic:
        # Keys of the layers are drawn anew: outputs alone are comparable.
        ours, theirs = ours[:1], theirs[:1]
    assert_same(ours, theirs, f"{name} {activation}")


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
def test_compiled_and_captured(name):
    torch.manual_seed(0)
    layer = bfp.LayerNormMLP(256, 384, recipe=name, activation="swiglu", device="cuda", dtype=torch.bfloat16)
    x, gradient = (tensors((512, 256), "alone", "bfloat16", seed)[0] for seed in (0, 1))
    down, hidden = with_scales(layer).down, tensors((512, 384), "pairs", "bfloat16", 2)[0]

    def run(h):
        return gated_product(down, h, None, Gating("silu", "pairs"))

    wanted = []
    for call in (run, torch.compile(run, fullgraph=True)):
        h = hidden.clone().requires_grad_()
        y = call(h)
        y.backward(gradient)
        wanted.append([y.detach(), h.grad, down.weight.grad.clone()])
        down.weight.grad = None
    if name == "fp8_current":
        # There the compiler joins the activation's gradient with the amax of the next cast.
        torch.testing.assert_close(wanted[1].pop(1), wanted[0].pop(1), rtol=2**-7, atol=2**-10)
    assert_same(wanted[1], wanted[0], f"compiled {name}")
    static = hidden.clone()
    with torch.no_grad():
        eager = run(static)
        graph, captured = capture(lambda: run(static))
        graph.replay()
        assert_same([captured], [eager], f"captured {name}")
    assert layer(x).shape == x.shape


def test_what_the_activation_makes_is_not_kept():
    """The cast allocates codes and scales alone, and the backward keeps gate, up and the columnwise ones."""
    tokens, features = 4096, 4096
    layer = bfp.Linear(features, 256, bias=False, recipe="fp8_block", device="cuda", dtype=torch.bfloat16)
    gate, up = (one.requires_grad_() for one in tensors((tokens, features), "apart", "bfloat16"))
    gated_product(layer, gate, up, Gating("silu", "apart"))
    before = torch.cuda.memory_allocated()
    y = gated_product(layer, gate, up, Gating("silu", "apart"))
    kept, one = torch.cuda.memory_allocated() - before, tokens * features
    assert kept < 1.3 * one + y.numel() * 2, kept / one
    for name, bytes_each in (("fp8_e4m3", 2), ("fp8_e4m3_1x128", 2), ("nvfp4", 1)):
        f = Format.parse(name)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        parts = gated_ops.quantize_gated(gate, up, "silu", "apart", OperandCast(f, f))
        peak = torch.cuda.max_memory_allocated() - before
        assert len(parts) in (4, 5, 6)
        assert peak < (bytes_each + 0.2) * one, (name, peak / one)


def test_nothing_waits_for_the_device(waiting_raises):
    layer = bfp.LayerNormMLP(256, 384, recipe="fp8_block", activation="swiglu", device="cuda", dtype=torch.bfloat16)
    x, gradient = (tensors((512, 256), "alone", "bfloat16", seed)[0] for seed in (0, 1))
    x.requires_grad_()
    layer(x).backward(gradient)
    with waiting_raises():
        layer(x).backward(gradient)

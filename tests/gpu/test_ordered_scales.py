"""Scales of 1x128 and of rows that casts write in the order in which products read them: the bits of those as stored."""

from collections import Counter

import pytest
import torch
from blockfp.torch_backend.linear import linear as linear_module
from blockfp.torch_backend.modules.layer_calls import gated_product
from blockfp.torch_backend.ops import cuda
from blockfp.torch_backend.ops.layer import gated_ops, linear_ops
from blockfp.torch_backend.ops.layer.activations import Gating
from blockfp.torch_backend.ops.quantize import quantize_plans
from cuda_arrays import capture

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.formats import Format
from blockfp.kernels import calls, switch
from blockfp.kernels.operand_cast import OperandCast
from blockfp.recipes import Cast

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the products are Hopper's", allow_module_level=True)

# torch 2.11's compiler looks at .grad of what is no leaf, and warns itself of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

FORMATS = ("fp8_e4m3_1x128", "fp8_e4m3_1x128_fp32", "fp8_e5m2_1x128_fp32", "fp8_e4m3_row", "fp8_e5m2_row_pow2")
# Whole tiles; whole vectors in ragged tiles; whole blocks of odd rows; ragged.
SHAPES = ((256, 512), (128, 128), (272, 392), (16, 8), (77, 384), (130, 200), (301, 33), (1, 300), (300, 1), (5, 4096))
DIRECTIONS = ((True, False), (False, True), (True, True))
LAID = ((True, True), (True, False), (False, True))


def data(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    return (x * torch.exp(2 * torch.randn(shape[-1], device="cuda", generator=generator))).to(dtype)


def assert_ordered(found, plain, laid, what):
    """Parts in order hold what the plain ones hold, `laid` telling of each two of them."""
    assert len(found) == len(plain)
    for direction, is_laid in enumerate(laid):
        (codes, scales), (wanted, stored) = found[2 * direction :][:2], plain[2 * direction :][:2]
        assert torch.equal(codes, wanted), what
        if is_laid:
            assert scales.shape == (stored.shape[1], -(-len(stored) // 4) * 4), what
            scales = scales[:, : len(stored)].mT
        assert torch.equal(scales.contiguous().view(torch.int32), stored.view(torch.int32)), what


def compare(cast, run, what):
    """A cast's parts in all orders, of the directions that it has."""
    wanted = [cast.row is not None, cast.column is not None]
    plain = run(cast)
    for laid in LAID:
        own = tuple(one and is_wanted for one, is_wanted in zip(laid, wanted, strict=True))
        found = run(cast._replace(laid=own))
        assert_ordered(found, plain, [one for one, is_wanted in zip(own, wanted, strict=True) if is_wanted], (*what, laid))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_casts(name, dtype):
    format, keys = Format.parse(name), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device="cuda")
    for shape in SHAPES:
        x = data(shape, getattr(torch, dtype))
        for row, column in DIRECTIONS:
            cast = OperandCast(format if row else None, format if column else None)
            compare(cast, lambda cast, x=x: quantize_plans.quantize_matrix(x, cast), (shape, row, column))
            random = cast._replace(random=(row, column))
            compare(random, lambda cast, x=x: quantize_plans.quantize_matrix(x, cast, keys=keys), (shape, row, column, "keys"))


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "fp8_e4m3_row"])
def test_any_strides_and_an_inf(name):
    format, room = Format.parse(name), data((300, 640))
    spoiled = data((256, 384))
    spoiled[7, 300] = float("-inf")
    ragged = data((77, 130))
    ragged[76, 129] = float("inf")
    for x in (room[3:259, 5:389], room[:, 8:520], room[0, :1].expand(64, 128), room.mT, spoiled, ragged):
        for row, column in DIRECTIONS:
            cast = OperandCast(format if row else None, format if column else None)
            compare(cast, lambda cast, x=x: quantize_plans.quantize_matrix(x, cast), (x.shape, x.stride(), row, column))
    _, scales, _, scales_t = quantize_plans.quantize_matrix(ragged, OperandCast(format, format, laid=(True, True)))
    assert bool(scales[:, :77].isnan().all())
    assert bool(scales_t[:, :130].isnan().all())


@pytest.mark.parametrize("layout", ["apart", "pairs"])
def test_of_an_activation(layout):
    format = Format.parse("fp8_e4m3_1x128")
    for rows, columns in ((256, 512), (272, 136), (32, 1024), (77, 384)):
        gate = data((rows, columns if layout == "apart" else 2 * columns))
        up = data((rows, columns), seed=1) if layout == "apart" else None
        for row, column in DIRECTIONS:
            cast = OperandCast(format if row else None, format if column else None)
            run = lambda cast, gate=gate, up=up: gated_ops.quantize_gated(gate, up, "silu", layout, cast)  # noqa: E731
            compare(cast, run, (rows, columns, row, column))


def test_nothing_else_is_written():
    """Neither around the scales nor in the padding of their lines."""
    for name in ("fp8_e4m3_1x128", "fp8_e4m3_row"):
        format = Format.parse(name)
        for shape in ((130, 201), (256, 384), (77, 256), (31, 65)):
            x, rooms = data(shape), {}
            cast = OperandCast(format, format, laid=(True, True))
            call = calls.quantize(shape, "bfloat16", cast)
            for part in ("scales", "scales_t"):
                grid = call.arrays[part][0]
                room = torch.full((grid[0] * grid[1] + 128,), -7.0, device="cuda")
                rooms[part] = room, room[64:-64].view(grid)
            cuda.carry_out(call, x, **{part: view for part, (_, view) in rooms.items()})
            for (room, view), lines in zip(rooms.values(), shape, strict=True):
                assert bool((room[:64] == -7).all() and (room[-64:] == -7).all() and (view[:, lines:] == -7).all())
                assert bool((view[:, :lines] > 0).all())


def forget():
    with switch.definition_only():
        pass


@pytest.fixture
def as_stored(monkeypatch):
    """Lets products order scales from now on: a function that is called between two steps."""

    def turn_off():
        for module in (linear_ops, linear_module):
            monkeypatch.setattr(module, "comes_laid", lambda *_, **__: False)
        forget()

    forget()
    yield turn_off
    monkeypatch.undo()
    forget()


E5M2 = Cast("fp8_e5m2_1x128", stochastic=True)
RECIPES = {
    "fp8_block": recipes.fp8_block(),
    "fp8_row": recipes.fp8_row(),
    "in order": recipes.fp8_block().replace(exact_order=True),
    "stochastic": recipes.fp8_block().replace(gradient=E5M2, gradient_columnwise=E5M2),
}


def assert_same(found, wanted):
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16)), number


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_have_the_same_bits(name, compiled, as_stored):
    def steps():
        results = []
        for tokens, inside, outside in ((256, 512, 384), (77, 200, 130), (4096, 384, 256), (6, 136, 1000)):
            torch.manual_seed(0)
            layer = bfp.Linear(inside, outside, recipe=RECIPES[name], device="cuda", dtype=torch.bfloat16)
            x = data((tokens, inside)).requires_grad_()
            if compiled:
                torch.compiler.reset()
                layer.compile(fullgraph=True, backend="aot_eager")
            y = layer(x) + layer(torch.relu(x))
            y.backward(data((tokens, outside), seed=1))
            results += [y.detach(), x.grad, torch.as_tensor(layer.weight.grad), layer.bias.grad]
        return results

    found = steps()
    as_stored()
    assert_same(found, steps())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_row"])
def test_behind_an_activation(name, as_stored):
    def steps():
        results = []
        for tokens, inside in ((256, 512), (80, 136), (77, 384)):
            torch.manual_seed(0)
            layer = bfp.Linear(inside, 256, recipe=name, bias=False, device="cuda", dtype=torch.bfloat16)
            gate, up = (data((tokens, inside), seed=seed).requires_grad_() for seed in (0, 1))
            y = gated_product(layer, gate, up, Gating("silu", "apart"))
            y.backward(data((tokens, 256), seed=2))
            results += [y.detach(), gate.grad, up.grad, torch.as_tensor(layer.weight.grad)]
        return results

    found = steps()
    as_stored()
    assert_same(found, steps())


def test_gradients_of_gradients(as_stored):
    def twice():
        x, w = (data(shape, seed=i).requires_grad_() for i, shape in enumerate(((77, 300), (130, 300))))
        y = bfp.linear(x, w, recipe="fp8_block")
        d_x, d_w = torch.autograd.grad(y.float().square().sum(), (x, w), create_graph=True)
        return [
            d_x.detach(),
            d_w.detach(),
            *torch.autograd.grad(d_x.float().square().sum() + d_w.float().square().sum(), (x, w)),
        ]

    found = twice()
    as_stored()
    assert_same(found, twice())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_row"])
def test_no_product_lays_scales_out(name):
    """Of a stored weight of 128x128, or of a row, neither: of what a step launches nothing is left that orders scales."""
    layer = bfp.Linear(512, 384, recipe=name, bias=False, device="cuda", dtype=torch.bfloat16)
    x, gradient = data((256, 512)).requires_grad_(), data((256, 384), seed=1)
    for _ in range(2):
        layer(x).backward(gradient)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        layer(x).backward(gradient)
        torch.cuda.synchronize()
    launched = Counter(event.name for event in profile.events() if event.device_type.name == "CUDA")
    assert any("quantize_across_warps" in one for one in launched), launched
    assert not [one for one in launched if "lay_scales" in one or "order_scales" in one], launched


def test_captured_in_a_graph():
    """With the kernel that marks an Inf behind it, which is launched before the cast has ended."""
    format, x = Format.parse("fp8_e4m3_1x128"), data((256, 512))
    cast = OperandCast(format, format, laid=(True, True))
    run = lambda: quantize_plans.quantize_matrix(x, cast)  # noqa: E731
    run()
    graph, found = capture(run)
    for value in (1.0, float("inf"), 2.0):
        x[5, 9] = value
        graph.replay()
        for one, other in zip(found, run(), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), value
        assert bool(found[1].isnan().all()) == (value == float("inf"))

"""MX operands that are quantized straight to aligned codes on a GPU: bit for bit what quantizing and aligning give."""

import pytest
import torch
from blockfp.torch_backend.linear import linear as linear_module
from blockfp.torch_backend.ops.groups import cuda_groups, grouped_ops
from blockfp.torch_backend.ops.layer import gated_kernels, gated_ops, linear_ops
from blockfp.torch_backend.ops.layer.activations import activate
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.quantize import cuda_layouts, quantize_plans
from cuda_arrays import capture
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import alignment
from blockfp.formats import FORMATS, Format
from blockfp.kernels import switch
from blockfp.kernels.calls import format_numbers, laid_parts
from blockfp.kernels.cuda_library import library
from blockfp.kernels.operand_cast import OperandCast

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the route is Hopper's", allow_module_level=True)

# torch 2.11's compiler looks at .grad of what is no leaf, and warns itself of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

MX = [f for f in FORMATS if alignment.can_align(f) and not f.square]
MAIN = [f for f in MX if "floor" not in f.name]
SHAPES = ((256, 512), (16, 8), (8, 136), (520, 264), (130, 200), (77, 33), (1, 300), (300, 1), (200, 130), (33, 4096))
KINDS = ("gaussian", "columns", "blocks", "tiny", "nan")


def data(kind, rows, columns, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def random():
        return torch.randn(rows, columns, device="cuda", generator=generator)

    x = random()
    if kind == "columns":
        x = x * torch.exp(3 * random()[:1])
    if kind == "blocks":
        powers = (random() * 8).round().clamp(-20, 12)
        x = x * torch.exp2(powers[(torch.arange(rows) // 32 * 32)][:, torch.arange(columns) // 32 * 32])
        x[random() > 1.2] = 0
    if kind == "tiny":
        x = x * (1e-38 if dtype is not torch.float16 else 1e-6)
    if kind == "nan":
        x[random() > 2.2] = float("nan")
        x[:, : columns // 3] = 0
    return x.to(dtype)


def forget():
    with switch.definition_only():
        pass


CALLS = []
"""Names of the library's functions that align, as they are called."""


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    real = library()
    for name in ("align", "quantize_aligned", "quantize_groups_aligned", "quantize_gated_aligned"):
        run = getattr(real, name)
        monkeypatch.setattr(real, name, lambda *a, run=run, name=name: (CALLS.append(name), run(*a))[1])
    forget()
    CALLS.clear()
    yield
    monkeypatch.undo()
    forget()


def direct_and_after(x, format, row, column, aligned):
    """What the kernel makes of x, and what quantizing and aligning make of it."""
    plain_cast = OperandCast(format if row else None, format if column else None)
    CALLS.clear()
    found = quantize_plans.quantize_matrix(x, plain_cast._replace(laid=aligned))
    plain = quantize_plans.quantize_matrix(x, plain_cast)
    assert CALLS == ["quantize_aligned"]
    wanted, rows, columns = [], *x.shape[-2:]
    for wants, aligns, length in ((row, aligned[0], columns), (column, aligned[1], rows)):
        if wants:
            parts, plain = plain[:2], plain[2:]
            wanted += cuda_layouts.align(*parts, format, columns=length) if aligns else parts
    return found, wanted


def assert_same_bytes(found, wanted, what=""):
    assert len(found) == len(wanted)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), (what, number)
        words = torch.int32 if one.dtype is torch.float32 else torch.uint8
        differs = one.view(words) != other.view(words)
        where = differs.nonzero()[:4].tolist() if bool(differs.any()) else []
        assert not where, (what, number, where, one[differs][:4].tolist(), other[differs][:4].tolist())


WANTED = ((True, False, (True, False)), (False, True, (False, True)), (True, True, (True, True)), (True, True, (True, False)))
"""Rows, columns, and which of them are aligned."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("format", MX, ids=str)
def test_bits(format, dtype):
    for shape in SHAPES:
        for kind in KINDS if "floor" not in format.name else ("blocks", "nan"):
            x = data(kind, *shape, getattr(torch, dtype))
            for row, column, aligned in WANTED:
                assert_same_bytes(*direct_and_after(x, format, row, column, aligned), (shape, kind, row, column, aligned))


@pytest.mark.parametrize("format", MAIN, ids=str)
def test_an_infinity_leaves_nothing_finite(format):
    for shape in ((256, 512), (130, 200)):
        x = data("gaussian", *shape, torch.bfloat16)
        x[3, 7] = float("-inf")
        for row, column, aligned in WANTED:
            found, wanted = direct_and_after(x, format, row, column, aligned)
            assert_same_bytes(found, wanted, (shape, row, column, aligned))
            if aligned[0]:
                assert bool((found[0][:, : shape[1]] == 0x7F).all())


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1"])
def test_any_strides(format):
    """Slices whose rows begin anywhere, expanded scalars, transposed matrices, stacks."""
    format, room = Format.parse(format), data("blocks", 300, 600, torch.bfloat16)
    for x in (room[3:259, 5:389], room[:, 8:520], room[0, :1].expand(64, 128), room.mT, room[:256, :256].view(4, 64, 256)):
        for row, column, aligned in WANTED:
            assert_same_bytes(*direct_and_after(x, format, row, column, aligned), (x.shape, x.stride(), row, column, aligned))


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_nothing_else_is_written(format):
    format = Format.parse(format)
    for rows, columns in ((130, 200), (256, 384), (31, 65)):
        x = data("gaussian", rows, columns, torch.bfloat16)
        shapes = [shape for lines in ((rows, columns), (columns, rows)) for shape, _ in laid_parts(lines, format)]
        rooms, views = [], []
        for number, shape in enumerate(shapes):
            count = shape[0] * shape[1] * (4 if number % 2 else 1)
            room = torch.full((count + 512,), 0xA5, dtype=torch.uint8, device="cuda")
            view = room[256 : 256 + count].view(torch.float32 if number % 2 else torch.uint8)
            rooms.append(room)
            views.append(view.view(shape))
        recorded = torch.empty(1, dtype=torch.int32, device="cuda")
        library().quantize_aligned(x, recorded, *views, None, None, *format_numbers(format))
        for room in rooms:
            assert bool((room[:256] == 0xA5).all())
            assert bool((room[-256:] == 0xA5).all())
        assert_same_bytes(views, direct_and_after(x, format, True, True, (True, True))[1])


def test_refuses_what_is_not_there():
    x, recorded = torch.randn(64, 64, device="cuda"), torch.empty(1, dtype=torch.int32, device="cuda")
    codes, scales = cuda_layouts.empty_laid(x, x.shape, Format.parse("mxfp8_e4m3"))
    nothing = (None,) * 4
    with pytest.raises(ValueError, match="blocks of 1x32 are aligned as they are quantized"):
        library().quantize_aligned(x, recorded, codes, scales, *nothing, *format_numbers(Format.parse("mxint8")))
    numbers = format_numbers(Format.parse("mxfp8_e4m3"))
    with pytest.raises(ValueError, match="codes must be FP8 codes"):
        library().quantize_aligned(x, recorded, codes[:, :32].contiguous(), scales, *nothing, *numbers)
    with pytest.raises(ValueError, match="come together"):
        library().quantize_aligned(x, recorded, codes, None, *nothing, *numbers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu2"])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1"])
def test_what_an_activation_makes(format, activation, dtype):
    format = Format.parse(format)
    for rows, columns in ((256, 384), (8, 136), (1040, 264)):
        for alone in (True, False):
            gate, up = (2 * data("gaussian", rows, columns, getattr(torch, dtype), seed) for seed in (0, 1))
            up = None if alone else up
            if not gated_kernels.agrees(gate, activation, not alone):
                pytest.skip("PyTorch's activation has other bits here")
            made = activate(gate, up, activation)
            for row, column, aligned in WANTED[:3]:
                cast = OperandCast(format if row else None, format if column else None, laid=aligned)
                CALLS.clear()
                found = gated_ops.quantize_gated(gate, up, activation, "apart", cast)
                assert CALLS == ["quantize_gated_aligned"]
                assert_same_bytes(
                    found, direct_and_after(made, format, row, column, aligned)[1], (rows, columns, alone, row, column)
                )


COUNTS = [0, 130, 1, 0, 256, 77, 0, 128, 32, 200, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("format", MAIN, ids=str)
def test_groups(format, dtype):
    """Rows and columns of all groups, as far as these go; with empty ones, rows past the last end, and an Inf in one group."""
    count, last = len(COUNTS), sum(COUNTS)
    tokens = last + 45
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32).cuda()
    padded = sum(-(-rows // 128) for rows in COUNTS)
    for features in (256, 200, 33):
        for kind in ("blocks", "nan", "inf"):
            x = data(kind, tokens, features, getattr(torch, dtype))
            if kind == "inf":
                x[133, 5] = float("inf")
            words = cuda_groups.group_rows(ends, tokens)
            plain = cuda_groups.quantize_groups(x, words, count, OperandCast(format, format))
            width = plain.column[0].shape[1] * 8 // format.element.bits
            after = (
                cuda_layouts.align(*plain.row, format, columns=features),
                cuda_layouts.align(*plain.column, format, columns=width),
            )
            for row, column, aligned in WANTED:
                cast = OperandCast(format if row else None, format if column else None, laid=aligned)
                CALLS.clear()
                found = cuda_groups.quantize_groups(x, words, count, cast)
                assert CALLS == ["quantize_groups_aligned"]
                what = (features, kind, row, column, aligned)
                if row:
                    codes, scales = found.row
                    assert_same_bytes(
                        [codes[:last], scales[:, :last].contiguous()],
                        [after[0][0][:last], after[0][1][:, :last].contiguous()],
                        what,
                    )
                if column and aligned[1]:
                    codes, scales = found.column
                    one, other = ([c[:, : 128 * padded].contiguous(), s[:padded]] for c, s in ((codes, scales), after[1]))
                    assert_same_bytes(one, other, what)
                elif column:
                    bits = format.element.bits
                    one, other = (
                        [c[:, : 16 * padded * bits].contiguous(), s[:, : 4 * padded].contiguous()]
                        for c, s in (found.column, plain.column)
                    )
                    assert_same_bytes(one, other, what)


def test_random_codes_are_aligned_in_a_pass_of_their_own():
    """So are rotated ones: directions that the kernel doesn't take come aligned all the same."""
    format, x = Format.parse("mxfp4_e2m1"), data("columns", 256, 384, torch.bfloat16)
    keys = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device="cuda")
    for random, rotate in (((True, True), False), ((True, False), False), ((False, True), True)):
        cast = OperandCast(format, format, random=random, rotate=rotate)
        plain = quantize_plans.quantize_matrix(x, cast, keys=keys)
        wanted = [*cuda_layouts.align(*plain[:2], format, columns=384), *cuda_layouts.align(*plain[2:], format, columns=256)]
        found = quantize_plans.quantize_matrix(x, cast._replace(laid=(True, True)), keys=keys)
        assert_same_bytes(found, wanted, (random, rotate))
    words = cuda_groups.group_rows(torch.tensor([100, 256], dtype=torch.int32, device="cuda"), 256)
    cast, keys = OperandCast(format, format, random=(True, False)), keys.expand(2, 2, 2).contiguous()
    plain = cuda_groups.quantize_groups(x, words, 2, cast, keys=keys)
    found = cuda_groups.quantize_groups(x, words, 2, cast._replace(laid=(True, True)), keys=keys)
    assert_same_bytes(found.row, cuda_layouts.align(*plain.row, format, columns=384))
    assert_same_bytes(found.column, cuda_layouts.align(*plain.column, format, columns=384))


@pytest.fixture
def apart(monkeypatch):
    """Turns direct alignment off: a function that is called between two steps."""

    def turn_off():
        no = lambda *_, **__: False  # noqa: E731
        for module, name in (
            (linear_ops, "comes_laid"),
            (linear_module, "comes_laid"),
            (grouped_ops, "rows_come_aligned"),
            (grouped_ops, "columns_come_aligned"),
        ):
            monkeypatch.setattr(module, name, no)
        forget()

    yield turn_off
    monkeypatch.undo()
    forget()


RECIPES = ("mxfp8", "mxfp6", "mxfp4", "mxfp4_rotated")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_have_the_same_bits(recipe, compiled, apart):
    def steps():
        results = []
        for tokens, inside, outside in ((256, 512, 384), (77, 200, 130)):
            torch.manual_seed(0)
            layer = bfp.Linear(inside, outside, recipe=recipe, device="cuda", dtype=torch.bfloat16)
            x = data("columns", tokens, inside, torch.bfloat16).requires_grad_()
            if compiled:
                torch.compiler.reset()
                layer.compile(fullgraph=True, backend="aot_eager")
            y = layer(x)
            y.backward(data("blocks", tokens, outside, torch.bfloat16, 1))
            results += [y.detach(), x.grad, torch.as_tensor(layer.weight.grad), layer.bias.grad]
        return results

    direct = steps()
    apart()
    assert_equal(direct, steps())


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(256, 512, bias=False, device="cuda", dtype=torch.bfloat16)
        self.down = torch.nn.Linear(512, 256, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_mlps_have_the_same_bits(recipe, compiled, apart):
    """Layers behind an activation, and inputs that are cast again in the backward."""

    def step():
        torch.manual_seed(0)
        model = bfp.convert(MLP(), recipe)
        x = data("gaussian", 384, 256, torch.bfloat16).requires_grad_()
        if compiled:
            torch.compiler.reset()
            model.compile(fullgraph=True, backend="aot_eager")
        y = model(torch.relu(x))
        y.backward(data("gaussian", 384, 256, torch.bfloat16, 1))
        return [y.detach(), x.grad, *(torch.as_tensor(p.grad) for p in model.parameters())]

    direct = step()
    apart()
    assert_equal(direct, step())


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_grouped_layers_have_the_same_bits(recipe, apart):
    def step():
        torch.manual_seed(0)
        layer = bfp.GroupedLinear(len(COUNTS), 256, 384, recipe=recipe, device="cuda", dtype=torch.bfloat16)
        x = data("columns", sum(COUNTS), 256, torch.bfloat16).requires_grad_()
        y = layer(x, torch.tensor(COUNTS, device="cuda"))
        y.backward(data("gaussian", sum(COUNTS), 384, torch.bfloat16, 1))
        return [y.detach(), x.grad, torch.as_tensor(layer.weight.grad), layer.bias.grad]

    direct = step()
    apart()
    assert_equal(direct, step())


def test_what_is_aligned_in_a_pass_of_its_own():
    """Weights, and codes that are kept for the backward; of exact products nothing is aligned."""
    layer = bfp.Linear(256, 128, recipe="mxfp8", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    # The weight, twice, and x columnwise.
    assert sorted(CALLS) == ["align"] * 3 + ["quantize_aligned"] * 2
    CALLS.clear()
    experts = bfp.GroupedLinear(2, 256, 128, recipe="mxfp8", device="cuda", dtype=torch.bfloat16)
    experts(x, torch.tensor([30, 34], device="cuda")).sum().backward()
    assert sorted(CALLS) == ["align"] * 3 + ["quantize_groups_aligned"] * 2
    CALLS.clear()
    exact = recipes.mxfp8(exact_products=True)
    bfp.linear(x, torch.randn(128, 256, device="cuda", dtype=torch.bfloat16), recipe=exact).sum().backward()
    assert CALLS == []


def test_an_aligned_operand_is_refused_elsewhere():
    q = bfp.quantize(torch.randn(64, 64, device="cuda"), "fp8_e4m3_1x128")
    a = products.Matrix(q.parts, Format.parse("mxfp8_e4m3"), laid=True)
    b = products.Matrix([torch.randn(64, 64, device="cuda")], None)
    with pytest.raises(ValueError, match="an operand comes laid out"):
        products.multiply_parts(a, b, 64, 64, None, torch.bfloat16, False, None)


def test_captured_in_a_graph():
    x = data("gaussian", 256, 512, torch.bfloat16)
    format = Format.parse("mxfp8_e4m3")
    wanted = direct_and_after(x, format, True, True, (True, True))[0]
    graph, (found, *_) = capture(lambda: direct_and_after(x, format, True, True, (True, True)))
    graph.replay()
    assert_same_bytes(found, wanted)

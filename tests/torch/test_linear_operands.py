"""`linear`'s operands: their bits, what is kept of them, its ops by opcheck, and the bound on sums in docs/numerics.md."""

import pytest
import torch
from arrays import values
from blockfp.torch_backend.linear import linear
from blockfp.torch_backend.ops.layer import linear_ops
from blockfp.torch_backend.ops.product import products
from blockfp.torch_backend.ops.quantize import operand_ops, quantize_plans
from blockfp.torch_backend.ops.quantize.key_ops import gradient_keys
from casting import CASTING
from linear_reference import SCALES, expected, state_of
from same_tensors import assert_equal

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics, rotation, rounding
from blockfp.kernels import switch
from blockfp.kernels.operand_cast import operand_cast


@pytest.mark.parametrize("name", CASTING)
def test_operands_are_bit_for_bit_those_of_quantize(name):
    """Codes and scales that reach the products: both directions, from one op."""
    recipe = recipes.parse(name)
    x = values((37, 80), 0)
    keys = gradient_keys(torch.tensor([3, 4], dtype=torch.int32))[0]
    for operand, multiplier in (("input", SCALES["input_scale"]), ("gradient", SCALES["gradient_scale"])):
        row, column = recipe.cast(operand), recipe.cast(operand, "columnwise")
        multiplier = multiplier if recipe.delayed else None
        found = operand_ops.quantize_operand(x, operand_cast(row, column, 0.0, keyed=True), multiplier=multiplier, keys=keys)
        for parts, cast, matrix, t in ((found.row, row, x, 0), (found.column, column, x.mT.contiguous(), 1)):
            if cast.format is None:
                assert parts == []
                continue
            matrix = rotation.rotate(matrix) if cast.rotate else matrix
            key = rounding.fold_in((3, 4), t) if cast.stochastic else None
            wanted = numerics.quantize(matrix, cast.format, key=key, multiplier=multiplier)
            assert_equal(parts, [part for part in wanted if part is not None])


def test_opcheck():
    x = values((37, 80), 0)
    key = torch.tensor([3, 4], dtype=torch.int32)
    for arguments in (
        (x, "mxfp8_e4m3", "mxfp8_e4m3"),
        (x, "fp8_e4m3", "fp8_e4m3", None, torch.tensor(3.0)),
        (x, "fp8_e4m3", None, torch.tensor([0x41000000], dtype=torch.int32)),
        (x, "nvfp4", "nvfp4", None, None, key.repeat(2, 1), True, True, True),
        (x, None, "fp8_e5m2_1x128"),
        (x[:0], "fp8_e4m3", "fp8_e4m3"),
    ):
        torch.library.opcheck(torch.ops.blockfp.quantize_operand.default, arguments)
    torch.library.opcheck(torch.ops.blockfp.gradient_keys.default, (key, torch.tensor(5), [2], 3))
    q = bfp.quantize(values((24, 80), 1), "mxfp8_e4m3_32x32")
    arguments = ([x], None, [q.codes, q.scales], "mxfp8_e4m3_32x32", 24, 80, torch.ones(24), torch.float32)
    torch.library.opcheck(products.product, arguments)
    arguments = ([x], None, q, "mxfp8_e4m3_32x32", 24, 80, torch.ones(24), torch.float32)
    torch.library.opcheck(products.weight_product, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8", "nvfp4"])
def test_opcheck_of_a_layer(name):
    recipe = recipes.parse(name)
    x, gradient, weight = values((37, 80), 0), values((37, 24), 2), values((24, 80), 1)
    q, scale = bfp.quantize(weight, recipe.weight.format), torch.tensor(60.0) if recipe.delayed else None
    casts, keys = recipe.text, gradient_keys(torch.tensor([3, 4], dtype=torch.int32))[0]
    parts = linear_ops.forward(x, q.codes, q.scales, q.tensor_scale, None, scale, casts, True)[1:]
    kept = parts[:-1] if recipe.delayed else parts
    some = {"test_utils": ("test_schema", "test_faketensor")}
    for w, checks in (((q.codes, q.scales, q.tensor_scale), {}), ((q, None, None), some)):
        for needs in ((True, True), (bool(checks), not checks)):
            arguments = (gradient, kept, *w, None, scale, keys, casts, *needs, 80, torch.bfloat16, [0, 0])
            torch.library.opcheck(linear_ops.linear_backward, arguments, **checks)


def test_plans_are_bounded(monkeypatch):
    """Lengths that never come again leave nothing behind but the newest plans."""
    monkeypatch.setattr(switch, "MOST", 8)
    layer = bfp.Linear(32, 16, recipe="mxfp8")
    caches = [linear_ops._forwards, linear_ops._backwards, quantize_plans._plans, linear._calls]
    for length in range(1, 60):
        x = values((length, 32), 0).requires_grad_()
        layer(x[None] if length % 2 else x).sum().backward()
        bfp.linear(x, values((16, 32), 1), recipe=recipes.mxfp8())
        assert all(len(cache) <= 8 for cache in caches)
    assert all(caches[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_for_compilers_is_the_definitions(dtype):
    x = values((5, 64), 0, dtype) * 100
    x[0, :4] = torch.tensor([torch.nan, -torch.inf, 0.0, -0.0])
    for case in (
        x,
        x[1:],
        x[1:] * 0,
        x[1:] * torch.finfo(dtype).smallest_normal / 8,
        torch.full((1, 2), torch.nan, dtype=dtype),
    ):
        wanted = numerics.amax(case, "fp8_e4m3").blocks.reshape(1)
        assert torch.equal(operand_ops.tensor_amax(case), wanted)


@pytest.mark.parametrize("name", CASTING)
def test_only_codes_and_scales_are_saved(name):
    """Beside the weight, the backward keeps codes and scales of x columnwise; nothing where no weight gradient is wanted."""
    recipe = recipes.parse(name)
    x, weight = values((64, 96), 0), bfp.quantize(values((32, 96), 1), recipe.weight.format)

    def saved(x_wants, weight_wants):
        found = []
        leaf, parameter = x.clone().requires_grad_(x_wants), weight.detach().requires_grad_(weight_wants)

        def pack(tensor):
            if not isinstance(tensor, bfp.QuantizedTensor):
                found.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            bfp.linear(leaf, parameter, recipe=recipe, state=state_of(recipe), key=7)
        return sum(tensor.nbytes for tensor in found)

    column = bfp.quantize(x.mT.contiguous(), recipe.input_columnwise.format)
    parts = [part for part in (column.codes, column.scales, column.tensor_scale) if part is not None]
    wanted = sum(part.nbytes for part in parts)
    assert saved(True, True) == saved(False, True) == wanted
    assert saved(True, False) == 0


def test_keys_of_a_step():
    """fold_in of step, rank, direction and group, one after another."""
    key = torch.tensor([11, 2**32 - 5], dtype=torch.int64)
    keys = gradient_keys(key, step=torch.tensor(9), folds=(3,), groups=2)
    words = rounding.fold_in(rounding.fold_in((11, 2**32 - 5), 9), 3)
    for group in range(2):
        for direction in range(2):
            wanted = rounding.fold_in(rounding.fold_in(words, direction), group)
            assert tuple(int(word) & 0xFFFFFFFF for word in keys[group, direction]) == tuple(wanted)
    assert gradient_keys(key).shape == (1, 2, 2)


def operands(kind, tokens, n, k, dtype):
    generator = torch.Generator().manual_seed(tokens + 7 * k)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    x, weight, gradient = random(tokens, k), random(n, k) * 0.1, random(tokens, n)
    if kind == "cancelling":
        # Each half takes back what the other adds, but for some units of the last place; also along the tokens.
        half = k // 2
        x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
        half = tokens // 2
        x[half : 2 * half], gradient[half : 2 * half] = x[:half], -gradient[:half]
        x, gradient = x + random(tokens, k) * 1e-4, gradient + random(tokens, n) * 1e-4
    if kind == "binades":
        spread = 1 if dtype is torch.float16 else 4  # nothing may overflow
        x, gradient = x * torch.exp2(spread * random(1, k)), gradient * torch.exp2(spread * random(tokens, 1))
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def assert_bound(actual, result, terms, bias=None):
    added = 0.0 if bias is None else bias.double()
    value, magnitude = result.value + added, result.magnitude + abs(added)
    lost = (terms + 4) * 2.0**-24 * magnitude
    bound = lost + torch.finfo(actual.dtype).eps / 2 * (value.abs() + lost) + torch.finfo(actual.dtype).tiny
    error = (actual.detach().double() - value).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max():.3} times the bound"


def hold(recipe, kind, dtype, shape):
    tokens, n, k = shape
    recipe = recipes.parse(recipe)
    x, weight, gradient = operands(kind, tokens, n, k, dtype)
    bias = values(n, 3).to(dtype)
    scales = SCALES if recipe.delayed else {}
    wanted = expected(x, weight, gradient, recipe, key=7, **scales)
    stored = weight if recipe.weight.format is None else bfp.quantize(weight, recipe.weight.format)
    x, stored = x.requires_grad_(), stored.requires_grad_()
    y = bfp.linear(x, stored, bias, recipe=recipe, state=state_of(recipe), key=7)
    y.backward(gradient)
    assert_bound(y, wanted.y, k + 1, bias)
    assert_bound(x.grad, wanted.d_x, n)
    assert_bound(stored.grad, wanted.d_weight, tokens)


KINDS = ("gaussian", "cancelling", "binades")


@pytest.mark.parametrize("recipe", recipes.RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_recipe_and_dtype(recipe, dtype):
    for kind in KINDS:
        for shape in ((33, 40, 513), (513, 7, 64)):
            hold(recipe, kind, dtype, shape)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [(2, 3, 16384), (16384, 3, 16), (2, 4096, 16)], ids=["forward", "weight", "input"])
def test_long_sums(recipe, shape):
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            hold(recipe, kind, dtype, shape)


def test_the_bound_tells_a_worse_sum_from_a_good_one():
    """bfloat16 sums, or operands that are rounded once more, are beyond it."""
    x, weight, _ = operands("gaussian", 8, 16, 512, torch.float32)
    recipe = recipes.mxfp8()
    wanted = expected(x, weight, torch.zeros(8, 16), recipe, key=7).y
    a, b = (bfp.quantize(v, "mxfp8_e4m3").dequantize() for v in (x, weight))
    for worse in ((a.bfloat16() @ b.bfloat16().mT).float(), x @ weight.mT):
        with pytest.raises(AssertionError, match="times the bound"):
            assert_bound(worse, wanted, 512)

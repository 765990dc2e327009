"""`linear`'s operands: their bits, one cast for the layers that read an input, what is kept of them; its ops by opcheck."""

import numpy as np
import pytest
import torch
from arrays import values
from blockfp.torch_backend.custom_ops import linear_ops, operand_ops, products, quantize_plans, shared_casts
from blockfp.torch_backend.custom_ops.key_ops import gradient_keys
from blockfp.torch_backend.linear import linear
from linear_reference import SCALES, state_of

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import numerics, rotation, rounding


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_operands_are_bit_for_bit_those_of_quantize(name):
    """Codes and scales that reach the products: both directions, from one op."""
    recipe = recipes.parse(name)
    x = values((37, 80), 0)
    keys = gradient_keys(torch.tensor([3, 4], dtype=torch.int32))[0]
    for operand, multiplier in (("input", SCALES["input_scale"]), ("gradient", SCALES["gradient_scale"])):
        row, column = recipe.cast(operand), recipe.cast(operand, "columnwise")
        multiplier = multiplier if recipe.delayed else None
        found = operand_ops.quantize_operand(
            x, row.format, column.format, multiplier=multiplier, rotate=column.rotate, eps=0.0,
            row_key=keys[0] if row.stochastic else None, column_key=keys[1] if column.stochastic else None,
        )  # fmt: skip
        for parts, cast, matrix, t in ((found.row, row, x, 0), (found.column, column, x.mT.contiguous(), 1)):
            if cast.format is None:
                assert parts == []
                continue
            matrix = rotation.rotate(matrix) if cast.rotate else matrix
            key = rounding.fold_in((3, 4), t) if cast.stochastic else None
            wanted = numerics.quantize(matrix, cast.format, key=key, multiplier=multiplier)
            for part, want in zip(parts, [part for part in wanted if part is not None], strict=True):
                assert torch.equal(part, want)


def test_opcheck():
    x = values((37, 80), 0)
    key = torch.tensor([3, 4], dtype=torch.int32)
    for arguments in (
        (x, "mxfp8_e4m3", "mxfp8_e4m3"),
        (x, "fp8_e4m3", "fp8_e4m3", None, torch.tensor(3.0)),
        (x, "fp8_e4m3", None, torch.tensor([0x41000000], dtype=torch.int32)),
        (x, "nvfp4", "nvfp4", None, None, key, key, True),
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


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 96)])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_layers_of_one_input_share_its_cast(name, shape, monkeypatch):
    """What three layers keep of a result that all of them read is kept once; bits are those of layers on their own."""
    layers = [bfp.Linear(96, 32, recipe=name) for _ in range(3)]
    leaf, cast, saved = values(shape, 0).requires_grad_(), recipes.parse(name).input_columnwise, []
    counted = {layer.weight.codes.data_ptr() for layer in layers}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = leaf * 1
        saved.clear()
        results = [layer(x) for layer in layers]
    plain = [t for t in saved if type(t) is torch.Tensor and t.numel() and t.data_ptr() not in counted]
    column = bfp.quantize(values(shape, 0).flatten(0, -2).mT.contiguous(), cast.format)
    each = sum(part.nbytes for part in (column.codes, column.scales, column.tensor_scale) if part is not None)
    times = 3 if name == "fp8_delayed" else 1
    assert sum({t.data_ptr(): t.nbytes for t in plain}.values()) == times * each
    alone = [layer(values(shape, 0).requires_grad_()) for layer in layers]
    assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))


def test_what_may_have_changed_is_cast_again():
    layer = bfp.Linear(32, 16, bias=False, recipe="mxfp8")
    fresh = lambda x: layer(x.detach().clone())  # noqa: E731
    x = values((4, 32), 0).requires_grad_() * 1
    assert torch.equal(layer(x), fresh(x))
    x.mul_(3)
    assert torch.equal(layer(x), fresh(x))
    with torch.no_grad():
        x[0].zero_()
        assert torch.equal(layer(x), fresh(x))
    layer(x)
    x.data = values((4, 32), 1)
    assert torch.equal(layer(x), fresh(x))
    # Memory that others fill, without a word to torch.
    memory = np.ones((4, 32), np.float32)
    leaf = torch.from_numpy(memory)
    first = layer(leaf)
    memory *= 2
    assert not torch.equal(layer(leaf), first)
    # Nothing of an input outlives it.
    x = x * 1
    layer(x)
    assert shared_casts.latest
    del x
    assert not shared_casts.latest


def test_compiled_layers_share_a_cast():
    """Layers that read one input quantize it once, and keep its codes once."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    first, second = (bfp.Linear(64, 32, recipe="mxfp8") for _ in range(2))

    def kept(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "blockfp" in str(node.target)])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    run = torch.compile(lambda x: (first(x), second(x)), backend=backend, fullgraph=True)
    sum(y.square().sum() for y in run(values((8, 64), 0).requires_grad_())).backward()
    forward, backward = graphs
    # One cast in each direction: of an input of the graph the backward keeps codes.
    assert sorted(forward) == ["blockfp.product.default"] * 2 + ["blockfp.quantize_operand.default"] * 2
    assert backward == ["blockfp.linear_backward.default"] * 2


def test_plans_are_bounded(monkeypatch):
    """Lengths that never come again leave nothing behind but the newest plans."""
    monkeypatch.setattr(quantize_plans, "MOST", 8)
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


@pytest.mark.parametrize("name", recipes.RECIPES)
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

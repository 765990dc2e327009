"""`dispatch` and `combine`: experts that ranks share get, to the bit, what one process would give them."""

import gloo
import numpy as np
import pytest
import threaded
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import blockfp
import blockfp.torch as bfp
from blockfp import recipes
from blockfp.sharding import dispatching

RECIPES = ("mxfp8", "fp8_current", "fp8_block", "mxfp4", "nvfp4")
EXPERTS, IN, HIDDEN = 5, 96, 64
KEY = 7


def routed(ranks, dtype=torch.float32, empty=None):
    """Tokens of each rank, their experts and weights; expert 3 gets nothing, and rank `empty` has nothing."""
    random = torch.Generator().manual_seed(0)
    found = []
    for rank in range(ranks):
        tokens = 0 if rank == empty else 40 + 17 * rank
        x = torch.randn(tokens, IN, generator=random) * 2.0 ** torch.randint(-3, 4, (tokens, 1), generator=random)
        order = torch.rand(tokens, EXPERTS - 1, generator=random).argsort(1)[:, :2]
        weights = torch.rand(tokens, 2, generator=random)
        gradient = torch.randn(tokens, IN, generator=random)
        found.append((x.to(dtype), order + (order == 3), weights, gradient.to(dtype)))
    return found


def parameters(recipe, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    recipe = recipes.parse(recipe)
    up = torch.randn(EXPERTS, 2 * HIDDEN, IN, generator=random, dtype=dtype) / 8
    down = torch.randn(EXPERTS, IN, HIDDEN, generator=random, dtype=dtype) / 8
    return [bfp.quantize(weight, recipe.weight.format) for weight in (up, down)]


def layer(received, up, down, weights):
    gate, value = received.multiply(received.tokens, up).chunk(2, 1)
    return bfp.combine(received.multiply(F.silu(gate) * value, down), received, weights)


def run(tokens, recipe, up, down, group=None, key=KEY):
    x, experts, weights, gradient = (each.clone() for each in tokens)
    x.requires_grad_()
    weights.requires_grad_()
    up, down = up.detach().requires_grad_(), down.detach().requires_grad_()
    received = bfp.dispatch(x, experts, EXPERTS, recipe=recipe, group=group, key=key)
    y = layer(received, up, down, weights)
    y.backward(gradient)
    return received, y.detach(), x.grad, weights.grad, up.grad, down.grad


def own(weight, rank, ranks):
    chunk = dispatching.chunk_of(EXPERTS, ranks)
    return weight[min(rank * chunk, EXPERTS) : (rank + 1) * chunk]


def one_rank(rank, each, recipe, up, down, by_mesh):
    ranks = len(each)
    group = init_device_mesh("cpu", (ranks,)) if by_mesh else dist.group.WORLD
    received, *results = run(each[rank], recipe, own(up, rank, ranks), own(down, rank, ranks), group)
    assert torch.equal(received.counts.cumsum(0), received.offs)
    assert int(received.counts.sum()) == len(received.tokens)
    return received, *results


def compared(ranks, recipe, dtype=torch.float32, empty=None, by_mesh=False):
    each = routed(ranks, dtype, empty)
    up, down = parameters(recipe, dtype)
    alone = run([torch.cat(parts) for parts in zip(*each, strict=True)], recipe, up, down)
    return each, alone, threaded.run(ranks, one_rank, each, recipe, up, down, by_mesh)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "fp8_block", "mxfp4"])
def test_ranks_that_share_experts_give_the_bits_of_one_process(recipe, ranks):
    """Five experts: some ranks have fewer, and of four the last has none."""
    _, (_, *alone), together = compared(ranks, recipe)
    names = ("y", "x.grad", "weights.grad", "up.grad", "down.grad")
    for name, whole, *parts in zip(names, alone, *(results for _, *results in together), strict=True):
        assert torch.equal(torch.cat(parts), whole), name
        assert whole.isfinite().all()
        assert whole.any()


@gloo.on(2)
def test_two_processes(rank):
    for recipe in RECIPES[:3]:
        each = routed(2, torch.bfloat16)
        up, down = parameters(recipe, torch.bfloat16)
        _, *alone = run([torch.cat(parts) for parts in zip(*each, strict=True)], recipe, up, down)
        _, *results = one_rank(rank, each, recipe, up, down, False)
        tokens = slice(0, 40) if rank == 0 else slice(40, None)
        for place, whole, part in zip([tokens] * 3 + [None] * 2, alone, results, strict=True):
            assert torch.equal(part, own(whole, rank, 2) if place is None else whole[place])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_a_mesh_and_a_rank_without_tokens(dtype):
    _, (_, *alone), together = compared(3, "mxfp8", dtype, empty=1, by_mesh=True)
    for whole, *parts in zip(alone, *(results for _, *results in together), strict=True):
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_arrives_is_what_the_core_says(recipe):
    each, _, together = compared(3, recipe)
    format = recipes.parse(recipe).input.format
    experts = [experts.numpy() for _, experts, _, _ in each]
    whole = bfp.quantize(torch.cat([x for x, *_ in each]), format)
    sizes = [len(to) for to in experts]
    codes = [part.numpy() for part in whole.codes.split(sizes)]
    scales = None if format.per_tensor else [part.numpy() for part in whole.scales.split(sizes)]
    for rank, (received, *_) in enumerate(together):
        tokens = received.tokens
        assert tokens.format is format
        assert np.array_equal(tokens.codes, dispatching.dispatched(codes, experts, EXPERTS)[rank])
        expected = whole.scales if scales is None else dispatching.dispatched(scales, experts, EXPERTS)[rank]
        assert np.array_equal(tokens.scales, expected)
        # The invariant: quantized before or after the way.
        values = dispatching.dispatched([x.numpy() for x, *_ in each], experts, EXPERTS)[rank]
        if not format.has_tensor_scale:
            assert torch.equal(bfp.quantize(torch.from_numpy(values), format).codes, tokens.codes)
        else:
            assert tokens.tensor_scale is None or tokens.tensor_scale == whole.tensor_scale


def test_random_bits_are_a_ranks_own_and_repeat_with_the_key():
    each, (_, y, *alone), together = compared(2, "nvfp4")
    assert torch.equal(torch.cat([results[0] for _, *results in together]), y)
    up, down = parameters("nvfp4")
    again = threaded.run(2, one_rank, each, "nvfp4", up, down, False)
    for whole, *parts in zip(alone, *(results for _, _, *results in together), strict=True):
        assert (torch.cat(parts) - whole).norm() < 0.3 * whole.norm()
    for (_, *before), (_, *after) in zip(together, again, strict=True):
        assert all(map(torch.equal, before, after))
    tokens = each[0]
    assert not torch.equal(run(tokens, "nvfp4", up, down)[-1], run(tokens, "nvfp4", up, down, key=8)[-1])


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_current"])
def test_products_and_gradients_are_those_of_dequantized_codes(recipe):
    """One process against float64, from the codes that travel."""
    (tokens,), casts = routed(1), recipes.for_linear(recipe)
    up, down = parameters(recipe)
    received, y, d_x, d_weights, d_up, d_down = run(tokens, recipe, up, down)
    x, experts, weights, gradient = tokens
    slots = dispatching.sending(experts.numpy(), EXPERTS).slots
    counts = received.counts.tolist()

    def seen(rows, cast):
        return torch.from_numpy(blockfp.quantize(rows.contiguous().numpy(), cast.format).dequantize())

    def turned(rows, row_cast, column_cast):
        """Rows of one expert as the weight's gradient sees them."""
        if row_cast.format.per_tensor:
            return rows.double()
        return seen(rows.float().mT, column_cast).double().mT

    rows = seen(x, casts.input)[slots // 2]
    d_rows = seen((gradient[:, None] * weights[..., None]).view(-1, IN), casts.gradient)[slots]
    w_up, w_down = up.dequantize().double(), down.dequantize().double()
    out = []
    back = []
    for expert, (own, g) in enumerate(zip(rows.split(counts), d_rows.split(counts), strict=True)):
        if not len(own):
            assert not d_up[expert].any()
            assert not d_down[expert].any()
            continue
        pre = (own.double() @ w_up[expert].mT).float().requires_grad_()
        gate, value = pre.chunk(2, 1)
        h = F.silu(gate) * value
        out.append(seen(h.detach(), casts.input).double() @ w_down[expert].mT)
        h_columns = seen(h.detach().mT, casts.input_columnwise).double()
        d_h = g.double() @ w_down[expert]
        expected = turned(g, casts.gradient, casts.gradient_columnwise).mT @ h_columns.mT
        torch.testing.assert_close(d_down[expert].double(), expected, rtol=1e-4, atol=1e-3)
        h.backward(d_h.float())
        columns = seen(pre.grad.mT, casts.gradient_columnwise).double()
        expected = columns @ turned(own, casts.input, casts.input_columnwise)
        assert (d_up[expert].double() - expected).norm() < 1e-3 * expected.norm()
        back.append(seen(pre.grad, casts.gradient).double() @ w_up[expert])
    rows_out = torch.empty(len(slots), IN, dtype=torch.float64)
    rows_out[slots] = torch.cat(out)
    by_slot = rows_out.view(-1, 2, IN)
    expected = (by_slot * weights[..., None]).sum(1)
    assert (y.double() - expected).norm() < 1e-3 * expected.norm()
    expected = (by_slot * gradient[:, None]).sum(2)
    assert (d_weights.double() - expected).norm() < 1e-3 * expected.norm()
    rows_back = torch.empty(len(slots), IN, dtype=torch.float64)
    rows_back[slots] = torch.cat(back)
    expected = rows_back.view(-1, 2, IN).sum(1)
    assert (d_x.double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_rows_that_are_no_codes_have_the_products_of_a_grouped_layer(recipe):
    """`multiply` of values, without a gradient in codes: bit for bit `GroupedLinear`."""
    (tokens,) = routed(1)
    up, _ = parameters(recipe)
    received = bfp.dispatch(tokens[0], tokens[1], EXPERTS, recipe=recipe)
    layer = bfp.GroupedLinear(EXPERTS, IN, 2 * HIDDEN, recipe=recipe)
    layer.weight = torch.nn.Parameter(up)
    with torch.no_grad():
        layer.bias.uniform_()
    bias = layer.bias.detach().clone().requires_grad_()
    weight = up.detach().requires_grad_()
    x = torch.randn(received.tokens.shape, generator=torch.Generator().manual_seed(3))
    given = [x.clone().requires_grad_() for _ in range(2)]
    results = [received.multiply(given[0], weight, bias), layer(given[1], received.counts)]
    for y in results:
        y.backward(y.detach().cos())
    assert torch.equal(*results)
    assert torch.equal(given[0].grad, given[1].grad)
    assert torch.equal(weight.grad, layer.weight.grad)
    assert torch.equal(bias.grad, layer.bias.grad)


def by_layers(rank, each, recipe, weights):
    """`layer` of modules that ranks share."""
    mesh = init_device_mesh("cpu", (len(each),))
    modules = []
    for weight in weights:
        experts, outputs, inputs = weight.shape
        module = bfp.GroupedLinear(experts, inputs, outputs, bias=False, recipe=recipe)
        bfp.load_high_precision_(module.weight, weight.dequantize())
        modules.append(bfp.parallelize(module, mesh, "experts"))
    up, down = modules
    x, experts, scores, gradient = each[rank]
    received = bfp.dispatch(x, experts, EXPERTS, recipe=recipe, group=mesh)
    gate, value = up(received.tokens, received).chunk(2, 1)
    y = bfp.combine(down(F.silu(gate) * value, received), received, scores)
    y.backward(gradient)
    return y.detach(), *(module.weight.grad.to_local() for module in modules)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_grouped_layers_take_what_was_received(recipe):
    each, weights = routed(3), parameters(recipe)
    _, y, _, _, d_up, d_down = run([torch.cat(parts) for parts in zip(*each, strict=True)], recipe, *weights)
    together = threaded.run(3, by_layers, each, recipe, weights)
    for whole, *parts in zip((y, d_up, d_down), *together, strict=True):
        assert torch.equal(torch.cat(parts), whole)


@threaded.on(2)
def test_layers_that_do_not_fit_are_refused(rank):
    received = bfp.dispatch(torch.ones(4, IN), torch.zeros(4, 1, dtype=torch.int64), EXPERTS, recipe="mxfp8")
    layer = bfp.GroupedLinear(EXPERTS, IN, 32, recipe="fp8_block")
    with pytest.raises(ValueError, match="the rows were dispatched by recipe mxfp8, and this layer has fp8_block"):
        layer(received.tokens, received)
    layer = bfp.parallelize(bfp.GroupedLinear(EXPERTS, IN, 32, recipe="mxfp8"), init_device_mesh("cpu", (2,)), "column")
    with pytest.raises(ValueError, match="dispatched rows need whole experts, but these are sharded as 'column'"):
        layer(received.tokens, received)


def assert_same_weight_gradient(loss_of):
    """The gradient of the second weight, whether its product is combined as it is or times 1."""
    (tokens,) = routed(1)
    up, down = parameters("mxfp8")
    gradients = []
    for through in (lambda y: y, lambda y: y * 1.0):
        weight = down.detach().requires_grad_()
        received = bfp.dispatch(tokens[0], tokens[1], EXPERTS, recipe="mxfp8")
        h = received.multiply(received.tokens, up).chunk(2, 1)[0]
        loss_of(through, received, received.multiply(h, weight), *tokens[2:]).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_gradient_on_its_way_through_other_operations_arrives_as_values():
    assert_same_weight_gradient(lambda through, received, y, w, g: (bfp.combine(through(y), received, w) * g).sum())


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_product_that_others_read_too_gets_the_sum_of_their_gradients(others):
    def loss_of(through, received, y, weights, _):
        total = bfp.combine(through(y), received, weights).sum() + bfp.combine(through(y), received).square().sum()
        for each in ("mean", "sum")[:others]:
            total = total + getattr(y.square(), each)() + bfp.combine(through(y), received).sum()
        return total

    assert_same_weight_gradient(loss_of)


# Dynamo looks at the gradients of what goes into the graphs between.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_leaves_its_graph_for_them():
    (tokens,) = routed(1)
    x, experts, weights, _ = tokens
    up, down = (weight.detach().requires_grad_() for weight in parameters("mxfp8"))

    def block(x):
        return layer(bfp.dispatch(x * 2, experts, EXPERTS, recipe="mxfp8"), up, down, weights).cos()

    results = []
    for run in (block, torch.compile(block, backend="aot_eager")):
        given = x.clone().requires_grad_()
        y = run(given)
        y.sum().backward()
        results.append((y, given.grad))
    assert all(map(torch.equal, *results))


def test_values_travel_where_the_recipe_has_no_format():
    (tokens,) = routed(1)
    recipe = recipes.parse("mxfp8").replace(input=recipes.Cast(None), input_columnwise=recipes.Cast(None))
    received = bfp.dispatch(tokens[0], tokens[1], EXPERTS, recipe=recipe)
    slots = dispatching.sending(tokens[1].numpy(), EXPERTS).slots
    assert torch.equal(received.tokens, tokens[0][slots // 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": torch.full((40, 2), 5)}, "experts must be numbers from 0 to 4"),
        ({"experts": torch.full((40, 2), -1)}, "experts must be numbers from 0 to 4"),
        ({"experts": torch.zeros(39, 2, dtype=torch.int64)}, r"experts .tokens, k. on one device, got \(40, 96\)"),
        ({"num_experts": 0}, "num_experts must be 1 or more, got 0"),
        ({"recipe": "fp8_delayed"}, "recipe fp8_delayed scales by amaxes of earlier steps"),
        (
            {"recipe": recipes.parse("mxfp8").replace(input=recipes.Cast("mxfp8_e4m3_32x32"))},
            "tokens in mxfp8_e4m3_32x32 share blocks of 32 rows",
        ),
    ],
)
def test_what_cannot_be_dispatched_is_refused(change, message):
    given = {
        "x": torch.ones(40, IN),
        "experts": torch.zeros(40, 2, dtype=torch.int64),
        "num_experts": EXPERTS,
        "recipe": "mxfp8",
    }
    with pytest.raises(ValueError, match=message):
        bfp.dispatch(**{**given, **change})


@threaded.on(2)
def test_wrong_numbers_of_experts_are_found_where_ranks_share_them(rank):
    experts = torch.full((4, 1), 9 if rank else -1)
    with pytest.raises(ValueError, match="experts must be numbers from 0 to 4"):
        bfp.dispatch(torch.ones(4, IN), experts, EXPERTS, recipe="mxfp8", group=dist.group.WORLD)


def test_what_is_no_group_or_no_key_is_refused():
    x, experts = torch.ones(4, IN), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(TypeError, match="group must be a process group, a mesh of one axis, or None, got str"):
        bfp.dispatch(x, experts, EXPERTS, recipe="mxfp8", group="ep")
    with pytest.raises(TypeError, match=r"experts must be int64 or int32, got torch\.float32"):
        bfp.dispatch(x, experts.float(), EXPERTS, recipe="mxfp8")
    received = bfp.dispatch(x, experts, EXPERTS, recipe="nvfp4")
    up, _ = parameters("nvfp4")
    with pytest.raises(ValueError, match="recipe nvfp4 rounds gradients stochastically: pass key= to dispatch"):
        received.multiply(received.tokens, up.requires_grad_())
    with pytest.raises(ValueError, match=r"y must be \[4, out\]"):
        bfp.combine(torch.ones(3, IN), received)
    other = bfp.dispatch(x, experts, EXPERTS, recipe="mxfp8")
    with pytest.raises(ValueError, match="the weight is in nvfp4_16x16, but recipe mxfp8 wants"):
        other.multiply(other.tokens, up)

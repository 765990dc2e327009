"""Memory: bytes that autograd saves, each once, and caches that stay bounded over steps with changing lengths."""

import gc
import math
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from arrays import values, with_scales
from blockfp.torch_backend.linear import dense_layer, grouped_layer, operands
from blockfp.torch_backend.ops.quantize import quantize_plans
from blockfp.torch_backend.torch_internals import KEEPS_RESULT, VIEWS
from casting import CASTING
from same_tensors import assert_equal
from torch import nn

import blockfp.torch as bfp
from blockfp import recipes
from blockfp.definition import layout
from blockfp.formats import FORMATS
from blockfp.kernels import switch

NAMES = tuple(CASTING)
# Of recipes whose layers are compiled alike, one.
COMPILED = tuple(name for name in NAMES if name not in ("fp8_current", "mxfp6", "mxfp4"))
# Of those, one with a state, one with blocks alone and one in two levels, where more than one module is compiled.
KINDS = ("fp8_delayed", "mxfp8", "nvfp4")
T, D, F_ = 128, 64, 128
NORM = 2 * 2 * T
"""Bytes of the mean and the deviation of each token, which a LayerNorm keeps."""
COMPILER = "aot_eager_decomp_partition"


def parts_of(tensor):
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [part for name in names for part in parts_of(getattr(tensor, name))] or [tensor]


def held(tensors):
    return {part.untyped_storage()._cdata: part for tensor in tensors for part in parts_of(tensor)}


def kept(module, x, run=None):
    """Bytes by dtype that a forward keeps, and the result."""
    found = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.update(held([tensor])) or tensor, lambda tensor: tensor):
        y = (module if run is None else run)(x)
    own = held([x, *module.parameters(), *module.buffers()])
    sizes = Counter()
    for address, part in found.items():
        if address not in own:
            sizes[part.dtype] += part.untyped_storage().nbytes()
    return sizes, y


def code_bytes(name, *inputs):
    """Bytes of uint8 in the columnwise parts of inputs [tokens, features]."""
    format = recipes.parse(name).input_columnwise.format
    parts = [part for tokens, features in inputs for part in layout.parts((features, tokens), format)]
    return sum(math.prod(shape) for shape, dtype in parts if dtype == "uint8")


def gated_bytes(name):
    """Bytes of codes of what an activation makes; none but in two levels, where a pass for amaxes would cost more."""
    recipe = recipes.parse(name)
    at_once = recipe.input_columnwise.format is recipe.input.format and recipe.input.format.scale.two_level
    return code_bytes(name, (T, F_)) if at_once else 0


def transformer(name, **options):
    torch.manual_seed(0)
    layer = bfp.TransformerLayer(D, F_, 4, recipe=name, norm="rms_norm", activation="swiglu", dtype=torch.bfloat16, **options)
    return with_scales(layer)


class Mlp(nn.Module):
    """An MLP of operations that autograd sees one by one, as models of others have it."""

    def __init__(self, name, activation, weights="quantized"):
        super().__init__()
        torch.manual_seed(0)
        options = {"recipe": name, "dtype": torch.bfloat16, "weights": weights}
        self.activation = activation
        self.norm = nn.LayerNorm(D, dtype=torch.bfloat16)
        self.up, self.down = bfp.Linear(D, F_, **options), bfp.Linear(F_, D, **options)

    def forward(self, x):
        return self.down(self.activation(self.up(self.norm(x))))


def gelu(x):
    return F.gelu(x, approximate="tanh")


def gradients(module, y, x):
    wanted = [x, *module.parameters()]
    return torch.autograd.grad(y, wanted, values(y.shape, 5, y.dtype))


def x_of(*batch):
    return values((*batch, T, D), 0, torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("name", NAMES)
def test_a_transformer_layer_keeps_codes_of_what_nothing_else_keeps(name):
    layer, x = transformer(name), x_of(1)
    sizes, y = kept(layer, x)
    # Of what the norms make. Attention keeps its own output, gate and up are kept for the activation.
    assert sizes[torch.uint8] == code_bytes(name, (T, D), (T, D)) + gated_bytes(name)
    # Query, key and value as they lie, the attention's output, gate and up.
    assert sizes[torch.bfloat16] == 2 * T * (3 * D + D + 2 * F_)
    y.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_an_mlp_keeps_codes_instead_of_values(name):
    sizes, _ = kept(*(Mlp(name, gelu), x_of()))
    assert sizes[torch.uint8] == code_bytes(name, (T, D), (T, F_))
    # What gelu reads, and nothing that a layer does.
    assert sizes[torch.bfloat16] == 2 * T * F_ + NORM


@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid, torch.tanh, lambda x: x[:, None].relu().flatten(1)])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_another_operation_keeps_have_no_codes_beside_them(name, activation, monkeypatch):
    results = []
    for keeps in (KEEPS_RESULT, ()):
        monkeypatch.setattr(dense_layer, "KEEPS_RESULT", keeps)
        module, x = Mlp(name, activation), x_of()
        sizes, y = kept(module, x)
        assert sizes[torch.bfloat16] == 2 * T * F_ + NORM
        assert sizes[torch.uint8] == code_bytes(name, (T, D), *([] if keeps else [(T, F_)]))
        for buffer, moved in module.named_buffers():
            if buffer.endswith("_scale"):
                # Delayed scaling's, moved on before the backward: the forward's own counts.
                moved.mul_(2)
        results.append([y, *gradients(module, y, x)])
    assert_equal(*results)


def test_gradients_of_gradients_where_values_are_kept(monkeypatch):
    results = []
    for keeps in (KEEPS_RESULT, ()):
        monkeypatch.setattr(dense_layer, "KEEPS_RESULT", keeps)
        module, x = Mlp("mxfp8", torch.tanh), x_of()
        (first,) = torch.autograd.grad(module(x).float().square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.float().square().sum(), [x, *module.parameters()]))
    assert_equal(*results)


@pytest.mark.parametrize(
    "operation",
    [
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        torch.exp,
        lambda x: x.softmax(-1),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ],
)
def test_operations_that_keep_their_result(operation):
    x, found = values((2, 4, 16, 8), 0).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        y = operation(x)
    assert type(y.grad_fn).__name__ in KEEPS_RESULT
    assert y.untyped_storage()._cdata in held(found)


def test_views():
    x = values((4, 6), 0).requires_grad_() * 1
    for view in (x.view(2, 2, 6), x.mT, x.permute(1, 0), x[None], x.flatten(), x.unsqueeze(0).flatten(0, 1)):
        assert type(view.grad_fn).__name__ in VIEWS
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    copy = x.mT.reshape(-1)
    assert type(copy.grad_fn.next_functions[0][0]).__name__ not in VIEWS


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in NAMES), *((name, True) for name in KINDS)])
def test_a_weight_that_is_cast_at_use_is_kept_once(name, compiled):
    results = []
    for weights in ("high_precision", "quantized"):
        torch._dynamo.reset()
        module, x = Mlp(name, gelu, weights), x_of()
        sizes, y = kept(module, x, torch.compile(module, fullgraph=True, backend=COMPILER) if compiled else None)
        assert sizes[torch.uint8] == (0 if compiled else code_bytes(name, (T, D), (T, F_)))
        results.append([y, *gradients(module, y, x)])
    assert_equal(*results)


def run_compiled(module, x, backend=COMPILER):
    torch._dynamo.reset()
    sizes, y = kept(module, x, torch.compile(module, fullgraph=True, backend=backend))
    return sizes, [y, *gradients(module, y, x)]


def swiglu(name):
    torch.manual_seed(0)
    return bfp.LayerNormMLP(D, F_, recipe=name, activation="swiglu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "name"),
    [*((swiglu, name) for name in COMPILED), *((lambda name: Mlp(name, gelu), name) for name in KINDS)],
    ids=[*(f"layer-{name}" for name in COMPILED), *(f"operations-{name}" for name in KINDS)],
)
def test_compiled_code_makes_casts_again_of_what_is_kept_anyway(name, make, monkeypatch):
    sizes, found = run_compiled(make(name), x_of())
    assert sizes[torch.uint8] == 0
    monkeypatch.setattr(operands, "apart", lambda x: x)
    more, wanted = run_compiled(make(name), x_of())
    assert more[torch.uint8] >= code_bytes(name, (T, D))
    assert sum(sizes.values()) < sum(more.values())
    assert_equal(found, wanted)


def test_inductor_makes_them_again():
    sizes, _ = run_compiled(transformer("fp8_block"), x_of(1), "inductor")
    assert sizes[torch.uint8] == 0
    # Query, key and value, the attention's output, what the residual adds it to, gate and up.
    assert sizes[torch.bfloat16] == 2 * T * (3 * D + D + D + 2 * F_)


def test_compiled_code_keeps_codes_where_it_has_nothing_to_make_them_of():
    layer = bfp.Linear(D, F_, recipe="mxfp8", dtype=torch.bfloat16)
    sizes, _ = run_compiled(layer, x_of())
    assert sizes[torch.uint8] == code_bytes("mxfp8", (T, D))


@pytest.mark.parametrize("name", KINDS)
def test_compiled_experts(name, monkeypatch):
    def experts():
        torch.manual_seed(0)
        layer = bfp.GroupedLinear(3, D, F_, recipe=name, dtype=torch.bfloat16)
        module = nn.Sequential(nn.LayerNorm(D, dtype=torch.bfloat16), layer)
        module.forward = lambda x: layer(module[0](x), ends)
        return module

    ends = torch.tensor([40, 8, 80])
    sizes, found = run_compiled(experts(), x_of())
    assert sizes[torch.uint8] == sizes[torch.bfloat16] == 0
    monkeypatch.setattr(grouped_layer, "apart", lambda x: x)
    more, wanted = run_compiled(experts(), x_of())
    assert sum(sizes.values()) < sum(more.values())
    assert_equal(found, wanted)


LENGTHS = (1, 16, 5, 128, 33, 130)
ROUNDS = 4


def entries():
    """How many entries each cache of blockfp holds: of functools, and dictionaries of modules."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("blockfp"):
            continue
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "cache_info"):
                found[f"{value.__module__}.{value.__name__}"] = value.cache_info().currsize
            elif type(value) is dict and attribute.startswith("_") and not attribute.startswith("__"):
                found[f"{name}.{attribute}"] = len(value)
    return found


def model_and_optimizer(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    bfp.convert(model, recipe)
    return model, bfp.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer, length):
    x = torch.randn(length, 64, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_lengths_that_come_again_leave_nothing_behind(recipe):
    model, optimizer = model_and_optimizer(recipe)
    # What there was before is not looked through again in each round.
    gc.collect()
    gc.freeze()
    counts, objects = [], []
    for _ in range(ROUNDS):
        for length in LENGTHS:
            step(model, optimizer, length)
        gc.collect()
        counts.append(entries())
        objects.append(len(gc.get_objects()))
    assert counts[-1] == counts[1]
    assert sum(counts[-1].values()) > len(LENGTHS)
    # What the counting itself keeps, and no entry for each step.
    assert objects[-1] - objects[1] < len(LENGTHS)


def test_plans_are_bounded(monkeypatch):
    """However many lengths come: one more than are kept drops all."""
    most = 8
    monkeypatch.setattr(switch, "MOST", most)
    # Plans that other tests have left.
    for plans in _plans():
        plans.clear()
    model, optimizer = model_and_optimizer("mxfp8")
    seen = 0
    for length in range(1, 40):
        step(model, optimizer, length)
        sizes = [len(plans) for plans in _plans()]
        seen = max(seen, *sizes)
        assert max(sizes) <= most
    assert seen == most


def _plans():
    """The dictionaries of plans: those that lengths are part of the keys of."""
    from blockfp.torch_backend.linear import linear
    from blockfp.torch_backend.ops.layer import linear_ops

    return [quantize_plans._plans, linear_ops._forwards, linear_ops._backwards, linear._calls]


def test_every_cache_is_bounded():
    """Or is one of answers about formats, dtypes and this machine, of which there are so many and no more."""
    unbounded = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("blockfp"):
            for value in vars(module).values():
                if hasattr(value, "cache_parameters") and value.cache_parameters()["maxsize"] is None:
                    unbounded.add(value)
    for value in unbounded:
        assert value.cache_info().currsize <= 8 * len(FORMATS), value.__qualname__

"""`parallelize`: experts, DTensors of other layers, tied weights, what is kept for the backward, and what is refused."""

import copy

import pytest
import threaded
import torch
from arrays import values
from blockfp.torch_backend.modules.cutting import part_of
from casting import CASTING
from parallel_operands import mesh_of, part, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import blockfp.torch as bfp
from blockfp import recipes

COUNTS = (40, 0, 7, 33)


def grouped(recipe, **options):
    torch.manual_seed(0)
    layer = bfp.GroupedLinear(4, 96, 160, recipe=recipe, **options)
    if layer.rng_key is not None:
        layer.rng_key.copy_(torch.tensor([1, 2]))
    return layer


def grouped_on_rank(rank, layer, style, kind):
    mesh, layer = mesh_of(kind), copy.deepcopy(layer)
    bfp.parallelize(layer, mesh["tp"], style)
    shard(layer, mesh)
    tp = mesh["tp"].get_local_rank()
    x, g, counts = values((80, 96)), values((80, 160), 1), COUNTS
    if style == "experts":
        rows = (0, 40) if tp == 0 else (40, 80)
        x, g, counts = x[slice(*rows)], g[slice(*rows)], COUNTS[2 * tp : 2 * tp + 2]
    x, g = (x, part(g, 1, tp)) if style == "column" else (part(x, 1, tp), g) if style == "row" else (x, g)
    x = x.clone().requires_grad_()
    y = layer(x, counts)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor(), tp


@pytest.mark.filterwarnings("ignore:While redistributing")
@pytest.mark.parametrize("style", ["experts", "column", "row"])
# Under FSDP the ranks round stochastically with keys of their own.
@pytest.mark.parametrize(
    ("recipe", "kind", "weights"),
    [
        *((name, "fsdp x tp", "quantized") for name in ("fp8_current", "fp8_block", "mxfp8")),
        *((name, "tp", "quantized") for name in ("mxfp8", "nvfp4")),
        *((name, "tp", "high_precision") for name in ("fp8_current", "fp8_block", "nvfp4")),
    ],
)
def test_grouped_linear(recipe, style, kind, weights):
    """Operands are those of one process, so results differ by the order of fp32 sums alone: relatively below 80 * 2^-23."""
    layer = grouped(recipe, weights=weights)
    x = values((80, 96)).requires_grad_()
    whole = copy.deepcopy(layer)
    y = whole(x, COUNTS)
    y.backward(values((80, 160), 1))
    for got_y, got_dx, dw, db, tp in threaded.run(4 if kind != "tp" else 2, grouped_on_rank, layer, style, kind):
        axes = {"experts": (0, 0), "column": (1, None), "row": (None, 1)}[style]
        expected = part(y.detach(), axes[0], tp), part(x.grad, axes[1], tp), whole.weight.grad, whole.bias.grad
        for got, want in zip((got_y, got_dx, dw, db), expected, strict=True):
            assert (got - want).norm() <= 80 * 2**-23 * want.norm()


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@threaded.on(2)
def test_an_optimizer_built_before_is_told_so_at_its_first_step(rank, weights):
    model = nn.Sequential(nn.RMSNorm(64), bfp.Linear(64, 64, recipe="mxfp8", weights=weights))
    early = [bfp.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1.0)]
    held, averaged = list(model.parameters()), torch.optim.swa_utils.get_ema_multi_avg_fn()
    bfp.parallelize(model, mesh_of("tp")["tp"], {"1": "column"})
    model(values((4, 64))).sum().backward()
    for optimizer in early:
        for call in (optimizer.step, optimizer.zero_grad):
            with pytest.raises(RuntimeError, match=r"parallelize has replaced it.*after parallelize"):
                call()
    for act in (
        lambda: nn.utils.clip_grad_norm_(held, 1.0),
        lambda: averaged(held, list(model.parameters()), 1),
        lambda: held[0].data,
        lambda: held[1] + 1,
    ):
        with pytest.raises(RuntimeError, match="parallelize has replaced it"):
            act()
    assert "Replaced" in repr(held)
    late = bfp.AdamW(model.parameters())
    late.step()
    assert len(late.state) == len(held)


@threaded.on(2)
def test_experts_that_share_a_scale_and_that_the_ranks_do_not_divide_are_refused_at_use(rank):
    layer = bfp.GroupedLinear(3, 64, 64, recipe="fp8_current", weights="high_precision")
    bfp.parallelize(layer, mesh_of("tp")["tp"], "experts")
    with pytest.raises(ValueError, match=r"experts that the ranks divide: keep them quantized \(weights='quantized'\)"):
        layer(values((4, 64)), [2, 2] if rank == 0 else [4])


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("tokens", [37, 5])
def test_dtensors_go_in_and_come_out(tokens):
    """A column and a row between torch's own DTensors, with tokens that four ranks don't divide; of 5 the last has none."""
    torch.manual_seed(0)
    up, down = bfp.Linear(64, 128, recipe="mxfp8"), bfp.Linear(128, 64, recipe="mxfp8")
    x = values((2, tokens, 64))
    whole = x.clone().requires_grad_()
    y = down(up(whole))
    y.sum().backward()

    def run(rank):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
        column = bfp.parallelize(copy.deepcopy(up), mesh, "column", sequence_parallel=True)
        row = bfp.parallelize(copy.deepcopy(down), mesh, "row", sequence_parallel=True)
        mine = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        hidden = column(mine)
        assert hidden.placements == (Shard(2),)
        out = row(hidden)
        assert out.placements == (Shard(1),)
        assert out.shape == (2, tokens, 64)
        out.to_local().sum().backward()
        return out.full_tensor(), mine.grad.full_tensor()

    for out, dx in threaded.run(4, run):
        assert (out - y).norm() <= 1e-5 * y.norm()
        assert (dx - whole.grad).norm() <= 1e-5 * whole.grad.norm()


LAYOUTS = {"replicated": Replicate(), "tokens": Shard(1), "features": Shard(2), "sum": None}


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_a_norm_are_whole_however_its_input_lies(layout, sequence):
    """A DTensor says itself whether each rank has its own tokens, whatever plain tensors would hold."""
    torch.manual_seed(0)
    layer = bfp.LayerNormLinear(64, 64, recipe="mxfp8")
    whole = copy.deepcopy(layer)
    y = whole(values((2, 64, 64)))
    y.square().sum().backward()

    def run(rank):
        mesh = mesh_of("tp")
        mine = bfp.parallelize(copy.deepcopy(layer), mesh, sequence_parallel=sequence)
        if layout == "sum":
            x = DTensor.from_local(values((2, 64, 64)) / 2, mesh, [Partial()], run_check=False)
        else:
            x = distribute_tensor(values((2, 64, 64)), mesh, [LAYOUTS[layout]], src_data_rank=None)
        out = mine(x)
        out.square().sum().backward()
        return out.full_tensor().detach(), mine.norm.weight.grad.full_tensor(), mine.norm.bias.grad.full_tensor()

    for got in threaded.run(2, run):
        for mine, want in zip(got, (y, whole.norm.weight.grad, whole.norm.bias.grad), strict=True):
            assert (mine - want).norm() <= 1e-5 * want.norm()


def test_tokens_may_lie_on_the_first_axis():
    """[tokens, batch, features], cut along the tokens: rows of x and of the output are runs of the whole's."""
    torch.manual_seed(0)
    layer = bfp.LayerNormMLP(64, 128, recipe="fp8_current")
    whole = values((32, 3, 64)).requires_grad_()
    y = layer(whole)
    y.square().sum().backward()

    def run(rank):
        mesh = mesh_of("tp")
        mine = bfp.parallelize(copy.deepcopy(layer), mesh, sequence_parallel=True, sequence_dim=0)
        x = part(values((32, 3, 64)), 0, rank).requires_grad_()
        out = mine(x)
        out.square().sum().backward()
        return out, x.grad

    for rank, (out, dx) in enumerate(threaded.run(2, run)):
        assert out.shape == (16, 3, 64)
        assert (out - part(y, 0, rank)).norm() <= 1e-5 * y.norm()
        assert (dx - part(whole.grad, 0, rank)).norm() <= 1e-3 * whole.grad.norm()


class Tied(nn.Module):
    """An embedding and the head that has its weight."""

    def __init__(self, recipe):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.head = bfp.Linear(64, 96, bias=False, recipe=recipe, weights="high_precision")
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_an_embedding_tied_to_a_head(recipe):
    """torch cuts the embedding, and the head takes its DTensor: one parameter, with both gradients."""
    torch.manual_seed(0)
    model, tokens = Tied(recipe), torch.arange(64).view(2, 32)
    whole = copy.deepcopy(model)
    whole(tokens).square().sum().backward()

    def run(rank):
        mesh, mine = mesh_of("tp"), copy.deepcopy(model)
        parallelize_module(mine.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
        mine.head.weight = mine.embedding.weight
        bfp.parallelize(mine, mesh, {"head": "column"})
        logits = mine(tokens)
        assert logits.shape == (2, 32, 48)
        logits.square().sum().backward()
        return mine.embedding.weight.grad.full_tensor()

    for gradient in threaded.run(2, run):
        expected = whole.embedding.weight.grad
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.filterwarnings("ignore:all-gather of the input in fp8_e4m3_row_pow2.*, and all of it has one scale")
@pytest.mark.parametrize("name", CASTING)
def test_what_is_kept_for_the_backward_is_this_ranks_part(name):
    """Gathered operands live as long as their product: the graph holds this rank's tokens and its part of the weight."""

    def run(rank):
        mesh = mesh_of("tp")
        layer = bfp.Linear(256, 256, recipe=name, tp_mesh=mesh, style="column", sequence_parallel=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            layer(torch.ones(128, 256).requires_grad_())
        return [tuple(tensor.shape) for tensor in kept if not isinstance(tensor, bfp.QuantizedTensor)]

    for shapes in threaded.run(2, run):
        cast = recipes.for_linear(name).input_columnwise
        assert max(torch.Size(shape).numel() for shape in shapes) == 128 * 256 * cast.format.element.bits // 8


def test_two_groups_in_turn_do_not_disturb_each_others_backward():
    """Each call's backward uses the group that its forward used."""
    torch.manual_seed(0)
    layer = bfp.Linear(64, 64, bias=False, recipe="fp8_current")

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        layers = {name: bfp.parallelize(copy.deepcopy(layer), mesh[name], "column") for name in ("outer", "inner")}
        one = layers["inner"]
        outputs = []
        inputs = [values((16, 64), i).requires_grad_() for i in range(2)]
        for x, name in zip(inputs, ("outer", "inner"), strict=True):
            one.parallel, one.weight = layers[name].parallel, layers[name].weight
            outputs.append(one(x))
        for y in outputs:
            y.square().sum().backward()
        return [x.grad for x in inputs]

    for grads in threaded.run(4, run):
        for i, got in enumerate(grads):
            x = values((16, 64), i).requires_grad_()
            layer(x).square().sum().backward()
            assert (got - x.grad).norm() <= 1e-5 * x.grad.norm()


@pytest.mark.parametrize("format", ["mxfp8_e5m2", "fp8_e5m2_1x128"])
def test_terms_of_a_reduce_scatter_may_travel_quantized(format):
    torch.manual_seed(0)
    layer = bfp.Linear(64, 256, bias=False, recipe="mxfp8")
    y = layer(values((64, 64)))

    def run(rank):
        mesh = mesh_of("tp")
        mine = bfp.parallelize(copy.deepcopy(layer), mesh, "row", sequence_parallel=True, reduce_format=format)
        return mine(part(values((64, 64)), 1, rank))

    for rank, got in enumerate(threaded.run(2, run)):
        error = (got - part(y, 0, rank)).norm() / y.norm()
        assert 1e-4 < error < 5e-2


def untouched(model, mesh, styles, **options):
    """A model that parallelize refuses is as it was."""
    before = {name: type(module) for name, module in model.named_modules()}
    params = dict(model.named_parameters())
    try:
        bfp.parallelize(model, mesh, styles, **options)
    finally:
        assert {name: type(module) for name, module in model.named_modules()} == before
        assert all(param is params[name] for name, param in model.named_parameters())
        assert all(getattr(module, "parallel", None) is None for module in model.modules())


def refused(rank, case):
    mesh = mesh_of("fsdp x tp")
    tp = mesh["tp"]
    linear = bfp.Linear(64, 64, recipe="mxfp8")
    if case == "mesh":
        bfp.parallelize(linear, mesh, "column")
    elif case == "style":
        bfp.parallelize(linear, tp)
    elif case == "experts":
        bfp.parallelize(linear, tp, "experts")
    elif case == "twice":
        bfp.parallelize(bfp.parallelize(linear, tp, "column"), tp, "column")
    elif case == "norm twice":
        bfp.parallelize(bfp.parallelize(nn.RMSNorm(64), tp), tp)
    elif case == "shared weight":
        other = bfp.Linear(64, 64, recipe="mxfp8")
        other.weight = linear.weight
        model = nn.ModuleDict({"norm": nn.RMSNorm(64), "one": linear, "other": other})
        untouched(model, tp, {"one": "column", "other": "row"})
    elif case == "pattern":
        untouched(nn.Sequential(linear, bfp.TransformerLayer(64, 64, 2, recipe="mxfp8")), tp, {"0": "column", "5": "row"})
    elif case == "heads":
        untouched(nn.Sequential(linear, bfp.TransformerLayer(63, 64, 3, recipe="mxfp8")), tp, {"0": "column"})
    elif case == "tied":
        model = Tied("mxfp8")
        try:
            bfp.parallelize(model, tp, {"head": "column"})
        finally:
            assert model.head.weight is model.embedding.weight
    elif case == "a norm of one's own":
        norm = type("OwnNorm", (nn.LayerNorm,), {})(64)
        untouched(nn.Sequential(norm, linear), tp, {"1": "column"}, sequence_parallel=True)
    elif case == "no known norm":
        layer = bfp.LayerNormLinear(64, 64, recipe="mxfp8")
        layer.norm = nn.Identity()
        untouched(layer, tp, None)
    elif case == "sequence of experts":
        bfp.parallelize(bfp.GroupedLinear(2, 64, 64, recipe="mxfp8"), tp, "row", sequence_parallel=True)
    elif case == "sequence_dim":
        untouched(nn.Sequential(nn.RMSNorm(64), linear), tp, {"1": "column"}, sequence_parallel=True, sequence_dim=1)
    elif case in ("another mesh", "both axes"):
        layer = bfp.LayerNormLinear(64, 64, recipe="mxfp8") if case == "both axes" else linear
        bfp.parallelize(layer, tp, None if case == "both axes" else "column")
        axes, placements = (mesh["shard"], [Shard(0)]) if case == "another mesh" else (mesh, [Shard(0), Shard(1)])
        layer(distribute_tensor(values((4, 4, 64)), axes, placements, src_data_rank=None))
    elif case == "experts as DTensors":
        layer = bfp.parallelize(bfp.GroupedLinear(2, 64, 64, recipe="mxfp8"), tp, "experts")
        layer(distribute_tensor(values((4, 64)), tp, [Shard(0)], src_data_rank=None), [2])
    elif case == "not cut":
        linear(distribute_tensor(values((4, 64)), tp, [Shard(0)], src_data_rank=None))
    elif case == "tokens first":
        bfp.parallelize(bfp.MultiheadAttention(64, 4, recipe="mxfp8"), tp, sequence_parallel=True, sequence_dim=0)
    elif case == "reduce":
        bfp.parallelize(linear, tp, "row", reduce_format="mxfp8_e5m2")
    elif case == "no mesh":
        bfp.Linear(64, 64, recipe="mxfp8", style="column")


MESSAGES = {
    "mesh": "tp_mesh must have one axis",
    "style": "style of a Linear must be one of ('column', 'row'), got None",
    "experts": "style of a Linear must be one of ('column', 'row'), got 'experts'",
    "twice": "already sharded: call parallelize once",
    "norm twice": "a SharedRMSNorm has nothing to shard",
    "shared weight": "also belongs to a layer of another style, which would shard it along axis 0: give both the same",
    "pattern": "no layer is named '5'",
    "heads": "2 ranks can't share 3 heads of keys and values evenly",
    "tied": "embedding.weight is also a parameter of a sharded layer, and sharding only one would untie them",
    "a norm of one's own": "0, a OwnNorm, isn't known, and its gradients would only cover each rank's own tokens",
    "no known norm": "a norm must be one of ['LayerNorm', 'RMSNorm'] to be shared, got a Identity",
    "sequence of experts": "sequence_parallel=True: the tokens of a GroupedLinear are sent to it",
    "sequence_dim": "sequence_dim must be -2, of [batch, tokens, features], or 0, of [tokens, batch, features], got 1",
    "another mesh": ", but the layer is sharded over DeviceMesh(",
    "both axes": ", but the layer is sharded over DeviceMesh(",
    "experts as DTensors": "experts take the rows that were sent to this rank, got a DTensor",
    "not cut": "x is a DTensor, but the layer isn't sharded",
    "tokens first": "attention takes [batch, tokens, features]",
    "reduce": "sequence_parallel=True",
    "no mesh": "need a tp_mesh",
}


@pytest.mark.parametrize("case", MESSAGES)
def test_refusals_are_the_same_on_every_rank(case):
    for error in threaded.errors(4, refused, case):
        assert isinstance(error, ValueError)
        assert MESSAGES[case] in str(error)


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp6_e3m2_32x32", "mxfp4_e2m1", "nvfp4_16x16"])
def test_parts_of_a_quantized_weight_put_together_are_the_whole(name):
    from blockfp.sharding.placement import Mesh, Sharding
    from blockfp.sharding.placement import Shard as Cut

    q = bfp.quantize(values((50, 68)), name)
    for dim in (0, 1):
        lies = Sharding((50, 68), Mesh((3,), ("tp",)), (Cut(dim),))
        parts = [part_of(q, lies, rank) for rank in range(3)]
        assert torch.equal(torch.cat([p.dequantize() for p in parts], dim), q.dequantize())
        assert [p.origin[dim] for p in parts] == [lies.region(rank).origin[dim] for rank in range(3)]

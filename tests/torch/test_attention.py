"""`MultiheadAttention`: against torch's own module, and cut by heads over a tensor-parallel group."""

import copy
import threading

import pytest
import threaded
import torch
import torch.nn.functional as F
from arrays import values
from parallel_operands import assert_same_operand, axes, batch_of, mesh_of, part, record_products, shard
from same_tensors import assert_equal
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import blockfp.torch as bfp
from blockfp import recipes

FEATURES, HEADS = 64, 4
HEAD = FEATURES // HEADS


def torchs_rows(key_value_heads):
    """For each row of torch's [query of all heads, key, value] projection, the row of ours that it is."""
    shared = HEADS // key_value_heads
    ours = torch.arange((HEADS + 2 * key_value_heads) * HEAD).view(key_value_heads, shared + 2, HEAD)
    queries = [ours[head // shared, head % shared] for head in range(HEADS)]
    keys, values = ([ours[head // shared, shared + which] for head in range(HEADS)] for which in (0, 1))
    return torch.cat([*queries, *keys, *values])


def torchs_own(layer, causal):
    """The result of `torch.nn.MultiheadAttention` with the dequantized weights, which are returned as leaves."""
    names = ("qkv.weight", "qkv.bias", "out.weight", "out.bias")
    leaves = [layer.get_parameter(name).detach() for name in names]
    leaves = [w.dequantize() if isinstance(w, bfp.QuantizedTensor) else w.clone() for w in leaves]
    qkv, qkv_bias, out, out_bias = (leaf.requires_grad_() for leaf in leaves)
    rows = torchs_rows(layer.key_value_heads)
    weights = {
        "in_proj_weight": qkv[rows], "in_proj_bias": qkv_bias[rows], "out_proj.weight": out, "out_proj.bias": out_bias,
    }  # fmt: skip
    theirs = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True)

    def call(x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
        return torch.func.functional_call(theirs, weights, (x, x, x), {"need_weights": False, "attn_mask": mask})[0]

    return call, leaves


@pytest.mark.parametrize("key_value_heads", [None, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8", "nvfp4"])
def test_it_is_torchs_module_of_the_dequantized_weights(name, causal, key_value_heads):
    """With products in high precision up to the order of sums; quantized ones are near."""
    torch.manual_seed(0)
    options = {"causal": causal, "key_value_heads": key_value_heads}
    layer = bfp.MultiheadAttention(FEATURES, HEADS, recipe=name, compute="high_precision", **options)
    quantized = bfp.MultiheadAttention(FEATURES, HEADS, recipe=name, **options)
    quantized.load_state_dict(layer.state_dict(), strict=False)
    call, leaves = torchs_own(layer, causal)
    x, g = values((2, 12, FEATURES)).requires_grad_(), values((2, 12, FEATURES), 1)
    expected = call(x)
    expected = [expected, *torch.autograd.grad(expected, (x, *leaves), g)]
    # Values of two bits and a half are off by up to a sixth.
    for one, tolerance in ((layer, 1e-5), (quantized, 0.4 if name == "nvfp4" else 0.1)):
        y = one(x)
        for got, wanted in zip([y, *torch.autograd.grad(y, (x, *one.parameters()), g)], expected, strict=True):
            assert got.shape == wanted.shape
            assert (got - wanted).norm() <= tolerance * wanted.norm()


def test_causal_attention_looks_back_only():
    torch.manual_seed(0)
    for causal in (False, True):
        layer, x = bfp.MultiheadAttention(FEATURES, HEADS, recipe="mxfp8", causal=causal), values((2, 5, FEATURES))
        earlier = layer(x)
        x[:, 3:] += 1
        assert torch.allclose(layer(x)[:, :3], earlier[:, :3], rtol=0, atol=1e-6) == causal


def exact(*shape, seed):
    """Integers from -7 to 7: sums of products of their codes are exact in fp32, in whatever order."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed)).float()


def layer_of(name, **options):
    layer = bfp.MultiheadAttention(FEATURES, HEADS, recipe=name, causal=True, **options)
    state = {key: exact(*layer.get_parameter(key).shape, seed=i) / 64 for i, key in enumerate(dict(layer.named_parameters()))}
    layer.load_state_dict(state, strict=False)
    for module in (layer.qkv, layer.out):
        if module.rng_key is not None:
            module.rng_key.copy_(torch.tensor([1, 2]))
    return layer


def batch_tensors(batch):
    return exact(2, 64, FEATURES, seed=10 + batch), exact(2, 64, FEATURES, seed=20 + batch)


def on_rank(rank, layer, kind, sequence):
    mesh, layer = mesh_of(kind), copy.deepcopy(layer)
    shard(bfp.parallelize(layer, mesh["tp"], sequence_parallel=sequence), mesh)
    tp, batch = mesh["tp"].get_local_rank(), batch_of(mesh)
    x, g = (part(tensor, 1 if sequence else None, tp) for tensor in batch_tensors(batch))
    y = layer(x.requires_grad_())
    y.backward(g)
    gradients = [parameter.grad.full_tensor() for parameter in layer.parameters()]
    return y.detach(), x.grad, gradients, threading.get_ident(), tp, batch


@pytest.mark.filterwarnings("ignore:While redistributing", "ignore:all-gather of the")
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sequence"])
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        *((name, "tp", {}) for name in recipes.RECIPES),
        ("mxfp8", "tp", {"key_value_heads": 2}),
        ("fp8_block", "fsdp x tp", {"key_value_heads": 2}),
        ("fp8_current", "fsdp x tp", {"weights": "high_precision", "bias": False}),
    ],
)
def test_cut_by_heads_every_operand_is_that_of_one_process(name, kind, options, sequence, monkeypatch):
    """Codes and scales of all six products. Sums that later operands come from are exact, so these have the same bits too."""
    seen, layer, references = record_products(monkeypatch), layer_of(name, **options), []
    for batch in range(2 if "fsdp" in kind else 1):
        seen.clear()
        whole = copy.deepcopy(layer)
        x, g = batch_tensors(batch)
        y = whole(x.requires_grad_())
        y.backward(g)
        ((qkv, out, out_weight, out_input, qkv_weight, qkv_input),) = seen.values()
        products = [qkv, out, out_input, out_weight, qkv_input, qkv_weight]
        references.append((y.detach(), x.grad, [parameter.grad for parameter in whole.parameters()], products))
    seen.clear()
    column, row = axes("column"), axes("row")
    cuts = [column[0], row[0], *row[1:], *column[1:]]
    mean = [sum(gradients) / len(gradients) for gradients in zip(*(reference[2] for reference in references), strict=True)]
    for y, dx, gradients, thread, tp, batch in threaded.run(2 * len(references), on_rank, layer, kind, sequence):
        *results, _, products = references[batch]
        for mine, theirs, cut in zip(seen[thread], products, cuts, strict=True):
            for one, other, axis in zip(mine, theirs, cut, strict=True):
                assert_same_operand(one, other, axis, tp)
        wanted = [*(part(result, 1 if sequence else None, tp) for result in results), *mean]
        for got, expected in zip([y, dx, *gradients], wanted, strict=True):
            assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.filterwarnings("ignore:all-gather of the")
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sequence"])
def test_a_dtensor_goes_in_and_comes_out(sequence):
    """Laid out as the layer wants its input, and with the bits that plain tensors give."""
    layer = layer_of("mxfp8")

    def run(rank):
        mesh = mesh_of("tp")["tp"]
        mine = bfp.parallelize(copy.deepcopy(layer), mesh, sequence_parallel=sequence)
        x, g = (part(tensor, 1 if sequence else None, rank) for tensor in batch_tensors(0))
        found = []
        for make in (torch.Tensor.clone, lambda t: DTensor.from_local(t, mesh, [Shard(1) if sequence else Replicate()])):
            leaf = make(x).requires_grad_()
            y = mine(leaf)
            y.backward(make(g))
            found.append([t.to_local() if isinstance(t, DTensor) else t for t in (y.detach(), leaf.grad)])
        assert isinstance(y, DTensor)
        assert y.placements == leaf.placements
        assert_equal(*found)

    threaded.run(2, run)


class Normed(bfp.MultiheadAttention):
    """With norms of its own: of tokens, and of each head's query."""

    def __init__(self, **options):
        super().__init__(FEATURES, HEADS, recipe="mxfp8", compute="high_precision", **options)
        self.tokens, self.queries = nn.RMSNorm(FEATURES), nn.LayerNorm(HEAD)

    def forward(self, x):
        query, key, value = self.qkv(self.tokens(x)).unflatten(-1, (-1, 3, HEAD)).transpose(-4, -2).unbind(-4)
        return self.out(F.scaled_dot_product_attention(self.queries(query), key, value).transpose(-3, -2).flatten(-2))


def test_norms_of_a_derived_class_have_whole_gradients():
    torch.manual_seed(0)
    layer = Normed()
    whole, x = copy.deepcopy(layer), values((2, 8, FEATURES))
    y = whole(x)
    y.square().sum().backward()

    def run(rank):
        mine = copy.deepcopy(layer)
        bfp.parallelize(nn.Sequential(mine), mesh_of("tp")["tp"], sequence_parallel=True)
        out = mine(part(x, 1, rank))
        out.square().sum().backward()
        return out.detach(), [p.grad.full_tensor() for norm in (mine.tokens, mine.queries) for p in norm.parameters()]

    expected = [p.grad for norm in (whole.tokens, whole.queries) for p in norm.parameters()]
    for rank, (out, gradients) in enumerate(threaded.run(2, run)):
        assert (out - part(y, 1, rank)).norm() <= 1e-5 * y.norm()
        for got, want in zip(gradients, expected, strict=True):
            assert (got - want).norm() <= 1e-4 * want.norm()

"""Torch's own operations on weights: memory is read, parts are written, writes are counted, averages are refused."""

import copy

import numpy as np
import pytest
import threaded
import torch
import torch.nn.functional as F
from arrays import values
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import blockfp.torch as bfp

BOTH = pytest.mark.parametrize("weights", ["quantized", "high_precision"])
X = values((4, 32), 0)


def weight(weights):
    return bfp.Linear(32, 32, recipe="mxfp8", weights=weights, bias=False).weight.detach()


@BOTH
@pytest.mark.parametrize(
    "read",
    [
        torch.from_dlpack,
        np.from_dlpack,
        np.asarray,
        lambda w: w.numpy(),
        lambda w: w.apply_(abs),
        lambda w: w.map_(torch.ones(32, 32), max),
        lambda w: w.map2_(torch.ones(32, 32), torch.ones(32, 32), max),
    ],
)
def test_memory_that_is_not_there_is_not_read(read, weights):
    w = weight(weights)
    with pytest.raises(NotImplementedError, match=r"take dequantize\(\) of a QuantizedTensor, values of a CastWeight"):
        read(w)
    with pytest.raises(NotImplementedError, match="take dequantize"):
        read(nn.Parameter(w, requires_grad=False))


@BOTH
@pytest.mark.parametrize("compare", [np.array_equal, np.array_equiv])
def test_numpy_does_not_take_it_for_unequal(compare, weights):
    """NumPy takes what raises for an array that is unequal."""
    w = weight(weights)
    for pair in ((w, w), (np.ones((32, 32), np.float32), w)):
        with pytest.raises(TypeError, match=f"numpy.{compare.__name__} is not defined for a {type(w).__name__}"):
            compare(*pair)
    assert np.shape(w) == (32, 32)


@BOTH
def test_numpy_leaves_a_file_as_it_is(weights, tmp_path):
    w, file = weight(weights), tmp_path / "weights.npy"
    file.write_bytes(b"kept")
    with pytest.raises(
        TypeError, match=rf"numpy\.save takes no {type(w).__name__}: save it by blockfp's save, or pass q\.dequantize"
    ):
        np.save(file, w)
    assert file.read_bytes() == b"kept"


@BOTH
def test_other_librarys_code_gets_no_pointer(weights):
    w = weight(weights)
    for each in (w, w.detach(), w[:8], w.clone(), nn.Parameter(w)):
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(each.detach())


def test_methods_of_tensors_are_what_they_are():
    w = weight("high_precision")
    assert torch.equal(w.take(torch.tensor([3, 5])), w.values.view(-1)[[3, 5]])
    with pytest.raises(NotImplementedError, match=r"aten\.take"):
        weight("quantized").take(torch.tensor([3, 5]))
    with pytest.raises(NotImplementedError, match=r"load_high_precision_\(parameter, values\)"):
        weight("quantized").copy_(1)


@pytest.mark.parametrize(
    "change", [lambda w: w.t_(), lambda w: w.resize_(4, 4), lambda w: w.unsqueeze_(0), lambda w: w.set_(torch.ones(2, 2))]
)
def test_shapes_are_not_changed_in_place(change):
    w = weight("high_precision")
    with pytest.raises(NotImplementedError, match=r"changes a tensor.s shape in place"):
        change(w)
    assert w.values.shape == w.shape == (32, 32)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "write",
    [
        lambda w, others: torch.add(X, X, out=w),
        lambda w, others: torch.cat([X, X], out=w),
        lambda w, others: torch.var(w, 1, out=w),
        lambda w, others: torch.max(X, 1, out=(w, others[0])),
        lambda w, others: torch.ops.aten._foreach_norm.Scalar_out([w, X], 2, out=[others[1], w]),
        lambda w, others: torch.unbind_copy(X, out=[others[1], w, others[1].clone(), others[1].clone()]),
    ],
)
def test_a_result_of_another_shape_goes_into_no_weight(write):
    w, others = weight("high_precision"), [torch.tensor([3]), torch.ones(2)]
    before = w.values.clone()
    with pytest.raises(NotImplementedError, match="CastWeight: its result"):
        write(w, others)
    assert w.shape == w.values.shape
    assert torch.equal(w.values, before)
    assert torch.equal(others[0], torch.tensor([3]))
    assert torch.equal(others[1], torch.ones(2))


def test_results_go_into_weights():
    w, indices, x = weight("high_precision"), torch.empty(0, dtype=torch.long), torch.randn(32, 32)
    assert torch.add(x, 1, out=w) is w
    assert torch.equal(w.values, x + 1)
    assert torch.mul(w, w, out=w) is w
    assert torch.equal(w.values, (x + 1) * (x + 1))
    found = torch.sort(x, out=(w, indices))
    assert found[0] is w
    assert found[1] is indices
    assert torch.equal(w.values, x.sort().values)
    assert torch.equal(indices, x.sort().indices)


def codes(shape, format, seed, scale=1.0):
    return bfp.quantize(scale * values(shape, seed), format)


@pytest.mark.parametrize(
    ("format", "shape", "part", "written"),
    [
        ("fp8_e4m3", (96, 64), slice(0, 32), False),
        ("fp8_e4m3", (3, 32, 64), 1, False),
        ("nvfp4_16x16", (3, 32, 64), slice(1, 2), False),
        ("mxfp8_e4m3_32x32", (96, 64), slice(0, 16), False),
        ("mxfp8_e4m3_32x32", (96, 64), slice(80, 96), False),
        ("mxfp8_e4m3_32x32", (96, 64), slice(32, 64), True),
        ("mxfp8_e4m3_32x32", (90, 64), slice(64, 90), True),
        ("mxfp8_e4m3_32x32", (3, 40, 64), 1, True),
        ("mxfp8_e4m3", (96, 64), slice(5, 7), True),
        ("fp8_e4m3_row", (96, 64), slice(5, 7), True),
        ("fp8_e4m3_row", (96, 64), (slice(None), slice(0, 32)), False),
    ],
)
def test_codes_are_copied_into_a_part_where_nothing_else_changes(format, shape, part, written):
    q, other = codes(shape, format, 0), codes(shape, format, 1, 100.0)
    expected = q.dequantize()
    if written:
        expected[part] = other.dequantize()[part]
        q[part] = other[part]
    else:
        with pytest.raises(NotImplementedError, match="shares a scale or an optimizer's original values"):
            q[part] = other[part]
        q[part].clone().copy_(other[part])
    assert torch.equal(q.dequantize(), expected)


def test_a_part_of_a_weight_with_originals_is_not_written():
    """An optimizer begins with them, and would write the old values back."""
    layer = bfp.GroupedLinear(3, 32, 64, recipe="mxfp8")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="original values"):
        layer.weight[1].copy_(bfp.quantize(torch.ones(64, 32), "mxfp8_e4m3_32x32"))


def stepped(optimizer, **options):
    def write(model):
        params = list(model.parameters())
        for param in params:
            param.grad = torch.ones(param.shape)
        optimizer(params, lr=0.1, **options).step()

    return write


WRITES = {
    "AdamW": stepped(bfp.AdamW),
    "Adam without masters": stepped(bfp.Adam, master=None),
    "AdamW, capturable": stepped(bfp.AdamW, capturable=True),
    "load_high_precision_": lambda model: bfp.load_high_precision_(model[0].weight, torch.ones(32, 32)),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "load values": lambda model: model.load_state_dict({f"{i}.weight": torch.ones(32, 32) for i in (0, 2)}),
    "init_": lambda model: bfp.init_(model[0].weight, nn.init.ones_),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_current", "nvfp4"])
@BOTH
def test_a_backward_of_weights_that_were_written_since_raises(name, recipe, weights):
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
    if recipe is None:
        if name in ("load_high_precision_", "init_"):
            return
    else:
        bfp.convert(model, recipe, weights=weights)
    before = model(X.clone().requires_grad_()).sum()
    WRITES[name](model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    model(X.clone().requires_grad_()).sum().backward()


@BOTH
@pytest.mark.parametrize(
    "product",
    [
        lambda w: X @ w.T,
        lambda w: X @ w.mT,
        lambda w: X @ w.t(),
        lambda w: X @ w.transpose(0, 1),
        lambda w: X @ w.movedim(0, 1),
        lambda w: torch.einsum("ti,oi->to", X, w),
        lambda w: torch.inner(X, w),
        lambda w: torch.tensordot(X, w, dims=([1], [1])),
        lambda w: torch.matmul(X, w.T, out=torch.empty(4, 32)),
        lambda w: F.linear(X, w.to("cpu")),
        lambda w: F.linear(X, w.float()),
        lambda w: F.linear(X.bfloat16(), w.bfloat16()),
        lambda w: F.linear(X, w.reshape(32, 32)),
        lambda w: F.linear(X, w.chunk(2)[0]),
        lambda w: F.linear(X, w.narrow(0, 0, 8)),
        lambda w: F.linear(X, w.detach().clone()),
    ],
)
def test_products_in_inference_mode_are_refused_as_elsewhere(product, weights):
    layer = bfp.Linear(32, 32, recipe="mxfp8", weights=weights)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(NotImplementedError, match=r"call the layer itself|aten\.unsqueeze"):
            product(layer.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "product",
    [
        lambda w: F.linear(X, w[0]),
        lambda w: F.linear(X, w.select(0, 1)),
        lambda w: F.linear(X, w.unbind()[2]),
        lambda w: F.linear(X, w[1:2].squeeze(0)),
        lambda w: X @ w.split([1, 2])[0].squeeze(0).T,
        lambda w: torch.sparse.mm(X.to_sparse(), w[0].T),
    ],
)
def test_a_product_with_one_experts_weight_is_refused(product, mode):
    layer = bfp.GroupedLinear(3, 32, 64, recipe="mxfp8", weights="high_precision")
    with mode(), pytest.raises(NotImplementedError, match="call the layer itself"):
        product(layer.weight)


def test_parts_of_values_are_views():
    w = bfp.CastWeight.from_values(torch.zeros(3, 4, 32), "mxfp8_e4m3")
    for i, one in enumerate(w.unbind()):
        assert type(one) is bfp.CastWeight
        one.fill_(i + 1)
    w[0][0].fill_(7)
    assert w.values[:, 1:].amin((1, 2)).tolist() == [1, 2, 3]
    assert w.values[0, 0].unique().tolist() == [7]


@pytest.mark.parametrize("name", ["mxfp8_e4m3_32x32", "nvfp4_16x16", "fp8_e4m3"])
def test_transposes_in_inference_mode(name):
    q = codes((40, 64), name, 0)
    expected = q.dequantize().T
    with torch.inference_mode():
        for flipped in (q.t(), q.transpose(0, 1), q.permute(1, 0), q.mT, q.T):
            assert torch.equal(flipped.dequantize(), expected)


@BOTH
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
def test_layers_of_fake_tensors(recipe, weights):
    real = bfp.Linear(32, 32, recipe=recipe, weights=weights)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = nn.Sequential(bfp.Linear(32, 32, recipe=recipe, weights=weights), nn.GELU(), real)
        x = torch.empty(4, 32, requires_grad=True)
        y = made(x)
        y.sum().backward()
    assert type(y) is type(x.grad) is type(made[0].weight.grad) is FakeTensor
    assert made[0].weight.grad.shape == (32, 32)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_what_is_refused_is_said_in_150_characters_and_the_rest_in_notes(weights):
    weight, x = bfp.Linear(64, 64, recipe="mxfp8", weights=weights).weight, torch.ones(4, 64)
    products = [lambda: weight @ x.T, lambda: x @ weight, lambda: F.linear(x, weight), lambda: weight.detach().numpy()]
    others = [lambda: weight + 1, lambda: 1 - weight, lambda: weight.sum(), lambda: weight.detach().mul_(2), lambda: weight < 1]
    stacks = [lambda: torch.stack([weight, weight]), lambda: F.embedding(torch.tensor([1]), weight), lambda: weight.norm()]
    for act in products + (others + stacks if weights == "quantized" else []):
        with pytest.raises(NotImplementedError) as raised:
            act()
        assert len(str(raised.value)) <= 150
    with pytest.raises(NotImplementedError, match=r"call the layer itself, or blockfp\.torch\.linear") as raised:
        F.linear(x, weight)
    assert any("lm_head" in note for note in raised.value.__notes__)


def net(weights):
    torch.manual_seed(0)
    return bfp.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp8", weights=weights)


def _full_tensor(rank, model):
    expected, model = model[0].weight.detach().dequantize(), fully_shard(copy.deepcopy(model))
    with pytest.raises(NotImplementedError, match=r"all_gather.*high_precision_state_dict\(model\)"):
        model[0].weight.full_tensor()
    assert torch.equal(bfp.high_precision_state_dict(model)["0.weight"], expected)
    assert torch.equal(model[0].weight.to_local().detach().dequantize(), expected.chunk(2)[rank])


def test_full_tensor():
    threaded.run(2, _full_tensor, net("quantized"))


def test_averages():
    x = values((32, 64), 0)
    quantized, kept = net("quantized"), net("high_precision")
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for model in (quantized, kept)]
    averages[0].update_parameters(quantized)  # the first one copies
    with pytest.raises(NotImplementedError, match=r"(?s)lerp.*AveragedModel.*weights=\"high_precision\""):
        averages[0].update_parameters(quantized)
    expected = [param.detach().clone() for param in kept.parameters()]
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    averages[1].update_parameters(kept)
    kept(x).square().mean().backward()
    optimizer.step()
    averages[1].update_parameters(kept)
    for average, old, param in zip(averages[1].parameters(), expected, kept.parameters(), strict=True):
        torch.testing.assert_close(_values(average), (_values(old) + _values(param)) / 2)
    # The average is quantized when it is used, as the weights are.
    assert not torch.equal(averages[1](x), copy.deepcopy(kept)(x))


def in_place(mine, theirs):
    for name, value in mine.items():
        if value.is_floating_point():
            value.mul_(0.5).add_(theirs[name], alpha=0.5)


def copied(mine, theirs):
    for name, value in mine.items():
        value.copy_(0.5 * value + 0.5 * theirs[name])


def soup(mine, theirs):
    return {name: torch.stack([value.float(), theirs[name].float()]).mean(0) for name, value in mine.items()}


def _state_dicts(rank, models, options):
    models = [fully_shard(copy.deepcopy(model)) for model in models]
    for average in (in_place, copied, soup):
        both = [get_model_state_dict(model, options=StateDictOptions(**options)) for model in models]
        if not all(both):
            continue
        with pytest.raises(NotImplementedError, match=r"their averages mean nothing\..*high_precision_state_dict"):
            average(*both)
    for model in models:
        assert bfp.high_precision_state_dict(model)["0.weight"].shape == (64, 64)


@pytest.mark.parametrize(
    "options", [{}, {"full_state_dict": True}, {"cpu_offload": True}, {"full_state_dict": True, "cpu_offload": True}], ids=str
)
def test_averages_of_sharded_state_dicts(options):
    threaded.run(2, _state_dicts, [net("quantized"), net("quantized")], options)


def _values(param):
    return param.detach().values if hasattr(param, "cut") else param.detach()

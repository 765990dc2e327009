"""Random keys of copies, and of optimizers that share theirs: no two layers of a model round by the same bits unsaid."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from arrays import through_a_file
from torch import nn

import blockfp.torch as bfp

X = torch.linspace(-1, 1, 32 * 64).reshape(32, 64)


def keys(model):
    return [tuple(module.rng_key.tolist()) for module in model.modules() if getattr(module, "rng_key", None) is not None]


def layer():
    torch.manual_seed(0)
    return bfp.Linear(64, 64, recipe="nvfp4")


def test_copies_in_one_model_have_keys_of_their_own():
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bfp.convert(block, "nvfp4", filter_fn=lambda path, _: path.startswith("linear"))
        encoder = nn.TransformerEncoder(block, 3)
    found = keys(encoder)
    assert len(found) == len(set(found)) == 6


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize(
    "build",
    [
        lambda one, copied: nn.Sequential(one, *(copied(one) for _ in range(3))),
        lambda one, copied: nn.ModuleList([copied(one), copied(one), copied(one), one]),
        lambda one, copied: nn.ModuleDict({"a": Pair(one, copied(one)), "b": copied(Pair(one, copied(one)))}),
        lambda one, copied: Pair(nn.Sequential(copied(one), copied(one)), nn.Sequential(one, copied(one))),
        lambda one, copied: Pair(pair := nn.Sequential(one, copied(one)), copied(pair)),
    ],
)
def test_however_a_model_is_put_together(build, copied):
    found = [keys(build(layer(), copied)) for _ in range(2)]
    assert len(set(found[0])) == len(found[0]) == 4
    assert found[0] == found[1]


def test_layers_of_one_model_round_their_gradients_by_other_bits_and_compute_alike():
    first = layer()
    results = []
    for one in nn.ModuleList([first, copy.deepcopy(first)]):
        x = X.clone().requires_grad_()
        y = one(x)
        y.backward(X.cos())
        results.append((y, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])


def test_a_copy_of_a_whole_model_is_that_model():
    model = nn.Sequential(layer(), nn.GELU(), layer())
    model[2] = copy.deepcopy(model[0])
    before = keys(model)
    other, saved = copy.deepcopy(model), pickled(model)
    wrapped = nn.Sequential(torch.compile(copy.deepcopy(model), backend="eager"))
    assert keys(other) == keys(saved) == keys(wrapped) == keys(model) == before
    for one in (model, other):
        one(X).sum().backward()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)


def test_a_layer_that_stands_in_a_model_twice_is_one():
    first = layer()
    model = nn.Sequential(copy.deepcopy(first), first, first)
    found = keys(model)
    model.again = first
    model[0] = model[0]
    assert keys(model) == found
    assert len(found) == 2


def test_a_teacher_takes_nothing_of_the_generator_and_changes_no_students_key():
    found = []
    for teaches in (False, True):
        first = layer()
        model = Pair(first, copy.deepcopy(first) if teaches else None)
        found.append((keys(first), torch.rand(3).tolist()))
        assert len(set(keys(model))) == 1 + teaches
    assert found[0] == found[1]


def test_what_is_loaded_keeps_its_keys():
    model = nn.Sequential(layer(), nn.GELU())
    model.append(copy.deepcopy(model[0]))
    other = nn.Sequential(layer(), nn.GELU(), bfp.Linear(64, 64, recipe="nvfp4"))
    other.load_state_dict(model.state_dict())
    assert keys(other) == keys(model)
    assert keys(through_a_file(model, weights_only=False)) == keys(model)


def test_layers_without_keys_and_on_meta():
    first = bfp.Linear(64, 64, recipe="mxfp8")
    assert not keys(nn.Sequential(first, copy.deepcopy(first)))
    meta = bfp.Linear(64, 64, recipe="nvfp4", device="meta")
    model = nn.Sequential(meta, copy.deepcopy(meta)).to_empty(device="cpu")
    assert len(set(keys(model))) == 2


def test_experts_in_groups():
    grouped = bfp.GroupedLinear(2, 64, 64, recipe="nvfp4")
    assert len(set(keys(nn.ModuleList([grouped, copy.deepcopy(grouped)])))) == 2


def stepped(optimizers, params, times=2):
    for _, (optimizer, param) in itertools.product(range(times), zip(optimizers, params, strict=True)):
        param.grad = torch.ones(param.shape)
        optimizer.step()


def parameters(count):
    return [nn.Parameter(bfp.quantize(X, "mxfp8_e4m3_32x32")) for _ in range(count)]


@pytest.mark.parametrize("options", [{"master": None}, {"moments": "fp8"}, {"moments": "bfloat16"}, {"master": None, "key": 7}])
def test_optimizers_that_take_turns_and_round_by_one_key_are_told(options):
    params = parameters(3)
    with pytest.warns(UserWarning, match=r"two optimizers .* key=") as told:
        stepped([bfp.AdamW([param], **options) for param in params], params)
    assert len(told) == 1


@pytest.mark.parametrize(
    "options", [[{}] * 3, [{"master": None, "key": i} for i in range(3)], [{"master": None}, {}, {"moments": "fp8", "key": 1}]]
)
def test_optimizers_that_share_no_random_bits_are_not(options):
    params = parameters(3)
    stepped([bfp.AdamW([param], **one) for one, param in zip(options, params, strict=True)], params)


def test_runs_one_after_the_other_are_not():
    kept = []
    for _ in range(2):
        params = parameters(1)
        kept.append(bfp.AdamW(params, master=None))
        stepped(kept[-1:], params, 4)

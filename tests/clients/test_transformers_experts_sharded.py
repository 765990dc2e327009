"""Experts of transformers that FSDP2 or expert parallelism cuts: outputs, gradients, training, checkpoints on other ranks."""

import copy

import pytest
import threaded
import torch
from hf_experts import TOKENS, experts_of, family, routed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import train

import blockfp.torch as bfp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def sharded_step(rank, plain, recipe, weights, expected):
    model = bfp.convert(copy.deepcopy(plain), recipe, weights=weights)
    mesh = init_device_mesh("cpu", (3,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = run(model, bfp.AdamW(model.parameters(), lr=1e-2))
    values = bfp.high_precision_state_dict(model)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    for path, value in values.items():
        torch.testing.assert_close(value, expected[1][path], rtol=0.1, atol=2e-3)
    assert f"{path_of(model)}.gate_up_proj" in get_model_state_dict(model)


def path_of(model):
    return next(path for path, _ in model.named_modules() if path.endswith(".experts"))


def run(model, optimizer):
    return train(optimizer, lambda _: model(TOKENS, labels=TOKENS).loss, range(2))


@pytest.mark.parametrize(
    ("name", "recipe", "weights"),
    [("Mixtral", "mxfp8", "quantized"), ("GptOss", "fp8_block", "quantized"), ("GptOss", "mxfp8", "high_precision")],
)
def test_fsdp(name, recipe, weights):
    """Four experts on three ranks, the same tokens on each: one process's losses, and its weights but for orders of sums."""
    plain = family(name)
    model = bfp.convert(copy.deepcopy(plain), recipe, weights=weights)
    losses = run(model, bfp.AdamW(model.parameters(), lr=1e-2))
    expected = losses, bfp.high_precision_state_dict(model)
    threaded.run(3, sharded_step, plain, recipe, weights, expected)


def by_ranks(rank, plain, recipe, weights, each):
    """Experts of one layer that ranks share: outputs, gradients of this rank's tokens, and of its experts."""
    experts = copy.deepcopy(plain)
    bfp.convert(experts, recipe, weights=weights)
    for module in experts.modules():
        if isinstance(getattr(module, "rng_key", None), torch.Tensor):
            module.rng_key.fill_(1)
    bfp.parallelize(experts, init_device_mesh("cpu", (len(each),), mesh_dim_names=("ep",)), "experts")
    x, index, scores = (one.clone() for one in each[rank])
    x.requires_grad_()
    scores.requires_grad_()
    y = experts(x, index, scores)
    y.backward(y.detach().cos())
    # torch 2.11 gathers the gradient of what is transposed and cut unevenly.
    own = [param.grad.redistribute(placements=param.placements).to_local() for param in experts.parameters()]
    return [y.detach(), x.grad, scores.grad, *own]


@pytest.mark.parametrize(
    ("name", "recipe", "weights"),
    [
        ("Mixtral", "mxfp8", "quantized"),
        ("GptOss", "fp8_block", "quantized"),
        ("GptOss", "mxfp8", "high_precision"),
        ("DeepseekV3", "fp8_current", "quantized"),
    ],
)
def test_experts_that_ranks_share_give_the_bits_of_one(name, recipe, weights):
    plain = experts_of(family(name))
    x, index, scores = routed(60)
    each = [[part[first:last] for part in (x, index, scores)] for first, last in ((0, 20), (20, 20), (20, 60))]
    (alone,) = threaded.run(1, by_ranks, plain, recipe, weights, [(x, index, scores)])
    together = threaded.run(3, by_ranks, plain, recipe, weights, each)
    for whole, *parts in zip(alone, *together, strict=True):
        assert torch.equal(torch.cat(parts), whole)
        assert whole.any()
    # And near what they give without codes on their way.
    local = copy.deepcopy(plain)
    y = bfp.convert(local, recipe, weights=weights)(x, index, scores)
    assert (y - alone[0]).norm() < 0.01 * y.norm() or recipe == "fp8_current"


def shared(plain, recipe):
    """A model under FSDP2 x EP on 2 x 2 ranks."""
    model = bfp.convert(copy.deepcopy(plain), recipe)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everywhere = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    bfp.parallelize(model, mesh["ep"], {"*.experts": "experts"})
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        layer.mlp.experts.set_gradient_divide_factor(4)
        layer.mlp.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=everywhere)
    return fully_shard(model, mesh=everywhere)


def shared_step(rank, plain, folder):
    """Two steps, each rank with tokens of its own, and the checkpoint after them."""
    model = shared(plain, "mxfp8")
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    losses = train(optimizer, lambda _: model(TOKENS.view(4, 1, 8)[rank], labels=TOKENS.view(4, 1, 8)[rank]).loss, range(2))
    values = bfp.high_precision_state_dict(model)
    bfp.save_checkpoint(folder, model, optimizer, step=2)
    return losses, values


def resharded(rank, plain, folder, expected):
    """The same checkpoint on three ranks, without expert parallelism."""
    model = bfp.convert(copy.deepcopy(plain), "mxfp8")
    mesh = init_device_mesh("cpu", (3,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    bfp.load_checkpoint(folder, model, bfp.AdamW(model.parameters(), lr=1e-2))
    values = bfp.high_precision_state_dict(model)
    assert all(torch.equal(values[path], value) for path, value in expected.items())


def test_fsdp_and_expert_parallelism_train_and_reshard(tmp_path):
    plain = family("Qwen3Moe")
    together = threaded.run(4, shared_step, plain, tmp_path / "checkpoint")
    model = bfp.convert(copy.deepcopy(plain), "mxfp8")
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        each = [model(tokens, labels=tokens).loss for tokens in TOKENS.view(4, 1, 8)]
        (sum(each) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    for step in range(2):
        assert [one[step] for one, _ in together] == pytest.approx(losses[step], rel=0.01)
    values = together[0][1]
    for path, value in bfp.high_precision_state_dict(model).items():
        # Adam's first steps have the size of the learning rate, whatever the gradient's.
        assert (values[path] - value).abs().mean() < 2e-3, path
    before = bfp.high_precision_state_dict(bfp.convert(copy.deepcopy(plain), "mxfp8"))
    assert not [path for path, _ in model.named_parameters() if torch.equal(values[path], before[path])]
    threaded.run(3, resharded, plain, tmp_path / "checkpoint", values)


def shared_keys(rank, plain):
    """Random keys as this rank drew them, and after a forward."""
    model = shared(plain, "nvfp4")
    keys = {name: key for name, key in model.named_buffers() if name.endswith("rng_key")}
    before = {name: key.tolist() for name, key in keys.items()}
    with torch.no_grad():
        model(TOKENS.view(4, 1, 8)[rank])
    return before, {name: key.tolist() for name, key in keys.items()}


def test_ranks_of_experts_take_one_random_key():
    """Each expert folds its number into it."""
    found = threaded.run(4, shared_keys, family("Qwen3Moe"))
    first = found[0][0]
    assert any("experts.down_proj" in name for name in first)
    assert not any(first[name] == before[name] for before, _ in found[1:] for name in first)
    assert all(after == first for _, after in found)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("column", "style of a QuantizedMixtralExperts must be 'experts', got 'column'"),
        ("fp8_delayed", "recipe fp8_delayed scales by amaxes of earlier steps"),
        ("twice", "a QuantizedMixtralExperts is already sharded"),
    ],
)
def test_what_cannot_be_cut_is_refused(case, message):
    experts = bfp.convert(experts_of(family("Mixtral")), case if case == "fp8_delayed" else "mxfp8")

    def cut(rank):
        mesh = init_device_mesh("cpu", (1,))
        if case == "twice":
            bfp.parallelize(experts, mesh, "experts")
        bfp.parallelize(experts, mesh, "column" if case == "column" else "experts")

    assert message in str(threaded.errors(1, cut)[0])

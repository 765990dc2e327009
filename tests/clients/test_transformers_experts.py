"""Experts that transformers holds in 3-D parameters, converted: products by hand, families, saving and sharding."""

import copy
import pickle
import warnings

import pytest
import threaded
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS = torch.arange(32).view(2, 16) * 7 % 126 + 1
COMMON = {
    "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16},
    "DeepseekV2": {
        "n_routed_experts": 4, "moe_intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1, **LATENT,
    },
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, **LATENT,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 16},
    "Olmoe": {"num_experts": 4},
    "Phimoe": {"num_local_experts": 4},
    "GraniteMoe": {"num_local_experts": 4},
}  # fmt: skip


def family(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, param in model.named_parameters():
            if path.endswith("_bias"):
                param.uniform_(-0.1, 0.1)
    return model


def experts_of(model):
    return next(module for path, module in model.named_modules() if path.endswith(".experts"))


def weights_of(experts):
    return {name: getattr(experts, name) for name in ("gate_up_proj", "down_proj")}


def routed(tokens=50, experts=4, k=2, features=64):
    torch.manual_seed(1)
    x = torch.randn(tokens, features)
    # Expert 1 gets nothing.
    index = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(tokens)])
    return x, index + (index > 0), torch.rand(tokens, k)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_it_does_unconverted_and_every_parameter_moves(name):
    plain = family(name)
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bfp.convert(model, "mxfp8")
    assert [path for path, _ in model.named_parameters()] == [path for path, _ in plain.named_parameters()]
    summary = bfp.summary(model)
    assert summary.share > 0.9
    assert summary.parameters == sum(param.numel() for param in plain.parameters())
    before = {path: value.clone() for path, value in bfp.high_precision_state_dict(model).items()}
    assert before.keys() == plain.state_dict().keys()
    losses = []
    optimizers = [bfp.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)]
    for _ in range(2):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss = one(TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        still = {path for path, param in model.named_parameters() if param.grad is None or not param.grad.any()}
        still_plain = {path for path, param in plain.named_parameters() if param.grad is None or not param.grad.any()}
        assert still == still_plain
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert losses[::2] == pytest.approx(losses[1::2], rel=0.03)
    assert losses[2] < losses[0]
    after = bfp.high_precision_state_dict(model)
    assert {path for path, _ in model.named_parameters() if torch.equal(before[path], after[path])} <= still


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "fp8_delayed", "fp8_block", "nvfp4"])
def test_recipes_keep_names_and_every_parameter_moves(recipe):
    plain = family("GptOss")
    model = bfp.convert(copy.deepcopy(plain), recipe)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    before = bfp.high_precision_state_dict(model)
    assert before.keys() == plain.state_dict().keys()
    before = {path: value.clone() for path, value in before.items()}
    losses = []
    for _ in range(3):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = bfp.high_precision_state_dict(model)
    assert not [path for path, _ in model.named_parameters() if torch.equal(before[path], after[path])]
    if recipe == "fp8_delayed":
        assert float(experts_of(model).gate_up_proj_product.input_scale) != 1


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_the_forward_is_that_of_transformers_on_the_same_weights(name):
    """Products in high precision: routing, gates, biases and empty experts are theirs."""
    plain = experts_of(family(name))
    model = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    experts = bfp.convert(model, "mxfp8", compute="high_precision")["experts"]
    with torch.no_grad():
        for path, weight in weights_of(experts).items():
            plain.get_parameter(path).copy_(weight.dequantize())
    x, index, weights = routed()
    results = []
    for module in (experts, plain):
        given = [each.clone().requires_grad_() for each in (x, weights)]
        y = module(given[0], index, given[1])
        y.square().sum().backward()
        results.append([y, *(each.grad for each in given), *(param.grad for param in module.parameters())])
    assert len(results[0]) == len(results[1]) > 4
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
def test_products_are_those_of_dequantized_operands(name, recipe):
    """Each product of one layer, forward and backward, against float64."""
    experts = experts_of(bfp.convert(family(name), recipe))
    casts = recipes.for_linear(recipes.parse(recipe), "quantized")
    calls = {}
    hooks = []
    for path in weights_of(experts):
        product = experts.get_submodule(f"{path}_product")

        def keep(module, given, kwargs, y, path=path):
            y.retain_grad()
            given[0].retain_grad()
            calls[path] = (given[0], given[3], y)

        hooks.append(product.register_forward_hook(keep, with_kwargs=True))
    x, index, weights = routed()
    experts(x.requires_grad_(), index, weights).square().sum().backward()
    counts = torch.bincount(index.flatten(), minlength=4)
    assert counts[1] == 0

    def seen(rows, cast):
        return torch.from_numpy(blockfp.quantize(rows.contiguous().numpy(), cast.format).dequantize()).double()

    for path, weight in weights_of(experts).items():
        x, offs, y = calls[path]
        assert offs.tolist() == counts.cumsum(0).tolist()
        bias, bias_gradient = getattr(experts, f"{path}_bias", None), []
        w = weight.dequantize().detach().double()
        w = w.mT if name == "GptOss" else w
        for expert, (rows, outputs, gradient, d_x) in enumerate(
            zip(*(part.split(counts.tolist()) for part in (x.detach(), y.detach(), y.grad, x.grad)), strict=True)
        ):
            d_w = weight.grad[expert].mT if name == "GptOss" else weight.grad[expert]
            if not len(rows):
                assert not d_w.any()
                continue
            expected = seen(rows, casts.input) @ w[expert].mT
            expected = expected if bias is None else expected + bias[expert].double()
            torch.testing.assert_close(outputs.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(d_x.double(), seen(gradient, casts.gradient) @ w[expert], rtol=1e-5, atol=1e-5)
            expected = seen(gradient.mT, casts.gradient_columnwise) @ seen(rows.mT, casts.input_columnwise).mT
            torch.testing.assert_close(d_w.double(), expected, rtol=1e-5, atol=1e-4)
            bias_gradient.append(gradient.sum(0))
        if bias is not None:
            torch.testing.assert_close(bias.grad[[0, 2, 3]], torch.stack(bias_gradient))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_saving_and_loading(name, recipe, tmp_path):
    plain = family(name)
    model = bfp.convert(copy.deepcopy(plain), recipe)
    expected = model(TOKENS).logits
    # The same model, by its own state dict, into one that was drawn otherwise.
    other = family(name)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    bfp.convert(other, recipe).load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS).logits, expected)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(experts_of(model)))):
        module = experts_of(same) if same is not None and hasattr(same, "model") else same
        assert torch.equal(module(*routed()), experts_of(model)(*routed()))
    # transformers' own files, of values, split by expert as the models' authors do.
    model.save_pretrained(tmp_path, state_dict=bfp.high_precision_state_dict(model))
    read = type(plain).from_pretrained(tmp_path).eval()
    for path, value in bfp.high_precision_state_dict(model).items():
        assert torch.equal(read.state_dict()[path], value), path
    assert torch.equal(bfp.convert(read, recipe)(TOKENS).logits, expected)
    # Plain values into a converted model.
    missing, unexpected = bfp.convert(family(name), recipe).load_state_dict(plain.state_dict(), strict=True)
    assert not missing
    assert not unexpected
    bfp.save_checkpoint(tmp_path / "checkpoint", model, step=1)
    third = bfp.convert(family(name), recipe)
    bfp.load_checkpoint(tmp_path / "checkpoint", third)
    assert torch.equal(third(TOKENS).logits, expected)


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
    losses = []
    for _ in range(2):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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


def test_a_filter_leaves_experts_unwarned():
    model = bfp.convert(family("Qwen3Moe"), "mxfp8", filter_fn=lambda path, layer: isinstance(layer, nn.Linear))
    left = [left for left in bfp.summary(model).left if left.path.endswith("gate_up_proj")]
    assert [one.reason for one in left] == ["filter_fn or recipe left it, or it came after convert"] * 2
    assert not any(one.unasked for one in left)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_compile_into_one_graph(name, recipe):
    experts = experts_of(bfp.convert(family(name), recipe))
    x, index, weights = routed()
    compiled = torch.compile(copy.deepcopy(experts), fullgraph=True, backend="aot_eager")
    results = []
    for one in (experts, compiled):
        given = x.clone().requires_grad_()
        y = one(given, index, weights)
        y.backward(y.detach().cos())
        results.append([y, given.grad, *(param.grad for param in one.parameters())])
    assert all(map(torch.equal, *results))


def refused(case):
    model = family("GptOss")
    experts = experts_of(model)
    if case == "blocks without a transpose":
        bfp.convert(model, recipes.by_operand(lambda *which: None if which[1:] == ("weight", "columnwise") else "mxfp8_e4m3"))
    elif case == "hooks":
        experts.down_proj.register_hook(lambda gradient: gradient)
        bfp.convert(model, "mxfp8")
    elif case == "methods":
        experts.forward = lambda *args: None
        bfp.convert(model, "mxfp8")
    elif case == "a tie":
        model.other = nn.Module()
        model.other.weight = experts.down_proj
        bfp.convert(model, "mxfp8", filter_fn=lambda path, layer: True)
    return model


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("blocks without a transpose", "'model.layers.0.mlp.experts': recipe .* gate_up_proj .experts, in, out. needs one"),
        ("hooks", "the down_proj of 'model.layers.0.mlp.experts', a GptOssExperts, has hooks"),
        ("methods", r"has methods put into it .forward."),
        ("a tie", "other.weight is the weight of"),
    ],
)
def test_what_cannot_be_converted_is_refused(case, message):
    with pytest.raises(ValueError, match=message):
        refused(case)


def test_experts_that_transformers_has_cut_are_refused():
    experts = experts_of(bfp.convert(family("Mixtral"), "mxfp8"))
    experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="cut these experts over ranks by a plan of its own"):
        experts(*routed())


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
    return [y.detach(), x.grad, scores.grad, *(param.grad.to_local() for param in experts.parameters())]


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


def shared_step(rank, plain, folder):
    """Two steps under FSDP2 x EP on 2 x 2 ranks, each with tokens of its own, and the checkpoint after them."""
    model = bfp.convert(copy.deepcopy(plain), "mxfp8")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everywhere = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    bfp.parallelize(model, mesh["ep"], {"*.experts": "experts"})
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        layer.mlp.experts.set_gradient_divide_factor(4)
        layer.mlp.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=everywhere)
    fully_shard(model, mesh=everywhere)
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(TOKENS.view(4, 1, 8)[rank], labels=TOKENS.view(4, 1, 8)[rank]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
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


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("column", "style of a QuantizedMixtralExperts must be 'experts', got 'column'"),
        ("fp8_delayed", "recipe fp8_delayed scales by amaxes of earlier steps"),
        ("twice", "a QuantizedMixtralExperts is cut already"),
    ],
)
def test_what_cannot_be_cut_is_refused(case, message):
    def cut(rank):
        experts = bfp.convert(experts_of(family("Mixtral")), case if case == "fp8_delayed" else "mxfp8")
        mesh = init_device_mesh("cpu", (1,))
        if case == "twice":
            bfp.parallelize(experts, mesh, "experts")
        bfp.parallelize(experts, mesh, "column" if case == "column" else "experts")

    assert message in str(threaded.errors(1, cut)[0])

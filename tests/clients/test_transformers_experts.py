"""Experts that transformers holds in 3-D parameters, converted: products by hand, families, saving, compiling."""

import copy
import importlib
import pickle
import warnings

import pytest
import torch
import transformers
from hf_experts import COMMON, FAMILIES, TOKENS, experts_of, family, routed, weights_of
from torch import nn
from training import train

import blockfp
import blockfp.torch as bfp
from blockfp import recipes
from blockfp.integrations.transformers import BlockfpConfig

GATES = {
    "Aria": "aria", "Beam": "beam", "DeepseekV4": "deepseek_v4", "HYV4": "hy_v4", "GptOss": "gpt_oss", "Inkling2": "inkling2",
    "MiniMaxM3VL": "minimax_m3_vl", "MuseSpark": "muse_spark", "NemotronH": "nemotron_h",
    "OpenAIPrivacyFilter": "openai_privacy_filter",
}  # fmt: skip


class ExpertsConfig:
    num_experts = num_local_experts = n_routed_experts = moe_num_experts = 4
    hidden_size = moe_hidden_size = 64
    intermediate_size = moe_intermediate_size = 96
    moe_latent_size = None
    hidden_act, mlp_hidden_act, _experts_implementation = "silu", "relu2", "eager"
    swiglu_limit, swiglu_alpha, mlp_gate_softcap, mlp_up_softcap, post_norm_eps = 0.5, 1.7, 7.0, 7.0, 1e-5


# Models whose routers are layers of torch's, and a piece of these layers' names.
ROUTERS = {
    "Gemma4": ({"num_experts": 4, "enable_moe_block": True, "moe_intermediate_size": 96, "top_k_experts": 2, "head_dim": 16,
                "global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 8}, "router.proj"),
    "Afmoe": ({"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16, "num_dense_layers": 1}, "router.gate"),
    "HunYuanMoEV1": ({"num_experts": 4, "moe_topk": 2, "head_dim": 16}, "gate.wg"),
}  # fmt: skip


def linear_router(name):
    config = {"Gemma4": "Gemma4TextConfig"}.get(name, f"{name}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**COMMON, **ROUTERS[name][0])).eval()


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_it_does_unconverted_and_every_parameter_moves(name):
    plain = family(name)
    model = copy.deepcopy(plain)
    # Built before: parameters stay the same objects.
    early = bfp.AdamW(model.parameters(), lr=1e-2)
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
    optimizers = [early, torch.optim.AdamW(plain.parameters(), lr=1e-2)]
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
    losses = train(optimizer, lambda _: model(TOKENS, labels=TOKENS).loss, range(3))
    assert losses[-1] < losses[0]
    after = bfp.high_precision_state_dict(model)
    assert not [path for path, _ in model.named_parameters() if torch.equal(before[path], after[path])]
    if recipe == "fp8_delayed":
        assert float(experts_of(model).gate_up_proj_product.input_scale) != 1


def results_of(module, x, index, weights):
    """y, and the gradients of x, weights and parameters."""
    given = [each.clone().requires_grad_() for each in (x, weights)]
    y = module(given[0], index, given[1])
    y.square().sum().backward()
    return [y, *(each.grad for each in given), *(param.grad for param in module.parameters())]


def assert_alike(experts, plain, *routed):
    """Compares experts with those of transformers that hold the values of their codes."""
    with torch.no_grad():
        for path, weight in weights_of(experts).items():
            plain.get_parameter(path).copy_(weight.dequantize())
    found, wanted = results_of(experts, *routed), results_of(plain, *routed)
    assert len(found) > 4
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_the_forward_is_that_of_transformers_on_the_same_weights(name):
    """Products in high precision: routing, gates, biases and empty experts are theirs."""
    plain = experts_of(family(name))
    model = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    experts = bfp.convert(model, "mxfp8", compute="high_precision")["experts"]
    assert_alike(experts, plain, *routed())


@pytest.mark.parametrize("name", GATES)
def test_every_gate_is_that_of_transformers(name):
    """Of all classes of experts in transformers 5.23 these are the ones that compute something different from Mixtral's."""
    module = importlib.import_module(f"transformers.models.{GATES[name]}.modeling_{GATES[name]}")
    torch.manual_seed(0)
    plain = getattr(module, f"{name}Experts")(ExpertsConfig)
    for param in plain.parameters():
        nn.init.normal_(param, std=0.2)
    experts = bfp.convert(copy.deepcopy(plain), "mxfp8", compute="high_precision")
    with torch.no_grad():
        for path, weight in experts.named_parameters():
            values = weight.dequantize() if isinstance(weight, bfp.QuantizedTensor) else weight
            plain.get_parameter(path).copy_(values)
    x, index, weights = routed()
    found, wanted = results_of(experts, x, index, weights), results_of(plain.double(), x.double(), index, weights.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 3e-6 * theirs.norm()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "nvfp4"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_no_tokens(name, recipe):
    experts = experts_of(bfp.convert(family(name), recipe))
    x, index, weights = routed()
    x, weights = x[:0].requires_grad_(), weights[:0].requires_grad_()
    y = experts(x, index[:0], weights)
    assert y.shape == (0, 64)
    y.sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in experts.parameters())
    assert x.grad.shape == (0, 64)


def test_tokens_of_the_expert_behind_the_last_are_dropped():
    """ZAYA's routers choose it for tokens that skip the layer."""
    plain = experts_of(family("Mixtral"))
    experts = bfp.convert(copy.deepcopy(plain), "mxfp8", compute="high_precision")
    x, index, weights = routed()
    index[::3, 1] = 4
    plain.config._experts_implementation = "eager"
    assert_alike(experts, plain, x, index, weights)


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
    assert b"torch_backend" not in pickle.dumps(experts_of(model))
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


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_stay_whatever_class_they_have(name, tmp_path):
    plain = linear_router(name)
    assert (
        type(plain.get_submodule(next(path for path, _ in plain.named_modules() if path.endswith(ROUTERS[name][1]))))
        is nn.Linear
    )
    routers = {path: param for path, param in plain.named_parameters() if ROUTERS[name][1] in path}
    assert routers
    ways = {
        "everything": ("mxfp8", None),
        "a filter": ("mxfp8", lambda path, layer: True),
        "patterns": ({ROUTERS[name][1].replace(".", "[.]"): None, "": "mxfp8"}, None),
    }
    for recipe, filter_fn in ways.values():
        model = bfp.convert(copy.deepcopy(plain), recipe, filter_fn=filter_fn)
        assert all(torch.equal(model.get_parameter(path), param) for path, param in routers.items())
        left = {one.path: one for one in bfp.summary(model).left}
        assert all(left[path].reason == "it chooses experts, and routers stay in high precision" for path in routers)
        assert not any(left[path].unasked for path in routers)
        model(TOKENS, labels=TOKENS).loss.backward()
        assert all(model.get_parameter(path).grad.any() for path in routers)
    plain.save_pretrained(tmp_path)
    read = type(plain).from_pretrained(tmp_path, quantization_config=BlockfpConfig("mxfp8")).eval()
    assert all(torch.equal(read.get_parameter(path), param) for path, param in routers.items())
    assert torch.equal(read(TOKENS).logits, model(TOKENS).logits)


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


def test_a_class_forward_that_is_replaced_behind_convert_is_called(monkeypatch):
    model = bfp.convert(family("GptOss"), "mxfp8")
    experts = experts_of(model)
    before = model(TOKENS).logits
    copied = pickle.loads(pickle.dumps(model))
    monkeypatch.setattr(type(experts).made_of, "forward", lambda self, x, index, weights: x * 0)
    assert not experts_of(copied)(torch.ones(2, 64), None, None).any()
    assert not torch.equal(model(TOKENS).logits, before)
    monkeypatch.undo()
    assert torch.equal(model(TOKENS).logits, before)
    layer = transformers.pytorch_utils.Conv1D(32, 64)
    bfp.convert(layer, "mxfp8")
    monkeypatch.setattr(transformers.pytorch_utils.Conv1D, "forward", lambda self, x: -x)
    assert torch.equal(layer(torch.ones(2, 64)), -torch.ones(2, 64))


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
        ("a tie", "other.weight is also the weight of"),
    ],
)
def test_what_cannot_be_converted_is_refused(case, message):
    with pytest.raises(ValueError, match=message):
        refused(case)


def test_experts_that_transformers_has_cut_are_refused():
    experts = experts_of(bfp.convert(family("Mixtral"), "mxfp8"))
    experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="sharded these experts by its own plan"):
        experts(*routed())

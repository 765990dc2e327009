"""Experts that transformers holds in 3-D parameters, converted: products by hand, families, saving, compiling."""

import copy
import pickle
import warnings

import pytest
import torch
from hf_experts import FAMILIES, TOKENS, experts_of, family, routed, weights_of
from torch import nn

import blockfp
import blockfp.torch as bfp
from blockfp import recipes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


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

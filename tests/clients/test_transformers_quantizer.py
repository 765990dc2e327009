"""transformers' from_pretrained with blockfp's quantization config: high-precision files, and what save_pretrained wrote."""

import copy
import json
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from hf_models import assert_same_model, family, is_quantized, load, logits
from processes import LIMIT
from transformers import AutoModelForCausalLM

import blockfp
import blockfp.torch as bfp
from blockfp import recipes
from blockfp.integrations.transformers import BlockfpConfig
from blockfp.recipes import Cast

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("name", "recipe"), [
    ("Llama", "mxfp8"), ("Llama", "fp8_delayed"), ("Qwen3", "nvfp4"), ("Mixtral", "fp8_block"), ("Qwen3Moe", "nvfp4"),
    ("GptOss", "mxfp4"),
])  # fmt: skip
def test_loaded_as_converted_saved_and_loaded_again(name, recipe, tmp_path):
    family(name).save_pretrained(tmp_path / "plain", max_shard_size="50KB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 2
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig(recipe))
    plain = bfp.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), recipe)
    assert_same_model(model, plain)
    initial = [p.initial for p in model.parameters() if isinstance(p, bfp.QuantizedTensor)]
    assert all(torch.equal(a, b.initial) for a, b in zip(initial, filter(is_quantized, plain.parameters()), strict=True))
    assert torch.equal(logits(model), logits(plain))

    model.save_pretrained(tmp_path / "codes", max_shard_size="50KB")
    again = load(tmp_path / "codes")
    assert_same_model(model, again)
    assert torch.equal(logits(model), logits(again))
    states = [dict(one.state_dict()) for one in (model, again)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    # The other faces read the folder too.
    held = blockfp.load(tmp_path / "codes")
    for path, param in model.named_parameters():
        if is_quantized(param):
            assert held[path].format is param.format
            assert held[path].codes.tobytes() == param.codes.numpy().tobytes()
    assert not any("_format_" in path for path in held)


def test_every_choice_comes_back(tmp_path):
    own = recipes.mxfp8().replace(gradient=Cast("mxfp8_e5m2"), name="mine")
    recipe = {"lm_head": None, "self_attn": own, "mlp": recipes.fp8_delayed(history=3)}
    family("Llama").save_pretrained(tmp_path / "plain")
    config = BlockfpConfig(recipe, modules_to_not_convert=["model.layers.1", "down_proj"], trainable=False, keep_init=False)
    model = load(tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16)
    converted = {path: layer.recipe for path, layer in model.named_modules() if isinstance(layer, bfp.Linear)}
    assert converted == {
        **{f"model.layers.0.self_attn.{name}_proj": own for name in "qkvo"},
        **{f"model.layers.0.mlp.{name}_proj": recipes.fp8_delayed(history=3) for name in ("gate", "up")},
    }
    quantized = list(filter(is_quantized, model.parameters()))
    assert not any(p.requires_grad or p.initial is not None for p in quantized)
    assert all(p.requires_grad for p in model.parameters() if not is_quantized(p))
    model.save_pretrained(tmp_path / "codes")
    written = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "blockfp"
    again = load(tmp_path / "codes", dtype=torch.bfloat16)
    assert_same_model(model, again)
    assert again.config.quantization_config.recipe == config.recipe
    assert {path: layer.recipe for path, layer in again.named_modules() if isinstance(layer, bfp.Linear)} == converted


def test_the_first_pattern_counts_in_files_too(tmp_path):
    """transformers sorts the keys of config.json."""
    recipe = {"lm_head": None, "down_proj": recipes.qat("nvfp4"), "z_proj|up_proj": "nvfp4_4over6", "": "mxfp8"}
    family("Llama").save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig(recipe))
    model.save_pretrained(tmp_path / "codes")
    again = load(tmp_path / "codes")
    assert_same_model(model, again)
    found = [{path: one.recipe for path, one in each.named_modules() if isinstance(one, bfp.Linear)} for each in (model, again)]
    assert found[0] == found[1]
    assert {str(one) for one in found[0].values()} == {"qat(nvfp4)", "nvfp4_4over6", "mxfp8"}
    assert torch.equal(logits(model), logits(again))
    assert list(again.config.quantization_config.recipe) == list(recipe)
    for wrong in (["mxfp8"], [["", "mxfp8", "nvfp4"]], [1]):
        with pytest.raises(ValueError, match=r"is not a list of \(pattern, recipe\) pairs"):
            BlockfpConfig(wrong)


@pytest.mark.parametrize("change", ["mxfp4_rotated", {"mlp": "fp8_current", "q_proj": "mxfp8"}], ids=["all", "some"])
def test_the_recipe_that_training_ends_in_is_saved(change, tmp_path):
    family("Llama").save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig({"lm_head": None, "": "nvfp4"}))
    copied = copy.deepcopy(model)
    given = copy.deepcopy(model.config.quantization_config)
    bfp.set_recipe(copied, None, change)
    for each in (model, copied):
        folder = tmp_path / f"codes{each is model}"
        each.save_pretrained(folder)
        again = load(folder)
        assert_same_model(each, again)
        assert torch.equal(logits(each), logits(again))
        layers = [{path: one.recipe for path, one in m.named_modules() if isinstance(one, bfp.Linear)} for m in (each, again)]
        assert layers[0] == layers[1]
        assert {one.name for one in layers[0].values()} != {"nvfp4"} or each is model
        again.save_pretrained(tmp_path / "again")
        assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    # Given to another model it is what it says; pickled too.
    ends_in = copied.config.quantization_config
    for one in (copy.copy(ends_in), pickle.loads(pickle.dumps(ends_in)), BlockfpConfig(**ends_in.to_dict())):
        other = load(tmp_path / "plain", quantization_config=one)
        assert {p: m.recipe for p, m in other.named_modules() if isinstance(m, bfp.Linear)} == layers[0]
    assert given.to_dict() == model.config.quantization_config.to_dict()


def test_another_config_than_the_file_s(tmp_path):
    family("Llama").save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig("mxfp8", modules_to_not_convert=["lm_head"]))
    model.save_pretrained(tmp_path / "codes")
    other = load(tmp_path / "codes", quantization_config=BlockfpConfig("fp8_block", compute="high_precision"))
    assert_same_model(model, other)
    layer = other.model.layers[0].mlp.up_proj
    assert layer.compute == "high_precision"
    assert layer.recipe.weight.format.name == "mxfp8_e4m3_32x32"
    assert layer.recipe.input == recipes.fp8_block().input
    requantized = load(tmp_path / "codes", quantization_config=BlockfpConfig("fp8_block", requantize=True))
    weight = requantized.model.layers[0].mlp.up_proj.weight
    values = model.model.layers[0].mlp.up_proj.weight.detach().dequantize()
    assert torch.equal(weight.codes, bfp.quantize(values, "fp8_e4m3_128x128").codes)
    assert not requantized.config.quantization_config.requantize


def test_tied_heads_stay(tmp_path):
    family("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(tmp_path, quantization_config=BlockfpConfig("mxfp8"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.quantization_config.modules_to_not_convert == ["^lm_head$"]
    model.save_pretrained(tmp_path / "codes")
    again = load(tmp_path / "codes")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(again))


def test_weights_in_high_precision(tmp_path):
    family("Mixtral").save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig("mxfp8", weights="high_precision"))
    plain = bfp.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), "mxfp8", weights="high_precision")
    assert torch.equal(logits(model), logits(plain))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(plain))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_device_maps(device_map, tmp_path):
    family("Mixtral").save_pretrained(tmp_path / "plain")
    found = [
        load(tmp_path / "plain", quantization_config=BlockfpConfig("nvfp4"), device_map=where) for where in (device_map, None)
    ]
    assert_same_model(*found)
    found[0].save_pretrained(tmp_path / "codes")
    assert_same_model(load(tmp_path / "codes", device_map=device_map), found[1])


def test_a_missing_weight_is_initialized(tmp_path):
    model = family("Llama")
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BlockfpConfig("nvfp4"), output_loading_info=True
    )
    assert report["missing_keys"] == {"model.layers.1.mlp.up_proj.weight"}
    drawn = loaded.model.layers[1].mlp.up_proj.weight.detach().dequantize()
    assert 0.01 < drawn.std() < 0.03
    assert torch.isfinite(logits(loaded)).all()


def test_without_transformers():
    code = "import sys; sys.modules['transformers'] = None; import blockfp.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert "integrations.transformers needs transformers 5 and safetensors" in done.stderr


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="'int4' is not known; choose one of"):
        BlockfpConfig("int4")
    with pytest.raises(TypeError, match="BlockfpConfig has no bits"):
        BlockfpConfig("mxfp8", bits=4)
    with pytest.raises(ValueError, match=r"recipe: '\(' is not a regular expression"):
        BlockfpConfig({"(": "mxfp8"})
    family("Llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model holds no .* to convert"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BlockfpConfig({"nothing": "mxfp8"}))
    with pytest.raises(ValueError, match="on the disk"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=BlockfpConfig(), device_map={"": "disk"}, offload_folder=tmp_path
        )

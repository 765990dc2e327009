"""Quantized releases in transformers models: bits and values of the files, back to files, and adapters to merge first."""

import json
import logging
import re

import pytest
import torch
import transformers
from command import run
from hf_models import TOKENS, family, load, logits
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import blockfp.torch as bfp
from blockfp.errors import BadFile
from blockfp.integrations.peft import register
from blockfp.integrations.transformers import BlockfpConfig, save_in_layout, stream_in_layout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def codes(shape, seed, nan=0x7F):
    """Bytes with every sign and exponent, and no NaN of E4M3."""
    found = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where((found & 0x7F) == nan, 0x38, found)


def scales(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-5


def fp8_blocks(name, rows, columns, seed):
    return {name: codes((rows, columns), seed).view(torch.float8_e4m3fn),
            f"{name}_scale_inv": scales((-(-rows // 128), -(-columns // 128)), seed)}  # fmt: skip


def ct_fp8(name, rows, columns, seed):
    return {name: codes((rows, columns), seed).view(torch.float8_e4m3fn), f"{name}_scale": scales((1,), seed),
            name.replace("weight", "input_scale"): scales((1,), seed)}  # fmt: skip


def ct_nvfp4(name, rows, columns, seed):
    return {f"{name}_packed": codes((rows, columns // 2), seed, nan=-1),
            f"{name}_scale": (codes((rows, columns // 16), seed + 1) & 0x7F).view(torch.float8_e4m3fn),
            f"{name}_global_scale": torch.tensor([2.0**9])}  # fmt: skip


def modelopt_nvfp4(name, rows, columns, seed):
    return {name: codes((rows, columns // 2), seed, nan=-1),
            f"{name}_scale": (codes((rows, columns // 16), seed + 1) & 0x7F).view(torch.float8_e4m3fn),
            f"{name}_scale_2": scales((), seed), name.replace("weight", "input_scale"): scales((), seed)}  # fmt: skip


def ct_mxfp4(name, rows, columns, seed):
    return {f"{name}_packed": codes((rows, columns // 2), seed, nan=-1),
            f"{name}_scale": 118 + codes((rows, columns // 32), seed) % 4}  # fmt: skip


def release(folder, model, layer, config, layers=r"self_attn\..*_proj|mlp\..*_proj|experts\."):
    """Writes a model as a release: its linear layers' weights by a function, everything else as it is."""
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    held, written = load_file(file), {}
    for i, (name, value) in enumerate(sorted(held.items())):
        chosen = name.endswith("weight") and value.ndim == 2 and re.search(layers, name)
        written |= layer(name, *value.shape, i) if chosen else {name: value}
    save_file(written, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return written


def quantized(model):
    return {name: param for name, param in model.named_parameters() if isinstance(param, bfp.QuantizedTensor)}


def same_bits(one, two):
    return one.numpy(force=True).tobytes() == two.contiguous().view(torch.uint8).numpy().tobytes()


DENSE = {
    "DeepSeek's FP8": (fp8_blocks, FP8, "fp8_e4m3_128x128_fp32", ("", "_scale_inv", None)),
    "compressed-tensors' FP8": (ct_fp8, {"quant_method": "compressed-tensors"}, "fp8_e4m3", ("", "_scale", None)),
    "compressed-tensors' NVFP4": (
        ct_nvfp4, {"quant_method": "compressed-tensors"}, "nvfp4", ("_packed", "_scale", "_global_scale"),
    ),
    "compressed-tensors' MXFP4": (ct_mxfp4, {"quant_method": "compressed-tensors"}, "mxfp4_e2m1", ("_packed", "_scale", None)),
    "ModelOpt's NVFP4": (modelopt_nvfp4, {"quant_method": "modelopt"}, "nvfp4", ("", "_scale", "_scale_2")),
}  # fmt: skip


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("which", DENSE)
def test_bits_are_the_file_s(which, trainable, tmp_path):
    layer, config, format, (own, scale, factor) = DENSE[which]
    file = release(tmp_path, family("Llama", **WIDE), layer, config)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BlockfpConfig("mxfp8", trainable=trainable), output_loading_info=True
    )
    assert not report["missing_keys"]
    assert all(name.endswith("input_scale") for name in report["unexpected_keys"])
    found = quantized(model)
    assert len(found) == 14
    for name, param in found.items():
        assert param.format.name == format
        assert param.requires_grad is trainable
        assert param.dtype == torch.bfloat16
        assert same_bits(param.codes, file[name + own])
        assert same_bits(param.scales, file[name + scale])
        if factor is not None:
            known = file[name + factor].reshape(())
            assert torch.equal(param.tensor_scale, 1 / known if factor == "_global_scale" else known)
    for name, param in model.named_parameters():
        if name not in found:
            assert torch.equal(param, file[name])
    assert type(model.lm_head) is torch.nn.Linear
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all((param.grad is not None) is trainable for param in found.values())
    # And to a file of blockfp's and back.
    model.save_pretrained(tmp_path / "codes")
    again = load(tmp_path / "codes")
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_experts_of_fp8_releases(name, tmp_path):
    options = {
        "Qwen3Moe": {"moe_intermediate_size": 128},
        "Mixtral": {"intermediate_size": 128},
        "DeepseekV3": {"head_dim": 32},
    }
    layers = r"self_attn\..*_proj|proj_with_mqa|mlp\.(shared_experts\.)?.*_proj|experts\."
    file = release(tmp_path, family(name, **{**WIDE, **options[name]}), fp8_blocks, FP8, layers)
    model = load(tmp_path, quantization_config=BlockfpConfig("fp8_block"))
    own, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2") if name == "Mixtral" else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    for i, layer in enumerate(model.model.layers):
        path = f"model.layers.{i}.{own}.experts"
        for e in range(4):
            both = layer.mlp.experts.gate_up_proj[e], layer.mlp.experts.down_proj[e]
            for ending, part in (("", "codes"), ("_scale_inv", "scales")):
                whole = torch.cat([file[f"{path}.{e}.{one}.weight{ending}"].view(torch.uint8) for one in (gate, up)])
                assert same_bits(getattr(both[0], part), whole)
                assert same_bits(getattr(both[1], part), file[f"{path}.{e}.{down}.weight{ending}"])
    # transformers dequantizes this on a CPU.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    for path, value in bfp.high_precision_state_dict(model).items():
        assert torch.equal(value, theirs.state_dict()[path]), path
    save_in_layout(model, tmp_path / "again", "fine-grained-fp8", file_bytes=500_000)
    written = {name: value for part in (tmp_path / "again").glob("*.safetensors") for name, value in load_file(part).items()}
    assert written.keys() == file.keys()
    # transformers keeps DeepSeek's correction of scores in float32.
    assert all(same_bits(value.to(file[name].dtype).view(torch.uint8), file[name]) for name, value in written.items())


def test_gpt_oss(tmp_path):
    torch.manual_seed(0)
    model = family("GptOss", **WIDE).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    file = {}
    for i, (name, value) in enumerate(load_file(path).items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = value.shape
            file[f"{name}_blocks"] = codes((experts, rows, columns // 32, 16), i, nan=-1)
            file[f"{name}_scales"] = 118 + codes((experts, rows, columns // 32), i) % 8
        else:
            file[name] = torch.randn(value.shape).to(value.dtype) / 10
    save_file(file, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = load(tmp_path, quantization_config=BlockfpConfig("mxfp8", compute="high_precision"))
    found = quantized(model)
    assert len(found) == 4
    for name, param in found.items():
        assert same_bits(param.codes, file[f"{name}_blocks"])
        assert same_bits(param.scales, file[f"{name}_scales"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, param in found.items():
        assert torch.equal(param.detach().dequantize(), theirs.get_parameter(name).mT)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0.05, atol=0.05)
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(param.grad.abs().max() > 0 for param in found.values())

    model.save_pretrained(tmp_path / "codes")
    assert torch.equal(logits(load(tmp_path / "codes")), logits(model))
    save_in_layout(model, tmp_path / "again", "mxfp4")
    (written,) = (tmp_path / "again").glob("*.safetensors")
    written = load_file(written)
    assert written.keys() == file.keys()
    assert all(same_bits(value.view(torch.uint8), file[name]) for name, value in written.items())
    dequantized = load(
        tmp_path, quantization_config=BlockfpConfig("mxfp4", requantize=True, modules_to_not_convert=["lm_head"])
    )
    weight = dequantized.model.layers[0].mlp.experts.down_proj
    assert weight.format.name == "mxfp4_e2m1_32x32"
    assert torch.equal(weight.codes, bfp.quantize(theirs.model.layers[0].mlp.experts.down_proj.detach(), weight.format).codes)


@pytest.mark.parametrize("choice", [{}, {"requantize": True}, {"modules_to_not_convert": ["experts"]}])
@pytest.mark.parametrize("inter", [128, 256])
def test_gpt_oss_in_square_blocks(inter, choice, tmp_path):
    """Files have experts [experts, out, in], of which one matrix may be as high as it is wide."""
    model = bfp.convert(family("GptOss", **(WIDE | {"intermediate_size": inter})), "fp8_block", keep_init=False)
    save_in_layout(model, tmp_path, "fine-grained-fp8")
    read = load(tmp_path, quantization_config=BlockfpConfig("fp8_block", **choice))
    for name, param in quantized(model).items():
        ours = read.get_parameter(name).detach()
        values = ours.dequantize() if isinstance(ours, bfp.QuantizedTensor) else ours
        turned = values.shape != param.shape or ("experts" in name and not choice)
        assert torch.equal(values.mT if turned else values, param.detach().dequantize()), name
    if "modules_to_not_convert" not in choice:
        torch.testing.assert_close(logits(read), logits(model), rtol=1e-5, atol=1e-5)
    read.save_pretrained(tmp_path / "codes")
    assert torch.equal(logits(load(tmp_path / "codes")), logits(read))


def test_transformers_own_fp8(tmp_path):
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    quantize = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    plain = family("Qwen3", **WIDE)
    state = plain.to(torch.bfloat16).state_dict()
    file = release(tmp_path, plain, lambda name, *_: quantize._quantize_one(name, state[name]), FP8)
    model = load(tmp_path, quantization_config=BlockfpConfig("fp8_block"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(quantized(model)) == 14
    for name, param in quantized(model).items():
        assert same_bits(param.codes, file[name])
        assert torch.equal(param.detach().dequantize(), theirs.get_parameter(name))


@pytest.mark.parametrize(
    ("name", "recipe"), [("Llama", "mxfp8"), ("Llama", "nvfp4"), ("Llama", "fp8_block"), ("Qwen3Moe", "fp8_current")]
)
def test_compressed_tensors_reads_what_is_saved(name, recipe, tmp_path):
    pytest.importorskip("compressed_tensors")
    options = {**WIDE, "moe_intermediate_size": 128} if name == "Qwen3Moe" else WIDE
    family(name, **options).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig(recipe, modules_to_not_convert=["lm_head"]))
    save_in_layout(model, tmp_path / "saved", "compressed-tensors", file_bytes=300_000)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    inputs = [group["input_activations"] for group in written["config_groups"].values()]
    strategy = {"mxfp8": "group", "fp8_block": "group", "fp8_current": "tensor", "nvfp4": None}[recipe]
    assert [one and one["strategy"] for one in inputs] == [strategy]
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=config)
    for path, value in bfp.high_precision_state_dict(model).items():
        # NVFP4: compressed-tensors divides by an inverse.
        tolerance = {"rtol": 2**-7, "atol": 0} if recipe == "nvfp4" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(theirs.state_dict()[path], value, **tolerance, msg=path)
    again = load(tmp_path / "saved", quantization_config=BlockfpConfig(recipe))
    for path, param in quantized(model).items():
        assert torch.equal(param.codes, again.get_parameter(path).codes)


def test_tensors_with_a_scale_each_are_refused_as_experts(tmp_path):
    options = {**WIDE, "moe_intermediate_size": 128}
    file = release(tmp_path, family("Qwen3Moe", **options), modelopt_nvfp4, {"quant_method": "modelopt"})
    with pytest.raises(ValueError, match=r"gate_up_proj combines .*\.0\.gate_proj\.weight and 7 more, each with its own scale"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BlockfpConfig("nvfp4"))
    config = BlockfpConfig("nvfp4", requantize=True)
    model, _ = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, output_loading_info=True)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    parts = file[name], file[f"{name}_scale"], file[f"{name}_scale_2"]
    q = bfp.QuantizedTensor.from_parts(
        parts[0], parts[1].view(torch.uint8), parts[2], format="nvfp4", columns=128, dtype=torch.bfloat16
    )
    # One scale of the tensor for all experts: the values are near, not the same.
    near = model.model.layers[1].mlp.experts.down_proj.detach().dequantize()[3]
    assert (near - q.dequantize()).float().norm() < 0.2 * q.dequantize().float().norm()


def test_experts_whose_blocks_would_move_are_refused(tmp_path):
    release(tmp_path, family("Qwen3Moe", **{**WIDE, "moe_intermediate_size": 96}), fp8_blocks, FP8)
    with pytest.raises(ValueError, match=r"concatenates .*, whose lengths \[96\] aren't multiples of the blocks' 128"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BlockfpConfig("fp8_block"))


def test_other_refusals(tmp_path):
    release(
        tmp_path, family("Llama", **WIDE),
        lambda name, *shape: {name: codes(shape[:2], 1).view(torch.float8_e4m3fn), f"{name}_zero_point": scales((1,), 1)},
        {"quant_method": "compressed-tensors"},
    )  # fmt: skip
    with pytest.raises(BadFile, match="uses zero points"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BlockfpConfig())
    with pytest.raises(ValueError, match="layout must be one of compressed-tensors, fine-grained-fp8"):
        save_in_layout(family("Llama"), tmp_path, "gguf")
    with pytest.raises(ValueError, match="no quantized weights: use save_pretrained"):
        save_in_layout(family("Llama"), tmp_path, "mxfp4")
    with pytest.raises(BadFile, match="fine-grained-fp8 has no layout for mxfp8"):
        save_in_layout(bfp.convert(family("Llama"), "mxfp8"), tmp_path, "fine-grained-fp8")


def test_experts_that_cannot_be_taken_apart(tmp_path):
    # 96 rows of each half: the blocks of 128 lie across them.
    model = bfp.convert(family("Qwen3Moe"), "fp8_block")
    with pytest.raises(ValueError, match=r"gate_up_proj \[4, 192, 64\] .* can't be taken apart"):
        save_in_layout(model, tmp_path, "fine-grained-fp8")
    assert not list(tmp_path.iterdir())


def test_without_a_config_transformers_reads_releases_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    release(tmp_path, family("Llama", **WIDE), fp8_blocks, FP8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not quantized(model)
    with pytest.raises(ValueError, match="make sure to pass the same quantization config class"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=transformers.Mxfp4Config())


BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
TARGETS = ["q_proj", "v_proj"]
CONFIGS = {
    "lora": LoraConfig(target_modules=TARGETS, r=4),
    "modules_to_save": LoraConfig(target_modules=TARGETS, r=4, modules_to_save=["lm_head"]),
    "loha": LoHaConfig(target_modules=TARGETS, r=4),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "oft": OFTConfig(target_modules=TARGETS, oft_block_size=8, r=0),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
MERGE = r"merge_and_unload\(\)"


def converted():
    return bfp.convert(family("Llama", **BLOCKS), "fp8_block", filter_fn=lambda path, layer: path != "lm_head")


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_written_or_sent(name, base, tmp_path):
    model = get_peft_model(converted(), CONFIGS[name])
    if base:
        model = model.get_base_model()
        if name == "prefix":
            # It adds nothing to the model itself.
            save_in_layout(model, tmp_path / "whole", "fine-grained-fp8")
            return
    with pytest.raises(ValueError, match=MERGE):
        save_in_layout(model, tmp_path / "new", "fine-grained-fp8")
    with pytest.raises(ValueError, match=MERGE):
        stream_in_layout(model, "fine-grained-fp8")
    with pytest.raises(ValueError, match=MERGE):
        bfp.stream_weights(model, layout="fine-grained-fp8")
    assert not list(tmp_path.iterdir())


def test_a_merged_one_is_written(tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(converted(), register(LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False)))
    model.merge_adapter()
    with pytest.raises(ValueError, match=MERGE):
        save_in_layout(model, tmp_path, "fine-grained-fp8")
    model = model.merge_and_unload()
    save_in_layout(model, tmp_path, "fine-grained-fp8")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert set(family("Llama", **BLOCKS).state_dict()) <= names
    assert set(bfp.stream_weights(model, layout="fine-grained-fp8").shapes) == names


def test_files_of_layouts_are_not_made_either(tmp_path):
    """Of checkpoints and files, whose own layout keeps whatever names there are."""
    model = get_peft_model(converted(), CONFIGS["lora"])
    bfp.save_checkpoint(tmp_path / "run", model, step=1)
    done = run("export", tmp_path / "run", tmp_path / "new", "--to", "fine-grained-fp8")
    assert done.exit_code == 2
    assert "merge_and_unload()" in " ".join(done.output.split())
    assert run("export", tmp_path / "run", tmp_path / "own.safetensors").exit_code == 0
    done = run("convert", tmp_path / "own.safetensors", tmp_path / "new", "--layout", "fine-grained-fp8")
    assert done.exit_code == 2
    assert "merge_and_unload()" in " ".join(done.output.split())
    assert not (tmp_path / "new").exists()

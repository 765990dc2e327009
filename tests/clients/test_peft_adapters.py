"""Adapters of `integrations.peft` are PEFT's own: they load over both kinds of models; PEFT itself writes no codes."""

import copy

import pytest
import torch
from documented import run_documented
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft_models import TOKENS, adapted, gpt_oss, llama
from torch import nn

import blockfp.torch as bfp
from blockfp.cli import app
from blockfp.integrations.peft import register

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:.*:DeprecationWarning")


def test_adapters_are_those_of_peft(tmp_path):
    """Saved, they load over PEFT's own layers, and over quantized ones again."""
    model = adapted("gpt-oss")
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    own = PeftModel.from_pretrained(gpt_oss(), tmp_path)
    state = get_peft_model_state_dict(own)
    assert state.keys() == get_peft_model_state_dict(model).keys()
    assert all(torch.equal(value, state[key]) for key, value in get_peft_model_state_dict(model).items())
    base = bfp.convert(
        gpt_oss(), "mxfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False, compute="high_precision"
    )
    again = PeftModel.from_pretrained(base, tmp_path, config=register(LoraConfig.from_pretrained(tmp_path))).eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_adapters_are_not_quantized():
    """Whatever filter_fn says: `all-linear`, then convert, is the order of tutorials."""
    model = get_peft_model(llama(), LoraConfig(target_modules="all-linear", r=4))
    bfp.convert(model, "nvfp4", keep_init=False)
    kinds = {name: type(param) for name, param in model.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {nn.Parameter}
    assert sum(kind is bfp.QuantizedTensor for kind in kinds.values()) == 2 * 7 + 1


def test_what_is_nobodys_to_quantize_is_left_to_peft():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(nn.Linear(8, 8), Own(8, 8), nn.Embedding(4, 8))
    made = get_peft_model(model, register(LoraConfig(target_modules=["0", "1", "2"]))).base_model.model
    kinds = [f"{type(layer).__module__}.{type(layer).__name__}" for layer in made]
    ours, own = "blockfp.integrations.peft", "peft.tuners.lora.layer"
    assert kinds == [f"{ours}.LoraLinear", f"{own}.Linear", f"{own}.Embedding"]
    with pytest.raises(TypeError, match=r"config must be a peft\.LoraConfig, got IA3Config"):
        register(IA3Config())


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
        LoraConfig(target_modules=["q_proj"], init_lora_weights="olora"),
        LoraConfig(target_modules=["q_proj"], init_lora_weights="mica"),
        LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        LoHaConfig(target_modules=["q_proj"], init_weights=False),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=16),
    ],
    ids=["pissa", "olora", "mica", "lora", "loha", "ia3", "oft"],
)
@pytest.mark.parametrize("safe_merge", [False, True])
def test_peft_itself_writes_no_codes(config, safe_merge):
    """Every way in which it writes a weight raises, and leaves the codes."""
    model = bfp.convert(llama(), "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = [part.clone() for part in weight.parts]
    with pytest.raises((NotImplementedError, TypeError)):
        get_peft_model(model, copy.deepcopy(config)).merge_adapter(safe_merge=safe_merge)
    assert all(map(torch.equal, weight.parts, before))


def test_other_variants_are_refused():
    model = get_peft_model(
        bfp.convert(llama(), "nvfp4", filter_fn=lambda path, layer: path != "lm_head", keep_init=False),
        register(LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[1])),
    )
    with pytest.raises((NotImplementedError, ValueError)):
        model.merge_adapter()


def test_a_released_model_is_loaded_as_documented(tmp_path):
    """Written by `blockfp convert` as compressed-tensors does: NVFP4 in rows, whose codes are then the file's."""
    model = llama()
    codes_of = {
        name: bfp.quantize(param.detach(), "nvfp4") if name.endswith("proj.weight") else param.detach()
        for name, param in model.named_parameters()
    }
    bfp.save(tmp_path / "own.safetensors", codes_of)
    command = ["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "released"), "--layout", "compressed-tensors"]
    with pytest.raises(SystemExit) as ended:
        app(command)
    assert ended.value.code == 0
    names = run_documented("QLoRA: a released model", model=llama().bfloat16(), folder=tmp_path / "released")
    loaded, released = names["model"], names["released"]
    held = {name: param for name, param in loaded.named_parameters() if isinstance(param, bfp.QuantizedTensor)}
    assert held.keys() == names["formats"].keys()
    assert len(held) == 2 * 7
    for name, param in held.items():
        assert all(map(torch.equal, param.parts, released[name].parts))
        assert torch.equal(param.codes, codes_of[name].codes)
    trained = get_peft_model(loaded, register(LoraConfig(target_modules="all-linear")))
    assert trained(TOKENS, labels=TOKENS).loss.isfinite()

"""PEFT's methods beside LoRA: over codes they learn as over the values that the codes stand for, or raise."""

import copy

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from peft_models import TOKENS, llama
from training import train

import blockfp.torch as bfp

# What PEFT warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}

METHODS = {
    "IA3Config": LAYERS | {"feedforward_modules": ["down_proj"]},
    "OFTConfig": LAYERS | {"oft_block_size": 8, "r": 0},
    "BOFTConfig": LAYERS | {"boft_block_size": 4},
    "LoHaConfig": LAYERS | {"r": 4},
    "LoKrConfig": LAYERS | {"r": 4},
    "VeraConfig": {"target_modules": ["q_proj", "o_proj"], "r": 4},
    "AdaLoraConfig": LAYERS | {"init_r": 4, "target_r": 2, "total_step": 10},
    "FourierFTConfig": {"target_modules": ["q_proj"], "n_frequency": 50},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 32},
}


def base(recipe):
    model = llama()
    return bfp.convert(
        model, recipe, filter_fn=lambda path, layer: path != "lm_head", keep_init=False, compute="high_precision"
    )


def adapted(model, name):
    torch.manual_seed(1)
    return get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **METHODS[name]))


def learnt(model):
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    def loss_of(step):
        torch.manual_seed(step)
        return model(input_ids=TOKENS, labels=TOKENS).loss

    return train(optimizer, loss_of, range(3))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", METHODS)
def test_it_learns_as_over_the_values(name, recipe, tmp_path):
    quantized = base(recipe)
    plain, again, codes = llama(), copy.deepcopy(quantized), quantized.state_dict()
    codes = {key: value.clone() for key, value in codes.items()}
    plain.load_state_dict(bfp.high_precision_state_dict(quantized))
    model, wanted = adapted(quantized, name), adapted(plain, name)
    before = {key: param.detach().clone() for key, param in model.named_parameters() if param.requires_grad}
    assert learnt(model) == learnt(wanted)
    assert all(not torch.equal(model.get_parameter(key), value) for key, value in before.items())
    kept = quantized.state_dict()
    left = {key: kept.get(key.replace(".weight", ".base_layer.weight"), kept.get(key)) for key in codes}
    assert all(torch.equal(value, left[key]) for key, value in codes.items() if left[key] is not None)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(again, tmp_path)
    outputs = [one.eval()(input_ids=TOKENS).logits for one in (model, loaded)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["DeloraConfig", "HRAConfig", "ShiraConfig"])
def test_what_needs_the_values_raises(name):
    model = base("mxfp8")
    codes = [weight.codes.clone() for weight in model.parameters() if isinstance(weight, bfp.QuantizedTensor)]
    with pytest.raises(NotImplementedError, match="QuantizedTensor"):
        get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", target_modules=["q_proj"]))(input_ids=TOKENS)
    kept = [weight.codes for weight in model.parameters() if isinstance(weight, bfp.QuantizedTensor)]
    assert all(torch.equal(one, other) for one, other in zip(codes, kept, strict=True))

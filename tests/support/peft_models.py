"""Small models of transformers with PEFT's adapters by `integrations.peft`, and the same in float64."""

import torch
from hf_experts import LATENT, with_biases
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import blockfp.torch as bfp
from blockfp.integrations.peft import register

TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(**sizes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).eval()


def gpt_oss():
    torch.manual_seed(0)
    return with_biases(GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)).eval())


def deepseek():
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**SIZES, **LATENT, **experts, moe_intermediate_size=96, first_k_dense_replace=1)
    return DeepseekV3ForCausalLM(config).eval()


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

MODELS = {
    "llama": (llama, "nvfp4", ["q_proj", "down_proj"], None),
    "gpt-oss": (gpt_oss, "mxfp4", ["q_proj"], EXPERTS),
    "deepseek": (deepseek, "fp8_block", ["q_proj", "kv_b_proj"], EXPERTS),
}


def adapted(name, *, first="convert", compute="high_precision", weights="quantized", **options):
    """A model of MODELS, quantized and adapted, in either order; its products of codes are exact unless `compute` says."""
    make, recipe, modules, parameters = MODELS[name]
    model = make()
    config = register(LoraConfig(target_modules=modules, target_parameters=parameters, r=4, lora_alpha=8, **options))
    for turn in ("convert", "peft") if first == "convert" else ("peft", "convert"):
        if turn == "peft":
            torch.manual_seed(1)
            model = get_peft_model(model, config)
            spread(model)
        else:
            model = bfp.convert(
                model,
                recipe,
                filter_fn=lambda path, layer: "lm_head" not in path,
                keep_init=False,
                weights=weights,
                compute=compute,
            )
    return model.eval()


def spread(model):
    """Makes adapters say something, as large as weights are."""
    torch.manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)


def codes(model):
    params = model.named_parameters()
    return {name: [part.clone() for part in q.parts] for name, q in params if isinstance(q, bfp.QuantizedTensor)}


def equal(one, other):
    return one.keys() == other.keys() and all(all(map(torch.equal, one[name], other[name])) for name in one)


def plain(model, name):
    """PEFT's own model over what the weights of `model` stand for, with the same adapters, in float64."""
    make, _, modules, parameters = MODELS[name]
    values = bfp.high_precision_state_dict(model)
    bare = {key.replace("base_model.model.", "").replace(".base_layer", ""): value for key, value in values.items()}
    base = make()
    # Expert by expert: torch's grouped product takes no float64.
    base.config._experts_implementation = "eager"
    base.load_state_dict({key: value for key, value in bare.items() if "lora_" not in key})
    dora = any("lora_magnitude" in key for key in values)
    config = LoraConfig(target_modules=modules, target_parameters=parameters, r=4, lora_alpha=8, use_dora=dora)
    made = get_peft_model(base, config).double()
    made.load_state_dict({key: values[key].double() for key in made.state_dict()})
    return made.eval()


def gradients(model):
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), {key: param.grad.double() for key, param in model.named_parameters() if param.requires_grad}


def off(one, other):
    return ((one - other).norm() / other.norm()).item()

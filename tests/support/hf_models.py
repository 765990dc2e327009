"""Small models of transformers, and what its from_pretrained makes of them."""

import torch
import transformers
from transformers import AutoModelForCausalLM

import blockfp.torch as bfp

TOKENS = torch.arange(32).view(2, 16)
COMMON = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1, "n_group": 1,
        "first_k_dense_replace": 0, "topk_group": 1, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
}  # fmt: skip


def family(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **FAMILIES[name], **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def load(folder, *arguments, **options):
    """Loads by from_pretrained, and asserts that it took all that there is."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, *arguments, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def assert_same_model(one, two):
    """Parameters and buffers alike to the bit, originals included."""
    params = dict(two.named_parameters())
    for name, a in one.named_parameters():
        b = params.pop(name)
        assert type(a) is type(b), name
        assert a.requires_grad == b.requires_grad, name
        if isinstance(a, bfp.QuantizedTensor):
            assert a.format is b.format, name
            assert all(torch.equal(x, y) for x, y in zip(a.parts, b.parts, strict=True)), name
        else:
            assert torch.equal(a, b), name
    assert not params
    names = [name for name, _ in one.named_buffers() if not name.endswith("rng_key")]
    buffers = dict(two.named_buffers())
    assert all(torch.equal(one.get_buffer(name), buffers[name]) for name in names)


def is_quantized(param):
    return isinstance(param, bfp.QuantizedTensor)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits

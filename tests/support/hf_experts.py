"""Small models of transformers with experts in 3-D parameters, a family each, and tokens routed to them."""

import torch
import transformers

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


def with_biases(model):
    """Biases of experts begin with zeros: these get values."""
    with torch.no_grad():
        for path, param in model.named_parameters():
            if path.endswith("_bias"):
                param.uniform_(-0.1, 0.1)
    return model


def family(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **FAMILIES[name])
    return with_biases(getattr(transformers, f"{name}ForCausalLM")(config).eval())


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

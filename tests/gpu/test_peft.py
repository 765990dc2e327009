"""PEFT's LoRA over codes on a GPU: no expert by itself, the CPU's merges, and codes that come back."""

import warnings

import pytest
import torch

pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM

import blockfp.torch as bfp
from blockfp.integrations.peft import merged, register

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def adapted(device, recipe, compute):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="eager").to(device)
    bfp.convert(model, recipe, filter_fn=lambda path, layer: path != "lm_head", keep_init=False, compute=compute)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    made = get_peft_model(model, register(LoraConfig(target_modules=["q_proj"], target_parameters=experts, r=4)))
    torch.manual_seed(1)
    for name, param in made.named_parameters():
        if "lora_" in name:
            param.data.copy_(torch.randn(param.shape) * 0.05)
    return made


def codes(model):
    return {
        name: [part.cpu() for part in q.parts] for name, q in model.named_parameters() if isinstance(q, bfp.QuantizedTensor)
    }


@pytest.mark.parametrize("compute", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["mxfp4", "fp8_block", "nvfp4"])
def test_steps_and_merges(recipe, compute):
    model, other = adapted("cuda", recipe, compute), adapted("cpu", recipe, compute)
    before = codes(model)
    ids = torch.randint(3, 128, (2, 64), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = []
    with warnings.catch_warnings():
        # Of experts that would be multiplied one by one, with a wait for each.
        warnings.filterwarnings("error", category=UserWarning)
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids.cuda(), labels=ids.cuda()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = codes(model)
    assert all(all(map(torch.equal, after[name], before[name])) for name in before)

    for name, param in other.named_parameters():
        if "lora_" in name:
            param.data.copy_(model.get_parameter(name))
    warnings.simplefilter("ignore")
    model.merge_adapter()
    other.merge_adapter()
    for ours, theirs in zip(merged(model), merged(other), strict=True):
        # The adapters' own products are summed in another order.
        assert ours.sqnr == pytest.approx(theirs.sqnr, abs=0.05)
    held, expected = codes(model), codes(other)
    same = [(a == b).double().mean().item() for name in held for a, b in zip(held[name], expected[name], strict=True)]
    assert min(same) > 0.99
    model.unmerge_adapter()
    back = codes(model)
    assert all(all(map(torch.equal, back[name], before[name])) for name in before)

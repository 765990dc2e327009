"""transformers' from_pretrained with blockfp's quantization config onto a GPU: the bits of a load on the CPU, and steps."""

import pytest
import torch

pytest.importorskip("transformers")
from hf_models import TOKENS, family, is_quantized, load
from training import train

import blockfp.torch as bfp
from blockfp.integrations.transformers import BlockfpConfig, save_in_layout

pytestmark = pytest.mark.filterwarnings("ignore")

WIDE = {"hidden_size": 256, "intermediate_size": 384}


def same_bits(one, two):
    for name, a in one.named_parameters():
        b = two.get_parameter(name)
        assert a.is_cuda, name
        assert a.requires_grad == b.requires_grad
        parts = zip(a.parts, b.parts, strict=True) if is_quantized(a) else [(a, b)]
        assert all(torch.equal(x.cpu(), y) for x, y in parts), name


@pytest.mark.parametrize(("name", "recipe"), [("Llama", "fp8_block"), ("Mixtral", "nvfp4"), ("GptOss", "mxfp4")])
def test_onto_a_gpu(name, recipe, tmp_path):
    family(name, **WIDE).to(torch.bfloat16).save_pretrained(tmp_path / "plain", max_shard_size="2MB")
    config = BlockfpConfig(recipe, modules_to_not_convert=["lm_head"])
    model = load(tmp_path / "plain", quantization_config=config, device_map="cuda", dtype=torch.bfloat16)
    same_bits(model, load(tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16))
    assert all(buffer.is_cuda for buffer in model.buffers())
    optimizer = bfp.AdamW(model.parameters(), lr=1e-2)
    tokens = TOKENS.cuda()
    losses = train(optimizer, lambda _: model(tokens, labels=tokens).loss, range(4))
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "codes")
    again = load(tmp_path / "codes", device_map="cuda", dtype=torch.bfloat16)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    same_bits(again, load(tmp_path / "codes", dtype=torch.bfloat16))


def test_a_release_onto_a_gpu(tmp_path):
    pytest.importorskip("transformers", "5.23", reason="5.17 doesn't say how experts are taken apart, and that is refused")
    family("Mixtral", **WIDE).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BlockfpConfig("fp8_block", modules_to_not_convert=["lm_head"]))
    save_in_layout(model.to("cuda"), tmp_path / "release", "fine-grained-fp8")
    for trainable in (True, False):
        config = BlockfpConfig("fp8_block", trainable=trainable)
        same_bits(
            load(tmp_path / "release", quantization_config=config, device_map="cuda"),
            load(tmp_path / "release", quantization_config=config),
        )

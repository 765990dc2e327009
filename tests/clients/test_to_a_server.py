"""The page "To a server": transformers' own readers decode the values that the forward of FSDP2's model multiplies."""

import os
from pathlib import Path

import gloo
import pytest
import torch
import transformers
from documented import run_documented
from hf_models import TOKENS, family
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import blockfp
import blockfp.torch as bfp
from blockfp import recipes
from blockfp.integrations.transformers import save_in_layout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def multiplied(model):
    """Values of the weights of the forward, by NumPy, in bfloat16; and all other parameters."""
    found, whole = {}, bfp.high_precision_state_dict(model)
    for name, param in model.named_parameters():
        local = getattr(param, "_local_tensor", param)
        values = param.detach()
        if isinstance(local, bfp.CastWeight):
            values = torch.from_numpy(blockfp.quantize(whole[name].float().numpy(), local.format).dequantize())
        elif hasattr(values, "full_tensor"):
            values = values.full_tensor()
        found[name] = values.bfloat16()
    return found


def assert_decoded(theirs, expected):
    params = dict(theirs.named_parameters())
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(params[name].bfloat16(), value), name


def _fp8(rank):
    folder = Path(os.environ["BLOCKFP_TEST_FOLDER"])
    options = {"hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 1}
    given = {"model": family("Qwen3", **options).bfloat16(), "torch": torch, "folder": folder / "fp8"}
    before = {name: p.detach().clone() for name, p in given["model"].named_parameters()}
    trained = run_documented("to a server: train", **given, batches=[TOKENS, 63 - TOKENS])
    names = ("model", "tokens", "torch", "folder")
    model = run_documented("to a server: save", **{name: trained[name] for name in names})["model"]
    expected = multiplied(model)
    if rank == 0:
        theirs = AutoModelForCausalLM.from_pretrained(folder / "fp8", dtype=torch.bfloat16)
        assert_decoded(theirs, expected)
        assert not torch.equal(expected["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def _mxfp4(rank):
    folder = Path(os.environ["BLOCKFP_TEST_FOLDER"]) / "mxfp4"
    model = family("GptOss").bfloat16()
    recipe = recipes.qat("mxfp4_e2m1_32x32", "mxfp8_e4m3")
    bfp.convert(model, recipe, filter_fn=lambda path, _: "experts" in path, weights="high_precision")
    fully_shard(model)
    optimizer = bfp.Muon(model.parameters(), lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    save_in_layout(model, folder, "mxfp4", quantize=True)
    expected = multiplied(model)
    if rank == 0:
        config = transformers.Mxfp4Config(dequantize=True)
        assert_decoded(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16), expected)


def test_transformers_quantizes_activations_as_the_forward_does(tmp_path):
    """FP8 per channel and per token: the layers of compressed-tensors round their inputs too, to the trainer's values."""
    pytest.importorskip("compressed_tensors")
    model = bfp.convert(
        family("Qwen3"), recipes.qat("fp8_e4m3_row", "fp8_e4m3_row"), filter_fn=lambda path, _: path != "lm_head"
    )
    save_in_layout(model, tmp_path, "compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    path = "model.layers.0.mlp.up_proj"
    layer, weight = theirs.get_submodule(path), model.get_submodule(path).weight.detach().dequantize().double()
    x = torch.randn(2, 3, 64) * torch.exp2(torch.randint(-6, 7, (2, 3, 1)))
    rounded = torch.from_numpy(blockfp.quantize(x.numpy().reshape(6, 64), "fp8_e4m3_row").dequantize()).reshape(x.shape)
    with torch.no_grad():
        # compressed-tensors decodes the weights in the model's first forward.
        logits = theirs(TOKENS).logits
        got = layer(x).double()
        torch.testing.assert_close(got, rounded.double() @ weight.mT, rtol=1e-5, atol=1e-5)
        assert (got - x.double() @ weight.mT).abs().max() > 1e-2
        assert torch.equal(layer.weight.double(), weight)
        torch.testing.assert_close(logits, model(TOKENS).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["_fp8", "_mxfp4"])
def test_transformers_decodes_what_the_forward_multiplies(way, tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKFP_TEST_FOLDER", str(tmp_path))
    gloo.run(2, __file__, way)

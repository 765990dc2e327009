"""What a server gets of a transformers model is what `save_in_layout` writes, under the names of releases, however sharded."""

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import gloo
import pytest
import torch
import transformers
from documented import run_documented
from hf_models import family, logits
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import blockfp.torch as bfp
from blockfp import cli
from blockfp.integrations.transformers import BlockfpConfig, save_in_layout, stream_in_layout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CASES = {
    "Llama, FP8": ("Llama", {}, "fp8_block", "fine-grained-fp8"),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}, "nvfp4", "modelopt"),
    "DeepSeek, FP8": ("DeepseekV3", {"hidden_size": 128}, "fp8_block", "fine-grained-fp8"),
    "Mixtral, MXFP8": ("Mixtral", {}, "mxfp8", "compressed-tensors"),
    "Qwen, NVFP4": ("Qwen3Moe", {}, "nvfp4", "compressed-tensors"),
    "gpt-oss": ("GptOss", {}, "mxfp4", "mxfp4"),
}
"""The last has experts as [experts, in, out], of equal sizes."""


def converted(name, **how):
    kind, options, recipe, layout = CASES[name]
    model = family(kind, **options)
    for param in model.parameters():
        # Not buffers: rotary frequencies are float32 in models that are loaded.
        param.data = param.data.bfloat16()
    keep = lambda path, _: path != "lm_head" and (layout != "mxfp4" or "experts" in path)  # noqa: E731
    return bfp.convert(model, recipe, filter_fn=keep, **how), layout


def received(stream, *, keeps=True):
    """The tensors of all buckets, whose digests and shapes are theirs."""
    found = {}
    for bucket in stream:
        assert bucket.nbytes == sum(tensor.nbytes for _, tensor in bucket) or not keeps
        for name, tensor in bucket:
            found[name] = tensor
            assert stream.shapes[name] == (tensor.dtype, tuple(tensor.shape))
            assert bucket.sha256[name] == hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    assert list(found) == (list(stream.shapes) if keeps else [])
    return found


def assert_equal(one, two):
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor.view(-1).view(torch.uint8), two[name].view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_file_and_the_server_computes_the_same(name, tmp_path):
    model, layout = converted(name)
    save_in_layout(model, tmp_path, layout)
    stream = stream_in_layout(model, layout, bucket_bytes=50_000)
    found = received(stream)
    file = tmp_path / "model.safetensors"
    assert_equal(found, load_file(file))
    assert set(stream.tied.values()) <= set(found)
    # A server that had another model, with what it was sent: the logits of both sides are equal.
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, {"format": "pt"})
    config = BlockfpConfig(CASES[name][2])
    server, report = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, output_loading_info=True)
    assert not any(report.values()), report
    # Square blocks have become blocks of one row, with the same values.
    assert torch.equal(logits(server), logits(model))


@pytest.mark.parametrize("name", CASES)
def test_weights_in_high_precision_are_sent_as_the_codes_of_a_quantized_model(name, tmp_path):
    model, layout = converted(name)
    save_in_layout(model, tmp_path / "codes", layout)
    expected = load_file(tmp_path / "codes" / "model.safetensors")
    values, _ = converted(name, weights="high_precision")
    assert torch.equal(logits(values), logits(model))
    with pytest.raises(ValueError, match=r"no quantized weights: .*quantize=True"):
        save_in_layout(values, tmp_path / "values", layout)
    save_in_layout(values, tmp_path / "values", layout, quantize=True)
    assert_equal(load_file(tmp_path / "values" / "model.safetensors"), expected)
    assert (tmp_path / "values" / "config.json").read_text() == (tmp_path / "codes" / "config.json").read_text()
    assert_equal(received(stream_in_layout(values, layout, quantize=True, bucket_bytes=50_000)), expected)


def _sharded(rank):
    expected = os.environ["BLOCKFP_TEST_FOLDER"]
    for i, name in enumerate(CASES):
        model, layout = converted(name)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        found = received(stream_in_layout(model, layout, bucket_bytes=50_000), keeps=rank == 0)
        values, _ = converted(name, weights="high_precision")
        fully_shard(values)
        again = received(stream_in_layout(values, layout, quantize=True, bucket_bytes=50_000), keeps=rank == 0)
        if rank == 0:
            assert_equal(found, load_file(Path(expected) / str(i) / "model.safetensors"))
            assert_equal(again, found)


def test_from_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKFP_TEST_FOLDER", str(tmp_path))
    for i, name in enumerate(CASES):
        save_in_layout(converted(name)[0], tmp_path / str(i), CASES[name][3])
    gloo.run(2, __file__, "_sharded")


def test_the_documented_lines():
    model, _ = converted("DeepSeek, FP8")
    given = {}
    engine = SimpleNamespace(load_weights=lambda bucket: given.update(bucket))
    run_documented("server: transformers", model=model, engine=engine)
    assert given["model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"].shape == (1, 1)


def test_plain_names_are_refused_where_experts_lie_turned():
    model, layout = converted("gpt-oss")
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj .* is \[experts, in, out\].*stream_in_layout"):
        bfp.stream_weights(model, layout=layout)


def test_releases_that_have_weights_together_are_refused(tmp_path):
    """Each would take the place of the one before: three of four were lost, silently."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.HrmTextConfig(**sizes, head_dim=64, H_cycles=1, L_cycles=1, num_layers_per_stack=1)
    model = transformers.HrmTextForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    bfp.convert(model, "fp8_block", filter_fn=lambda path, _: path != "lm_head")
    message = r"q_proj\.weight: this model's releases have it as attn\.gqkv_proj\.weight, made by .*Concatenate"
    with pytest.raises(ValueError, match=message):
        save_in_layout(model, tmp_path / "served", "fine-grained-fp8")
    with pytest.raises(ValueError, match=message):
        stream_in_layout(model, "fine-grained-fp8")
    assert "model.H_module.layers.0.self_attn.q_proj.weight" in bfp.stream_weights(model, layout="fine-grained-fp8").shapes

    # Nor is such a release read, whose pieces would be said to be missing.
    file = tmp_path / "plain" / "model.safetensors"
    held = {
        name: bfp.quantize(value, "fp8_e4m3_128x128_fp32") if "_proj" in name else value
        for name, value in load_file(file).items()
    }
    bfp.save(tmp_path / "own.safetensors", held)
    said = CliRunner().invoke(cli.app, ["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "release"),
                                        "--layout", "fine-grained-fp8"])  # fmt: skip
    assert said.exit_code == 0, said.output
    (tmp_path / "release" / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    for requantize in (False, True):
        with pytest.raises(ValueError, match=r"gqkv_proj\.weight is quantized, and the model splits it into .*q_proj"):
            AutoModelForCausalLM.from_pretrained(
                tmp_path / "release", quantization_config=BlockfpConfig("fp8_block", requantize=requantize)
            )

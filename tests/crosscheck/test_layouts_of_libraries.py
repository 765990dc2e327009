"""Quantized models that other libraries write, and that the command converts from one released layout to another."""

import json

import numpy as np
import pytest
from command import plain, run
from held_formats import FORMATS
from released_files import BF16, FP8, fp8_codes, some_bytes, write

import blockfp
from blockfp.definition import layout
from blockfp.errors import BadFile
from blockfp.files.layouts import known
from blockfp.files.layouts.known import LAYOUTS
from blockfp.formats import Format


def test_transformers_writes_blocks_of_fp8(tmp_path):
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = type("Config", (), {"weight_block_size": (128, 128), "scale_fmt": "float"})
    quantizer = type("Quantizer", (), {"quantization_config": config})
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    from safetensors.torch import save_file

    parts = fp8.Fp8Quantize(quantizer).convert({"a.weight": x})
    save_file(parts, tmp_path / "model.safetensors")
    q = blockfp.load(tmp_path / "model.safetensors")["a.weight"]
    assert q.codes.tobytes() == parts["a.weight"].view(torch.uint8).numpy().tobytes()
    values = fp8.Fp8Dequantize(quantizer)._dequantize_one(parts["a.weight"], parts["a.weight_scale_inv"], torch.float32)
    np.testing.assert_array_equal(q.dequantize(np.float32), values.numpy())


def test_transformers_reads_the_same_mxfp4(tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = some_bytes(2, 64, 3, 16), some_bytes(2, 64, 3, below=200)
    write(tmp_path / "model.safetensors", {"e_blocks": blocks, "e_scales": scales})
    values = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    got = blockfp.load(tmp_path / "model.safetensors")["e"].dequantize(np.float32)
    np.testing.assert_array_equal(got, values.mT.numpy())


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e4m3_row", "fp8_e4m3_128x128_fp32", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"])
def test_compressed_tensors_writes_it(format, tmp_path):
    """Its own compressor's entries are read with their bits, and mean what its decompressor says."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from safetensors.torch import save_file

    from blockfp.files.layouts import compressed_tensors

    scheme = compressed_tensors.scheme(Format.parse(format))
    group = {"targets": ["Linear"], "weights": scheme.weights, "format": scheme.format}
    told = {"quant_method": "compressed-tensors", "format": scheme.format, "config_groups": {"group_0": group}}
    config = QuantizationConfig.model_validate(told)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    apply_quantization_config(model, config)
    layer, q = model[0], blockfp.quantize(model[0].weight.detach().numpy(), format)
    # Scales are what a calibration finds; the library then rounds and packs by itself.
    with torch.no_grad():
        if scheme.group == 32:
            layer.weight_scale.copy_(torch.exp2(torch.from_numpy(q.scales.astype(np.float32)) - 127))
        else:
            scales = q.scales.view(FP8).astype(np.float32) if scheme.group else q.scales
            layer.weight_scale.copy_(torch.from_numpy(scales.reshape(layer.weight_scale.shape)))
        if q.tensor_scale is not None:
            layer.weight_global_scale.fill_(float(np.float32(1) / q.tensor_scale))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    written = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(written, tmp_path / "model.safetensors")
    got = blockfp.load(tmp_path / "model.safetensors")["0.weight"]
    assert got.format.name == format
    codes = written.get("0.weight_packed", written.get("0.weight"))
    assert got.codes.tobytes() == codes.view(torch.uint8).numpy().tobytes()
    compressor.decompress_model(model)
    ours = torch.from_numpy(got.dequantize(np.float32)).to(layer.weight.dtype)
    if got.tensor_scale is None:
        assert torch.equal(layer.weight, ours)
    else:
        torch.testing.assert_close(layer.weight, ours, rtol=2.0**-7, atol=0)


def test_a_state_dict_that_safetensors_has_saved(tmp_path):
    """Its entries say the format, so all faces read it; without its scales it raises."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    import blockfp.torch as bfp

    model = bfp.convert(torch.nn.Sequential(torch.nn.Linear(40, 24)), "nvfp4")
    state = model.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    held = blockfp.load(tmp_path)
    assert held.keys() == {"0.weight", "0.bias", "0.rng_key", "0.step"}
    q = held["0.weight"]
    assert q.format.name == "nvfp4_16x16"
    for mine, its in ((q.codes, model[0].weight.codes), (q.scales, model[0].weight.scales)):
        assert mine.tobytes() == its.numpy().tobytes()
    assert q.tensor_scale == model[0].weight.tensor_scale.item()
    # torch's HuggingFaceStorageWriter divides what ranks share, such as these names, among their files.
    for missing, told in (
        ("_scale", r"0\.weight_scale"),
        ("_format_nvfp4_16x16", r"no 0\.weight_format_\.\., .*a rank's shard"),
    ):
        others = {name: part for name, part in state.items() if name != "0.weight" + missing}
        save_file(others, tmp_path / "model.safetensors")
        with pytest.raises(BadFile, match=told):
            blockfp.load(tmp_path)


A, ONE = fp8_codes(8, 64).view(FP8), np.ones((), np.float32)


def kept(format):
    """The layouts that hold a format as it is."""
    weight = blockfp.quantize(np.ones((128, 128), np.float32), format)
    described = type("W", (), {"name": "a.weight", "format": format, "shape": weight.shape})
    return [name for name, one in LAYOUTS.items() if one.problem(described) is None]


PAIRS = [(format, name) for format in FORMATS for name in kept(format)]


def test_every_layout_holds_some_format():
    assert {name for _, name in PAIRS} == set(LAYOUTS)


@pytest.mark.parametrize(("format", "name"), PAIRS, ids=str)
def test_there_and_back(format, name, tmp_path):
    """Values are the same; so are codes, and scales where blocks are those of the layout."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((160, 256)) * np.exp(rng.standard_normal((160, 1)))).astype(BF16)
    arrays = {"a.weight": blockfp.quantize(x, format), "lm_head.weight": x[:4], "a.bias": x[0]}
    blockfp.save(tmp_path / "in.safetensors", arrays)
    result = run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", name)
    assert result.exit_code == 0, result.output
    assert "1 quantized weight unchanged, 0 requantized" in plain(result.output)
    result = run("convert", tmp_path / "out", tmp_path / "back.safetensors", "--layout", "blockfp")
    assert result.exit_code == 0, result.output
    before, after = (blockfp.load(tmp_path / f"{file}.safetensors") for file in ("in", "back"))
    assert before.keys() == after.keys()
    a, b = before["a.weight"], after["a.weight"]
    np.testing.assert_array_equal(a.codes, b.codes)
    rows = (format.block or (1, 1))[0]
    same_blocks = format.block == b.format.block
    np.testing.assert_array_equal(a.scales if same_blocks else layout.repeat_scales(a.scales, rows, 160), b.scales)
    if name == "compressed-tensors" and format.scale.two_level:
        np.testing.assert_allclose(b.tensor_scale, a.tensor_scale, rtol=2.0**-23)
    else:
        np.testing.assert_array_equal(a.dequantize(np.float32), b.dequantize(np.float32))
    np.testing.assert_array_equal(before["lm_head.weight"], after["lm_head.weight"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_is_requantized_once(name, monkeypatch, tmp_path):
    calls, once = [], known.quantize
    monkeypatch.setattr(known, "quantize", lambda *arguments: calls.append(1) or once(*arguments))
    x = {f"{i}.weight": blockfp.quantize(np.ones((128, 256), np.float32), "mxfp6_e3m2") for i in range(2)}
    blockfp.save(tmp_path / "in.safetensors", x)
    assert run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", name).exit_code == 0
    assert len(calls) == 2


def test_scales_that_a_layout_can_not_hold_are_refused_where_they_are_made(tmp_path):
    x = np.ones((128, 256), np.float32)
    x[3, 4] = np.nan
    blockfp.save(tmp_path / "in.safetensors", {"a.weight": blockfp.quantize(x, "mxfp8_e4m3")})
    result = run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", "modelopt")
    assert result.exit_code == 2
    assert "has NaN scales, which modelopt would read as numbers" in plain(result.output)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_layout_has_not_is_requantized_and_said(name, tmp_path):
    x = np.random.default_rng(3).standard_normal((128, 256)).astype(np.float32)
    q = blockfp.quantize(x, "mxfp6_e3m2")
    blockfp.save(tmp_path / "in.safetensors", {"a.weight": q})
    result = run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", name)
    assert result.exit_code == 0, result.output
    assert "requantized a.weight: mxfp6_e3m2 to" in plain(result.output)
    (got,) = blockfp.load(tmp_path / "out").values()
    target = LAYOUTS[name].nearest(q.format)
    expected = blockfp.quantize(q.dequantize(), target)
    np.testing.assert_array_equal(got.codes, expected.codes)
    noise = ((got.dequantize() - x) ** 2).sum() / (x**2).sum()
    assert noise < (0.03 if target.element.bits == 4 else 0.004)


def test_scales_of_activations_are_left_out_and_named(tmp_path):
    """Servers would look for them in a configuration that says nothing of them; what is no such scale stays."""
    left = {"l.0.up.input_scale": ONE, "l.0.attn.k_scale": ONE, "l.0.attn.q.q_scale": np.ones(1, np.float32)}
    kept = {
        "l.0.attn.v_scale": np.ones(4, np.float32),
        "l.1.input_scale": ONE,
        "output_scale": ONE,
        "l.0.up.bias": np.ones(8, BF16),
    }
    file = {"l.0.up.weight": A, "l.0.up.weight_scale": ONE, "l.0.attn.q.weight": A, "l.0.attn.q.weight_scale": ONE}
    source = write(tmp_path / "model.safetensors", file | left | kept)
    said = run("convert", source, tmp_path / "out", "--layout", "compressed-tensors")
    assert said.exit_code == 0, said.output
    text = plain(said.output)
    assert "omitted: 3 activation scales" in text
    assert all(name in text for name in left)
    got = blockfp.load(tmp_path / "out")
    assert set(got) == {"l.0.up.weight", "l.0.attn.q.weight", *kept}
    said = run("convert", source, tmp_path / "own.safetensors", "--layout", "blockfp")
    assert "omitted" not in said.output
    assert set(left) | set(kept) < set(blockfp.load(tmp_path / "own.safetensors"))


def test_modelopt_states_no_inputs_whose_scale_is_left_out(tmp_path):
    """ModelOpt's algorithm NVFP4 quantizes inputs by `input_scale`; vLLM reads uninitialized memory where it is missing."""
    q = blockfp.quantize(np.random.default_rng(3).standard_normal((32, 64)).astype(np.float32), "nvfp4")
    parts = {
        "a.weight": q.codes,
        "a.weight_scale": q.scales.view(FP8),
        "a.weight_scale_2": np.float32(q.tensor_scale).reshape(()),
    }
    source = write(tmp_path / "model.safetensors", {**parts, "a.input_scale": ONE})
    assert run("convert", source, tmp_path / "out", "--layout", "modelopt").exit_code == 0
    assert "a.input_scale" not in blockfp.load(tmp_path / "out")
    told = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert told["quant_algo"] == config["quant_algo"] == "W4A16_NVFP4"
    assert all("input_activations" not in group for group in config["config_groups"].values())
    assert {group["weights"]["group_size"] for group in config["config_groups"].values()} == {told["group_size"]} == {16}
    got = blockfp.load(tmp_path / "out")["a.weight"]
    assert (got.codes.tobytes(), got.scales.tobytes()) == (q.codes.tobytes(), q.scales.tobytes())


@pytest.mark.parametrize(
    ("format", "name"), [("nvfp4", "modelopt"), ("fp8_e4m3", "compressed-tensors"), ("mxfp8_e4m3", "compressed-tensors")]
)
@pytest.mark.parametrize("equal", [False, True])
def test_scales_that_servers_join_are_named(format, name, equal, tmp_path):
    x = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    layers = {f"layers.0.attn.{layer}_proj.weight": x * (1 if equal else i) for i, layer in enumerate("qkv", 1)}
    layers |= {"layers.0.attn.o_proj.weight": 9 * x, "layers.0.mlp.up_proj.weight": 7 * x}
    blockfp.save(tmp_path / "in.safetensors", {own: blockfp.quantize(values, format) for own, values in layers.items()})
    result = run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", name)
    assert result.exit_code == 0, result.output
    said = "q_proj, k_proj, v_proj of layers.0.attn have scales of the whole tensor" in " ".join(plain(result.output).split())
    assert said == (not equal and format != "mxfp8_e4m3")


def test_a_config_beside_the_model_stays(tmp_path):
    (tmp_path / "in").mkdir()
    blockfp.save(
        tmp_path / "in" / "model.safetensors",
        {"a.weight": blockfp.quantize(np.ones((128, 128), np.float32), "fp8_e4m3_128x128")},
    )
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    assert run("convert", tmp_path / "in", tmp_path / "out", "--layout", "fine-grained-fp8").exit_code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_a_model_is_held_against_its_source(tmp_path):
    arrays = {"a.weight": np.random.default_rng(3).standard_normal((128, 256)).astype(BF16), "a.bias": np.ones(4, BF16)}
    source = write(tmp_path / "source.safetensors", arrays)
    own = tmp_path / "own.safetensors"
    assert run("quantize", source, own, "--format", "fp8_e4m3_128x128_fp32").exit_code == 0
    assert run("convert", own, tmp_path / "released", "--layout", "fine-grained-fp8").exit_code == 0
    result = run("check", tmp_path / "released", "--source", source)
    assert result.exit_code == 0, result.output
    assert "a.weight: fp8_e4m3_128x128_fp32, SQNR 3" in result.output
    assert "1 quantized weight and 1 other tensor" in result.output
    q = blockfp.load(own)["a.weight"]
    q.codes[3, 7] ^= 1
    blockfp.save(tmp_path / "other.safetensors", {"a.weight": q, "a.bias": arrays["a.bias"]})
    result = run("check", tmp_path / "other.safetensors", "--source", source)
    assert result.exit_code == 1
    assert "NO (blockfp makes other bits)" in result.output
    blockfp.save(tmp_path / "less.safetensors", {"a.weight": q})
    assert run("check", tmp_path / "less.safetensors", "--source", source).exit_code == 2
    assert run("check", own, "--source", source, "--format", "nvfp4").exit_code == 2

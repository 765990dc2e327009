"""Released quantized models: written by their own libraries or to their layout, read, and converted between layouts."""

import json

import ml_dtypes
import numpy as np
import pytest
from held_formats import FORMATS
from typer.testing import CliRunner

import blockfp
from blockfp import cli
from blockfp.definition import layout
from blockfp.errors import BadFile
from blockfp.files.layouts import known
from blockfp.files.layouts.known import LAYOUTS
from blockfp.files.modelfile import Entry, write_safetensors
from blockfp.formats import Format

FP8, E8M0, BF16 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16))
RNG = np.random.default_rng(3)


def write(path, arrays, config=None):
    entries = [Entry(name, array.dtype, array.shape) for name, array in arrays.items()]
    write_safetensors(path, entries, arrays.items(), {"format": "pt"})
    if config is not None:
        path.with_name("config.json").write_text(json.dumps(config))
    return path


def some_bytes(*shape, below=256):
    return RNG.integers(0, below, shape, dtype=np.uint8)


def fp8_codes(*shape):
    """Any FP8 codes but NaN."""
    codes = some_bytes(*shape)
    return np.where(codes & 0x7F == 0x7F, 0x12, codes).astype(np.uint8)


def values_of(codes):
    """The E2M1 numbers of packed bytes, the low four bits first."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return np.where(nibbles & 8, -1, 1) * magnitudes[nibbles & 7]


def spread(scales, rows, columns, shape):
    """A scale for each element."""
    return np.repeat(np.repeat(scales.astype(np.float64), rows, -2), columns, -1)[..., : shape[-2], : shape[-1]]


# ---- each layout, by hand


@pytest.mark.parametrize("scale", [np.float32, E8M0], ids=["fp32", "e8m0"])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (3, 128, 256)])
def test_fp8_in_blocks(shape, scale, tmp_path):
    codes = fp8_codes(*shape)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = RNG.uniform(1e-3, 2, grid).astype(scale)
    file = {"a.weight": codes.view(FP8), "a.weight_scale_inv": scales, "norm.weight": np.ones(4, BF16)}
    got = blockfp.load(write(tmp_path / "model.safetensors", file, {"torch_dtype": "float16"}))
    q = got["a.weight"]
    assert got.keys() == {"a.weight", "norm.weight"}
    assert q.format.name == ("fp8_e4m3_128x128_fp32" if scale is np.float32 else "fp8_e4m3_128x128")
    assert q.dtype == np.float16
    np.testing.assert_array_equal(q.codes, codes)
    np.testing.assert_array_equal(q.scales, scales.astype(np.float32))
    exact = codes.view(FP8).astype(np.float64) * spread(scales, 128, 128, shape)
    np.testing.assert_array_equal(q.dequantize(np.float32), exact.astype(np.float32))


def test_experts_of_gpt_oss(tmp_path):
    blocks, scales = some_bytes(2, 64, 3, 16), some_bytes(2, 64, 3, below=250)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    file = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": np.zeros((2, 64), BF16)}
    got = blockfp.load(write(tmp_path / "model.safetensors", file))
    q = got[name]
    assert (q.format.name, q.shape, q.dtype) == ("mxfp4_e2m1", (2, 64, 96), BF16)
    assert set(got) == {name, f"{name}_bias"}
    np.testing.assert_array_equal(q.codes.reshape(-1), blocks.reshape(-1))
    np.testing.assert_array_equal(q.scales, scales)
    exact = values_of(blocks.reshape(2, 64, 48)) * spread(2.0 ** (scales.astype(np.float64) - 127), 1, 32, (64, 96))
    np.testing.assert_array_equal(q.dequantize(np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("divides", [False, True], ids=["modelopt", "compressed-tensors"])
def test_nvfp4(divides, tmp_path):
    codes, scales = some_bytes(48, 32), fp8_codes(48, 4) & 0x7F
    factor = np.float32(2.0**-9 if divides else 0.0123)
    packed, second = ("_packed", "_global_scale") if divides else ("", "_scale_2")
    stored = np.full((1,), 1 / factor, np.float32) if divides else factor.reshape(())
    file = {f"a.weight{packed}": codes, "a.weight_scale": scales.view(FP8), f"a.weight{second}": stored}
    file |= {"a.input_scale": np.float32(1).reshape(())}
    got = blockfp.load(write(tmp_path / "model.safetensors", file))
    q = got["a.weight"]
    assert q.format.name == "nvfp4"
    assert q.tensor_scale == factor
    assert set(got) == {"a.weight", "a.input_scale"}
    np.testing.assert_array_equal(q.codes, codes)
    np.testing.assert_array_equal(q.scales, scales)
    wide = (scales.view(FP8).astype(np.float32) * factor).astype(np.float32)
    exact = values_of(codes) * spread(wide, 1, 16, (48, 64))
    np.testing.assert_array_equal(q.dequantize(np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_with_one_scale(shape, dtype, tmp_path):
    codes, scale = fp8_codes(40, 24), np.full(shape, 0.375, dtype)
    got = blockfp.load(write(tmp_path / "model.safetensors", {"a.weight": codes.view(FP8), "a.weight_scale": scale}))
    assert got["a.weight"].format.name == "fp8_e4m3"
    np.testing.assert_array_equal(got["a.weight"].dequantize(np.float32), codes.view(FP8).astype(np.float32) * 0.375)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("scale", [(40, 1), (40,)], ids=str)
def test_fp8_with_a_scale_for_each_row(scale, dtype, tmp_path):
    codes, scales = fp8_codes(40, 200), RNG.uniform(1e-3, 2, scale).astype(dtype)
    file = {"a.weight": codes.view(FP8), "a.weight_scale": scales}
    q = blockfp.load(write(tmp_path / "model.safetensors", file))["a.weight"]
    assert q.format.name == "fp8_e4m3_row"
    np.testing.assert_array_equal(q.codes, codes)
    np.testing.assert_array_equal(q.scales, scales.astype(np.float32).reshape(40, 1))
    exact = codes.view(FP8).astype(np.float64) * scales.astype(np.float64).reshape(40, 1)
    np.testing.assert_array_equal(q.dequantize(np.float32), exact.astype(np.float32))


@pytest.mark.parametrize(
    ("strategies", "format"),
    [(["channel"], "row"), (["channel", "tensor"], "row"), (["channel", "group"], "1x128_fp32"), ([], "1x128_fp32")],
    ids=str,
)
def test_short_rows_are_what_the_config_says(strategies, format, tmp_path):
    """Up to 128 columns a scale for each row is also one for each block of 1x128."""
    groups = {f"group_{i}": {"weights": {"strategy": strategy}} for i, strategy in enumerate(strategies)}
    config = {"quantization_config": {"config_groups": groups}} if groups else None
    file = {"a.weight": fp8_codes(40, 128).view(FP8), "a.weight_scale": np.full((40, 1), 0.25, np.float32)}
    got = blockfp.load(write(tmp_path / "model.safetensors", file, config))
    assert got["a.weight"].format.name == f"fp8_e4m3_{format}"


A, ONE = fp8_codes(8, 64).view(FP8), np.ones((), np.float32)
INT4 = RNG.integers(0, 9, (16, 4), dtype=np.int32)
REFUSED = {
    "(8, 2)": {"a.weight": fp8_codes(16, 256).view(FP8), "a.weight_scale": np.ones((8, 2), np.float32)},
    "no format of blockfp has": {"a.weight_packed": INT4, "a.weight_scale": np.ones((16, 1), BF16)},
    "zero points": {"a.weight_packed": INT4, "a.weight_zero_point": np.zeros((16, 1), np.int8)},
    "GPTQ": {"a.qweight": INT4, "a.qzeros": INT4, "a.scales": np.ones((1, 4), np.float16)},
    "NF4": {"a.weight": some_bytes(64, 1), "a.weight.quant_state.bitsandbytes__nf4": some_bytes(9)},
    "int8 (16, 32) with scales": {"a.weight": some_bytes(16, 32).view(np.int8), "a.weight_scale": np.ones((16, 1), BF16)},
    "(3, 3)": {"a.weight": fp8_codes(64, 32).view(FP8), "a.weight_scale_inv": np.ones((3, 3), np.float32)},
    "AWQ": {"a.weight": A, "a.weight_scale": ONE, "a.pre_quant_scale": np.ones(64, BF16)},
    "sparse": {"a.weight.compressed": A, "a.weight.bitmask": some_bytes(8, 8)},
    "a.scale_weight is there": {"a.weight": A, "a.scale_weight": ONE},
    "a._weight_scale is there": {"a._weight_qdata": A, "a._weight_scale": np.ones((8, 1), np.float32)},
    "a.weight_scale_2, which no layout": {
        "a.weight": A,
        "a.weight_scale_inv": np.ones((1, 1), np.float32),
        "a.weight_scale_2": ONE,
    },
    "a.weight_scale, and a.weight_scale_inv, which": {"a.weight": A, "a.weight_scale_inv": ONE, "a.weight_scale": ONE},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_format_says_is_refused(message, tmp_path):
    with pytest.raises(BadFile) as caught:
        blockfp.load(write(tmp_path / "model.safetensors", REFUSED[message]))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["b.weight", "b.weight_packed", "b_blocks"])
@pytest.mark.parametrize("told", [True, False], ids=["by config.json", "by another weight"])
def test_codes_without_scales_are_refused(told, name, tmp_path):
    """A reader would take them for values."""
    alone = {name: some_bytes(4, 2, 16) if name == "b_blocks" else A.view(FP8 if name == "b.weight" else np.uint8)}
    config = {"quantization_config": {"quant_method": "fp8"}} if told else None
    file = alone if told else alone | {"a.weight": A, "a.weight_scale": ONE}
    with pytest.raises(BadFile, match=f"{name}'.* without scales"):
        blockfp.load(write(tmp_path / "model.safetensors", file, config))


def test_plain_fp8_is_an_array(tmp_path):
    got = blockfp.load(write(tmp_path / "model.safetensors", {"a.weight": A}, {"torch_dtype": "bfloat16"}))
    np.testing.assert_array_equal(got["a.weight"].view(np.uint8), A.view(np.uint8))


@pytest.mark.parametrize(
    ("shape", "block", "reads"),
    [((130, 256), [96, 128], False), ((256, 512), [128, 128], True), ((64, 60), [64, 64], True), ((64, 128), [64, 64], False)],
    ids=str,
)
def test_blocks_are_as_large_as_config_json_says(shape, block, reads, tmp_path):
    grid = tuple(-(-size // 128) for size in shape)
    file = {"a.weight": fp8_codes(*shape).view(FP8), "a.weight_scale_inv": RNG.uniform(1, 2, grid).astype(np.float32)}
    path = write(tmp_path / "model.safetensors", file, {"quantization_config": {"weight_block_size": block}})
    if reads:
        assert blockfp.load(path)["a.weight"].format.name == "fp8_e4m3_128x128_fp32"
    else:
        with pytest.raises(BadFile, match=f"config.json says blocks of {block[0]}x{block[1]}"):
            blockfp.load(path)


def test_rotated_inputs_are_refused(tmp_path):
    config = {"quantization_config": {"transform_config": {"config_groups": {"R4": {"apply": []}}}}}
    with pytest.raises(BadFile, match="transform_config"):
        blockfp.load(write(tmp_path / "model.safetensors", {"a.weight": A, "a.weight_scale": ONE}, config))


@pytest.mark.parametrize("ending", [".scale", ".qscale_weight"])
def test_other_names_of_scales(ending, tmp_path):
    """DeepSeek V4's, FP8 in blocks beside experts in FP4, and Mistral's."""
    fp8, fp4 = fp8_codes(128, 256), some_bytes(8, 32)
    scales = RNG.uniform(1, 2, (1, 2)).astype(E8M0)
    file = {"a.weight": fp8.view(FP8), f"a{ending}": scales, "norm.weight": np.ones(4, BF16), "norm.scale": np.ones(4, BF16)}
    file |= {"e.weight": fp4.view(np.int8), f"e{ending}": some_bytes(8, 2, below=250).view(E8M0)}
    config = {"quantization_config": {"weight_block_size": [128, 128]}}
    got = blockfp.load(write(tmp_path / "model.safetensors", file, config))
    assert set(got) == {"a.weight", "e.weight", "norm.weight", "norm.scale"}
    assert (got["a.weight"].format.name, got["e.weight"].format.name) == ("fp8_e4m3_128x128", "mxfp4_e2m1")
    np.testing.assert_array_equal(got["a.weight"].codes, fp8)
    np.testing.assert_array_equal(got["a.weight"].scales, scales.astype(np.float32))
    np.testing.assert_array_equal(got["e.weight"].codes, fp4)


def test_own_arrays_of_such_names_come_back_as_they_were(tmp_path):
    arrays = {"a": some_bytes(4, 32).view(np.int8), "a_scale": np.ones((4, 1), np.float32), "b": fp8_codes(64, 32).view(FP8)}
    blockfp.save(tmp_path / "own.safetensors", arrays | {"b_scale": np.ones((), np.float32)})
    got = blockfp.load(tmp_path / "own.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name].view(np.uint8), array.view(np.uint8))


# ---- between layouts


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


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
    x = (RNG.standard_normal((160, 256)) * np.exp(RNG.standard_normal((160, 1)))).astype(BF16)
    arrays = {"a.weight": blockfp.quantize(x, format), "lm_head.weight": x[:4], "a.bias": x[0]}
    blockfp.save(tmp_path / "in.safetensors", arrays)
    result = run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", name)
    assert result.exit_code == 0, result.output
    assert "1 quantized weights as they are, 0 requantized" in " ".join(result.output.split())
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
    assert "has NaN scales, which modelopt would read as numbers" in " ".join(result.output.split())
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_layout_has_not_is_requantized_and_said(name, tmp_path):
    x = RNG.standard_normal((128, 256)).astype(np.float32)
    q = blockfp.quantize(x, "mxfp6_e3m2")
    blockfp.save(tmp_path / "in.safetensors", {"a.weight": q})
    result = run("convert", tmp_path / "in.safetensors", tmp_path / "out", "--layout", name)
    assert result.exit_code == 0, result.output
    assert "requantized a.weight: mxfp6_e3m2 to" in " ".join(result.output.split())
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
    text = " ".join(said.output.split())
    assert "left out: 3 scales of activations" in text
    assert all(name in text for name in left)
    got = blockfp.load(tmp_path / "out")
    assert set(got) == {"l.0.up.weight", "l.0.attn.q.weight", *kept}
    said = run("convert", source, tmp_path / "own.safetensors", "--layout", "blockfp")
    assert "left out" not in said.output
    assert set(left) | set(kept) < set(blockfp.load(tmp_path / "own.safetensors"))


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


# ---- held against the libraries that write them


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


# ---- beside the source


def test_a_model_is_held_against_its_source(tmp_path):
    arrays = {"a.weight": RNG.standard_normal((128, 256)).astype(BF16), "a.bias": np.ones(4, BF16)}
    source = write(tmp_path / "source.safetensors", arrays)
    own = tmp_path / "own.safetensors"
    assert run("quantize", source, own, "--format", "fp8_e4m3_128x128_fp32").exit_code == 0
    assert run("convert", own, tmp_path / "released", "--layout", "fine-grained-fp8").exit_code == 0
    result = run("check", tmp_path / "released", "--source", source)
    assert result.exit_code == 0, result.output
    assert "a.weight: fp8_e4m3_128x128_fp32, SQNR 3" in result.output
    assert "1 quantized weights and 1 other tensors" in result.output
    q = blockfp.load(own)["a.weight"]
    q.codes[3, 7] ^= 1
    blockfp.save(tmp_path / "other.safetensors", {"a.weight": q, "a.bias": arrays["a.bias"]})
    result = run("check", tmp_path / "other.safetensors", "--source", source)
    assert result.exit_code == 1
    assert "NO (other bits than blockfp makes of it)" in result.output
    blockfp.save(tmp_path / "less.safetensors", {"a.weight": q})
    assert run("check", tmp_path / "less.safetensors", "--source", source).exit_code == 2
    assert run("check", own, "--source", source, "--format", "nvfp4").exit_code == 2


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
    del state["0.weight_scale"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(BadFile, match=r"0\.weight_scale"):
        blockfp.load(tmp_path)

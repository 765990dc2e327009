"""Released quantized models, written to each layout by hand, and read."""

import importlib.util
import random

import numpy as np
import pytest
from bad_files import changed, text_of
from command import run
from released_files import BF16, E8M0, FP8, fp8_codes, some_bytes, spread, uniform, values_of, write

import blockfp
from blockfp.errors import BadFile
from blockfp.files.layouts.layout import not_released


@pytest.mark.parametrize("scale", [np.float32, E8M0], ids=["fp32", "e8m0"])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (3, 128, 256)])
def test_fp8_in_blocks(shape, scale, tmp_path):
    codes = fp8_codes(*shape)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = uniform(1e-3, 2, grid).astype(scale)
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
    codes, scales = fp8_codes(40, 200), uniform(1e-3, 2, scale).astype(dtype)
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
INT4 = np.random.default_rng(3).integers(0, 9, (16, 4), dtype=np.int32)
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
    "a.scale_weight exists": {"a.weight": A, "a.scale_weight": ONE},
    "a._weight_scale exists": {"a._weight_qdata": A, "a._weight_scale": np.ones((8, 1), np.float32)},
    "a.weight_scale_2, which no layout combines": {
        "a.weight": A,
        "a.weight_scale_inv": np.ones((1, 1), np.float32),
        "a.weight_scale_2": ONE,
    },
    "a.weight_scale and also a.weight_scale_inv, which": {"a.weight": A, "a.weight_scale_inv": ONE, "a.weight_scale": ONE},
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


def int8(*shape):
    return some_bytes(*shape).view(np.int8)


FOREIGN = {
    "hqq": ({"a.W_q": some_bytes(32, 64), "a.scale": np.ones((64, 1), BF16), "a.zero": np.ones((64, 1), BF16)}, "a.W_q"),
    "hqq of 3 bits": ({"a.W_q": INT4, "a.scale": np.ones((64, 1), BF16), "a.zero": np.ones((64, 1), BF16)}, "a.W_q"),
    "eetq": ({"a.weight": int8(32, 64), "a.weight_scales": np.ones(64, np.float16)}, "a.weight"),
    "aqlm": (
        {"a.codes": int8(8, 4, 2), "a.codebooks": np.ones((2, 16, 1, 8), BF16), "a.scales": np.ones((8, 1), BF16)},
        "a.codes",
    ),
    "aqlm of 16 bits": ({"a.codes": int8(8, 4, 4).view(np.int16), "a.codebooks": np.ones((2, 16, 1, 8), BF16)}, "a.codes"),
    "torchao": ({"a._weight_qdata": int8(32, 64), "a._weight_scale": np.ones((32, 1), BF16)}, "a._weight_qdata"),
    "gptq": ({"a.qweight": INT4, "a.scales": np.ones((1, 4), np.float16)}, "a.qweight"),
    "spqr": ({"a.dense_weights": INT4.reshape(-1)}, "a.dense_weights"),
}
"""Models of methods that have no layout here, as their libraries write them, and the name of the codes."""


@pytest.mark.parametrize("method", FOREIGN)
def test_integers_of_a_method_that_is_not_known_are_refused(method, tmp_path):
    """They would be taken for values; by every face and command that reads quantized models."""
    file, name = FOREIGN[method]
    file |= {"norm.weight": np.ones(64, BF16), "embed.weight": np.ones((4, 64), BF16)}
    told = {"quantization_config": {"quant_method": method.split()[0], "bits": 8}}
    path = write(tmp_path / "model.safetensors", file, told)
    what = f"{path}, tensor '{name}': is {file[name].dtype} {file[name].shape} without scales"
    faces = ["blockfp", *(f"blockfp.{library}" for library in ("torch", "jax") if importlib.util.find_spec(library))]
    for face in faces:
        with pytest.raises(BadFile) as caught:
            importlib.import_module(face).load(tmp_path)
        assert str(caught.value).startswith(what)
        assert f"config.json names the method '{method.split()[0]}', whose layout is unknown" in str(caught.value)
    out = tmp_path / "out.safetensors"
    for command in (
        ("quantize", path, out, "--format", "nvfp4"),
        ("dequantize", path, out),
        ("convert", path, out, "--layout", "blockfp"),
        ("check", path, "--source", path),
    ):
        result = run(*command)
        assert result.exit_code == 2, result.output
        assert what in result.stderr.replace("\n", "")
    assert not out.exists()
    # Of a model with pictures the settings are in a part of their own; without any it's a file of integers.
    write(path, file, {"text_config": told})
    with pytest.raises(BadFile, match="without scales"):
        blockfp.load(path)
    write(path, file, {"architectures": ["Plain"]})
    assert set(blockfp.load(path)) == set(file)


def test_other_integers_of_a_known_method_are_values(tmp_path):
    """Tables of tokens and positions; but not bytes, which are codes."""
    tables = {
        "ids": np.arange(512)[None],
        "experts": np.arange(64, dtype=np.int32).reshape(8, 8),
        "order": np.arange(8, dtype=np.int8),
    }
    file = {"a.weight": A, "a.weight_scale": ONE, **tables}
    own = {"a.rng_key": np.arange(2, dtype=np.uint32), "a.step": np.arange(1, dtype=np.int32)}
    config = {"quantization_config": {"quant_method": "blockfp"}}
    assert blockfp.load(write(tmp_path / "own.safetensors", own, config)).keys() == own.keys()
    config = {"quantization_config": {"quant_method": "fp8"}}
    got = blockfp.load(write(tmp_path / "model.safetensors", file, config))
    for name, table in tables.items():
        np.testing.assert_array_equal(got[name], table)
    with pytest.raises(BadFile, match=r"tensor 'b.weight': is uint8 \(8, 32\) without scales"):
        blockfp.load(write(tmp_path / "model.safetensors", file | {"b.weight": some_bytes(8, 32)}, config))


@pytest.mark.parametrize("text", ["{", "\xff", "[" * 10_000, '{"a": 1, "a": 2}'])
def test_settings_that_cannot_be_read_are_not_passed_over(text, tmp_path):
    for name, file in {"codes": {"a.weight": A, "a.weight_scale": ONE}, "integers": {"a.weight": int8(32, 64)}}.items():
        path = write(tmp_path / f"{name}.safetensors", file)
        path.with_name("config.json").write_text(text, encoding="latin-1")
        with pytest.raises(BadFile, match=r"config\.json: can't be read, and may say how the model is quantized"):
            blockfp.load(path)
        write(tmp_path / "values.safetensors", {"a.weight": np.ones((4, 4), BF16)})
        assert set(blockfp.load(tmp_path / "values.safetensors")) == {"a.weight"}


def test_settings_changed_anyhow(tmp_path):
    """A file is read, or refused, whatever stands in config.json."""
    scheme = {"strategy": "block", "block_structure": [128, 128], "group_size": 128}
    told = {"quant_method": "fp8", "weight_block_size": [128, 128], "transform_config": {"config_groups": {}}}
    config = {"dtype": "float16", "quantization_config": told | {"config_groups": {"group_0": {"weights": scheme}}}}
    path = write(tmp_path / "model.safetensors", {"a.weight": A, "a.weight_scale_inv": np.ones((1, 1), np.float32)})
    rng, refused = random.Random(0), 0
    for _ in range(300):
        path.with_name("config.json").write_text(text_of(changed(rng, config)))
        try:
            assert blockfp.load(path)["a.weight"].shape == (8, 64)
        except BadFile:
            refused += 1
    assert 0 < refused < 300


def one_of(value, dtype=np.float32):
    return np.full(1, value, dtype)


@pytest.mark.parametrize("ending", ["_packed", ""], ids=["compressed-tensors", "modelopt"])
def test_a_scale_above_the_scales_of_16_bits(ending, tmp_path):
    """As saving a model after `.to(bfloat16)` leaves it: the number that is there."""
    codes, scales = some_bytes(48, 32), fp8_codes(48, 4) & 0x7F
    second = "_global_scale" if ending else "_scale_2"
    file = {f"a.weight{ending}": codes, "a.weight_scale": scales.view(FP8), f"a.weight{second}": one_of(0.3, BF16)}
    q = blockfp.load(write(tmp_path / "model.safetensors", file))["a.weight"]
    factor = np.float32(BF16.type(0.3))
    assert q.tensor_scale == (np.float32(1) / factor if ending else factor)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf, -1.0, 1e-45])
def test_a_scale_above_the_scales_that_is_no_number(value, tmp_path):
    """Of those that multiply zero and the smallest are numbers; dividing by them gives none."""
    codes, scales = some_bytes(48, 32), fp8_codes(48, 4) & 0x7F
    for ending, second in (("_packed", "_global_scale"), ("", "_scale_2")):
        file = {f"a.weight{ending}": codes, "a.weight_scale": scales.view(FP8), f"a.weight{second}": one_of(value)}
        path = write(tmp_path / f"model{second}.safetensors", file)
        if np.isfinite(value) and value >= 0 and not ending:
            assert blockfp.load(path)["a.weight"].tensor_scale == np.float32(value)
            continue
        with pytest.raises(
            BadFile, match=f"tensor 'a.weight{second}': holds a scale that is (-?inf|nan|-1.0): scales.* must be finite"
        ):
            blockfp.load(path)


def test_a_scale_above_the_scales_that_is_missing_is_named(tmp_path):
    file = {"a.weight_packed": some_bytes(48, 32), "a.weight_scale": (fp8_codes(48, 4) & 0x7F).view(FP8)}
    with pytest.raises(BadFile, match=r"tensor 'a\.weight': .*\(a\.weight_scale\) and without a\.weight_global_scale, the one"):
        blockfp.load(write(tmp_path / "model.safetensors", file))
    file["a.weight_global_scale"] = np.ones(2, np.float32)
    with pytest.raises(BadFile, match=r"and one above them, float32 \(2,\) \(a\.weight_global_scale\): a way to quantize"):
        blockfp.load(write(tmp_path / "model.safetensors", file))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_scales_that_are_no_numbers(value, tmp_path):
    """Of a tensor, of rows and of blocks."""
    for name, scales in {"": np.ones(()), "_row": np.ones((8, 1)), "_inv": np.ones((1, 1))}.items():
        scales = scales.astype(np.float32 if name != "_row" else BF16)
        scales.reshape(-1)[-1] = value
        ending = "_scale_inv" if name == "_inv" else "_scale"
        path = write(tmp_path / f"model{name}.safetensors", {"a.weight": A, f"a.weight{ending}": scales})
        with pytest.raises(BadFile, match=f"tensor 'a.weight{ending}': holds a scale that is {value}: scales must be finite"):
            blockfp.load(path)


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
    file = {"a.weight": fp8_codes(*shape).view(FP8), "a.weight_scale_inv": uniform(1, 2, grid).astype(np.float32)}
    path = write(tmp_path / "model.safetensors", file, {"quantization_config": {"weight_block_size": block}})
    if reads:
        assert blockfp.load(path)["a.weight"].format.name == "fp8_e4m3_128x128_fp32"
    else:
        with pytest.raises(BadFile, match=f"config.json specifies blocks of {block[0]}x{block[1]}"):
            blockfp.load(path)


def test_rotated_inputs_are_refused(tmp_path):
    config = {"quantization_config": {"transform_config": {"config_groups": {"R4": {"apply": []}}}}}
    with pytest.raises(BadFile, match="transform_config"):
        blockfp.load(write(tmp_path / "model.safetensors", {"a.weight": A, "a.weight_scale": ONE}, config))


@pytest.mark.parametrize("ending", [".scale", ".qscale_weight"])
def test_other_names_of_scales(ending, tmp_path):
    """DeepSeek V4's, FP8 in blocks beside experts in FP4, and Mistral's."""
    fp8, fp4 = fp8_codes(128, 256), some_bytes(8, 32)
    scales = uniform(1, 2, (1, 2)).astype(E8M0)
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


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.0.self_attn.q_proj.base_layer.weight", True),
        ("base_model.model.lm_head.modules_to_save.default.weight", True),
        ("layers.0.attn.q_proj.lora_a.weight", True),  # torchtune's
        ("transformer.h.0.attn.attn.lora_A", True),  # litgpt's
        ("base_model.model.model.embed_tokens.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("wav2vec2.encoder.layers.0.adapter_layer.linear_1.weight", False),
        ("model.layers.0.attn.w_lora.lora.0.weight", False),  # RWKV's
        ("base_model.weight", False),
    ],
)
def test_names_of_adapters_are_no_release_s(name, found):
    assert (not_released(["model.norm.weight", name]) is not None) == found

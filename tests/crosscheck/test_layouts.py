"""Released quantized models, written to each layout by hand, and read."""

import numpy as np
import pytest
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
    file = {"a.weight": fp8_codes(*shape).view(FP8), "a.weight_scale_inv": uniform(1, 2, grid).astype(np.float32)}
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

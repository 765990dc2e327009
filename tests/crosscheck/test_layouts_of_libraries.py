"""Quantized models that other libraries write, read with their bits and their values."""

import numpy as np
import pytest
from released_files import FP8, some_bytes, write

import blockfp
from blockfp.errors import BadFile
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
        ("_format_nvfp4_16x16", r"no 0\.weight_format_\.\. .*a rank's shard"),
    ):
        others = {name: part for name, part in state.items() if name != "0.weight" + missing}
        save_file(others, tmp_path / "model.safetensors")
        with pytest.raises(BadFile, match=told):
            blockfp.load(tmp_path)

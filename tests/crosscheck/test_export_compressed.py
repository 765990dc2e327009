"""`blockfp export --to compressed-tensors`: what the library reads, and what is refused."""

import json

import pytest

torch = pytest.importorskip("torch", reason="checkpoints are PyTorch's")

from command import run  # noqa: E402
from exported import SHAPES, save, unsharded  # noqa: E402
from held_formats import FORMATS  # noqa: E402
from resumed import model_of  # noqa: E402

import blockfp.torch as bfp  # noqa: E402
from blockfp.files.layouts import compressed_tensors  # noqa: E402
from blockfp.formats import Format  # noqa: E402


def test_what_compressed_tensors_has_no_layout_for():
    without = {format.name for format in FORMATS if compressed_tensors.scheme(format) is None}
    assert without == {f.name for f in FORMATS if f.element.name not in ("e4m3", "e2m1")}


def test_names_that_compressed_tensors_would_take_for_classes(tmp_path):
    layers = {"Linear": bfp.Linear(64, 64, recipe="mxfp8"), "a": torch.nn.Sequential(bfp.Linear(64, 64, recipe="mxfp8"))}
    bfp.save_checkpoint(tmp_path / "run", torch.nn.ModuleDict(layers), step=1)
    assert run("export", tmp_path / "run", tmp_path / "ct", "--to", "compressed-tensors").exit_code == 0
    (group,) = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["re:^Linear$", "a.0"]


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")


COVERED = [format.name for format in FORMATS if compressed_tensors.scheme(format)]


@pytest.mark.parametrize("format", COVERED)
def test_compressed_tensors_loads_it(format, library, tmp_path):
    """Through its own configuration, compression and decompression of a model's modules."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from safetensors.torch import load_file

    save(0, tmp_path / "run", format, "one", torch.bfloat16)
    result = run("export", tmp_path / "run", tmp_path / "ct", "--to", "compressed-tensors")
    assert result.exit_code == 0, result.output
    trained, _ = unsharded(format, torch.bfloat16)
    config = QuantizationConfig.model_validate(json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"])
    model = torch.nn.Sequential(*(torch.nn.Linear(128, rows) for rows, _ in SHAPES))
    apply_quantization_config(model, config)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    entries = load_file(tmp_path / "ct" / "model.safetensors")
    missing, unexpected = model.load_state_dict(entries, strict=False)
    assert (missing, unexpected) == ([], [])
    # It loads into parameters that the library made: none of them rounds what is in the file.
    for i, layer in enumerate(model):
        for name, entry in list(layer.named_parameters(recurse=False)):
            assert torch.equal(entry.to(torch.float64), entries[f"{i}.{name}"].to(torch.float64)), name
    compressor.decompress_model(model)
    for got, layer in zip(model, trained, strict=True):
        expected = layer.weight.detach().dequantize(torch.float32)
        if layer.weight.format.scale.two_level:
            _within_an_ulp_of_bfloat16(got.weight, expected)
        else:
            assert torch.equal(got.weight.to(torch.float32), expected.to(got.weight.dtype).to(torch.float32))


def _within_an_ulp_of_bfloat16(got, expected):
    ours = expected.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    assert (got.detach().to(torch.bfloat16).view(torch.int16).to(torch.int32) - ours).abs().max() <= 1


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_16x16"])
def test_nvfp4_in_fp32_is_within_2_ulp(format, library, tmp_path):
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from safetensors.torch import load_file

    save(0, tmp_path / "run", format, "one")
    assert run("export", tmp_path / "run", tmp_path / "ct", "--to", "compressed-tensors").exit_code == 0
    entries = load_file(tmp_path / "ct" / "model.safetensors")
    arguments = QuantizationArgs(**compressed_tensors.scheme(Format.parse(format)).weights)
    trained, _ = unsharded(format)
    for i, layer in enumerate(trained):
        packed = entries[f"{i}.weight_packed"]
        values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
        got = dequantize(
            values,
            entries[f"{i}.weight_scale"].to(torch.float32),
            args=arguments,
            dtype=torch.float32,
            global_scale=entries[f"{i}.weight_global_scale"],
        )
        ulps = got.view(torch.int32) - layer.weight.detach().dequantize(torch.float32).view(torch.int32)
        assert 0 <= ulps.abs().max() <= 2


@pytest.mark.parametrize(
    ("format", "value", "message"), [("mxfp4_e2m1", float("nan"), "has NaN scales"), ("nvfp4", 1e-37, "has no finite inverse")]
)
def test_scales_that_compressed_tensors_cannot_hold(format, value, message, tmp_path):
    model = model_of(format, SHAPES)
    with torch.no_grad():
        model[0].weight = torch.nn.Parameter(bfp.quantize(torch.full((64, 128), value), format))
    bfp.save_checkpoint(tmp_path / "run", model, step=1)
    result = run("export", tmp_path / "run", tmp_path / "ct", "--to", "compressed-tensors")
    assert result.exit_code == 2
    assert message in result.output.replace("\n", "")
    assert not (tmp_path / "ct").exists()

"""`blockfp export --to compressed-tensors`: what the library reads, and what is refused."""

import json

import pytest

torch = pytest.importorskip("torch", reason="checkpoints are PyTorch's")

from command import run  # noqa: E402
from exported import SHAPES, save, unsharded  # noqa: E402
from held_formats import FORMATS  # noqa: E402
from resumed import model_of  # noqa: E402

import blockfp  # noqa: E402
import blockfp.torch as bfp  # noqa: E402
from blockfp import recipes  # noqa: E402
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


DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
# (weight, input): compressed-tensors' preset, or fields of its arguments, or None for 16 bits
INPUTS = {
    ("fp8_e4m3_row", "fp8_e4m3_row"): "FP8_DYNAMIC",
    ("fp8_e4m3_row_pow2", "fp8_e4m3_row_pow2"): "FP8_DYNAMIC",
    ("fp8_e4m3_128x128_fp32", "fp8_e4m3_1x128_fp32"): "FP8_BLOCK",
    ("fp8_e4m3_128x128", "fp8_e4m3_1x128"): "FP8_BLOCK",
    ("fp8_e4m3", "fp8_e4m3"): {**DYNAMIC, "strategy": "tensor"},
    ("fp8_e4m3_128x128", "fp8_e4m3_row"): {**DYNAMIC, "strategy": "token"},
    ("mxfp8_e4m3_32x32", "mxfp8_e4m3"): "MXFP8",
    ("mxfp4_e2m1", "mxfp4_e2m1"): "MXFP4",
    ("fp8_e4m3_row", None): None,
    ("fp8_e4m3_row", "fp8_e5m2"): None,
    ("fp8_e4m3_row", "fp8_e4m3_128x128"): None,
    ("fp8_e4m3_row", "mxfp8_e4m3"): None,
    ("mxfp4_e2m1", "mxfp8_e4m3"): None,
    ("nvfp4", "nvfp4"): None,
    ("nvfp4", "fp8_e4m3_row"): None,
}


def described(model, folder, **options):
    """The library's reading of the configuration of a stream, which must be that of a checkpoint's export."""
    from compressed_tensors.quantization import QuantizationConfig

    config = bfp.stream_weights(model, layout="compressed-tensors", **options).configs["config.json"]
    bfp.save_checkpoint(folder / "run", model, step=1)
    quantize = ["--quantize"] if options else []
    assert run("export", folder / "run", folder / "ct", "--to", "compressed-tensors", *quantize).exit_code == 0
    assert json.loads((folder / "ct" / "config.json").read_text()) == config
    return QuantizationConfig.model_validate(config["quantization_config"]).config_groups


@pytest.mark.parametrize("options", [{}, {"quantize": True}], ids=["quantized", "high precision"])
@pytest.mark.parametrize("pair", INPUTS, ids=str)
def test_inputs_are_described_as_the_forward_quantizes_them(pair, options, library, tmp_path):
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

    weights = "high_precision" if options else "quantized"
    model = bfp.convert(torch.nn.Sequential(torch.nn.Linear(128, 64)), recipes.qat(*pair), weights=weights)
    (group,) = described(model, tmp_path, **options).values()
    expected = INPUTS[pair]
    if isinstance(expected, str):
        preset = preset_name_to_scheme(expected, ["Linear"])
        assert (group.weights, group.input_activations) == (preset.weights, preset.input_activations)
    else:
        assert group.input_activations == (expected and QuantizationArgs(**expected))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e4m3_row", "fp8_e4m3_1x128_fp32", "mxfp8_e4m3"])
def test_the_library_rounds_inputs_to_our_values(format, library):
    """In fp32, where it divides by 448; our scale is the same or the next number."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    weight = "mxfp8_e4m3" if format == "mxfp8_e4m3" else "fp8_e4m3_row"
    model = bfp.convert(torch.nn.Sequential(torch.nn.Linear(256, 64)), recipes.qat(weight, format))
    config = bfp.stream_weights(model, layout="compressed-tensors").configs["config.json"]["quantization_config"]
    arguments = QuantizationArgs(**config["config_groups"]["group_0"]["input_activations"])
    x = torch.randn(2, 8, 256) * torch.exp2(torch.randint(-6, 7, (2, 8, 256)))
    got = fake_quantize(x, *compute_dynamic_scales_and_zp(x, arguments, None), arguments)
    ours = blockfp.quantize(x.reshape(16, 256).numpy(), format).dequantize()
    torch.testing.assert_close(got.reshape(16, 256), torch.from_numpy(ours), rtol=2**-22, atol=0)


def test_layers_with_other_inputs_are_other_groups(library, tmp_path):
    """By path, with delayed scaling, computed in high precision, and with rows that don't hold whole groups."""
    row, block = (recipes.qat("fp8_e4m3_row", format) for format in ("fp8_e4m3_row", "fp8_e4m3_1x128"))
    layers = {"a": row, "b": block, "c": row, "d": recipes.fp8_delayed(), "e": recipes.qat("fp8_e4m3_row"), "short": block}
    model = torch.nn.ModuleDict({n: torch.nn.Sequential(torch.nn.Linear(64 if n == "short" else 128, 64)) for n in layers})
    bfp.convert(model, lambda path: layers[path.partition(".")[0]])
    model["f"] = bfp.convert(torch.nn.Sequential(torch.nn.Linear(128, 64)), row, compute="high_precision")
    found = {tuple(group.targets): group.input_activations for group in described(model, tmp_path).values()}
    assert {targets: inputs and inputs.strategy for targets, inputs in found.items()} == {
        ("a.0", "c.0"): "token", ("b.0",): "group", ("d.0",): None, ("e.0", "short.0", "f.0"): None
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_without_recipes_states_no_inputs(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = bfp.convert(torch.nn.Sequential(torch.nn.Linear(128, 64)), "fp8_row")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "run")
    assert run("export", tmp_path / "run", tmp_path / "ct", "--to", "compressed-tensors", "--prefix", "").exit_code == 0
    (group,) = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert (group["targets"], group["input_activations"]) == (["re:^0$"], None)


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

"""`blockfp quantize` and `blockfp dequantize`: what they write, and what they refuse."""

import json

import numpy as np
import pytest
import safetensors.numpy
from command import ARRAYS, MATRIX, refused, run, write_model
from held_formats import FORMATS
from same_bits import assert_same_bits

import blockfp
from blockfp.definition import numerics
from blockfp.files import quantized_model
from blockfp.files.modelfile import Entry, open_model, write_safetensors


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("format", FORMATS[::3], ids=str)
def test_quantize_and_dequantize(model, tmp_path, format):
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    assert run("quantize", model, small, "--format", format).exit_code == 0
    assert run("dequantize", small, back).exit_code == 0
    stored = {tensor.name: tensor.read() for tensor in open_model(small).tensors}
    restored = {tensor.name: tensor.read() for tensor in open_model(back).tensors}
    assert restored.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        if x.ndim < 2 or x.dtype == np.int64:
            assert_same_bits(stored[name], x)
            assert_same_bits(restored[name], x)
            continue
        q = numerics.quantize(x, format)
        assert (stored[name].dtype, stored[name].shape) == (x.dtype, (0, *x.shape))
        assert_same_bits(stored[f"{name}_codes"], q.codes)
        assert_same_bits(stored[f"{name}_scale"], q.scales)
        assert_same_bits(stored.get(f"{name}_tensor_scale"), q.tensor_scale)
        values = numerics.dequantize(*q, format, x.dtype.name, columns=x.shape[-1])
        assert_same_bits(restored[name], values)
    assert open_model(back).metadata == {"format": "pt"}
    described = json.loads(open_model(small).metadata["blockfp"])["tensors"]
    assert described["experts"] == {"format": format.name, "shape": [3, 40, 20], "dtype": "bfloat16"}


def test_dequantize_to_another_dtype(model, tmp_path):
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    run("quantize", model, small, "--format", "mxint8")
    assert run("dequantize", small, back, "--dtype", "float16").exit_code == 0
    assert safetensors.numpy.load_file(back)["experts"].dtype == np.float16
    refused(run("dequantize", small, back, "--force", "--dtype", "float64"), "--dtype float64: must be")


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_overwrites_only_with_force(model, tmp_path, command):
    source = model
    if command == "dequantize":
        source = tmp_path / "small.safetensors"
        run("quantize", model, source, "--format", "nvfp4")
    more = ("--format", "nvfp4") if command == "quantize" else ()
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    refused(run(command, source, out, *more), "out.safetensors: already exists; --force overwrites it")
    assert out.read_text() == "precious"
    assert run(command, source, out, *more, "--force").exit_code == 0
    assert open_model(out).tensors
    assert run(command, source, source, *more, "--force").exit_code == 0, "in place"


def test_an_interrupted_run_leaves_the_old_file(model, tmp_path, monkeypatch):
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    calls = []

    def interrupted(x, format):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return blockfp.quantize(x, format)

    monkeypatch.setattr(quantized_model, "quantize", interrupted)
    result = run("quantize", model, out, "--format", "mxfp8_e4m3", "--force")
    assert result.exit_code != 0
    assert out.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [model, out]


def test_quantize_refuses_what_it_cannot_store(model, tmp_path):
    out = tmp_path / "out.safetensors"
    refused(run("quantize", model, tmp_path / "out.npz", "--format", "nvfp4"), "OUT", "must end in .safetensors")
    refused(run("quantize", model, out, "--format", "all"), "format 'all' is not known")
    small = tmp_path / "small.safetensors"
    run("quantize", model, small, "--format", "nvfp4")
    refused(run("quantize", small, out, "--format", "nvfp4"), "small.safetensors: is quantized already")
    np.savez(tmp_path / "name.npz", w=MATRIX, __metadata__=np.ones(3))
    refused(run("quantize", tmp_path / "name.npz", out, "--format", "nvfp4"), "a name must be a string other than")
    np.savez(tmp_path / "clash.npz", w=MATRIX, w_scale=np.ones(3))
    clash = run("quantize", tmp_path / "clash.npz", out, "--format", "nvfp4")
    refused(clash, "tensor 'w_scale'", "needed for the codes or scales")
    np.savez(tmp_path / "text.npz", w=MATRIX, t=np.array(["text"]))
    refused(run("quantize", tmp_path / "text.npz", out, "--format", "nvfp4"), "tensor 't'", "can't be stored")
    assert not out.exists()


def test_dequantize_refuses_a_file_of_values(tmp_path):
    path = tmp_path / "plain.safetensors"
    write_safetensors(path, [Entry("w", MATRIX.dtype, MATRIX.shape)], [("w", MATRIX)], {})
    refused(run("dequantize", path, tmp_path / "out.safetensors"), "plain.safetensors", "has no quantized tensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {}}, "tensor 'w': has codes but no w_format_"),
        ({"metadata": {"blockfp": "not json"}}, "metadata 'blockfp' is not what blockfp writes"),
        ({"metadata": {"blockfp": '{"version": 9, "tensors": {}}'}}, "is of version 9"),
        ({"format": "mxfp9"}, "tensor 'w': its description in the metadata is wrong: format 'mxfp9' is not known"),
        ({"shape": [8, 96]}, "tensor 'w': is float32 of shape (0, 4, 96), mxfp8_e4m3 of shape (8, 96) needs"),
        ({"shape": [96]}, "tensor 'w': can't be float32 of shape (96,)"),
        ({"dtype": "float8"}, "tensor 'w': can't be float8"),
        ({"without": "w_scale"}, "tensor 'w_scale': is missing"),
    ],
)
def test_dequantize_refuses_what_does_not_fit(tmp_path, change, message):
    q = blockfp.quantize(MATRIX[:4], "mxfp8_e4m3")
    arrays = {"w": np.empty((0, 4, 96), np.float32), "w_codes": q.codes, "w_scale": q.scales}
    arrays.pop(change.get("without"), None)
    described = {"format": "mxfp8_e4m3", "shape": [4, 96], "dtype": "float32"} | change
    metadata = change.get("metadata", {"blockfp": json.dumps({"version": 1, "tensors": {"w": described}})})
    path = tmp_path / "q.safetensors"
    write_safetensors(path, [Entry(n, a.dtype, a.shape) for n, a in arrays.items()], arrays.items(), metadata)
    refused(run("dequantize", path, tmp_path / "out.safetensors"), "q.safetensors", message)
    assert list(tmp_path.iterdir()) == [path]

"""safetensors' dtypes of 4 and 8 bits beyond OCP's: torch, safetensors and JAX read what is written, and the other way."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import blockfp
from blockfp.errors import BadFile
from blockfp.files.modelfile import open_model

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402

import blockfp.torch as bfp  # noqa: E402

F4 = np.dtype(ml_dtypes.float4_e2m1fn)
BYTES = torch.arange(256, dtype=torch.uint8).reshape(8, 32)


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_torchs_dtypes(name, tmp_path):
    x = BYTES.view(getattr(torch, name))
    safetensors.torch.save_file({"x": x}, tmp_path / "theirs.safetensors")
    bfp.save(tmp_path / "ours.safetensors", {"x": x})
    for file in ("theirs", "ours"):
        path = tmp_path / f"{file}.safetensors"
        for found in (bfp.load(path)["x"], safetensors.torch.load_file(path)["x"]):
            assert (found.dtype, found.shape) == (x.dtype, x.shape)
            assert torch.equal(found.view(torch.uint8), BYTES)


def test_elements_of_4_bits_are_numpys(tmp_path):
    """Each of the sixteen, in files of torch and of ours."""
    elements = np.arange(16, dtype=np.uint8).view(F4)
    assert elements.astype(np.float32).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    pairs = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    safetensors.torch.save_file({"x": pairs.view(torch.float4_e2m1fn_x2)}, tmp_path / "theirs.safetensors")
    blockfp.save(tmp_path / "ours.safetensors", {"x": elements, "y": np.ones(3, np.float32)})
    for file in ("theirs", "ours"):
        path = tmp_path / f"{file}.safetensors"
        found = blockfp.load(path)["x"]
        assert found.dtype == F4
        np.testing.assert_array_equal(found.view(np.uint8), elements.view(np.uint8))
        assert torch.equal(bfp.load(path)["x"].view(torch.uint8), pairs)
        assert next(t for t in open_model(path).tensors if t.name == "x").nbytes == 8
    assert (tmp_path / "ours.safetensors").stat().st_size % 4 == 0


def test_jax_has_numpys_elements(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    import blockfp.jax

    x = np.arange(32, dtype=np.uint8).reshape(4, 8)
    for dtype in (F4, np.dtype(ml_dtypes.float8_e4m3fnuz)):
        held = (x & 15 if dtype == F4 else x).view(dtype)
        blockfp.jax.save(tmp_path / "x.safetensors", {"x": jnp.asarray(held)})
        found = blockfp.jax.load(tmp_path / "x.safetensors")["x"]
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), held.view(np.uint8))
        np.testing.assert_array_equal(blockfp.load(tmp_path / "x.safetensors")["x"].view(np.uint8), held.view(np.uint8))


def test_elements_that_fill_no_bytes(tmp_path):
    odd = np.zeros((3, 5), np.uint8).view(F4)
    with pytest.raises(BadFile, match=r"tensor 'x': has 15 elements of 4 bits, which don't fill bytes"):
        blockfp.save(tmp_path / "x.safetensors", {"x": odd})
    assert not list(tmp_path.iterdir())
    blockfp.save(tmp_path / "x.safetensors", {"x": odd[:2]})
    np.testing.assert_array_equal(blockfp.load(tmp_path / "x.safetensors")["x"].view(np.uint8), odd[:2].view(np.uint8))
    with pytest.raises(BadFile, match=r"tensor 'x': is float4_e2m1fn \(2, 5\); .*needs an even last axis"):
        bfp.load(tmp_path / "x.safetensors")
    header = b'{"x":{"dtype":"F4","shape":[3,5],"data_offsets":[0,8]}}'
    (tmp_path / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BadFile, match=r"tensor 'x': has 15 elements of 4 bits"):
        blockfp.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("format", ["mxfp4_e2m1", "nvfp4"])
def test_a_release_with_codes_of_this_dtype(format, tmp_path):
    """The same weight as with the codes' bytes."""
    q = bfp.quantize(torch.randn(48, 64), format)
    scales = q.scales.view(torch.float8_e8m0fnu if format == "mxfp4_e2m1" else torch.float8_e4m3fn)
    held = {"a.weight": q.codes.view(torch.float4_e2m1fn_x2), "a.weight_scale": scales}
    if q.tensor_scale is not None:
        held["a.weight_scale_2"] = q.tensor_scale
    else:
        held = {"a.weight": held["a.weight"], "a.weight_scale_inv": scales}
    safetensors.torch.save_file(held, tmp_path / "model.safetensors")
    found = blockfp.load(tmp_path / "model.safetensors")["a.weight"]
    assert found.format.name == format
    np.testing.assert_array_equal(found.codes, q.codes.numpy())
    np.testing.assert_array_equal(found.dequantize(np.float32), q.dequantize(torch.float32).numpy())
    # Without scales they are values of their own, and in a quantized model codes of no layout.
    safetensors.torch.save_file({"a.weight": held["a.weight"]}, tmp_path / "model.safetensors")
    assert blockfp.load(tmp_path / "model.safetensors")["a.weight"].dtype == F4
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(BadFile, match=r"tensor 'a\.weight': is float4_e2m1fn \(48, 64\) without scales"):
        blockfp.load(tmp_path / "model.safetensors")


def test_codes_with_another_bias_are_not_taken_for_e4m3(tmp_path):
    """FNUZ has half of E4M3's values, under the same bytes."""
    held = {"a.weight": BYTES.view(torch.float8_e4m3fnuz), "a.weight_scale_inv": torch.ones(1, 1)}
    safetensors.torch.save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(BadFile, match=r"tensor 'a\.weight': is float8_e4m3fnuz .*a way to quantize that no format"):
        blockfp.load(tmp_path / "model.safetensors")
    safetensors.torch.save_file({"a.weight": held["a.weight"], "b.scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert blockfp.load(tmp_path / "model.safetensors")["a.weight"].dtype.name == "float8_e4m3fnuz"

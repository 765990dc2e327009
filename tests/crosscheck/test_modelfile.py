"""Model files: what is read is what was written, and whatever is wrong with a file is said with its name."""

import io
import json
import random
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from bad_files import bad_safetensors
from safetensors import safe_open
from same_bits import assert_same_bits
from samples import DTYPES, sample

import blockfp
from blockfp.errors import BadFile
from blockfp.files.modelfile import Entry, open_model, write_safetensors

TENSORS = {
    "embeddings.weight": sample("bf16_valued", (7, 12)),
    "bias": np.arange(5, dtype=np.float16),
    "ids": np.arange(3, dtype=np.int64)[None],
    "mask": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.5, np.float32),
}


def raw_safetensors(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read_all(path):
    return {tensor.name: tensor.read() for tensor in open_model(path).tensors}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def test_reads_what_safetensors_wrote(model):
    read = read_all(model)
    assert read.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert_same_bits(read[name], x)
    assert open_model(model).metadata == {"format": "pt"}


def test_says_what_is_skipped(model):
    skipped = {tensor.name: tensor.skipped for tensor in open_model(model).tensors}
    assert skipped == {
        "embeddings.weight": None,
        "empty": None,
        "bias": "1 axis",
        "ids": "dtype int64",
        "mask": "dtype bool",
        "scalar": "a scalar",
    }


def test_safetensors_and_torch_read_what_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    x = sample("random_bits", (3, 5), "bfloat16")
    arrays = {"b.bf16": x, "a": np.ones(3, np.uint8), "c": np.float32(3) * np.ones(()), "ä": np.ones((2, 2))}
    path = tmp_path / "out.safetensors"
    write_safetensors(path, [Entry(n, a.dtype, a.shape) for n, a in arrays.items()], reversed(arrays.items()), {"k": "v"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"k": "v"}
        assert set(file.keys()) == set(arrays)
        assert torch.equal(file.get_tensor("b.bf16").view(torch.int16), torch.from_numpy(x.view(np.int16)))
        assert file.get_tensor("c") == 3
    read = read_all(path)
    for name, array in arrays.items():
        assert_same_bits(read[name], array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_and_npz(tmp_path, dtype):
    x = sample("random_bits", (6, 8), dtype)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "plain.npz", first=x, second=x[0], scalar=x[0, 0])
    np.savez_compressed(tmp_path / "packed.npz", first=x, second=x[0], scalar=x[0, 0])
    assert_same_bits(read_all(tmp_path / "x.npy")["x"], x)
    for name in ("plain", "packed"):
        read = read_all(tmp_path / f"{name}.npz")
        assert_same_bits(read["first"], x)
        assert_same_bits(read["second"], x[0])
        assert_same_bits(read["scalar"], np.asarray(x[0, 0]))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_in_other_orders(tmp_path, version):
    x = sample("gaussian", (6, 8))
    for name, array in (("fortran", np.asfortranarray(x)), ("big", x.astype(">f4"))):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array(file, array, version)
        assert_same_bits(read_all(tmp_path / f"{name}.npy")[name], x)


def test_a_truncated_safetensors_is_refused(model, tmp_path):
    whole = model.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in (*range(0, len(whole), 5), len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(BadFile, match=r"cut\.safetensors"):
            read_all(cut)
    with pytest.raises(BadFile, match=r"tensor 'mask': truncated: its data end at byte"):
        open_model(cut)


def test_bytes_after_an_array_are_refused(tmp_path):
    """NumPy reads the first array of several in a file, and says nothing of the others."""
    with (tmp_path / "two.npy").open("wb") as file:
        np.save(file, sample("gaussian", (2, 4)))
        np.save(file, sample("gaussian", (2, 4)))
    with pytest.raises(BadFile, match=r"tensor 'two': has 160 bytes after its array of shape \(2, 4\)"):
        open_model(tmp_path / "two.npy")


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_every_truncated_numpy_file_is_refused(tmp_path, suffix):
    whole = io.BytesIO()
    x = sample("gaussian", (2, 4))
    np.save(whole, x) if suffix == "npy" else np.savez(whole, x=x)
    cut = tmp_path / f"x.{suffix}"
    for length in range(len(whole.getvalue())):
        cut.write_bytes(whole.getvalue()[:length])
        with pytest.raises(BadFile, match=rf"x\.{suffix}"):
            read_all(cut)


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json at all", "not JSON"),
        (b'{"\xff": 1}', "not JSON"),
        ([1, 2], "header is not one of safetensors"),
        ({"w": 3}, "header is not one of safetensors"),
        ({"w": {"dtype": "F32"}}, "header is not one of safetensors"),
        ({"w": {**entry(), "extra": 1}}, "header is not one of safetensors"),
        ({"w": entry(dtype="F7")}, "tensor 'w': dtype F7 is not known"),
        ({"w": entry(shape=(2, 3))}, r"tensor 'w': F32 of shape \[2, 3\] has 24 bytes, the header gives it 16"),
        ({"w": entry(shape=(-2, -2))}, "tensor 'w': shape .* must be integers of 0 or more"),
        ({"w": entry(offsets=(8, 24))}, "tensor 'w': truncated"),
        ({"w": entry(shape=(1, 2), offsets=(0, 8))}, "bad.safetensors: has 8 bytes after its tensors"),
        (
            {"v": entry(shape=(1, 2), offsets=(0, 8)), "w": entry(shape=(1, 3), offsets=(4, 16))},
            "tensor 'w': its data begin at byte 4 of all data, and those before end at 8",
        ),
        ({"w": entry(shape=(1, 2), offsets=(8, 16))}, "tensor 'w': its data begin at byte 8 of all data"),
        ({"w": entry(shape=("2", 2))}, "tensor 'w': shape .* must be integers of 0 or more"),
        ({"w": {**entry(), "data_offsets": [0]}}, "not enough values to unpack"),
        ({"__metadata__": [1], "w": entry()}, "header is not one of safetensors"),
        ({"__metadata__": {"x": 1}, "w": entry()}, "header is not one of safetensors.* must be strings by strings"),
        (b'{"w": 1, "w": 2}', "not JSON: duplicate name 'w'"),
        ({"\ud800": entry()}, "header is not one of safetensors: UnicodeEncodeError"),
        (json.dumps({"w": entry()}).encode("utf-16-le"), "not JSON"),
        (b"[" * 100_000, "not JSON: maximum recursion depth"),
    ],
)
def test_corrupt_headers(tmp_path, header, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw_safetensors(header, bytes(16)))
    with pytest.raises(BadFile, match=message):
        open_model(path)


def test_a_header_length_beyond_the_file(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(BadFile, match="not a safetensors file, or truncated"):
        open_model(path)


def test_a_file_cut_while_it_is_open(model):
    [tensor] = [t for t in open_model(model).tensors if t.name == "embeddings.weight"]
    model.write_bytes(model.read_bytes()[:-40])
    with pytest.raises(BadFile, match=r"tensor 'embeddings\.weight': truncated"):
        [t.read() for t in [tensor]]


def test_a_damaged_zip_member_is_named(tmp_path):
    path = tmp_path / "x.npz"
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.savez(path, good=x, damaged=x + 1)
    data = bytearray(path.read_bytes())
    at = data.rindex((x + 1).tobytes())
    data[at + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadFile, match=r"x\.npz, tensor 'damaged': Bad CRC-32"):
        read_all(path)


def test_objects_and_records_are_not_read(tmp_path):
    np.save(tmp_path / "o.npy", np.array([{}, None]), allow_pickle=True)
    with pytest.raises(BadFile, match=r"o\.npy, tensor 'o': holds Python objects"):
        open_model(tmp_path / "o.npy")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / "text.npz").write_text("no zip file")
    zipfile.ZipFile(tmp_path / "none.npz", "w").close()
    for name, message in {
        "absent.npy": "no such file",
        "folder.npy": "is a directory",
        "model.bin": "must end in .safetensors, .npy, .npz",
        "text.npz": "not a zip file",
        "none.npz": "holds no arrays",
    }.items():
        with pytest.raises(BadFile, match=message):
            open_model(tmp_path / name)


def test_the_writer_holds_arrays_against_their_entries(tmp_path):
    entries = [Entry("w", np.dtype(np.float32), (2, 2))]
    path = tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match="'w' is float64"):
        write_safetensors(path, entries, [("w", np.zeros((2, 2)))], {})
    with pytest.raises(ValueError, match="no data for the tensors w"):
        write_safetensors(path, entries, [], {})
    with pytest.raises(ValueError, match="would be called 'w'"):
        write_safetensors(path, entries * 2, [], {})


def test_small_floats_are_read_as_they_are(tmp_path):
    path = tmp_path / "fp8.safetensors"
    x = np.arange(8, dtype=np.uint8).reshape(2, 4).view(ml_dtypes.float8_e4m3fn)
    path.write_bytes(raw_safetensors({"w": entry("F8_E4M3", (2, 4), (0, 8))}, x.tobytes()))
    [tensor] = open_model(path).tensors
    assert tensor.skipped == "dtype float8_e4m3fn"
    assert_same_bits(tensor.read().view(np.uint8), x.view(np.uint8))


def test_what_is_read_the_library_reads_too(tmp_path):
    """Of headers changed anyhow: blockfp takes none that safetensors doesn't."""
    whole = tmp_path / "whole.safetensors"
    blockfp.save(
        whole, {"q": blockfp.quantize(TENSORS["embeddings.weight"], "nvfp4"), "x": TENSORS["bias"]}, metadata={"k": "v"}
    )
    content, path, rng, taken = whole.read_bytes(), tmp_path / "bad.safetensors", random.Random(0), 0
    for _ in range(600):
        path.write_bytes(bad_safetensors(rng, content))
        try:
            found = open_model(path)
        except BadFile:
            continue
        taken += 1
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == {tensor.name for tensor in found.tensors}
            assert (file.metadata() or {}) == found.metadata
    assert taken > 50

"""The `blockfp` command end to end: what it prints, writes and exits with."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from command import ARRAYS, HALF, MATRIX, plain, refused, run, write_model
from processes import LIMIT
from typer.testing import CliRunner

import blockfp
from blockfp import cli
from blockfp.check import backends
from blockfp.check.crosscheck import Definition
from blockfp.commands import console
from blockfp.definition import numerics
from blockfp.files.modelfile import Entry, write_safetensors
from blockfp.formats import NAMES


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.safetensors")


@pytest.fixture
def wrong_kernels(monkeypatch):
    """A backend "kernels" that errs in one code of the matrix's last row."""

    class Wrong(Definition):
        name = "kernels"

        def quantize(self, x, format):
            q = numerics.quantize(x, format)
            if x.ndim == 2:
                q.codes[-1, 5] ^= 1
            return q

    monkeypatch.setitem(backends.BACKENDS, "kernels", Wrong)


def test_info():
    result = run("info")
    assert result.exit_code == 0
    for word in ("blockfp", blockfp.__version__, "numpy", np.__version__, "apache-tvm-ffi", *backends.BACKENDS):
        assert word in result.stdout


def test_info_as_json():
    found = json.loads(run("info", "--json").stdout)
    assert found["blockfp"] == blockfp.__version__
    assert {f"backend {name}" for name in backends.BACKENDS} < set(found)
    assert all(set(row) == {"device", "operands", "how"} for row in found["products"])


def test_formats():
    lines = run("formats").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *NAMES]
    rows = {row["name"]: row for row in json.loads(run("formats", "--json").stdout)}
    assert tuple(rows) == NAMES
    assert rows["nvfp4"]["bits per element"] == 4.5
    assert rows["fp8_e4m3_128x128"]["bits per element"] == 8 + 32 / 128**2
    assert (rows["mxint8_32x32"]["block"], rows["fp8_e5m2_row"]["block"]) == ("32x32", "per row")


def test_version_and_help():
    assert run("--version").stdout == f"blockfp {blockfp.__version__}\n"
    assert run("check", "-h").stdout == run("check", "--help").stdout


def test_paragraphs_of_the_help_are_whole():
    """No line ends early: the terminal's width alone breaks lines."""
    text = run("check", "--help").stdout
    assert "and whether blockfp makes the same bits. With" in plain(text)
    assert "whether blockfp makes" in text


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("che", ["check"]),
        ("check --format mxint", ["mxint8", "mxint8_floor", "mxint8_32x32", "mxint8_32x32_floor"]),
        ("check --backend torch-", ["torch-cuda", "torch-compiled", "torch-definition"]),
        ("check --summation hopper", ["hopper_bf16", "hopper_fp8"]),
        ("export run out --to high", ["high-precision"]),
    ],
)
def test_completion(typed, offered, monkeypatch):
    """What a shell asks for when a user presses the tab key."""
    words = ["blockfp", *typed.split(" ")]
    line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_BLOCKFP_COMPLETE": "complete_bash"}
    for name, value in line.items():
        monkeypatch.setenv(name, value)
    found = CliRunner().invoke(cli.app, [], prog_name="blockfp").stdout.split()
    assert sorted(found) == sorted(offered)


def in_several_files(folder, arrays):
    """Writes a model as Hugging Face does: a file for each array, and their index."""
    folder.mkdir()
    names = {name: f"model-{i:05}-of-{len(arrays):05}.safetensors" for i, name in enumerate(arrays, 1)}
    for name, file in names.items():
        entry = Entry(name, arrays[name].dtype, arrays[name].shape)
        write_safetensors(folder / file, [entry], [(name, arrays[name])], {})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def test_models_in_several_files(model, tmp_path):
    """A folder and an index are the same model as one file: to be checked, and quantized into the same bytes."""
    index = in_several_files(tmp_path / "parts", ARRAYS)
    (tmp_path / "whole").mkdir()
    model.rename(tmp_path / "whole" / "model.safetensors")
    written = []
    for number, source in enumerate((tmp_path / "whole", index.parent, index)):
        checked = run("check", source, "--format", "mxfp8_e4m3", "--report", tmp_path / f"{number}.json")
        assert checked.exit_code == 0, checked.output
        assert "2 tensors in 1 format through" in plain(checked.stdout)
        target = tmp_path / f"{number}.safetensors"
        assert run("quantize", source, target, "--format", "nvfp4_16x16").exit_code == 0
        written.append(safetensors.numpy.load_file(target))
    for other in written[1:]:
        assert other.keys() == written[0].keys()
        assert all(np.array_equal(other[name], written[0][name]) for name in other)
    assert run("check", "--compare", tmp_path / "0.json", tmp_path / "1.json").exit_code == 0
    (index.parent / "model-00001-of-00004.safetensors").unlink()
    refused(run("check", index.parent), "names model-00001-of-00004.safetensors: no such file")


def test_the_current_folder_has_a_name(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert "skipped in ., 1 axis: layer.bias" in run("check", ".", "--format", "mxfp8_e4m3").stdout


def test_quiet(model, tmp_path, wrong_kernels):
    """Only errors are printed; the exit code stays."""
    done = run("check", model, "--format", "mxfp8_e4m3", "--backend", "numpy", "--backend", "kernels", "-q")
    assert (done.exit_code, done.stdout) == (1, "")
    done = run("quantize", model, tmp_path / "q.safetensors", "--format", "nvfp4", "-q")
    assert (done.exit_code, done.output) == (0, "")
    refused(run("check", "-q", "no.npy"), "no such file")
    assert run("formats").stdout


def test_as_many_checks_at_once_as_threads(model, monkeypatch):
    """A backend that counts who is in it: two at most, as asked; with one thread, one."""
    for threads in (1, 2):
        counting = Counting()
        monkeypatch.setitem(backends.BACKENDS, "counting", lambda counting=counting: counting)
        done = run("check", model, "--backend", "numpy", "--backend", "counting", "--threads", threads)
        assert done.exit_code == 0, done.output
        assert 1 <= counting.most <= threads
    refused(run("check", model, "--threads", 0), "greater than or equal to 1")


class Counting(Definition):
    """The definition, which knows how many quantize by it at once."""

    name = "counting"

    def __init__(self):
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def quantize(self, x, format):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            return super().quantize(x, format)
        finally:
            with self.lock:
                self.inside -= 1


def test_a_python_runs_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "blockfp", "--help"], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert "Usage: " in done.stdout


def test_info_says_what_is_not_here(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "jax", backends.installed("no_such_library", "jax_backend.check", "JaxBackend"))
    result = run("info")
    assert "unavailable: no_such_library is not installed" in plain(result.stdout)


def test_check_all_equal(model, tmp_path):
    report, plot = tmp_path / "out.json", tmp_path / "out.png"
    formats = ("--format", "mxfp8_e4m3", "--format", "nvfp4_16x16")
    result = run("check", model, *formats, "--report", report, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "all bits equal" in plain(result.stdout)
    assert "skipped in model.safetensors, 1 axis: layer.bias" in result.stdout
    assert "skipped in model.safetensors, dtype int64: ids" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")

    found = json.loads(report.read_text())
    assert found["identical"]
    assert next(iter(found["backends"])) == "numpy"
    assert [line["format"] for line in found["formats"]] == ["mxfp8_e4m3", "nvfp4_16x16"]
    [file] = found["files"]
    assert [(s["name"], s["reason"]) for s in file["skipped"]] == [("ids", "dtype int64"), ("layer.bias", "1 axis")]
    tensors = {tensor["name"]: tensor for tensor in file["tensors"]}
    assert tensors["experts"]["shape"] == [3, 40, 20]
    assert tensors["experts"]["dtype"] == "bfloat16"
    check = tensors["layer.weight"]["checks"][0]
    assert check["identical"]
    assert check["sqnr_db"] > 20
    assert check["bytes"] == 70 * 96 + 70 * 3
    assert check["original_bytes"] == 4 * 70 * 96
    assert sum(check["scale_exponents"].values()) == 70 * 3


def test_check_all_formats_of_several_files(model, tmp_path):
    np.save(tmp_path / "x.npy", MATRIX.astype(np.float16))
    np.savez(tmp_path / "z.npz", a=MATRIX, b=HALF)
    files = [model, tmp_path / "x.npy", tmp_path / "z.npz"]
    result = run("check", *files, "--backend", "numpy", "--report", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "only one backend, nothing to compare" in plain(result.stdout)
    found = json.loads((tmp_path / "out.json").read_text())
    assert [Path(file["path"]).name for file in found["files"]] == ["model.safetensors", "x.npy", "z.npz"]
    assert {line["format"] for line in found["formats"]} == set(NAMES)
    assert all(name in result.stdout for name in NAMES)


def test_per_tensor_table(model):
    result = run("check", model, "--format", "mxfp8_e4m3", "--backend", "numpy", "--per-tensor")
    assert "layer.weight" in result.stdout
    assert "experts" in result.stdout


@pytest.mark.parametrize(("shape", "reason"), [((4,), "1 axis"), ((0, 64), "no elements"), ((3, 8, 0), "no elements")])
def test_nothing_to_check_is_said(tmp_path, shape, reason):
    np.save(tmp_path / "v.npy", np.ones(shape, np.float32))
    result = run("check", tmp_path / "v.npy", "--backend", "numpy", "--plot", tmp_path / "v.png")
    assert result.exit_code == 2
    assert f"skipped in v.npy, {reason}: v" in result.stdout
    assert "0 tensors in 51 formats through numpy: nothing to check" in plain(result.stdout)
    assert "yes" not in result.stdout


def test_what_one_backend_has_alone_is_not_equal(model):
    result = run("check", model, "--format", "mxfp8_e4m3", "--backend", "numpy")
    assert result.exit_code == 2
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("mxfp8_e4m3")]
    assert row[1] == "-"


def test_check_names_the_first_difference(model, tmp_path, wrong_kernels):
    arguments = ("--backend", "numpy", "--backend", "kernels", "--format", "mxfp8_e4m3", "--format", "mxfp4_e2m1")
    result = run("check", model, *arguments, "--report", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert result.exit_code == 1
    code = numerics.quantize(MATRIX, "mxfp8_e4m3").codes[69, 5]
    bits = MATRIX[69, 5].view(np.uint32)
    difference = f"codes[69, 5] of input 0x{bits:08x} is 0x{code ^ 1:02x}, expected 0x{code:02x}"
    assert f"{model}, layer.weight, mxfp8_e4m3: kernels: {difference}" in result.stdout
    assert "codes[69, 10]" in result.stdout, "packed codes are counted by element"
    assert "bits differ" in plain(result.stdout)
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["identical"]
    [checks] = [tensor["checks"] for tensor in found["files"][0]["tensors"] if tensor["name"] == "layer.weight"]
    first = {"backend": "kernels", "part": "codes", "index": [69, 5], "input": f"0x{bits:08x}"}
    assert checks[0]["differences"][0] == {**first, "expected": f"0x{code:02x}", "found": f"0x{code ^ 1:02x}"}
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "mxfp8"), "format 'mxfp8' is not known; did you mean 'mxfp8_e5m2' or 'mxfp8_e4m3'"),
        (("--backend", "cuda"), "--backend cuda: must be one of numpy"),
        (("--report", "out.txt"), "--report out.txt: the name must end in .json"),
        (("--plot", "nowhere/out.png"), "--plot nowhere/out.png: nowhere is not a folder"),
    ],
)
def test_bad_options(model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused(run("check", model, *arguments), message)
    assert list(tmp_path.iterdir()) == [model]


def test_what_cannot_be_written(model, tmp_path, monkeypatch):
    """One line says that nothing can be written there: before the work where that can be known, after it otherwise."""
    named = ("--format", "mxfp8_e4m3", "--backend", "numpy", "--backend", "numpy")
    assert "only one backend" in plain(run("check", model, *named).stdout)
    with monkeypatch.context() as patch:
        patch.setattr(console.os, "access", lambda path, mode: mode != os.W_OK)
        refused(run("check", model, *named, "--report", tmp_path / "r.json"), "r.json:", "isn't writable")

    def full(*_):
        raise OSError(28, "No space left on device", "x.tmp")

    monkeypatch.setattr("blockfp.files.atomic.os.replace", full)
    for name, arguments in (
        ("r.json", ("check", model, *named, "--report")),
        ("q.safetensors", ("quantize", model, *named[:2])),
    ):
        said = f"error: [Errno 28] saving {tmp_path / name}: No space left on device: 'x.tmp'"
        refused(run(*arguments, tmp_path / name), said)
    assert list(tmp_path.iterdir()) == [model]


def test_a_backend_that_is_not_here(model, monkeypatch):
    for name in [name for name in backends.BACKENDS if name.startswith("jax")]:
        monkeypatch.setitem(backends.BACKENDS, name, backends.installed("no_such_library", "jax_backend.check", "JaxBackend"))
    refused(run("check", model, "--backend", "jax"), "--backend jax: unavailable: no_such_library is not installed")
    result = run("check", model, "--format", "mxfp8_e4m3")
    assert result.exit_code == 0
    assert "jax" not in result.stdout


@pytest.mark.parametrize("command", ["check", "quantize", "dequantize"])
def test_bad_files_are_named_and_nothing_is_written(model, tmp_path, command):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(model.read_bytes()[:-10])
    before = sorted(tmp_path.iterdir())
    more = {
        "check": ("--report", tmp_path / "out.json", "--plot", tmp_path / "out.png"),
        "quantize": (tmp_path / "out.safetensors", "--format", "mxfp8_e4m3"),
        "dequantize": (tmp_path / "out.safetensors",),
    }[command]
    refused(run(command, cut, *more), f"error: {cut}, tensor 'experts': truncated")
    refused(run(command, tmp_path / "none.safetensors", *more), "none.safetensors: no such file")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["check", "quantize"])
def test_a_file_damaged_further_in(tmp_path, command):
    path = tmp_path / "x.npz"
    np.savez(path, good=MATRIX, damaged=MATRIX + 1)
    data = bytearray(path.read_bytes())
    data[data.rindex((MATRIX + 1).tobytes()) + 100] ^= 1
    path.write_bytes(data)
    out = tmp_path / "out.safetensors"
    more = ("--report", tmp_path / "out.json") if command == "check" else (out,)
    result = run(command, path, *more, "--format", "mxfp8_e4m3")
    refused(result, "x.npz, tensor 'damaged': Bad CRC-32")
    assert list(tmp_path.iterdir()) == [path]


def test_installed_command(model, tmp_path):
    command = [Path(sys.executable).with_name("blockfp"), "check", model, "--format", "mxfp8_e4m3", "--backend", "numpy"]
    done = subprocess.run([*command, "--backend", "kernels"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode in (0, 2), done.stderr
    assert ("all bits equal" in plain(done.stdout)) == (done.returncode == 0)
    assert done.returncode == 0 or "kernels: unavailable" in done.stderr
    done = subprocess.run([command[0], "check", "no.npy"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (2, "error: no.npy: no such file\n")


def test_bfloat16_numpy_files_pass(tmp_path):
    np.save(tmp_path / "b.npy", HALF.astype(ml_dtypes.bfloat16))
    result = run("check", tmp_path / "b.npy", "--format", "mxfp6_e2m3", "--report", tmp_path / "b.json")
    assert result.exit_code == 0
    assert json.loads((tmp_path / "b.json").read_text())["files"][0]["tensors"][0]["dtype"] == "bfloat16"

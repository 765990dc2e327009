"""`blockfp check --compare` of two reports, and backends of a user's own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from command import plain, run
from processes import LIMIT
from samples import sample

from blockfp.check import backends

ARRAYS = {"up": sample("bf16_valued", (40, 70)), "down": sample("gaussian", (3, 20, 64), "float16")}
FORMATS = ("--format", "mxfp8_e4m3", "--format", "nvfp4", "--backend", "numpy")


def report(folder, arrays=ARRAYS, formats=FORMATS):
    folder.mkdir()
    np.savez(folder / "model.npz", **arrays)
    result = run("check", folder / "model.npz", *formats, "--report", folder / "report.json")
    assert result.exit_code == 2, result.output
    assert "only one backend, nothing to compare" in plain(result.stdout)
    return folder / "report.json"


def changed(path, change):
    found = json.loads(path.read_text())
    change(found)
    other = path.with_name("changed.json")
    other.write_text(json.dumps(found))
    return other


def check_of(found, tensor, format):
    [of_tensor] = [t for t in found["files"][0]["tensors"] if t["name"] == tensor]
    return next(check for check in of_tensor["checks"] if check["format"] == format)


@pytest.fixture
def path(tmp_path):
    return report(tmp_path / "a")


def test_equal_reports_of_two_places(path, tmp_path):
    other = report(tmp_path / "b")
    result = run("check", "--compare", path, other)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "format      equal  tensors",
        "mxfp8_e4m3  yes          2",
        "nvfp4       yes          2",
        "4 tensors in 2 formats, counted per format: all bits equal",
    ]


@pytest.mark.parametrize("part", ["codes", "scales", "values"])
def test_a_difference_is_named(path, part):
    def change(found):
        check_of(found, "down", "nvfp4")[f"{part}_sha256"] = "0" * 64

    result = run("check", "--compare", path, changed(path, change))
    assert result.exit_code == 1
    was = check_of(json.loads(path.read_text()), "down", "nvfp4")[f"{part}_sha256"]
    assert f"down, nvfp4: SHA-256 of {part} {was[:12]}.. and 000000000000.." in result.stdout
    assert "nvfp4       NO (1)" in result.stdout
    assert "mxfp8_e4m3  yes" in result.stdout


def test_one_bit_of_another_input_is_said(path, tmp_path):
    arrays = {**ARRAYS, "up": ARRAYS["up"].copy()}
    arrays["up"].view(np.uint32)[3, 3] ^= 1
    result = run("check", "--compare", path, report(tmp_path / "b", arrays))
    assert result.exit_code == 1
    assert "up: not the same tensor: other values" in result.stdout
    result = run("check", "--compare", path, report(tmp_path / "c", {**ARRAYS, "up": ARRAYS["up"][:20]}))
    assert "up: not the same tensor: [40, 70] and [20, 70]" in result.stdout


def test_what_is_in_one_alone(path, tmp_path):
    other = report(tmp_path / "b", {"up": ARRAYS["up"]}, ("--format", "mxfp8_e4m3", "--backend", "numpy"))
    result = run("check", "--compare", path, other)
    assert result.exit_code == 1
    assert "down: only in A" in result.stdout
    assert "up, nvfp4: only in A" in result.stdout
    none = report(tmp_path / "c", {"other": ARRAYS["up"]})
    assert run("check", "--compare", path, none).exit_code == 2


def test_versions_are_said_and_count_for_nothing(path):
    def change(found):
        found["versions"]["numpy"] = "1.0"
        del found["backends"]["numpy"]

    result = run("check", "--compare", path, changed(path, change))
    assert result.exit_code == 0
    assert f"A and B differ in numpy: {np.__version__} and 1.0" in result.stdout
    assert f"A and B differ in backend numpy: NumPy {np.__version__} and not there" in result.stdout


def test_a_report_whose_own_backends_differed_is_not_equal(path):
    result = run("check", "--compare", path, changed(path, lambda found: found.update(identical=False)))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2:] == [
        "bits differed among the backends of B; the first one's are compared",
        "4 tensors in 2 formats, counted per format: not all bits are equal",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a report of blockfp check"),
        ('{"files": 3}', "is not a report"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
        ('{"files": [], "files": []}', "is not JSON: duplicate name 'files'"),
        ("9" * 5000, "is not JSON"),
        ('{"files": [], "identical": true, "backends": {}, "versions": "x"}', "is not a report"),
    ],
)
def test_what_is_no_report(path, text, message):
    other = path.with_name("other.json")
    other.write_text(text, encoding="latin-1")
    result = run("check", "--compare", path, other)
    assert result.exit_code == 2
    assert f"{other}: {message}" in plain(result.stderr)


def the_tensor(found):
    return found["files"][0]["tensors"][0]


def put(into, key, value):
    return lambda found: into(found).__setitem__(key, value)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [7, None, [1], {"a": 1}, True])
@pytest.mark.parametrize(
    ("into", "key"),
    [
        (the_tensor, "sha256"),
        (the_tensor, "dtype"),
        (the_tensor, "name"),
        (the_tensor, "checks"),
        (lambda found: the_tensor(found)["shape"], 0),
        (lambda found: the_tensor(found)["checks"][0], "codes_sha256"),
        (lambda found: the_tensor(found)["checks"][0], "format"),
        (lambda found: found["versions"], "numpy"),
        (lambda found: found["backends"], "numpy"),
        (lambda found: found, "versions"),
    ],
)
def test_a_report_of_other_types(path, into, key, value, side):
    pair = [path, path]
    pair[side] = changed(path, put(into, key, value))
    result = run("check", "--compare", *pair)
    if (key, value) == (0, 7):  # a size
        assert result.exit_code == 1
        return
    assert result.exit_code == 2, result.output
    assert f"{pair[side]}: is not a report of blockfp check" in plain(result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1
    assert isinstance(result.exception, SystemExit)


def test_hashes_that_are_there_twice_are_not_passed_over(path):
    """The second would hide the first."""
    for double in (
        lambda found: the_tensor(found)["checks"].append(the_tensor(found)["checks"][0]),
        lambda found: found["files"][0]["tensors"].append(the_tensor(found)),
    ):
        other = changed(path, double)
        result = run("check", "--compare", path, other)
        assert result.exit_code == 2, result.output
        assert "which is duplicated" in result.stderr


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing", "too long"])
def test_a_report_that_is_no_file(path, kind):
    """Nothing waits for a pipe, or reads a device to its end."""
    other = path.with_name("other.json")
    if kind == "pipe":
        os.mkfifo(other)
    elif kind == "device":
        other.symlink_to("/dev/zero")
    elif kind == "folder":
        other.mkdir()
    elif kind == "too long":
        with other.open("wb") as file:
            file.truncate(2**30 + 1)
    command = [sys.executable, "-m", "blockfp", "check", "--compare", path, other]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    why = {
        "folder": "is a directory",
        "nothing": "No such file",
        "too long": "is not JSON: the file of 1073741825 bytes is not",
    }
    assert done.stderr.startswith(f"error: {other}: {why.get(kind, 'is not a regular file')}")
    assert len(done.stderr.splitlines()) == 1


def test_options_that_do_not_go_together(path):
    result = run("check", "model.npz", "--compare", path, path, "--per-tensor")
    assert result.exit_code == 2
    assert "remove FILE and --per-tensor" in result.stderr
    result = run("check")
    assert result.exit_code == 2
    assert "name a .safetensors, .npy or .npz file, a folder with a model, or two reports with --compare" in result.stderr


OWN = """
import numpy as np
from blockfp.definition import numerics
from blockfp.check.crosscheck import Definition


class Same(Definition):
    name = "mine"


class Off(Same):
    def quantize(self, x, format):
        q = numerics.quantize(x, format)
        q.codes[0, 1] ^= 1
        return q


class Tuple(Same):
    def quantize(self, x, format):
        return tuple(numerics.quantize(x, format))


class Lists(Same):
    def dequantize(self, q, format, dtype, columns):
        return [1.0]


class Numpy(Definition):
    pass


class Nameless:
    version = "1"

    def quantize(self): ...

    def dequantize(self): ...


def make():
    return Same()


same = Same()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "my_backend.py").write_text(OWN)
    np.save(folder / "x.npy", ARRAYS["up"])
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [*backends.sys.path])
    yield
    backends.sys.modules.pop("my_backend", None)


def check_own(*names):
    return run("check", "x.npy", "--format", "mxfp8_e4m3", *(a for name in names for a in ("--backend", f"my_backend:{name}")))


@pytest.mark.parametrize("name", ["Same", "make", "same"])
def test_a_backend_of_your_own(own, name):
    result = check_own(name)
    assert result.exit_code == 0, result.output
    assert "through numpy, mine: all bits equal" in plain(result.stdout)


def test_its_differences_are_named(own):
    result = check_own("Off")
    assert result.exit_code == 1
    assert "mine: codes[0, 1] of input" in result.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Tuple",
            "backend 'mine': quantize must return blockfp.definition.numerics.Quantized(codes, scales, tensor_scale), "
            "got tuple",
        ),
        ("Lists", "backend 'mine': dequantize must return a NumPy array, got list"),
        ("Missing", "--backend my_backend:Missing: my_backend has no attribute 'Missing'"),
        ("Nameless", "--backend my_backend:Nameless: Nameless.name must be a string: see blockfp.check.crosscheck.Backend"),
        ("Numpy", "--backend my_backend:Numpy: another backend is also named 'numpy'"),
    ],
)
def test_what_is_no_backend(own, name, message):
    result = check_own(name)
    assert result.exit_code == 2
    assert message in plain(result.stderr)


def test_a_module_that_is_not_there(own):
    result = run("check", "x.npy", "--backend", "no_such_module:Same")
    assert result.exit_code == 2
    assert "--backend no_such_module:Same: unavailable: No module named 'no_such_module'" in plain(result.stderr)

"""Finding and building the CUDA library, with a compiler and a driver that stand in for NVIDIA's."""

import os
import re
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import LIMIT

from blockfp.kernels import cuda_build, cuda_library
from blockfp.kernels.switch import once

NVCC = """#!/bin/sh
echo call >> "$BLOCKFP_CALLS"
while [ "$1" != -o ]; do shift; done
sleep 0.02
echo "${BLOCKFP_MADE-code}" | head -c -1 > "$2"
"""


class Driver:
    """The calls of libcuda that are made, for devices of these compute capabilities."""

    def __init__(self, *capabilities):
        self.capabilities = capabilities

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.capabilities[device.value][{75: 0, 76: 1}[attribute]]
        return 0


@pytest.fixture
def devices(monkeypatch, tmp_path):
    """Makes devices of these capabilities visible; libraries are looked for in an empty cache alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_build, "installed", lambda name: None)
    monkeypatch.setattr(cuda_build, "LIBRARY", "libblockfp_cuda_of_a_test.so")
    monkeypatch.setattr(cuda_library._cuda, "loaded", None)
    monkeypatch.setattr(cuda_library._cuda, "_load", once(cuda_library._cuda._load_first))
    monkeypatch.setattr(cuda_library._cuda, "why_not", "")

    def visible(*capabilities):
        monkeypatch.setattr(cuda_build, "_driver", lambda: Driver(*capabilities))
        for module in (cuda_build, cuda_library):
            monkeypatch.setattr(module, "device_count", lambda: len(capabilities))

    return visible


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """A compiler that makes files of a few bytes; the number of its calls."""
    compiler, calls = tmp_path / "bin" / "nvcc", tmp_path / "calls"
    compiler.parent.mkdir()
    compiler.write_text(NVCC)
    compiler.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setenv("BLOCKFP_CALLS", str(calls))
    return lambda: len(calls.read_text().splitlines())


def test_the_architectures_are_those_of_all_devices(devices):
    devices((9, 0), (9, 0), (10, 0))
    assert cuda_build.architectures() == ("90a", "100a")
    devices((12, 0), (8, 6))
    assert cuda_build.architectures() == ("86", "120a")
    devices((9, 0), (7, 5))
    with pytest.raises(RuntimeError, match=r"device 1 has 7\.5: leave such devices out of CUDA_VISIBLE_DEVICES"):
        cuda_build.architectures()
    devices()
    with pytest.raises(RuntimeError, match="no CUDA device is here"):
        cuda_build.architectures()


def test_of_several_that_want_it_one_builds(devices, nvcc):
    # Threads stand for processes: each opens the lock by itself.
    devices((9, 0))
    with ThreadPoolExecutor(4) as pool:
        found = {future.result() for future in [pool.submit(cuda_build.find_or_build) for _ in range(4)]}
    assert len(found) == 1
    flags = cuda_build.flags_for("90a")
    assert nvcc() == len(cuda_build.commands(cuda_build.where().parent, flags)) + 1


def test_what_is_built_is_found_without_a_compiler(devices, nvcc, monkeypatch):
    devices((9, 0))
    built, calls = cuda_build.find_or_build(), nvcc()
    monkeypatch.setattr(cuda_build, "_nvcc", lambda: pytest.fail("asked for nvcc"))
    assert cuda_build.find_or_build() == built
    assert nvcc() == calls


@pytest.fixture
def quick(nvcc, monkeypatch):
    """The same compiler, called for one of the sources; the number of its calls."""
    every = cuda_build.commands
    monkeypatch.setattr(cuda_build, "commands", lambda out, flags: every(out, flags)[:1])
    return nvcc


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


def test_nobody_else_can_write_what_is_built(devices, quick, tmp_path):
    """Whatever the umask is."""
    devices((9, 0))
    before = os.umask(0)
    try:
        built = cuda_build.find_or_build()
    finally:
        os.umask(before)
    key = built.parent.name
    stem = cuda_build.LIBRARY.removesuffix(".so")
    assert modes(tmp_path / "cache") == {
        **dict.fromkeys(["cache", "blockfp", key], 0o700),
        f"{stem}.so": 0o644,
        f"{stem}.sha256": 0o600,
        f"{stem}.lock": 0o600,
    }
    assert cuda_build.find() == built


PLACES = {"library": lambda path: path, "sum": lambda path: path.with_suffix(".sha256"), "key": lambda path: path.parent}
PLACES["cache"] = lambda path: path.parent.parent


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["others may write", "a group may write", "of another user", "a link of another user's"])
def test_what_others_may_have_put_there_is_not_loaded(devices, quick, place, how, tmp_path):
    """Nor does anything beside it change; `info` and the warning say which file or folder it is."""
    devices((9, 0))
    path = PLACES[place](cuda_build.find_or_build())
    if "user" in how and os.geteuid() != 0:
        pytest.skip("root alone can make a file of another user's")
    if "user" not in how:
        path.chmod(path.stat().st_mode | (stat.S_IWOTH if how == "others may write" else stat.S_IWGRP))
    elif how == "of another user":
        os.chown(path, 1234, -1)
    else:
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
        os.chown(path, 1234, -1, follow_symlinks=False)
    calls = quick()
    found = modes(tmp_path)
    why = "belongs to uid 1234" if "user" in how else r"has mode 0\d+, with which others may write it"
    said = rf"^{path} {why}; no code is loaded from there: remove it, or set XDG_CACHE_HOME"
    for ask in (cuda_build.find, cuda_build.find_or_build):
        with pytest.raises(RuntimeError, match=said):
            ask()
    assert re.search(rf"{path} {why}", cuda_library.status())
    with pytest.warns(RuntimeWarning, match=rf"no CUDA kernels: RuntimeError: {path} {why}.*the definition runs instead"):
        assert not cuda_library.available()
    assert quick() == calls
    assert modes(tmp_path) == found


def test_a_cache_that_everybody_may_rename(devices, quick, tmp_path):
    """In /tmp nobody renames what isn't theirs, by the sticky bit; elsewhere they could, between a look and the loading."""
    devices((9, 0))
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match=rf"{cache}/blockfp can be renamed by everybody, as {cache} has no sticky bit"):
        cuda_build.find_or_build()
    assert quick() == 0
    cache.chmod(0o1777)
    assert cuda_build.find_or_build() == cuda_build.find()


@pytest.mark.parametrize("damage", ["empty", "cut short", "changed", "no sum", "no library"])
def test_what_is_not_what_was_built_is_built_again(devices, quick, damage, capfd):
    devices((9, 0))
    built, calls = cuda_build.find_or_build(), quick()
    content = built.read_bytes()
    if damage in ("empty", "cut short", "changed"):
        built.write_bytes({"empty": b"", "cut short": content[:-1], "changed": content[::-1]}[damage])
    else:
        (built if damage == "no library" else built.with_suffix(".sha256")).unlink()
    assert cuda_build.find() is None
    assert "not built yet" in cuda_library.status()
    assert cuda_build.find_or_build() == built
    assert (quick(), built.read_bytes()) == (2 * calls, content)
    assert ("is not what was built, by its SHA-256" in capfd.readouterr().err) == (damage != "no library")


def test_an_empty_library_is_an_error(devices, quick, monkeypatch):
    devices((9, 0))
    monkeypatch.setenv("BLOCKFP_MADE", "")
    with pytest.raises(RuntimeError, match="nvcc has made an empty library"):
        cuda_build.find_or_build()
    assert cuda_build.find() is None


def test_a_relative_cache_is_ignored(devices, quick, tmp_path, monkeypatch):
    """The folder in which somebody works is no place to take code from."""
    devices((9, 0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("cache", ".", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cuda_build.where().parents[2] == tmp_path / "home" / ".cache"
    monkeypatch.setenv("HOME", "home")
    with pytest.raises(RuntimeError, match="the home folder 'home' is no absolute path: set HOME, or XDG_CACHE_HOME, to one"):
        cuda_build.find_or_build()
    assert "the home folder 'home'" in cuda_library.status()


def test_the_library_is_on_the_disk_before_it_has_its_name(devices, quick, monkeypatch):
    devices((9, 0))
    flushed, fsync, replace = [], os.fsync, os.replace

    def flush(descriptor):
        fsync(descriptor)
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def named(source, target):
        assert str(source) in flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", named)
    cuda_build.find_or_build()
    assert len(flushed) == 1


def test_a_device_without_kernels_is_warned_of_once(devices, monkeypatch):
    devices((9, 0))

    def missing():
        raise FileNotFoundError("nvcc was not found")

    monkeypatch.setattr(cuda_build, "_nvcc", missing)
    with pytest.warns(
        RuntimeWarning, match="no CUDA kernels: FileNotFoundError: nvcc was not found; the definition runs instead"
    ):
        assert not cuda_library.available()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cuda_library.available()


def test_without_a_device_nothing_is_said():
    script = "from blockfp.kernels import cuda_library; cuda_library.device_count = lambda: 0; cuda_library.available()"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=LIMIT)


def test_python_knows_each_function_that_the_library_exports():
    folder = cuda_build._sources() / "cuda"
    text = "".join(path.read_text() for path in folder.rglob("*.cu"))
    assert set(re.findall(r"EXPORT_(?:TYPED_FUNC|PACKED)\((\w+)[,)]", text)) - {"name"} == set(cuda_library._FUNCTIONS)

"""Finding and building the CUDA library, with a compiler and a driver that stand in for NVIDIA's."""

import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import LIMIT

from blockfp.kernels import cuda_build, cuda_library
from blockfp.kernels.once import once

NVCC = """#!/bin/sh
echo call >> "$BLOCKFP_CALLS"
while [ "$1" != -o ]; do shift; done
sleep 0.02
: > "$2"
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
    """A compiler that makes empty files; the number of its calls."""
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

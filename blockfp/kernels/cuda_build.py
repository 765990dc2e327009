"""Finds the CUDA kernel library, or builds it with nvcc into a cache.

    ~/.cache/blockfp/KEY/libblockfp_cuda.so        KEY is a digest of the sources and flags
    ~/.cache/blockfp/KEY/libblockfp_cuda.sha256    digest of the library, written when it was built

Code is loaded from the cache, so only its user may be able to write there: files and folders that belong to another user or are
writable by others are refused with their path. A library that doesn't match its digest, such as an empty one, is rebuilt.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from .library import import_tvm_ffi, installed

LIBRARY = "libblockfp_cuda.so"
ELEMENTS = ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "Int8")
_PER_ELEMENT = (
    *("quantize_aligned", "quantize_tiles", "quantize_gated", "quantize_groups", "quantize_rows"),
)  # longest compile first
_FLAGS = ("-std=c++17", "-O3", "--threads", "1", "-Xcompiler", "-fPIC,-fvisibility=hidden")


@cache
def device_count() -> int:
    """Returns the number of CUDA devices that the driver sees; 0 without a driver."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def architectures() -> tuple[str, ...]:
    """Returns the visible devices' architectures as nvcc names them, with generation-specific instructions: ("89", "90a").

    Raises RuntimeError without a device, or if the kernels can't run on one.
    """
    driver, found = _driver(), set()
    if driver is None or device_count() == 0:
        raise RuntimeError("no CUDA device is here: name the architecture to build for")
    for index in range(device_count()):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        if major.value < 8:
            raise RuntimeError(
                f"the CUDA kernels need compute capability 8.0 or later, and device {index} has {major.value}.{minor.value}: "
                "leave such devices out of CUDA_VISIBLE_DEVICES"
            )
        found.add((major.value, minor.value))
    # Generation-specific ("a") targets exist from 9.0.
    return tuple(f"{major}{minor}{'a' if major >= 9 else ''}" for major, minor in sorted(found))


def where() -> Path:
    """Returns the library's path, built or not: the installed one, else one in the cache."""
    return installed(LIBRARY) or _cache() / _digest(_sources(), flags_for(*architectures())) / LIBRARY


def find() -> Path | None:
    """Returns the library's path, or None if it must be built first.

    Raises RuntimeError if somebody else could have written to the cache or to a folder above it.
    """
    path = where()
    if path.parent.parent != _cache():
        return path
    _check_folders(path.parent)
    sum = path.with_suffix(".sha256")
    if not path.exists() or not sum.exists():
        return None
    for file in (path, sum):
        _check_own(file)
    return path if _sum(path) == sum.read_text() else None


def find_or_build() -> Path:
    """Returns the library's path and builds it if necessary. One of several processes builds; the others wait.

    Raises RuntimeError as `find` does and if the compiler fails, OSError without a compiler or a writable cache.
    """
    if found := find():
        return found
    path = where()
    _make_folder(path.parent)
    _check_folders(path.parent)
    with os.fdopen(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := find():
            return found
        if path.exists():
            print(f"blockfp: {path} is not what was built, by its SHA-256", file=sys.stderr, flush=True)
        names = ", ".join(f"sm_{a}" for a in architectures())
        print(f"blockfp: building its CUDA kernels for {names}, once, into {path.parent}", file=sys.stderr, flush=True)
        build(path, flags_for(*architectures()))
        sum = path.with_suffix(".sha256")
        sum.unlink(missing_ok=True)
        with os.fdopen(os.open(sum, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(_sum(path))
    return path


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_folder(path: Path) -> None:
    """Creates a folder and missing parents with access for this user only, whatever the umask."""
    if not path.is_dir():
        _make_folder(path.parent)
        with suppress(FileExistsError):
            path.mkdir(0o700)


def _check_folders(folder: Path) -> None:
    """Raises RuntimeError if others may have written to a folder of the cache, or can."""
    for each in (folder.parent, folder):
        if os.path.lexists(each):
            _check_own(each)
    for above in (folder.parent.parent, folder.parent.resolve().parent):
        if above.exists() and above.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise _refused(folder.parent, f"can be renamed by everybody, as {above} has no sticky bit")


def _check_own(path: Path) -> None:
    for found in (path.lstat(), path.stat()):
        if found.st_uid not in (0, os.geteuid()):
            raise _refused(path, f"belongs to uid {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refused(path, f"has mode {stat.S_IMODE(found.st_mode):04o}, with which others may write it")


def _refused(path: Path, why: str) -> RuntimeError:
    return RuntimeError(f"{path} {why}; no code is loaded from there: remove it, or set XDG_CACHE_HOME to a folder of your own")


def flags_for(*architectures: str) -> tuple[str, ...]:
    """Returns nvcc's flags for machine code of these architectures, such as "90a" and "100a"."""
    return (*_FLAGS, *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures))


def _sources() -> Path:
    """Returns the folder with cuda/ and include/: inside the package, or next to it in a source tree."""
    for place in (Path(__file__).parent, Path(__file__).parents[2] / "kernels"):
        if (place / "cuda").is_dir():
            return place
    raise FileNotFoundError("the CUDA sources are not beside the package: install blockfp again")


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore relative paths
        base = Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError(f"the home folder {str(Path.home())!r} is no absolute path: set HOME, or XDG_CACHE_HOME, to one")
    return base / "blockfp"


def _nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None and Path("/usr/local/cuda/bin/nvcc").is_file():
        found = "/usr/local/cuda/bin/nvcc"
    if found is None:
        raise FileNotFoundError(
            "nvcc was not found: install the CUDA toolkit, or install blockfp with -Ccmake.define.BLOCKFP_CUDA=ON where it is"
        )
    return found


def _digest(sources: Path, flags: tuple[str, ...]) -> str:
    # Without the compiler's version, since built libraries run on machines without nvcc.
    from importlib import metadata

    digest = hashlib.sha256(repr((flags, ELEMENTS, metadata.version("apache-tvm-ffi"))).encode())
    for folder in ("cuda", "include"):
        for file in sorted(p for p in (sources / folder).rglob("*") if p.is_file()):
            digest.update(str(file.relative_to(sources)).encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def commands(out: Path, flags: tuple[str, ...]) -> list[tuple[list[str], Path]]:
    """Returns the compiler's calls as (command, object file)."""
    sources = _sources()
    includes = [f"-I{p}" for p in (sources / "cuda", sources / "include", *_tvm_includes())]
    files = {file.stem: file for file in sorted((sources / "cuda").rglob("*.cu"))}
    units = [(name, element) for name in _PER_ELEMENT for element in ("E2M1", *(e for e in ELEMENTS if e != "E2M1"))]
    units += [(name, "") for name in files if name not in _PER_ELEMENT]
    calls = []
    for name, element in units:
        target = out / f"{name}{'_' if element else ''}{element}.o"
        define = [f"-DBLOCKFP_ELEMENT={element}"] if element else []
        calls.append(([_nvcc(), *flags, *define, *includes, "-c", str(files[name]), "-o", str(target)], target))
    return calls


def _tvm_includes() -> list[str]:
    libinfo = import_tvm_ffi("tvm_ffi.libinfo")

    return [str(libinfo.find_include_path()), str(libinfo.find_dlpack_include_path())]


def build(path: Path, flags: tuple[str, ...]) -> None:
    """Compiles and links the library to `path`, which appears complete or not at all.

    Raises RuntimeError with the compiler's message, and OSError without a compiler or if the library can't be written.
    """
    libinfo = import_tvm_ffi("tvm_ffi.libinfo")

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        calls = commands(Path(scratch), flags)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, (call for call, _ in calls)))
        linked = Path(scratch) / LIBRARY
        tvm = Path(libinfo.find_libtvm_ffi())
        link = [_nvcc(), "-shared", "-cudart", "static", *(str(target) for _, target in calls)]
        _run([*link, f"-L{tvm.parent}", "-ltvm_ffi", "-ldl", "-o", str(linked)])
        if not linked.stat().st_size:
            raise RuntimeError(f"{link[0]} has made an empty library")
        linked.chmod(0o644)
        with linked.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(linked, path)


def main(arguments: list[str]) -> None:
    """`python -m blockfp.kernels.cuda_build OUT 90a 100a` builds the library at OUT; it needs no device."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m blockfp.kernels.cuda_build OUT ARCHITECTURE [ARCHITECTURE ...]")
    build(Path(arguments[0]).absolute(), flags_for(*arguments[1:]))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main(sys.argv[1:])

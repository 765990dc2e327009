"""Processes of their own: modules that an import brings along, and first calls from many threads at once."""

import json
import subprocess
import sys
import textwrap
import threading
import tomllib
from pathlib import Path

import pytest
from processes import LIMIT

from blockfp.kernels.switch import once

ROOT = Path(__file__).parents[2]

HEAVY = {"jax", "jaxlib", "torch", "tvm_ffi", "typer", "rich", "matplotlib", "safetensors"}


def imported_by(statement: str, tmp_path) -> set[str]:
    """The names of all modules that are there after an import."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    return set(json.loads(done.stdout))


def test_the_core_brings_no_framework(tmp_path):
    found = imported_by("import blockfp, blockfp.sharding.plans, blockfp.sharding.simulate, blockfp.check.crosscheck", tmp_path)
    assert not found & HEAVY


@pytest.mark.parametrize(("face", "other"), [("jax", "torch"), ("torch", "jax")])
def test_a_face_brings_neither_the_other_nor_an_adapter(tmp_path, face, other):
    pytest.importorskip(face)
    found = imported_by(f"import blockfp.{face}", tmp_path)
    assert face in found
    assert other not in found
    assert [name for name in found if name.startswith("blockfp.integrations")] == []


QUANTIZES = {
    "blockfp": "import blockfp, numpy; blockfp.quantize(numpy.ones((2, 64), 'f4'), 'mxfp8_e4m3')",
    "jax": "import blockfp.jax as bfp, jax.numpy as jnp; bfp.quantize(jnp.ones((2, 64)), 'mxfp8_e4m3').dequantize()",
}
THEN_TORCH = """
from blockfp.kernels import native
assert native.available(), native.status()
assert "tvm_ffi" in sys.modules and "torch" not in sys.modules
import numpy, torch, tvm_ffi
import blockfp.torch as bfp
x = torch.linspace(-3, 3, 256).reshape(4, 64)
assert bfp.quantize(x, "mxfp8_e4m3").dequantize().shape == x.shape
x.requires_grad_()
w = bfp.quantize(torch.ones(32, 64), "mxfp8_e4m3_32x32")
bfp.linear(x, w, recipe="mxfp8").sum().backward()
assert bool(x.grad.isfinite().all())
shared = torch.arange(5)
assert torch.from_dlpack(tvm_ffi.from_dlpack(shared)).data_ptr() == shared.data_ptr()
assert tvm_ffi.convert(lambda x: int(numpy.from_dlpack(x).sum()))(shared) == 10
"""


@pytest.mark.parametrize("face", QUANTIZES)
def test_kernels_bring_no_torch(tmp_path, face):
    """TVM FFI, which calls them, would import it first. Where it is imported later its tensors go through, all the same."""
    pytest.importorskip("torch")
    pytest.importorskip("tvm_ffi")
    if face != "blockfp":
        pytest.importorskip(face)
    script = f"import sys\n{QUANTIZES[face]}\n{THEN_TORCH}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_torch_is_hidden_from_one_thread_alone(tmp_path):
    """Another thread that imports it meanwhile gets it; one that has it already keeps it; TVM FFI may insist on it."""
    modules = {
        "torch": "",
        "insists": "import torch",
        "tvm_ffi": """
            import sys, threading
            thread = threading.Thread(target=__import__, args=("torch",))
            thread.start()
            thread.join()
            others = sys.modules.pop("torch")
            try:
                import torch
            except ImportError:
                torch = None
        """,
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    script = """
import sys
from blockfp.kernels.library import import_tvm_ffi
finders = list(sys.meta_path)
made = import_tvm_ffi()
assert made.others is not None and made.torch is None
assert sys.meta_path == finders
del sys.modules["tvm_ffi"]
assert import_tvm_ffi("insists").torch
del sys.modules["insists"]
import torch
assert import_tvm_ffi("insists").torch is torch, "it is there already"
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_the_core_needs_nothing_optional(tmp_path):
    absent = "import sys; sys.modules |= dict.fromkeys(['jax', 'torch', 'typer']); import blockfp, numpy; "
    use = "blockfp.quantize(numpy.ones((2, 64), 'f4'), 'nvfp4').dequantize()"
    subprocess.run([sys.executable, "-c", absent + use], cwd=tmp_path, timeout=LIMIT, check=True)


def test_the_command_says_what_it_needs(tmp_path):
    script = "import sys; sys.modules['typer'] = None; import blockfp.cli"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert done.stderr == "the blockfp command needs typer: pip install 'blockfp[cli]'\n"


def test_the_core_loads_no_more_than_quantizing_needs(tmp_path):
    # Time is for benchmarks/cpu.py. A room that is loaded unasked, or a package that starts a network client, shows here.
    script = """
import json, sys
import numpy, ml_dtypes
before = set(sys.modules)
import blockfp
added = set(sys.modules) - before
packages = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
print(json.dumps([sorted(packages), sorted(added)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    packages, added = json.loads(done.stdout)
    assert packages == ["array_api_compat", "blockfp"]
    unasked = {"cli", "check", "files.export", "files.manifest", "files.modelfile", "sharding.plans", "sharding.simulate"}
    unasked |= {"jax", "torch"}
    assert not {f"blockfp.{module}" for module in unasked} & set(added)
    assert not {"asyncio", "email", "http.client", "importlib.metadata", "multiprocessing", "ssl", "subprocess"} & set(added)


@pytest.mark.parametrize(
    ("face", "own"),
    [
        ("jax", {"jax._src", "jax.experimental", "jax.extend"}),
        ("torch", {"torch.utils"}),  # not torch._dynamo, DTensor or DCP, which cost more than the rest of the face
    ],
)
def test_a_face_brings_little_beside_its_library(tmp_path, face, own):
    pytest.importorskip(face)
    added = imported_by(f"import blockfp.{face}", tmp_path) - imported_by(f"import numpy, {face}", tmp_path)
    others = {name for name in added if name.partition(".")[0] not in ("array_api_compat", "blockfp", "ml_dtypes")}
    libraries = {".".join(name.split(".")[:2]) for name in others if name.partition(".")[0] not in sys.stdlib_module_names}
    assert libraries == own
    assert len(others) < 50


DTENSOR = """
import sys, importlib.util, torch, torch.distributed as dist
import blockfp.torch as bfp
q = bfp.quantize(torch.ones(32, 64), "mxfp8_e4m3")
assert "torch.distributed.tensor" not in sys.modules
assert importlib.util.find_spec("torch.distributed.tensor") is not None, "found, not imported"
finders = len(sys.meta_path)
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
assert len(sys.meta_path) == finders - 1

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
try:
    bfp.quantize(DTensor.from_local(torch.ones(32, 64), mesh, [Replicate()]), "mxfp8_e4m3")
except ValueError as error:
    print("quantize:", error)
try:
    DTensor.from_local(q, mesh, [Shard(0)]).dequantize()
except NotImplementedError as error:
    print("dequantize:", error)
codes, scales = (DTensor.from_local(part, mesh, [Shard(0)]) for part in (q.codes, q.scales))
values = torch.ops.blockfp.dequantize(codes, scales, None, q.format.name, torch.float32, 64, [0, 0])
print("placed:", tuple(values.placements) == (Shard(0),) and bool((values.to_local() == 1).all()))
dist.destroy_process_group()
"""


def test_dtensor_may_be_imported_later(tmp_path):
    """The face doesn't import it, and the rules for it hold as soon as a program does."""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", DTENSOR], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["quantize"].startswith("x is a DTensor")
    assert lines["dequantize"].startswith("a DTensor has no dequantize()")
    assert lines["placed"] == "True"


@pytest.mark.parametrize(("face", "library"), [("jax", "JAX"), ("torch", "PyTorch")])
def test_a_face_says_which_extra_installs_its_library(tmp_path, face, library):
    """Nothing else that is missing is called so: another module's error stays its own."""
    for absent, message in (
        (face, f"ModuleNotFoundError: blockfp.{face} needs {library}: pip install 'blockfp[{face}]'"),
        ("ml_dtypes", "ModuleNotFoundError: import of ml_dtypes halted; None in sys.modules"),
    ):
        script = f"import sys; sys.modules[{absent!r}] = None; import blockfp.{face}"
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
        assert done.stderr.splitlines()[-1] == message


@pytest.mark.parametrize(
    ("face", "library", "old", "private"),
    [
        ("jax", "JAX", "0.10.1", "jax._src.dtypes.register_canonicalize_value_handler"),
        ("torch", "PyTorch", "2.10.0", "torch._foreach_add_"),
    ],
)
def test_a_version_that_will_not_do_is_named(tmp_path, face, library, old, private):
    """Too old, as pyproject.toml says it; or without a private part that a newer one may have moved."""
    here = pytest.importorskip(face).__version__
    with (ROOT / "pyproject.toml").open("rb") as file:
        bounds = tomllib.load(file)["project"]["optional-dependencies"][face]
    (oldest,) = (bound.partition(">=")[2] for bound in bounds if bound.startswith(f"{face}>="))
    too_old = f"{face}.__version__, {face}.__version_info__ = {old!r}, {tuple(map(int, old.split('.')))}"
    for change, message in (
        (too_old, f"blockfp.{face} needs {library} {oldest} or later, got {old}"),
        (f"del {private}", f"and {library} {here} has others"),
    ):
        script = f"import {face}\n{change}\nimport blockfp.{face}"
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
        assert done.stderr.splitlines()[-1].startswith("ImportError: ")
        assert message in done.stderr.splitlines()[-1]


FIRST_CALLS = """
import sys, threading
import numpy
import blockfp
{imports}

sys.setswitchinterval(1e-6)
formats = ["mxfp8_e4m3", "nvfp4", "fp8_e4m3", "mxfp6_e2m3"]
x = {ones}
start, failed = threading.Barrier(len(formats) * 2), []

def first(format):
    start.wait()
    try:
        q = {face}.quantize(x, format)
        assert (numpy.asarray(q.dequantize()) == 1).all()
    except Exception as error:
        failed.append(f"{{format}}: {{error}}")

threads = [threading.Thread(target=first, args=(format,)) for format in formats * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("\\n".join(failed) or None)
"""

FACES = {
    "blockfp": ("", "numpy.ones((64, 128), 'f4')"),
    "blockfp.jax": ("import blockfp.jax, jax_tvm_ffi, jax.numpy", "jax.numpy.ones((64, 128))"),
    "blockfp.torch": ("import blockfp.torch, torch", "torch.ones(64, 128)"),
}


@pytest.mark.parametrize("face", FACES)
def test_threads_may_call_first_together(tmp_path, face):
    imports, ones = FACES[face]
    script = FIRST_CALLS.format(imports=imports, ones=ones, face=face)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_once_runs_a_function_once_for_all_threads():
    runs, inside, go_on = [], threading.Event(), threading.Event()

    @once
    def slow(number):
        runs.append(number)
        inside.set()
        assert go_on.wait(LIMIT)
        return object()

    found = []
    threads = [threading.Thread(target=lambda: found.append(slow(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert inside.wait(LIMIT)
    go_on.set()
    for thread in threads:
        thread.join()
    assert runs == [1]
    assert len(found) == 4
    assert len({id(result) for result in found}) == 1
    slow(2)
    assert runs == [1, 2]


def test_once_tries_again_after_an_error():
    tries = []

    @once
    def second_time():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return "there"

    with pytest.raises(OSError, match="not yet"):
        second_time()
    assert second_time() == second_time() == "there"
    assert len(tries) == 2

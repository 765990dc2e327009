"""Modules that an import brings along, each import in a process of its own."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import LIMIT

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
    assert [name for name in found if "integrations" in name] == []


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

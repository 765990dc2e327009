"""Modules that an import brings along, each import in a process of its own."""

import json
import subprocess
import sys

import pytest
from processes import LIMIT

HEAVY = ("jax", "jaxlib", "torch", "tvm_ffi", "typer", "rich", "matplotlib", "safetensors")


def imported_by(statement: str, tmp_path) -> set[str]:
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    return {name for name in json.loads(done.stdout) if name in HEAVY}


def test_the_core_brings_no_framework(tmp_path):
    assert (
        imported_by("import blockfp, blockfp.sharding.plans, blockfp.sharding.simulate, blockfp.check.crosscheck", tmp_path)
        == set()
    )


@pytest.mark.parametrize(("face", "other"), [("jax", "torch"), ("torch", "jax")])
def test_a_face_does_not_bring_the_other(tmp_path, face, other):
    pytest.importorskip(face)
    found = imported_by(f"import blockfp.{face}", tmp_path)
    assert face in found
    assert other not in found


@pytest.mark.parametrize("face", ["jax", "torch"])
def test_a_face_brings_no_adapter(tmp_path, face):
    pytest.importorskip(face)
    script = f"import blockfp.{face}, sys; print([name for name in sys.modules if 'integrations' in name])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("library", ["jax", "torch", "typer"])
def test_the_core_needs_nothing_optional(tmp_path, library):
    absent = f"import sys; sys.modules['{library}'] = None; import blockfp, numpy; "
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

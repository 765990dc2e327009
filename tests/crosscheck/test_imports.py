"""What importing costs and brings along, each in a process of its own."""

import json
import subprocess
import sys

import pytest

HEAVY = ("jax", "jaxlib", "torch", "tvm_ffi", "typer", "rich", "matplotlib", "safetensors")


def imported_by(statement: str, tmp_path) -> set[str]:
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    return {name for name in json.loads(done.stdout) if name in HEAVY}


def test_the_core_brings_no_framework(tmp_path):
    assert imported_by("import blockfp, blockfp.plans, blockfp.simulate, blockfp.crosscheck", tmp_path) == set()


@pytest.mark.parametrize(("face", "other"), [("jax", "torch"), ("torch", "jax")])
def test_a_face_does_not_bring_the_other(tmp_path, face, other):
    pytest.importorskip(face)
    found = imported_by(f"import blockfp.{face}", tmp_path)
    assert face in found
    assert other not in found


@pytest.mark.parametrize("library", ["jax", "torch", "typer"])
def test_the_core_needs_nothing_optional(tmp_path, library):
    absent = f"import sys; sys.modules['{library}'] = None; import blockfp, numpy; "
    use = "blockfp.quantize(numpy.ones((2, 64), 'f4'), 'nvfp4').dequantize()"
    subprocess.run([sys.executable, "-c", absent + use], cwd=tmp_path, timeout=60, check=True)


def test_the_command_says_what_it_needs(tmp_path):
    script = "import sys; sys.modules['typer'] = None; import blockfp.cli"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "the blockfp command needs typer: pip install 'blockfp[cli]'\n"


def test_import_takes_under_150_milliseconds(tmp_path):
    # NumPy, ml_dtypes and what they bring are there first: the limit is on what blockfp adds to the interpreter and them.
    script = """
import time
start = time.process_time()
import blockfp
print(time.process_time() - start)
"""
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        times.append(float(done.stdout))
    assert min(times) < 0.15, times

"""First calls from many threads at once, in processes of their own: what a process does once is done once."""

import subprocess
import sys
import threading

import pytest
from processes import LIMIT

from blockfp.kernels.once import once

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

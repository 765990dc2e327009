"""Memory of large results is used again, and never while anything holds it."""

import subprocess
import sys
import threading
import traceback

import numpy as np
import pytest
from processes import LIMIT, environment

import blockfp
from blockfp.kernels import native, reused_memory

SHAPE = (1024, 4096)
FORMAT = "mxfp8_e4m3"


@pytest.fixture(autouse=True)
def _none_waiting():
    reused_memory._waiting.clear()
    yield
    reused_memory._waiting.clear()


def array(value, shape=SHAPE):
    return np.full(shape, value, np.float32)


def address(codes):
    return codes.ctypes.data if isinstance(codes, np.ndarray) else codes.data_ptr()


def in_torch(value):
    torch = pytest.importorskip("torch")
    return torch.full(SHAPE, value, dtype=torch.float32)


FACES = pytest.mark.parametrize("made", [array, in_torch], ids=["numpy", "torch"])


@FACES
def test_a_result_comes_where_the_last_one_was(made):
    first = address(native.quantize(made(1.0), FORMAT).codes)
    again = native.quantize(made(2.0), FORMAT)
    assert address(again.codes) == first
    assert (native.dequantize(*again, FORMAT, "float32", columns=SHAPE[1]) == 2).all()


@FACES
def test_each_result_that_is_held_has_memory_of_its_own(made):
    held = [native.quantize(made(float(value)), FORMAT) for value in range(1, 9)]
    assert len({address(q.codes) for q in held}) == 8
    for value, q in enumerate(held, 1):
        assert (native.dequantize(*q, FORMAT, "float32", columns=SHAPE[1]) == value).all()


def views():
    torch = pytest.importorskip("torch")
    return {
        "a slice": lambda codes: codes[7:9, 1:],
        "another dtype": lambda codes: codes.view(np.int32).T,
        "a memoryview": memoryview,
        "a tensor": torch.from_numpy,
        "DLPack": torch.from_dlpack,
        "a tensor's row": lambda codes: torch.from_numpy(codes)[3].view(torch.int32),
        "a tensor's array": lambda codes: torch.from_numpy(codes)[:, 5].numpy(),
        "a storage": lambda codes: torch.from_numpy(codes).untyped_storage(),
    }


@pytest.mark.parametrize(
    "name",
    ["a slice", "another dtype", "a memoryview", "a tensor", "DLPack", "a tensor's row", "a tensor's array", "a storage"],
)
def test_what_is_made_of_a_result_holds_its_memory(name):
    codes = native.quantize(array(1.0), FORMAT).codes
    first = codes.ctypes.data
    kept = views()[name](codes)
    del codes
    assert native.quantize(array(2.0), FORMAT).codes.ctypes.data != first
    assert not any(block.address == first for block in reused_memory._waiting)
    del kept
    assert any(block.address == first for block in reused_memory._waiting)


def test_what_is_made_of_a_tensor_holds_its_memory():
    torch = pytest.importorskip("torch")
    codes = native.quantize(in_torch(1.0), FORMAT).codes
    assert not codes._is_view()
    assert codes.untyped_storage().nbytes() == codes.numel()
    first, kept = codes.data_ptr(), codes.view(torch.int32)[5:].numpy()
    del codes
    assert address(native.quantize(in_torch(2.0), FORMAT).codes) != first
    del kept
    assert any(block.address == first for block in reused_memory._waiting)


def test_few_blocks_wait_and_none_of_another_size_is_taken():
    held = [native.quantize(array(1.0), FORMAT) for _ in range(reused_memory.WAITING + 3)]
    del held
    assert len(reused_memory._waiting) == reused_memory.WAITING
    larger = native.quantize(array(3.0, (1536, 4096)), FORMAT)
    assert larger.codes.nbytes == 1536 * 4096
    assert len(reused_memory._waiting) == reused_memory.WAITING
    assert reused_memory.array(reused_memory.LEAST - 1) is None
    assert reused_memory.array(reused_memory.MOST + 1) is None


def test_bfloat16_results_too():
    q = blockfp.quantize(array(1.5), FORMAT)
    first = q.dequantize("bfloat16")
    at = first.ctypes.data
    assert (first == 1.5).all()
    del first
    assert q.dequantize("bfloat16").ctypes.data == at
    assert native.dequantize(q.codes, q.scales, None, FORMAT, "bfloat16", columns=SHAPE[1]).dtype == "bfloat16"


def test_threads_share_what_waits():
    failed = []

    def work(thread):
        try:
            for step in range(12):
                value = 2.0**thread * (1 + step % 4 / 4)  # E4M3 has it
                q = native.quantize(array(value), FORMAT)
                if not (native.dequantize(*q, FORMAT, "float32", columns=SHAPE[1]) == value).all():
                    failed.append(value)
        except Exception:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


FORK = """
import os
import numpy as np
from blockfp.kernels import native, reused_memory

def codes_of(value):
    return native.quantize(np.full((1024, 4096), value, np.float32), "mxfp8_e4m3").codes

held, waits = codes_of(1.0), codes_of(2.0)
before, first = held.copy(), waits.ctypes.data
del waits
child = os.fork()
if not child:
    inherited = len(reused_memory._waiting)
    own = [codes_of(4.0), codes_of(-4.0)]
    same = (held == before).all() and (own[0] != own[1]).all()
    del held
    os._exit(0 if same and inherited == 0 and len(reused_memory._waiting) == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (held == before).all() and codes_of(8.0).ctypes.data == first
"""


def test_a_forked_process_has_its_own():
    done = subprocess.run([sys.executable, "-c", FORK], env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")

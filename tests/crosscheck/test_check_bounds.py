"""Bounds of `blockfp check`: memory of the arrays in work, and the CPUs of this process."""

import os
import threading

import numpy as np
import pytest
from processes import LIMIT

from blockfp.check import pieces
from blockfp.check.pieces import PIECE
from blockfp.formats import Format


def test_the_bound_holds_for_any_threads_and_lets_a_large_one_run_alone():
    """Many threads ask for random numbers of bytes; their sum never passes the bound while two are in work."""
    work, sums, now, lock = pieces.InFlight(100), [], [], threading.Lock()
    sizes = np.random.default_rng(0).integers(1, 140, 200).tolist()
    start = threading.Barrier(16)

    def ask(mine):
        start.wait()
        for size in mine:
            with work.room(size):
                with lock:
                    now.append(size)
                    sums.append(list(now))
                with lock:
                    now.remove(size)

    threads = [threading.Thread(target=ask, args=(sizes[i::16],)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert len(sums) == len(sizes)
    assert all(len(one) == 1 or sum(one) <= 100 for one in sums)
    assert not now


def test_small_checks_run_together():
    """Two that fit are in work at once: each waits for the other inside."""
    work, both = pieces.InFlight(100), threading.Barrier(2, timeout=LIMIT)

    def ask():
        with work.room(50):
            both.wait()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not both.broken


def test_a_tensor_scale_takes_the_whole_array_and_blocks_a_piece():
    x = np.broadcast_to(np.float32(1), (1 << 16, 1 << 14))
    assert pieces.bytes_of(x, Format.parse("nvfp4")) == 16 << 30
    assert pieces.bytes_of(x, Format.parse("mxfp8_e4m3")) == 16 * PIECE


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize(
    ("quota", "least"), [("max 100000", None), ("50000 100000", 1), ("150000 100000", 2), ("nonsense", None)]
)
def test_cpus_are_those_that_this_process_may_use(tmp_path, quota, least):
    (tmp_path / "cpu.max").write_text(quota)
    may = os.sched_getaffinity(0)
    assert pieces.usable_cpus(tmp_path / "cpu.max") == min(len(may), least or len(may))
    assert pieces.usable_cpus(tmp_path / "none") == len(may)
    try:
        os.sched_setaffinity(0, {min(may)})
        assert pieces.usable_cpus(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, may)

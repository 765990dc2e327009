"""Checkpoints that are still being written when a program ends: saved, or stderr and the exit status say that they aren't."""

import subprocess
import sys

import torch
from processes import LIMIT, environment

import blockfp.torch as bfp
from blockfp.files import manifest

FULL = """
import atexit, resource, signal, sys
from torch import nn
import blockfp.torch as bfp

atexit.register(print, "others' exit handlers have run")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
saving = bfp.save_checkpoint(sys.argv[1], nn.Linear(64, 128), step=3, wait=False)
print("the training ends")
if len(sys.argv) > 2:
    try:
        saving.wait()
    except OSError:
        print("told")
"""

DESTROYED = """
import sys, time
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import blockfp.torch as bfp
from blockfp.torch_backend.checkpoint import checkpoint_files

def late(*args):
    time.sleep(0.5)
    return original(*args)

original, checkpoint_files.write = checkpoint_files.write, late
run, store, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
model = fully_shard(bfp.convert(nn.Linear(64, 64), "mxfp8"))
bfp.save_checkpoint(run, model, step=2, wait=False)
dist.destroy_process_group()
"""


def started(program, *arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=environment(), **pipes)


def test_a_save_that_fails_at_the_end(tmp_path):
    """On stderr at once and once more, and in the exit status, which leaves out nobody's exit handlers."""
    unheard, heard = started(FULL, tmp_path / "run"), started(FULL, tmp_path / "other", "waits")
    out, err = unheard.communicate(timeout=LIMIT)
    assert unheard.returncode == 120, err
    assert out.splitlines() == ["the training ends", "others' exit handlers have run"]
    at_once, at_the_end = (line for line in err.splitlines() if line.startswith("blockfp: "))
    assert "run/step-00000003 was not saved: rank 0: OSError: [Errno 27] writing: File too large" in at_once
    assert "run/step-00000003 was not saved when the program ended, and nobody has called wait()" in at_the_end
    assert not list((tmp_path / "run").iterdir())
    out, err = heard.communicate(timeout=LIMIT)
    assert (heard.returncode, out.splitlines()[1]) == (0, "told"), err


def test_ranks_that_leave_their_process_group(tmp_path):
    """As every script for torchrun ends; the save goes on without the group."""
    ranks = [started(DESTROYED, tmp_path / "run", tmp_path / "store", rank) for rank in range(2)]
    for rank in ranks:
        _, err = rank.communicate(timeout=LIMIT)
        assert rank.returncode == 0, err
    assert manifest.steps(tmp_path / "run") == [2]
    model = bfp.convert(torch.nn.Linear(64, 64), "mxfp8")
    assert bfp.load_checkpoint(tmp_path / "run", model).step == 2

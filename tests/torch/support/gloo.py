"""Ranks as processes over real gloo, or NCCL: a fresh interpreter imports torch once and forks them.

    run(4, __file__, "function")    calls function(rank) of that file on four ranks

Run as a script it is that interpreter: gloo.py WORLD FILE FUNCTION BACKEND.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from processes import environment


def run(world, file, function, timeout=120, backend="gloo"):
    """Calls `function(rank)` of a file on `world` ranks; with "nccl", each with the GPU of its number.

    Returns:
        What they have printed, warnings included.

    Raises:
        AssertionError: a rank failed, or they are not done in time; the message has what all of them printed.
    """
    command = [sys.executable, __file__, str(world), str(file), function, backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{function} on {world} ranks hangs:\n{error.stdout}\n{error.stderr}") from error
    assert done.returncode == 0, f"{function} on {world} ranks:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def _rank_main(rank, world, store, function, backend):
    import torch
    import torch.distributed as dist

    code = 1
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        function(rank)
        dist.barrier()
        code = 0
    except BaseException:
        print(f"rank {rank} of {world}:\n{traceback.format_exc()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads make a plain exit abort now and then.
    os._exit(code)


def _main(world, file, name, backend):
    spec = importlib.util.spec_from_file_location("ranks", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks"] = module
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _rank_main(rank, world, Path(folder) / "store", getattr(module, name), backend)
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
